"""The kernels that serve a problem, in order of preference, and why other kernels do not.

A measurement of one problem is used for all problems with the same :func:`tuning_key` or :func:`problem_class`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ..gpu.architectures import Device
from ..kernels import KERNELS, Kernel, TileConfig
from ..kernels.support import nearest, refusal
from ..problem.lengths import Packed, Padded
from ..problem.problem import MASK_KINDS, Problem
from .operation import Operation


def algorithms(operation: str = "forward") -> tuple[str, ...]:
    """The values of a call's ``algorithm``: "auto", then the algorithms of the operation's kernels."""
    return ("auto", *dict.fromkeys(spec.algorithm for spec in _known(operation)))


def any_serves(problem: Problem, capability: int | None = None) -> bool:
    """Whether some kernel serves the problem: on some GPU, or on GPUs of ``capability``."""
    return any(refusal(kernel, problem, capability) is None for kernel in _known(problem.operation))


def _known(operation: str) -> list[Kernel]:
    return [kernel for kernel in KERNELS.values() if kernel.operation == operation]


def serving_kernels(
    operation: Operation, problem: Problem, device: Device | None, algorithm: str, kernel: str | None,
    fastest: Mapping[str, str],
) -> tuple[list[Kernel], list[str]]:  # fmt: skip
    """The kernels that serve the problem, in order of preference, and the reasons for this order. Raises ValueError if
    no kernel serves the problem: the message says why the kernels for its elements refuse."""
    known, replaced = _known(operation.name), []
    if kernel is not None:
        named = [spec for spec in known if spec.name == kernel]
        if not named:
            raise ValueError(f"kernel={kernel!r} is not known; use one of {', '.join(s.name for s in known)}")
        reason = f"kernel={kernel!r} was asked for"
    else:
        choices = algorithms(operation.name)
        is_text = isinstance(algorithm, str)
        if is_text and operation.name == "backward" and algorithm in set(algorithms()).difference(choices):
            replaced = [f"algorithm={algorithm!r} has no backward: auto"]
            algorithm = "auto"
        if not is_text or algorithm not in choices:
            raise ValueError(f"algorithm={algorithm!r} is not known; use one of {', '.join(choices)}")
        named = [spec for spec in known if algorithm in ("auto", spec.algorithm)]
        reason = f"algorithm={algorithm!r} was asked for"
    if device is None:
        # NumPy runs every algorithm in every dtype: the kernel's name only selects the schedule.
        return named, [reason] if algorithm != "auto" or kernel else replaced
    free = algorithm == "auto" and kernel is None
    measured = fastest.get(problem_class(problem)) if free and not operation.split_selects_kernel else None
    preferred = sorted(named, key=lambda spec: spec.name != measured)
    found = (spec for spec in preferred if refusal(spec, problem, device=device) is None)
    # In decode, the splits select among all serving kernels. Other operations take the first kernel.
    serving = list(found if operation.split_selects_kernel else itertools.islice(found, 1))
    if not serving:
        raise ValueError(_refused(problem, device, algorithm, named))
    if free and operation.split_selects_kernel:
        kind = "TMA" if serving[0].uses_copy_engine else "cp.async"
        reason = f"auto: kernels that read the cache by {kind}; the splits below select one of them"
    elif free:
        reason = _preference(serving[0], measured, named, problem, device)
    return serving, [*replaced, reason]


def _preference(
    chosen: Kernel, measured: str | None, known: list[Kernel], problem: Problem, device: Device
) -> str:
    """Why ``chosen`` is preferred, and why kernels before it in the registry are not."""
    reason = (
        f"auto: {chosen.name} is the fastest measured for this class of problem on {device.name}"
        if chosen.name == measured
        else f"auto: {chosen.name} is the first kernel in the registry that serves this problem (no measurement of "
        f"this class of problem on {device.name})"
    )
    before = [
        f"{spec.name} {refusal(spec, problem, device=device) or 'was measured slower'}"
        for spec in known[: known.index(chosen)]
    ]
    return reason + (f" ({'; '.join(before)})" if before else "")


def _refused(problem: Problem, device: Device, algorithm: str, named: list[Kernel]) -> str:
    near = nearest(named, problem)
    why = "; ".join(f"{spec.name} {refusal(spec, problem, device=device)}" for spec in near)
    cure = "convert with .astype, copy to contiguous arrays, or use a mask of cufa.masks"
    ragged = isinstance(problem.lengths, (Padded, Packed))
    options = problem.alibi or problem.sink or problem.dropped or problem.score
    if problem.mask.irregular_kind in MASK_KINDS or options or ragged:
        cure = "the CPU serves every problem: pass NumPy arrays (.get()), and device='cpu'"
    if algorithm != "auto":
        cure += ", or leave algorithm at 'auto'"
    where = f"{device.name} ({device.arch.name})"
    return f"algorithm={algorithm!r}: no kernel runs {problem} on {where}: {why}. Fix: {cure}"


def serving_configs(spec: Kernel, problem: Problem, device: Device) -> tuple[TileConfig, ...]:
    """The kernel's configs that fit the device and serve the problem."""
    fitting = spec.fitting(spec.configs + spec.v_configs, problem.head_dim, device, problem.v_dim)
    return tuple(x for x in fitting if refusal(spec, problem, config=x) is None)


def tuning_key(spec: Kernel, problem: Problem) -> str:
    """Key of the problems that share tuned tiles: same kernel, dtype, precision, head dim, kind of mask and length
    class. Total query rows, rounded down to a power of two, also agree: the number of thread blocks decides which tiles
    fill the GPU. Decode: key/value heads of all sequences, too."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    items = (
        f", {_power_of_two(problem.batch * problem.kv_heads)} heads" if problem.operation == "decode" else ""
    )
    return (
        f"{spec.name}/{problem.dtype}/{problem.precision}/d{problem.dims_text}/{problem.mask_kind}/"
        f"{_length_class(problem)}/{_power_of_two(rows)} rows{items}"
    )


def problem_class(problem: Problem) -> str:
    """Key of the problems that share a fastest kernel: same operation, elements, precision, head dim, kind of mask,
    kind of lengths and length class, and with or without soft cap."""
    elements = "-".join(dict.fromkeys((problem.q_element.name, problem.k_element.name, problem.precision)))
    mask = problem.mask_kind + ("-softcap" if problem.softcap is not None else "")
    if problem.lengths.kind != "dense":
        mask += f"-{problem.lengths.compiled_kind.replace(' ', '-')}"
    return f"{problem.operation}/{elements}/d{problem.dims_text}/{mask}/{_length_class(problem)}"


def _length_class(problem: Problem) -> int:
    """seqlen_k, rounded down to a power of two: problems of one class share measurements."""
    return _power_of_two(problem.seqlen_k)


def _power_of_two(count: int) -> int:
    """``count``, rounded down to a power of two; 1 for 0."""
    return 1 << max(count.bit_length() - 1, 0)
