"""The controls of the page Run: from a preset to a job."""

from __future__ import annotations

import dataclasses

import streamlit as st

from cufa.bench import decode
from cufa.bench.runner import Contender
from cufa.bench.suites import SUITES, Case
from cufa.core.architectures import Device
from cufa.core.problem import HEAD_DIM_STEP, ITEMSIZE, MAX_HEAD_DIM, Problem, default_scale
from cufa.dashboard import page
from cufa.dashboard.model import presets
from cufa.dashboard.model.configs import config_key
from cufa.dashboard.model.devices import device_of, peers_here, run_devices
from cufa.dashboard.state import Controls
from cufa.dashboard.views.shape_controls import choose_kv_heads
from cufa.dashboard.worker.jobs import CPU, Job
from cufa.kernels import KERNELS, KernelSpec, TileConfig
from cufa.planner import fitting_configs

_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_CPU_TILES = ((64, 64), (128, 128), (256, 256), (256, 512), (512, 512), (512, 1024))
_EVERY, _PLANNED = "every", "planner"
_FIELDS = {
    "batch": "batch",
    "heads": "heads",
    "sq": "seqlen_q",
    "sk": "seqlen_k",
    "d": "head_dim",
}


def choose(controls: Controls) -> Job:
    """The controls, and the job that they describe."""
    with page.control_box():
        columns = st.columns([1.6, 2, 2.2])
        with columns[0]:
            device_name = controls.choice("on", "Run on", run_devices())
        device = device_of(device_name)
        shapes, suites = presets.presets(), presets.suites(device)
        with columns[1]:
            words = {name: p.words for name, p in shapes.items()} | suites
            first = list(shapes)[0 if device is None else 1]
            preset = controls.choice("preset", "Start from", words, first)
        with columns[2]:
            offered = [*dict.fromkeys(s.algorithm for s in KERNELS.values()), *peers_here(device_name)]
            titles = {s.algorithm: s.title for s in reversed(KERNELS.values())}
            help_text = (
                "They take turns in one run, so that a change of clocks hits all alike.  \n"
                + "  \n".join(f"**{name}**: {titles[name]}" for name in offered if name in titles)
            )
            default = ["naive", "fa1", "fa2"]
            if device is not None:
                default = [s.algorithm for s in KERNELS.values() if s.runs_on(device.arch.capability)]
                default = [name for name in ("fa2", "fa3") if name in default]
            kernels = controls.several("kernels", "Kernels", offered, default, help=help_text)
        if preset == presets.DECODE:
            st.caption("\n".join(f"- {case.title}" for case in decode.cases()))
            return Job("suite decode", device_name, (), _seconds(controls), tuple(decode.cases()))
        if preset in suites:
            name = preset.removeprefix(presets.SUITE)
            cases = tuple((p, _only(found, kernels)) for p, found in SUITES[name].cases(device))
            cases = tuple(case for case in cases if case[1])
            st.caption(_suite_words(cases))
            seconds = _seconds(controls)
            return Job(f"suite {name}", device_name, cases, seconds)
        problem = _choose_problem(controls, preset, shapes[preset].problem, device)
        columns = st.columns([2, 2.4, 1])
        with columns[0]:
            tilings = _choose_tiles(controls, kernels, problem, device)
        with columns[1]:
            lengths = controls.several(
                "also",
                "Also at these lengths",
                [str(n) for n in _LENGTHS],
                [],
                help="For a curve in Compare.",
            )
        with columns[2]:
            seconds = _seconds(controls)
    wanted = tuple(c for kernel in kernels for c in tilings.get(kernel, (Contender(kernel),)))
    problems = [problem, *(dataclasses.replace(problem, seqlen_q=int(n), seqlen_k=int(n)) for n in lengths)]
    cases = tuple((p, wanted) for p in dict.fromkeys(problems)) if wanted else ()
    title = shapes[preset].words.partition(":")[0]
    return Job(title, device_name, cases, seconds)


def _seconds(controls: Controls) -> float:
    choices = {"0.2": "0.2 s", "0.5": "0.5 s", "1": "1 s", "3": "3 s", "10": "10 s"}
    help_text = "At least ten rounds are taken, however long they last."
    return float(controls.choice("seconds", "Measure for", choices, "0.5", help=help_text))


def _suite_words(cases: tuple[Case, ...]) -> str:
    if not cases:
        return "None of the chosen kernels is part of this suite."
    lines = [f"- {problem}: {', '.join(c.label for c in found[:6])}" for problem, found in cases[:8]]
    more = [f"- and {len(cases) - 8} more shapes"] if len(cases) > 8 else []
    return "\n".join(lines + more)


def _only(found: tuple[Contender, ...], kernels: list[str]) -> tuple[Contender, ...]:
    return tuple(c for c in found if c.algorithm in kernels)


def _choose_problem(controls: Controls, preset: str, start: Problem, device: Device | None) -> Problem:
    """The shape: a preset sets all of it, and every part can then be changed."""
    applied = st.session_state.get("run.preset.applied")
    if applied is not None and applied != preset:
        for name, attribute in _FIELDS.items():
            controls.set(name, getattr(start, attribute))
        controls.set("kv", str(start.kv_heads))
        controls.set("dtype", start.dtype)
        controls.set("mask", "causal" if start.causal else "full")
    st.session_state["run.preset.applied"] = preset
    columns = st.columns(6)
    with columns[0]:
        batch = controls.integer("batch", "Batch", start.batch, 1, 4096)
    with columns[1]:
        heads = controls.integer("heads", "Heads", start.heads, 1, 1024)
    with columns[2]:
        kv_heads = choose_kv_heads(controls, heads, start.kv_heads)
    with columns[3]:
        seqlen_q = controls.integer("sq", "Queries", start.seqlen_q, 1, 1 << 20, step=128)
    with columns[4]:
        seqlen_k = controls.integer("sk", "Keys", start.seqlen_k, 1, 1 << 20, step=128)
    with columns[5]:
        head_dim = controls.integer("d", "Head dim", start.head_dim, 8, MAX_HEAD_DIM, step=HEAD_DIM_STEP)
    if head_dim % HEAD_DIM_STEP:
        rounded = -(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP
        controls.notice(f"head dim {head_dim} is not a multiple of {HEAD_DIM_STEP}; {rounded} is used.")
        head_dim = rounded
    columns = st.columns([2, 1, 1.4])
    with columns[0]:
        dtypes = [d for d in ITEMSIZE if device is None or d != "float64"]
        dtype = controls.choice("dtype", "Data type", dtypes, start.dtype, segmented=True)
    with columns[1]:
        masks = {"causal": "causal", "full": "full"}
        default = "causal" if start.causal else "full"
        causal = controls.choice("mask", "Mask", masks, default, segmented=True) == "causal"
    precision = "float32" if dtype == "float32" else "native"
    if dtype == "float32" and device is not None:  # nothing else has a choice
        with columns[2]:
            precisions = {"float32": "float32 accuracy", "tf32": "tf32 products"}
            precision = controls.choice("precision", "Precision", precisions, segmented=True)
    return Problem(
        batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, dtype,
        causal=causal, scale=default_scale(head_dim), precision=precision,
    )  # fmt: skip


def _choose_tiles(
    controls: Controls, kernels: list[str], problem: Problem, device: Device | None
) -> dict[str, tuple[Contender, ...]]:
    """What is run of each kernel whose tiles are chosen; the planner decides for the others."""
    fitting = {kernel: _tilings(kernel, problem, device) for kernel in kernels}
    keys = {key: str(config) for found in fitting.values() for key, config in found.items()}
    words = {_PLANNED: "what the planner picks", **keys, _EVERY: "every tiling that fits, side by side"}
    help_text = "A kernel that is not built with the chosen tiles takes the planner's."
    chosen = controls.choice("tiles", "Tiles (queries × keys)", words, help=help_text)
    if chosen == _PLANNED:
        return {}
    picked = {
        kernel: tuple(Contender(kernel, config) for key, config in found.items() if chosen in (key, _EVERY))
        for kernel, found in fitting.items()
    }
    return {kernel: contenders for kernel, contenders in picked.items() if contenders}


def _tilings(kernel: str, problem: Problem, device: Device | None) -> dict[str, TileConfig]:
    """Tilings that the kernel can run with, by their names in links."""
    if not any(spec.algorithm == kernel for spec in KERNELS.values()):
        return {}  # another library's
    if device is None:
        return {f"{q}x{kv}": TileConfig(q, kv, num_warps=0) for q, kv in _CPU_TILES}
    spec = next((s for s in KERNELS.values() if s.algorithm == kernel and _serves(s, problem)), None)
    configs = fitting_configs(spec, problem.head_dim, device) if spec else ()
    return {config_key(c): c for c in configs}


def _serves(spec: KernelSpec, problem: Problem) -> bool:
    return problem.dtype in spec.dtypes and problem.precision in spec.precisions


def seconds_expected(job: Job, rate: float | None) -> float | None:
    """Rough seconds of a CPU job from the FLOP/s of products here; None when nothing is known.

    At least ten rounds, two calls to warm up and one to check, at half of the ceiling.
    """
    if job.device != CPU or rate is None:
        return None
    total = 0.0
    for problem, contenders in job.cases:
        dense = 4 * problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k * problem.head_dim
        one = len(contenders) * dense / (0.5 * rate)
        total += max(job.seconds, 10 * one) + 3 * one
    return total + 1
