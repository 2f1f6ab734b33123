"""What checked mode cannot see, and why: printed where it has found nothing."""

from __future__ import annotations

BLIND_SPOTS: tuple[tuple[str, str], ...] = (
    (
        "the text of asm statements",
        "primitives are executed by host twins; golden vectors from a GPU hold the results of the two together",
    ),
    (
        "wgmma_registers, pair_registers",
        "these bind the compiler: nothing happens here that could be left out",
    ),
    (
        "registers_release_to and registers_raise_to that only some warps of a warpgroup call, or none",
        "found is who asks for more registers than its launch can give; how many a thread uses, ptxas decides",
    ),
    (
        "loads of an accumulator, or of an operand in registers, between wgmma.fence and the product",
        "only values are compared, so only stores show",
    ),
    (
        "wgmma.wait_group that the warps of a warpgroup execute at different places",
        "PTX wants all four at one; here, as in machine code, each warp waits for itself",
    ),
    (
        "griddepcontrol.launch_dependents that comes late, or is missing in some blocks",
        "that costs time only; found is a launch in which no block calls it though the next one may begin early",
    ),
    (
        "loads and stores through plain C++ pointers that miss every array",
        "what a kernel does without primitives is followed only where it hits one, or shared memory",
    ),
    (
        "a box that is read before another block writes there, and used",
        "of two racing blocks the copy engine's must come second here; try another --schedule",
    ),
    (
        "a store to another block of the cluster that only a later st.async of its thread seems to order",
        "the mbarrier's clock is the thread's, which knows of both",
    ),
    (
        "a store that only a relaxed arrival at another block's mbarrier seems to order",
        "it orders what the thread has read; the mbarrier's clock knows of its stores, too",
    ),
    (
        "whether the blocks that wait for one another all fit on a GPU",
        "here a block that waits is put aside for the next, whatever their number",
    ),
    (
        "what depends on two lanes of a warp that run at the very same time",
        "lanes run one by one between two points that they reach together",
    ),
)


def as_lines() -> list[str]:
    return [f"{what}: {why}" for what, why in BLIND_SPOTS]
