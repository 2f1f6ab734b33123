"""What checked mode cannot find, and why: printed when it has found nothing."""

from __future__ import annotations

BLIND_SPOTS: tuple[tuple[str, str], ...] = (
    (
        "the text of asm statements",
        "host twins execute primitives; golden vectors from a GPU compare the results of the two",
    ),
    (
        "wgmma_registers, pair_registers, computed_here",
        "these constrain the compiler: their twins do nothing",
    ),
    (
        "registers_release_to and registers_raise_to that only some warps of a warpgroup call, or none",
        "only a request for more registers than the launch has is found; ptxas decides how many a thread uses",
    ),
    (
        "loads of an accumulator, or of an operand in registers, between wgmma.fence and the product",
        "values of registers are compared, and a load changes none: only stores are found",
    ),
    (
        "wgmma.wait_group that the warps of a warpgroup execute at different places",
        "PTX requires one place for all four; here, as in machine code, each warp waits for itself",
    ),
    (
        "griddepcontrol.launch_dependents that comes late, or is missing in some blocks",
        "it costs time only; a launch without any such call, before a launch that may begin early, is found",
    ),
    (
        "loads and stores through plain C++ pointers that miss every array",
        "accesses without primitives are checked only inside an array or shared memory",
    ),
    (
        "a TMA box that is read and used, although another block writes the same memory",
        "the race is found only if the writing block runs first; try another --schedule",
    ),
    (
        "a store to another block of the cluster that only a later st.async of its thread seems to order",
        "the mbarrier gets the thread's clock, which includes both stores",
    ),
    (
        "a store that only a relaxed arrival at another block's mbarrier seems to order",
        "it orders only the thread's reads; the mbarrier's clock also includes its stores",
    ),
    (
        "whether the blocks that wait for one another all fit on a GPU",
        "here a waiting block makes room for the next block, whatever their number",
    ),
    (
        "errors that need two lanes of a warp to run at the same time",
        "lanes run one by one between two points that they reach together",
    ),
)


def as_lines() -> list[str]:
    return [f"{what}: {why}" for what, why in BLIND_SPOTS]
