"""`cufa parallel`: the time of a call on several GPUs, predicted, or measured on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from ..masks import causal as causal_mask
from ..masks import full
from ..parallel import Group, Prediction, distribute, flash_attention, flash_attention_backward, plan
from ..parallel.launch import launch
from ..parallel.placement import KINDS
from ..parallel.prediction import LINKS
from ..parallel.schemes import SCHEMES
from .common import SIZE, Exit, fail, json_option, print_json, stacked, stdout

_WARM_S, _TIMED_S = 0.5, 1.5


@click.group("parallel")
def parallel_command() -> None:
    """Attention over several GPUs: predicted for any number of GPUs, measured on this machine's GPUs.

    Exit codes: 0 done; 2 wrong usage; 3 fewer GPUs than ranks.
    """


_options = stacked(
    click.option("-n", "--ranks", type=click.IntRange(1, 128), default=2, show_default=True),
    click.option("--seqlen", type=SIZE, default=32768, show_default=True, help="Of the whole sequence."),
    click.option("--heads", type=SIZE, default=16, show_default=True),
    click.option("--kv-heads", type=SIZE, help="[heads]"),
    click.option("--head-dim", type=SIZE, default=128, show_default=True),
    click.option("--causal/--full", default=True, show_default=True),
    click.option("--placement", type=click.Choice(KINDS), default="zigzag", show_default=True),
    click.option("--scheme", type=click.Choice(SCHEMES), default="auto", show_default=True),
    click.option("--link", type=click.Choice([*LINKS]), default="nvlink4", show_default=True),
    click.option("--backward", is_flag=True, help="Of the gradients."),
)


def _plan(o: dict[str, Any], rate: float | None = None) -> Prediction:
    kv_heads = o["kv_heads"] or o["heads"]
    shapes = (1, o["heads"], o["seqlen"], o["head_dim"]), (1, kv_heads, o["seqlen"], o["head_dim"])
    names = ("ranks", "causal", "placement", "scheme", "backward", "link")
    try:
        return plan(*shapes, rate=rate, **{name: o[name] for name in names})
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@parallel_command.command("plan")
@_options
@json_option
def plan_command(as_json: bool, **options: Any) -> None:
    """Predict volume, overlap and time of a call, for any number of GPUs. Needs no GPU.

    Exit codes: 0 done; 2 wrong usage.
    """
    prediction = _plan(options)
    if as_json:
        print_json(_row(prediction))
    else:
        stdout().print(str(prediction), markup=False, soft_wrap=True)


@parallel_command.command("bench")
@_options
@click.option("--one-process", is_flag=True, help="All GPUs in one process: peer copies instead of NCCL.")
@json_option
def bench_command(one_process: bool, as_json: bool, **options: Any) -> None:
    """Measure a call on GPUs 0 to RANKS - 1 of this machine, in a process each, beside its prediction.

    The share is relative to one GPU's rate on a sequence with the same work, while all GPUs compute.

    Exit codes: 0 done; 1 a process failed; 2 wrong usage; 3 fewer GPUs than ranks.
    """
    ranks = options["ranks"]
    _plan(options)  # wrong usage is refused before processes start
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no CuPy, no driver
        fail(Exit.MISSING, f"needs {ranks} GPUs: {error}; `cufa parallel plan` predicts without any")
    if count < ranks:
        fail(
            Exit.MISSING,
            f"needs {ranks} GPUs, of which {count} are here; `cufa parallel plan` predicts without any",
        )
    times = [_measured(None, options)] if one_process else launch(ranks, _measured, options)
    for x in times:
        if isinstance(x, RuntimeError):
            fail(Exit.FAILED, str(x))
    alone, seconds = (max(x[i] for x in times) for i in range(2))  # the slowest rank's
    rate = _work(options, _seqlen_alone(options)) / alone
    plan_, measured = _plan(options, rate), {"seconds": seconds, "alone_seconds": alone}
    measured["share"] = _work(options) / ranks / rate / seconds
    if as_json:
        print_json(_row(plan_) | measured)
        return
    stdout().print(str(plan_), markup=False, soft_wrap=True)
    stdout().print(
        f"measured   {seconds * 1e3:.3f} ms, {measured['share']:.1%} of one GPU's rate, {rate / 1e12:.0f} TFLOP/s",
        markup=False,
    )


def _measured(comm: Any, options: dict[str, Any]) -> tuple[float, float]:
    """Seconds of one GPU for a rank's work while all GPUs compute, and seconds of the call of all ranks. ``comm``: of
    this process, which uses the GPU of its rank's number; None: this process uses all GPUs."""
    import cupy

    mine = range(options["ranks"])
    if comm is not None:
        mine = range(comm.Get_rank(), comm.Get_rank() + 1)
        cupy.cuda.Device(mine[0]).use()
    group, seqlen = Group([*mine] if comm is None else comm), _seqlen_alone(options)
    each = [_call(options, Group([rank]), seqlen) for rank in mine]
    alone = _timed(lambda: [call() for call in each], mine, group)
    return alone, _timed(_call(options, group), mine, group)


def _row(p: Prediction) -> dict[str, Any]:
    return {
        "scheme": p.schedule.scheme, "ranks": p.schedule.ranks, "backward": p.backward,
        "predicted_seconds": p.seconds, "predicted_share": p.efficiency, "received_bytes": p.received,
    }  # fmt: skip


def _work(o: dict[str, Any], seqlen: int | None = None) -> float:
    """FLOP of the whole call."""
    n = seqlen or o["seqlen"]
    mask = causal_mask() if o["causal"] else full()
    each = (10 if o["backward"] else 4) * o["head_dim"] * o["heads"]
    return float(each * mask.visible_scores(n, n))


def _inputs(o: dict[str, Any], group: Group, seqlen: int, placement: str) -> list[Any]:
    """dout, q, k, v: random."""
    import cupy

    from ..problem.element import ELEMENTS

    heads, kv_heads = o["heads"], o["kv_heads"] or o["heads"]
    rng, arrays = cupy.random.default_rng(0), []
    for count in (heads, heads, kv_heads, kv_heads):
        x = rng.standard_normal((1, count, seqlen, o["head_dim"]), cupy.float32)
        arrays.append(distribute(x.astype(ELEMENTS["bfloat16"].dtype), group, placement))
    return arrays


def _call(o: dict[str, Any], group: Group, seqlen: int | None = None) -> Callable[[], Any]:
    placement = o["placement"] if seqlen is None else "contiguous"
    dout, *qkv = _inputs(o, group, seqlen or o["seqlen"], placement)
    options: dict[str, Any] = {"group": group, "placement": placement, "causal": o["causal"]}
    options |= {"scheme": o["scheme"]} if seqlen is None else {}

    def forward() -> Any:
        return flash_attention(*qkv, return_lse=True, **options)

    if not o["backward"]:
        return forward
    results = forward()
    return lambda: flash_attention_backward(dout, *qkv, *results, **options)


def _seqlen_alone(o: dict[str, Any]) -> int:
    """Tokens of a sequence with the work of a rank: scores grow with the square of the length."""
    return max(int(o["seqlen"] / o["ranks"] ** 0.5) // 128 * 128, 1)


def _timed(call: Callable[[], Any], mine: Sequence[int], group: Group) -> float:
    """Seconds of a call, warm, many in a row. All processes make the same number of calls, and begin together."""
    import cupy

    def wait() -> None:
        group.synchronize()
        for rank in mine:
            cupy.cuda.Device(rank).synchronize()

    def run(count: int) -> float:
        wait()
        together(0)
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        return time.perf_counter() - start

    def together(number: int) -> int:
        return max(int(x[0]) for x in group.gather({rank: [number] for rank in group.local}))

    run(1)
    once = run(3) / 3
    run(together(int(_WARM_S / once)))
    count = max(together(int(_TIMED_S / once)), 3)
    return run(count) / count
