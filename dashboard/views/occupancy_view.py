"""The page Occupancy: the compiled kernel, and what-if sliders."""

from __future__ import annotations

from collections.abc import Iterable

import streamlit as st

from cufa.build.static_compile import MissingCompilerError
from cufa.build.variants import Variant
from cufa.dashboard import page, sentences
from cufa.dashboard.charts import occupancy as charts
from cufa.dashboard.charts.occupancy import Point
from cufa.dashboard.model import counters
from cufa.dashboard.model.compiled import Compiled, Compiler, Entry
from cufa.dashboard.model.configs import config_key, config_words
from cufa.dashboard.model.trace import measured_timeline
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views.occupancy_choice import Choice, begin
from cufa.gpu.architectures import Device
from cufa.gpu.occupancy import UNLIMITED, Occupancy, Resource
from cufa.problem.problem import Problem
from cufa.run.cpu.blas import usable_cores
from cufa.schedule.order import WHOLE_HEAD
from cufa.schedule.schedule import Schedule

_WHAT_IF_OF = "occupancy.build"
_GROUP = 128
"""Threads of a warpgroup."""


@st.cache_resource(show_spinner=False)
def compiler() -> Compiler:
    """One for the whole server."""
    return Compiler(jobs=max(1, min(4, usable_cores() - 1)))


def compile_first() -> None:
    """Start compiling the default build."""
    compiler().want([begin()])


def show_kernel(choice: Choice, controls: Controls, palette: Palette) -> None:
    """The chosen build: verdict, limits, what-if sliders."""
    if choice.config is None:
        return
    try:
        with st.spinner("Compiling…"):
            built = compiler().get(choice.variant(choice.config, choice.arch))
    except MissingCompilerError as error:
        page.verdict("There is no compiler here: the registers are unknown.", "warn")
        st.info(str(error))
        return
    for finding in built.findings:
        st.error(finding, icon=":material/error:")
    if not built.entries:
        return
    # Traces belong to the launch over tiles.
    main = next(e for e in built.entries if e.name == choice.spec.entry)
    entry = main
    if len(built.entries) > 1:
        entries = {e.name: e for e in built.entries}
        entry = entries[controls.choice("entry", "Launch", list(entries), main.name, segmented=True)]
    page.verdict(charts.verdict(entry.occupancy(choice.arch)), tag="compiled")
    _show_facts(entry, choice)
    _show_limits(entry, choice)
    if entry is main:
        _show_achieved(entry, choice)
    _show_what_if(entry, choice, controls, palette)


def _show_facts(entry: Entry, choice: Choice) -> None:
    spills = "no spills" if not entry.spill_bytes else f"{entry.spill_bytes} bytes spilled"
    o = entry.occupancy(choice.arch)
    st.caption(
        f"Mask: {choice.problem.scores_text} · **{entry.registers}** registers per thread · "
        f"**{entry.threads}** threads per block · **{entry.shared_bytes:,}** bytes of shared memory per block · "
        f"{spills} · {choice.arch.nvrtc_name} · without allocation granularity, registers alone would allow "
        f"{o.unrounded_warps} warps"
    )


def _show_limits(entry: Entry, choice: Choice) -> None:
    """Each resource alone: use of a block, capacity of an SM, and blocks per SM."""
    o, arch = entry.occupancy(choice.arch), choice.arch
    none = "no limit"
    rows = [
        (Resource.WARPS, f"{o.warps_per_block}", f"{arch.max_warps}"),
        (Resource.REGISTERS, f"{o.granted_registers:,}", f"{arch.registers:,}"),
        (Resource.SHARED_MEMORY, f"{o.granted_shared_memory:,} B", f"{arch.shared_memory:,} B"),
        (Resource.BARRIERS, f"{entry.barriers}", none if arch.barriers is None else f"{arch.barriers}"),
        (Resource.BLOCKS, "1", f"{arch.max_blocks}"),
    ]
    lines = [
        {
            "resource": str(resource),
            "per block": takes,
            "per SM": has,
            "blocks per SM": none if o.limits[resource] == UNLIMITED else f"{o.limits[resource]}",
            "": "limits" if resource in o.limiters else "",
        }
        for resource, takes, has in rows
    ]
    page.table(lines)
    if entry.split:
        least, most, groups = entry.split[0], entry.split[-1], entry.threads // _GROUP
        consumers = sentences.count(groups - 1, "consumer")
        st.caption(
            f"The kernel moves registers between warpgroups (setmaxnreg). At launch: {groups} × {entry.registers} = "
            f"{groups * entry.registers}. Then the producer keeps {least}, and {consumers} "
            f"{sentences.plural(groups - 1, 'takes')} {most} each: {least + (groups - 1) * most} in total."
        )


def _show_achieved(entry: Entry, choice: Choice) -> None:
    """Achieved occupancy in traces of the same build."""
    assert choice.config is not None
    wanted = choice.spec.name, config_key(choice.config), _compiled_as(choice.problem), choice.arch.name
    for recorded in counters.all_traces()[0].values():
        trace, p = recorded.trace, recorded.trace.problem
        build = trace.kernel, config_key(trace.config), _compiled_as(p), trace.environment.get("arch")
        if build != wanted or not recorded.has_every_block:
            continue
        schedule = Schedule.of(p, trace.config.block_q, trace.config.block_kv, choice.spec.skip_masked_tiles)
        device = Device(recorded.card, choice.arch, trace.num_sms)
        order = choice.spec.order(p, schedule, device, trace.config)
        whole_heads = order is not None and bool((order.q_block == WHOLE_HEAD).all())
        timeline = measured_timeline(trace.records, trace.num_sms, whole_heads)
        theoretical = entry.occupancy(choice.arch).blocks
        page.verdict(
            f"Achieved {timeline.mean_blocks:.2f} of {sentences.count(theoretical, 'block')} per SM, "
            f"averaged over the run, idle tail included ({trace.problem}; {recorded.card}, "
            f"{trace.environment['recorded'][:10]}).",
            "",
            page.origin_tag(recorded.origin),
            small=True,
        )


def _compiled_as(p: Problem) -> tuple[object, ...]:
    """Properties of a problem that the compiler sees; 16-bit types need equal resources."""
    return p.head_dim, p.itemsize, p.mask_kind, p.softcap is None


def _show_what_if(entry: Entry, choice: Choice, controls: Controls, palette: Palette) -> None:
    page.header("What if")
    arch = choice.arch
    _begin_anew(entry, choice, controls)
    columns = st.columns(3)
    sliders = (
        ("regs", "Registers per thread", entry.registers, 16, arch.max_registers_per_thread, 1),
        ("smem", "Shared memory per block (bytes)", entry.shared_bytes, 0, arch.shared_memory_per_block, 16),
        ("threads", "Threads per block", entry.threads, 32, arch.max_threads_per_block, 32),
    )
    registers, shared, threads = (
        controls.integer(name, label, begin, least, most, step=step, slider=True, at=column)
        for (name, label, begin, least, most, step), column in zip(sliders, columns, strict=True)
    )
    kernel = Point(entry.registers, entry.threads, entry.shared_bytes, entry.barriers)
    what_if = Point(registers, threads, shared, entry.barriers)
    if what_if == kernel:
        page.verdict(
            "Move a slider: the circle is the changed block, the diamond the compiled kernel.", small=True
        )
    else:
        left, right = st.columns([5, 1.2], vertical_alignment="center")
        with left:
            page.verdict(charts.verdict(what_if.on(arch)), tag="predicted", small=True)
        with right:
            help_text = "Reset the sliders to the compiled kernel."
            page.button("As compiled", "occupancy.reset", "restart_alt", _set_what_if, entry, help=help_text)
    for column, (field, title, _) in zip(page.line_of_fields(300, 300, 300), charts.SWEEPS, strict=True):
        alt = (
            f"Occupancy on {arch.name} against {title}: the kernel has {getattr(kernel, field):,} and "
            f"{kernel.on(arch).fraction:.0%}, the what-if point {getattr(what_if, field):,} and "
            f"{what_if.on(arch).fraction:.0%}."
        )
        with column:
            figure = charts.curve(arch, field, kernel, what_if, palette)
            page.figure(figure, f"occupancy.curve.{field}", alt)


def _set_what_if(entry: Entry) -> None:
    """Set the sliders to the compiled kernel: in a callback, or before the sliders exist."""
    for name, value in (("regs", entry.registers), ("smem", entry.shared_bytes), ("threads", entry.threads)):
        Controls.put("occupancy", name, value)


def _begin_anew(entry: Entry, choice: Choice, controls: Controls) -> None:
    """Reset the sliders when another build is chosen."""
    assert choice.config is not None
    build = str((choice.variant(choice.config, choice.arch), entry.name))
    if st.session_state.get(_WHAT_IF_OF, build) != build:
        _set_what_if(entry)
    st.session_state[_WHAT_IF_OF] = build


def show_table(choice: Choice, palette: Palette) -> None:
    """Each tiling of the kernel on each architecture; fills up while builds compile."""
    page.header("All tiles, all architectures")
    waiting = compiler().want(_builds(choice).values())
    if compiler().missing or not choice.rows:
        return
    st.fragment(_table, run_every=1.0 if waiting else None)(choice, palette, waiting > 0)


def _builds(choice: Choice) -> dict[tuple[int, int], Variant]:
    return {
        (row, column): choice.variant(config, arch)
        for row, config in enumerate(choice.rows)
        for column, arch in enumerate(choice.archs)
        if config in choice.configs(arch)
    }


def _table(choice: Choice, palette: Palette, was_waiting: bool) -> None:
    builds = _builds(choice)
    known = {place: compiler().known(variant) for place, variant in builds.items()}
    waiting = sum(compiled is None for compiled in known.values())
    if was_waiting and not waiting:
        st.rerun()  # the whole page, which then stops refreshing
    archs, configs = choice.archs, choice.rows
    cells: list[list[Occupancy | str]] = [["does not fit"] * len(archs) for _ in configs]
    for (row, column), compiled in known.items():
        cells[row][column] = "…" if compiled is None else "does not compile"
        if compiled is not None and compiled.entries:
            each = [e.occupancy(archs[column]) for e in compiled.entries]
            cells[row][column] = min(each, key=lambda o: o.fraction)
    page.verdict(_table_verdict(known.values(), waiting), tag="compiled", small=True)
    if waiting:
        st.progress(1 - waiting / len(builds), f"{len(builds) - waiting} of {len(builds)} built")
    selected = None
    if choice.config in configs and choice.arch in archs:
        selected = configs.index(choice.config), archs.index(choice.arch)
    names = [config_words(c) for c in configs]
    columns = [f"{a.name}<br>{a.typical_card}" for a in archs]
    lines = [
        f"{name} on {arch.name}: {charts.verdict(o)}"
        for name, line in zip(names, cells, strict=True)
        for arch, o in zip(archs, line, strict=True)
        if not isinstance(o, str)
    ]
    alt = "Table of tiles by architecture. " + " ".join(lines)
    page.figure(charts.table(names, columns, cells, palette, selected), "occupancy.table", alt)
    if len(choice.variant(configs[0], archs[0]).launches) > 1:
        st.caption("This kernel has several launches: each cell shows the launch with the lowest occupancy.")


def _table_verdict(known: Iterable[Compiled | None], waiting: int) -> str:
    if waiting:
        return f"{sentences.count(waiting, 'build')} {sentences.plural(waiting, 'is')} being compiled on this machine."
    builds = [x for x in known if x is not None]
    findings = sum(len(x.findings) for x in builds)
    number = sentences.count(len(builds), "build")
    if findings:
        return f"{number}, {sentences.count(findings, 'finding')}: a shipped kernel must have no finding."
    return f"{number}: no spilled register and no other finding."
