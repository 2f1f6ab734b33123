"""`cufa parallel`: what several GPUs would need for a shape, and what this machine's need."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from ..masks import causal as causal_mask
from ..masks import full
from ..parallel import Group, Prediction, distribute, flash_attention, flash_attention_backward, plan
from ..parallel.placement import KINDS
from ..parallel.prediction import LINKS
from ..parallel.schemes import SCHEMES
from .common import SIZE, Exit, fail, json_option, print_json, stdout

_WARM_S, _TIMED_S = 0.5, 1.5


@click.group("parallel")
def parallel_command() -> None:
    """Attention over several GPUs: predicted for any number, measured on those of this machine.

    Exit codes: 0 done; 2 wrong usage; 3 fewer GPUs than ranks.
    """


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(
        (
            click.option("-n", "--ranks", type=click.IntRange(1, 128), default=2, show_default=True),
            click.option(
                "--seqlen", type=SIZE, default=32768, show_default=True, help="Of the whole sequence."
            ),
            click.option("--heads", type=SIZE, default=16, show_default=True),
            click.option("--kv-heads", type=SIZE, help="[heads]"),
            click.option("--head-dim", type=SIZE, default=128, show_default=True),
            click.option("--causal/--full", default=True, show_default=True),
            click.option("--placement", type=click.Choice(KINDS), default="zigzag", show_default=True),
            click.option("--scheme", type=click.Choice(SCHEMES), default="auto", show_default=True),
            click.option("--link", type=click.Choice([*LINKS]), default="nvlink4", show_default=True),
            click.option("--backward", is_flag=True, help="Of the gradients."),
        )
    ):
        function = option(function)
    return function


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
    found = _plan(options)
    if as_json:
        print_json(_row(found))
    else:
        stdout().print(str(found), markup=False, soft_wrap=True)


@parallel_command.command("bench")
@_options
@json_option
def bench_command(as_json: bool, **options: Any) -> None:
    """Measure a call on GPUs 0 to RANKS - 1 of this machine, in one process, beside its prediction.

    The share is that of one GPU's own rate on a sequence with the same work, which all GPUs compute at once.

    Exit codes: 0 done; 2 wrong usage; 3 fewer GPUs than ranks.
    """
    ranks = options["ranks"]
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
    alone, rate = _alone(options)
    found = _plan(options, rate)
    seconds = _timed(_call(options, Group([*range(ranks)])), ranks)
    measured = {"seconds": seconds, "share": _work(options) / ranks / rate / seconds, "alone_seconds": alone}
    if as_json:
        print_json(_row(found) | measured)
        return
    stdout().print(str(found), markup=False, soft_wrap=True)
    stdout().print(
        f"measured   {seconds * 1e3:.3f} ms, {measured['share']:.1%} of one GPU's rate, {rate / 1e12:.0f} TFLOP/s",
        markup=False,
    )


def _row(found: Prediction) -> dict[str, Any]:
    return {
        "scheme": found.schedule.scheme, "ranks": found.schedule.ranks, "backward": found.backward,
        "predicted_seconds": found.seconds, "predicted_share": found.efficiency, "received_bytes": found.received,
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
    rng, found = cupy.random.default_rng(0), []
    for count in (heads, heads, kv_heads, kv_heads):
        x = rng.standard_normal((1, count, seqlen, o["head_dim"]), cupy.float32)
        found.append(distribute(x.astype(ELEMENTS["bfloat16"].dtype), group, placement))
    return found


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


def _alone(o: dict[str, Any]) -> tuple[float, float]:
    """Seconds of one GPU for the work of a rank, and its FLOP/s. All GPUs compute at once."""
    ranks = o["ranks"]
    seqlen = max(int(o["seqlen"] / ranks**0.5) // 128 * 128, 1)  # scores grow with the square of the length
    calls = [_call(o, Group([rank]), seqlen) for rank in range(ranks)]
    seconds = _timed(lambda: [call() for call in calls], ranks)
    return seconds, _work(o, seqlen) / seconds


def _timed(call: Callable[[], Any], ranks: int) -> float:
    """Seconds of a call, warm, many in a row."""
    import cupy

    def wait() -> None:
        for rank in range(ranks):
            cupy.cuda.Device(rank).synchronize()

    def run(seconds: float, count: int = 0) -> tuple[float, int]:
        start, done = time.perf_counter(), 0
        while done < count or (not count and time.perf_counter() - start < seconds):
            call()
            done += 1
            if not count:
                wait()
        wait()
        return time.perf_counter() - start, done

    spent, done = run(_WARM_S)
    spent, done = run(0.0, max(int(_TIMED_S * done / spent), 3))
    return spent / done
