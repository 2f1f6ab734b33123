"""Which kernels serve a problem, in order of preference, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping

from ..gpu.architectures import Device
from ..kernels import Kernel, kernels_of
from ..kernels.support import refusal
from ..problem.lengths import Packed, Padded
from ..problem.problem import MASK_KINDS, Problem
from .operation import Operation
from .problem_classes import problem_class


def algorithms(operation: str = "forward") -> tuple[str, ...]:
    """What a call may name: "auto", then the algorithms of the operation's kernels."""
    return ("auto", *dict.fromkeys(spec.algorithm for spec in kernels_of(operation).values()))


def any_serves(problem: Problem, capability: int | None = None) -> bool:
    """Whether some kernel serves the problem on some GPU, or on one of this capability."""
    kernels = kernels_of(problem.operation).values()
    return any(refusal(kernel, problem, capability) is None for kernel in kernels)


def serving_kernels(
    operation: Operation,
    problem: Problem,
    device: Device | None,
    algorithm: str,
    kernel: str | None,
    fastest: Mapping[str, str],
) -> tuple[list[Kernel], list[str]]:
    """The kernels that may run the problem, in order of preference, and why."""
    known = list(kernels_of(operation.name).values())
    if kernel is not None:
        named = [spec for spec in known if spec.name == kernel]
        if not named:
            raise ValueError(f"kernel={kernel!r} is not known; use one of {', '.join(s.name for s in known)}")
        reason = f"kernel={kernel!r} was asked for"
    else:
        known_algorithms = algorithms(operation.name)
        if not isinstance(algorithm, str) or algorithm not in known_algorithms:
            choices = ", ".join(known_algorithms)
            raise ValueError(f"algorithm={algorithm!r} is not known; use one of {choices}")
        named = [spec for spec in known if algorithm in ("auto", spec.algorithm)]
        reason = f"algorithm={algorithm!r} was asked for"
    if device is None:
        # NumPy runs every algorithm in every dtype; the kernel's name only says which schedule.
        return named, [reason] if algorithm != "auto" or kernel else []
    refusals = {spec.name: refusal(spec, problem, device=device) for spec in named}
    serving = [spec for spec in named if refusals[spec.name] is None]
    if not serving:
        raise ValueError(_refused(problem, device, algorithm, refusals))
    if algorithm == "auto" and kernel is None:
        serving, reason = _preferred(operation, serving, fastest.get(problem_class(problem)), device)
        reason += _passed_over(serving[0], refusals)
    return serving, [reason]


def _preferred(
    operation: Operation, serving: list[Kernel], measured: str | None, device: Device
) -> tuple[list[Kernel], str]:
    """The kernels, the preferred one first, and the reason."""
    first = next((spec for spec in serving if spec.name == measured), None)
    if operation.splits:
        kind = "the copy engine" if serving[0].uses_copy_engine else "its threads' own copies"
        return serving, f"auto: a kernel that reads the cache by {kind}, for the splits that follow"
    if first is None:
        return serving, (
            f"auto: {serving[0].name} is first in the registry's order of those that serve this problem (nothing "
            f"was measured for its class on {device.name})"
        )
    preferred = [first, *(spec for spec in serving if spec is not first)]
    return preferred, f"auto: {first.name} is the fastest measured for this class of problem on {device.name}"


def _refused(problem: Problem, device: Device, algorithm: str, refusals: Mapping[str, str | None]) -> str:
    why = "; ".join(f"{name} {reason}" for name, reason in refusals.items())
    cure = "convert with .astype, copy to contiguous arrays, or take a mask of cufa.masks"
    dense = not isinstance(problem.lengths, (Padded, Packed))
    if problem.mask.beyond_band in MASK_KINDS or problem.alibi or problem.sink or not dense:
        cure = "the CPU computes all of it: pass NumPy arrays (.get()), and device='cpu'"
    elif algorithm != "auto":
        cure += ", or leave the choice to 'auto'"
    return f"no kernel for {algorithm!r} runs {problem} on {device.name} ({device.arch.name}): {why}. Fix: {cure}"


def _passed_over(chosen: Kernel, refusals: Mapping[str, str | None]) -> str:
    before = []
    for name, reason in refusals.items():
        if name == chosen.name:
            break
        before.append(f"{name} {reason or 'was measured, and is slower'}")
    return f" ({'; '.join(before)})" if before else ""
