"""The controls of the page Run: from a preset to a job."""

from __future__ import annotations

import dataclasses

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from cufa.calls.shapes import FORWARD_DTYPES, MAX_TOKENS
from cufa.dashboard import page
from cufa.dashboard.model import presets
from cufa.dashboard.model.configs import config_key
from cufa.dashboard.model.devices import device_of, peers_here, run_devices
from cufa.dashboard.model.measurements import in_words
from cufa.dashboard.model.subject import Subject
from cufa.dashboard.state import Controls
from cufa.dashboard.views import mask_control
from cufa.dashboard.views.shape_controls import card_key, choose_kv_heads, choose_regime
from cufa.dashboard.worker.jobs import CPU, Job
from cufa.gpu.architectures import Device
from cufa.kernels import TileConfig, kernels_of
from cufa.measure.cases import READ, Case, Contender, Work
from cufa.measure.measuring import WARM_SECONDS
from cufa.measure.regimes import Regime
from cufa.measure.suites import SUITES
from cufa.plan.candidates import serving_configs
from cufa.plan.operation import OPERATIONS, Operation
from cufa.problem.lengths import Cached
from cufa.problem.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, Problem, default_scale

_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_CPU_TILES = ((64, 64), (128, 128), (256, 256), (256, 512), (512, 512), (512, 1024))
_EVERY, _PLANNED = "every", "planner"
_PAGES = ("0", "16", "64", "128")
_FIELDS = {"batch": "batch", "heads": "heads", "sq": "seqlen_q", "sk": "seqlen_k", "d": "head_dim"}


def choose(controls: Controls) -> Job:
    """The controls, and the job that they describe."""
    with page.control_box():
        columns = page.fields(1.9, 2.1, 3.4)
        device_name = controls.choice("on", "Run on", run_devices(), local=True, at=columns[0])
        device = device_of(device_name)
        named = dict.fromkeys(suite.operation for suite in SUITES.values())
        titles = {name: OPERATIONS[name].title for name in named if presets.presets(name)}
        operation = OPERATIONS[controls.choice("op", "Operation", titles, segmented=True, at=columns[1])]
        shapes, suites = presets.presets(operation.name), presets.suites(device, operation.name)
        words = {name: p.words for name, p in shapes.items()} | suites
        first = list(shapes)[0 if device is None else 1]
        preset = controls.choice("preset", "Start from", words, first, local=True, at=columns[2])
        kernels = _choose_kernels(controls, operation, device_name, device)
        if preset in suites:
            name = preset.removeprefix(presets.SUITE)
            cases = tuple(_only(case, kernels) for case in SUITES[name].cases(device))
            cases = tuple(case for case in cases if case.contenders)
            st.caption(_suite_words(cases))
            return Job(f"suite {name}", device_name, cases, *_choose_regime(controls, page.fields(2, 1, 3)))
        problem = _choose_problem(controls, preset, shapes[preset].problem, device)
        columns = page.fields(1.8, 1.9, 1.7, 1)
        with columns[0]:
            tilings = _choose_tiles(controls, kernels, problem, device)
        also, help_text = [str(n) for n in _LENGTHS], "For a curve in Compare."
        lengths = controls.several("also", "Also at these lengths", also, [], at=columns[1], help=help_text)
        regime = _choose_regime(controls, columns[2:])
    wanted = tuple(c for kernel in kernels for c in tilings.get(kernel, (Contender(kernel),)))
    problems = dict.fromkeys([problem, *(_longer(problem, int(n)) for n in lengths)])
    cases = tuple(Case(p, wanted) for p in problems) if wanted else ()
    is_preset = problem == shapes[preset].problem
    title = shapes[preset].words.partition(":")[0] if is_preset else in_words(problem)
    return Job(title, device_name, cases, *regime)


def subject_of(job: Job) -> Subject:
    """Subject of a job for links: its first shape, and its first cufa kernel with its tiles."""
    case, device = job.cases[0], device_of(job.device)
    capability = None if device is None else device.arch.capability
    for contender in case.contenders:
        problem = case.problem_of(contender)
        for spec in kernels_of(problem.operation).values():
            if spec.algorithm == contender.algorithm and spec.refuses(problem, capability) is None:
                card = "" if device is None else card_key(device)
                return Subject(problem, spec.name, contender.config, card)
    return Subject(case.problem)


def _choose_kernels(
    controls: Controls, operation: Operation, device_name: str, device: Device | None
) -> list[str]:
    """Algorithms, other libraries, and a plain read."""
    known = kernels_of(operation.name).values()
    offered = [*dict.fromkeys(s.algorithm for s in known), *peers_here(device_name)]
    titles = {s.algorithm: s.title for s in reversed(known)}
    default = [s.algorithm for s in known if device is None or s.runs_on(device.arch.capability)]
    if operation.split_selects_kernel:
        offered = ["auto", *offered]
        titles["auto"] = "the planner's choice of split"
        default = ["auto"]
    else:
        usual = ("naive", "fa1", "fa2") if device is None else ("fa2", "fa3")
        default = [name for name in usual if name in default] or default
    if operation.memory_bound and device is not None:
        offered.append(READ)
        titles[READ] = "a kernel that only reads keys and values"
        default = [x for x in offered if x != "fixed" and x != "balanced"]
    help_text = "\u2003\n".join(f"- **{name}**: {titles[name]}" for name in offered if name in titles)
    return controls.several("kernels", "Kernels", offered, default, local=True, help=help_text)


def _choose_regime(controls: Controls, columns: list[DeltaGenerator]) -> tuple[float, Regime]:
    """Seconds and regime, in the order of a job's fields."""
    regime = choose_regime(controls, list(Regime), columns[0])
    help_text = "For all kernels of a shape together; at least ten rounds."
    if regime is Regime.SUSTAINED:
        help_text = "For each kernel alone, after a warm-up. Joules need 3 s."
    words, begin = {n: f"{n} s" for n in ("0.2", "0.5", "1", "3", "10")}, f"{regime.seconds:g}"
    return float(
        controls.choice("seconds", "Measure for", words, begin, at=columns[1], help=help_text)
    ), regime


def _suite_words(cases: tuple[Case, ...]) -> str:
    if not cases:
        return "This suite contains none of the chosen kernels."
    lines = [
        f"- {in_words(case.problem, case.name)}: {', '.join(c.label for c in case.contenders[:6])}"
        for case in cases[:8]
    ]
    more = [f"- and {len(cases) - 8} more"] if len(cases) > 8 else []
    return "\n".join(lines + more)


def _only(case: Case, kernels: list[str]) -> Case:
    """The case with the chosen kernels only; an e4m3 case keeps all cufa kernels, as no control names them."""
    of_e4m3 = any(c.quantized for c in case.contenders)
    chosen = (c for c in case.contenders if c.algorithm in kernels or (of_e4m3 and not c.is_peer))
    return dataclasses.replace(case, contenders=tuple(chosen))


def _longer(problem: Problem, length: int) -> Problem:
    """The problem at another length; decoding keeps its number of queries."""
    if not isinstance(problem.lengths, Cached):
        return dataclasses.replace(problem, seqlen_q=length, seqlen_k=length)
    cache = _paged(problem.cache.page_size, problem.batch, length)
    return dataclasses.replace(problem, seqlen_k=length, lengths=cache)


def _paged(page_size: int, batch: int, capacity: int) -> Cached:
    """A full cache; only the last page of a sequence may have room."""
    pages = -(-capacity // page_size) if page_size else 0
    return Cached(page_size, pages, batch * pages)


def _choose_problem(controls: Controls, preset: str, start: Problem, device: Device | None) -> Problem:
    """The shape: a preset sets all fields, which can then be changed."""
    cached = isinstance(start.lengths, Cached)
    applied = st.session_state.get("run.preset.applied")
    if applied is not None and applied != preset:
        for name, attribute in _FIELDS.items():
            controls.set(name, getattr(start, attribute))
        controls.set("kv", str(start.kv_heads))
        controls.set("dtype", start.dtype)
        mask_control.put("run", start)
    st.session_state["run.preset.applied"] = preset
    columns = page.fields(1, 1, 1, 1, 1, 1)
    batch = controls.integer("batch", "Sequences" if cached else "Batch", start.batch, 1, 4096, at=columns[0])
    heads = controls.integer("heads", "Heads", start.heads, 1, 1024, at=columns[1])
    kv_heads = choose_kv_heads(controls, heads, start.kv_heads, at=columns[2])
    most, step = (MAX_TOKENS, 1) if cached else (1 << 20, 128)
    label = "New tokens" if cached else "Queries"
    seqlen_q = controls.integer("sq", label, start.seqlen_q, 1, most, step=step, at=columns[3])
    label = "Cached tokens" if cached else "Keys"
    seqlen_k = controls.integer("sk", label, start.seqlen_k, 1, 1 << 20, step=128, at=columns[4])
    head_dim = controls.integer(
        "d", "Head dim", start.head_dim, 8, MAX_HEAD_DIM, step=HEAD_DIM_STEP, at=columns[5]
    )
    if head_dim % HEAD_DIM_STEP:
        rounded = -(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP
        controls.notice(f"head dim {head_dim} is not a multiple of {HEAD_DIM_STEP}; the page uses {rounded}.")
        head_dim = rounded
    mask, softcap = mask_control.choose(controls, start.mask, start.softcap, cached=cached)
    columns = page.fields(2.6, 1.6, 2)
    precisions = {p for s in kernels_of(start.operation).values() for p in s.precisions}
    served = {d for s in kernels_of(start.operation).values() for d in s.dtypes}
    dtypes = [d for d in FORWARD_DTYPES if device is None or d in served]
    dtype = controls.choice("dtype", "Data type", dtypes, start.dtype, segmented=True, at=columns[0])
    precision = "float32" if dtype == "float32" and "float32" in precisions else "native"
    if precision != "native" and device is not None:  # only float32 on a GPU has a choice
        words = {"float32": "float32 accuracy", "tf32": "tf32 products"}
        precision = controls.choice("precision", "Precision", words, segmented=True, at=columns[1])
    problem = dataclasses.replace(
        start, batch=batch, heads=heads, kv_heads=kv_heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim,
        dtype=dtype, mask=mask, scale=default_scale(head_dim), softcap=softcap, precision=precision,
    )  # fmt: skip
    return _choose_cache(controls, problem, device, columns[1:]) if cached else problem


def _choose_cache(
    controls: Controls, problem: Problem, device: Device | None, columns: list[DeltaGenerator]
) -> Problem:
    """Layout and element type of keys and values."""
    words = {size: f"pages of {size}" if size != "0" else "contiguous" for size in _PAGES}
    page_size = int(controls.choice("pages", "Cache", words, at=columns[0]))
    elements = {"same": "as the queries"}
    known = dict.fromkeys(x for s in kernels_of(problem.operation).values() for x in s.k_dtypes)
    elements |= {x: x for x in known if problem.itemsize == 2 and device is not None}
    element = controls.choice("cache", "Type of the cache", elements, at=columns[1])
    k_dtype = None if element == "same" else element
    cache = _paged(page_size, problem.batch, problem.seqlen_k)
    if page_size and problem.seqlen_k % page_size:
        rounded = cache.max_pages * page_size
        controls.notice(
            f"{problem.seqlen_k:,} tokens do not fill the last page of {page_size}; the page uses {rounded:,} tokens."
        )
        problem = dataclasses.replace(problem, seqlen_k=rounded)
    return dataclasses.replace(problem, lengths=cache, k_dtype=k_dtype, v_dtype=k_dtype)


def _choose_tiles(
    controls: Controls, kernels: list[str], problem: Problem, device: Device | None
) -> dict[str, tuple[Contender, ...]]:
    """Contenders of each kernel with the chosen tiles; the planner decides for the other kernels."""
    fitting = {kernel: tilings(kernel, problem, device) for kernel in kernels}
    keys = {key: str(config) for configs in fitting.values() for key, config in configs.items()}
    words = {_PLANNED: "the planner's choice", **keys, _EVERY: "every tiling that fits, side by side"}
    help_text = "A kernel that is not built with the chosen tiles uses the planner's choice."
    chosen = controls.choice("tiles", "Tiles (queries × keys)", words, help=help_text)
    if chosen == _PLANNED:
        return {}
    picked = {
        kernel: tuple(Contender(kernel, config) for key, config in configs.items() if chosen in (key, _EVERY))
        for kernel, configs in fitting.items()
    }
    return {kernel: contenders for kernel, contenders in picked.items() if contenders}


def tilings(kernel: str, problem: Problem, device: Device | None) -> dict[str, TileConfig]:
    """Tilings of the kernel by name in links."""
    named = [spec for spec in kernels_of(problem.operation).values() if spec.algorithm == kernel]
    if not named:
        return {}  # another library
    if device is None:
        return {f"{q}x{kv}": TileConfig(q, kv, num_warps=0) for q, kv in _CPU_TILES}
    spec = next((s for s in named if s.refuses(problem, device.arch.capability) is None), None)
    return {config_key(c): c for c in (serving_configs(spec, problem, device) if spec else ())}


def seconds_expected(job: Job, rate: float | None) -> float | None:
    """Estimated seconds of a CPU job from this machine's FLOP/s of products; None if unknown.

    In turns: at least ten rounds, two warm-up calls and one check, at half of the ceiling.
    """
    if job.device != CPU or rate is None:
        return None
    total = 0.0
    for case in job.cases:
        p, number = case.problem, len(case.contenders)
        work = Work.of(p)
        scores = p.batch * p.heads * p.seqlen_q * p.seqlen_k  # all scores: some contenders skip nothing
        one = number * work.flops / max(1, work.scores) * scores / (0.5 * rate)
        if job.regime is Regime.SUSTAINED:
            total += max(number * (job.seconds + WARM_SECONDS), 6 * one) + 3 * one
        else:
            total += max(job.seconds, 10 * one) + 3 * one
    return total + 1
