"""Masked work: when each thread block runs, predicted and measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict

import streamlit as st

from cufa.dashboard import page, sentences
from cufa.dashboard.charts import timeline as charts
from cufa.dashboard.model import counters, devices, launch
from cufa.dashboard.model.counters import Kept
from cufa.dashboard.model.launch import Timeline
from cufa.dashboard.model.subject import Subject
from cufa.dashboard.model.trace import measured_timeline, perfetto
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import links
from cufa.dashboard.views.masked_controls import MOST_THREAD_BLOCKS, View
from cufa.dashboard.views.shape_controls import card_key
from cufa.gpu.architectures import Device, find_architecture

_TRACE_TIMEOUT = 180
TRACE_TIME = (
    "One launch with these stores, at the clock of that moment. Benchmarks give other times: the median of many "
    "launches of the build without stores."
)


def show_timelines(view: View, palette: Palette) -> None:
    """The prediction, the measurement of a trace build, and the tail of both."""
    page.header("On the SMs")
    if len(view.blocks) > MOST_THREAD_BLOCKS:
        text = f"{len(view.blocks):,} thread blocks are too many: the simulation takes up to {MOST_THREAD_BLOCKS:,}."
        page.verdict(text, "warn", small=True)
        return
    entry = counters.matching_trace(view.problem, view.spec.name, view.config, view.device)
    if entry is None:
        _show_predicted(view, palette)
        _offer_trace(view)
        _choose_recorded()
        return
    left, right = st.columns(2)
    with left:
        _show_predicted(view, palette)
    with right:
        measured = measured_timeline(entry.trace.records, entry.trace.num_sms, view.whole_heads)
        _show_measured(entry, measured, view.device, palette)
    if entry.is_of(view.device) and entry.has_every_block:
        _show_tails(view, measured, page.origin_tag(entry.origin), palette)
    else:
        _offer_trace(view)
    _choose_recorded()


def _show_predicted(view: View, palette: Palette) -> None:
    timeline = view.predicted
    tone = "warn" if timeline.idle_places > 0.1 else ""
    page.verdict(_predicted_verdict(view), tone, "predicted", small=True)
    figure = charts.timeline_figure(timeline, palette)
    page.figure(figure, "masked.predicted", charts.describe_timeline(timeline))
    rule = f"{sentences.count(view.blocks_per_sm, 'thread block')}, and the next block in launch order takes the first "
    rule += "free place"
    if view.blocks.thread_block is not None:
        rule = f"one persistent block, which takes its own {view.item_noun}s in the kernel's order"
    text, group = f"Simulated: each SM holds {rule}. All tiles take the same time.", view.problem.group_size
    if view.schedule.by_keys and group > 1:
        text += f" Tiles are counted for one of the {group} query heads of a K/V head."
    st.caption(text)
    title = f"predicted: {view.spec.name}, {view.problem}"
    offer_trace(lambda: perfetto(timeline, title), "predicted")


def _predicted_verdict(view: View) -> str:
    timeline, device = view.predicted, view.device
    if not timeline.span:
        return "No thread block has a tile to compute."
    if timeline.busy_sms < device.num_sms:
        return (
            f"Only {timeline.busy_sms} of {device.num_sms} SMs get a thread block: {timeline.tail:.0%} of "
            "SM time is idle."
        )
    if view.blocks.thread_block is not None:
        number = int(view.blocks.thread_block.max()) + 1
        items = sentences.count(len(view.blocks), view.item_noun)
        return f"{items} on {sentences.count(number, 'persistent thread block')}: {_idle(timeline)}."
    waves = len(view.blocks) / (device.num_sms * view.blocks_per_sm)
    of_waves = f"{waves:.1f} {sentences.plural(1 if waves == 1 else 2, 'wave')}"
    return f"{sentences.count(len(view.blocks), 'thread block')}, {of_waves}: {_idle(timeline)}."


def _idle(timeline: Timeline) -> str:
    """Idle time of SMs at the end, and of empty places, which shows the cost of the last wave."""
    sms = f"{sentences.share(timeline.tail)} of SM time is idle at the end"
    if timeline.slots_per_sm == 1:
        return sms
    return f"{sms}, {sentences.share(timeline.idle_places)} of the places' time is empty"


def _show_measured(entry: Kept, timeline: Timeline, device: Device, palette: Palette) -> None:
    """A trace. A trace of another card is marked as such, without a verdict."""
    trace, tag = entry.trace, page.origin_tag(entry.origin)
    text = f"{timeline.span:,.0f} µs, {_idle(timeline)}; {timeline.mean_blocks:.1f} blocks per SM on average."
    if not entry.has_every_block:
        text = f"{timeline.span:,.0f} µs. Only the first thread block of each pair has a record; the second runs on "
        text += "an SM that is empty in this figure."
    if entry.is_of(device):
        page.verdict(text, "warn" if timeline.tail > 0.1 and entry.has_every_block else "", tag, small=True)
    else:
        text = f"On another card, {entry.card}: {text[0].lower()}{text[1:]}"
        page.verdict(f"{text} This says nothing about {device.name}.", "", tag, small=True)
    figure = charts.timeline_figure(timeline, palette)
    page.figure(figure, "masked.measured", charts.describe_timeline(timeline))
    stale = "" if trace.is_current else " **The kernel's sources have changed since.**"
    st.caption(
        f"{entry.card}, {trace.environment['recorded'][:10]}: start, end and SM of each thread block, "
        f"written by a trace build of the kernel ({trace.problem.dtype}). {TRACE_TIME}{stale}"
    )
    offer_trace(lambda: perfetto(timeline, f"{tag}: {trace.name}"), tag)


def _show_tails(view: View, measured: Timeline, tag: str, palette: Palette) -> None:
    predicted = view.predicted
    difference = measured.tail - predicted.tail
    word = f"{abs(difference):.1%} of SM time {'longer' if difference > 0 else 'shorter'} than"
    page.verdict(f"The tail is {'as' if abs(difference) < 0.001 else word} predicted.", small=True)
    lines = {"predicted": predicted, tag: measured}
    alt = (
        "Two lines: when each SM finished its last block, as share of the run, SMs sorted. The area above "
        f"a line is idle time: {predicted.tail:.1%} predicted, {measured.tail:.1%} {tag}."
    )
    page.figure(charts.sm_finish(lines, palette), "masked.finish", alt)
    most, reckoned = measured.slots_per_sm, predicted.slots_per_sm
    if most > reckoned and view.blocks.thread_block is None:
        with_more = launch.predict(view.blocks, view.device.num_sms, most).tail
        is_same = abs(with_more - predicted.tail) < 0.001
        st.caption(
            f"The card held up to {most} thread blocks per SM. The prediction assumes the {reckoned} of the kernel's "
            f"launch bounds; its registers allow more. With {most}, the prediction is "
            f"{'the same' if is_same else f'{with_more:.1%} idle'}. The page Occupancy shows the limits."
        )


def offer_trace(make: Callable[[], bytes], name: str) -> None:
    """A download in the format of Chrome and Perfetto, made on demand."""
    help_text = (
        "Open the file in ui.perfetto.dev or chrome://tracing. A predicted tile lasts one microsecond."
    )
    key, file, mime = f"masked.export.{name}", f"cufa-{name}.json", "application/json"
    page.download("Chrome / Perfetto trace", make, file, mime, key, "download", help=help_text)


def _offer_trace(view: View) -> None:
    """Without a trace of this view: take one on a GPU, or say that there is none."""
    if devices.gpu_count() and view.is_registered:
        if st.button("Trace it on this GPU", key="masked.trace", icon=":material/monitoring:"):
            with st.spinner("Compiling and running the trace build…"):
                error = run_trace(view)
            if error is None:
                st.rerun()
            st.error(error, icon=":material/error:")
        return
    if view.refusal is not None:
        return
    why = "no kernel has these tiles" if devices.gpu_count() else "this machine has no GPU"
    page.not_measured(f"no trace of this problem is recorded, and {why}.")


def _choose_recorded() -> None:
    """Open a recorded trace."""
    known, damaged = counters.all_traces()
    for text in damaged:
        st.warning(text, icon=":material/broken_image:")
    if not known:
        return
    traces = ((name, entry.trace, entry.card) for name, entry in known.items())
    words = {name: f"{x.kernel}: {x.problem}, {x.config} · {card}" for name, x, card in traces}
    st.selectbox(
        "Recorded traces", list(known), None, words.__getitem__, "masked.open", on_change=_open_chosen, args=(known,),
        placeholder="Open a trace: it sets the controls above",
    )  # fmt: skip


def _open_chosen(known: dict[str, Kept]) -> None:
    """Show the traced launch, by a link to it."""
    chosen = st.session_state.pop("masked.open", None)
    if chosen is not None:
        trace = known[chosen].trace
        arch = find_architecture(trace.environment.get("arch", "sm_90"))
        card = card_key(Device(str(trace.environment["device"]), arch, trace.num_sms))
        subject = Subject(trace.problem, trace.kernel, trace.config, card)
        Controls.follow(links.link("masked_work", subject))


def run_trace(view: View) -> str | None:
    """Trace in a separate process, which may crash. Returns None, or the error."""
    config = asdict(view.config)
    request = {"problem": view.problem.as_json(), "algorithm": view.algorithm, "config": config}
    command = [sys.executable, "-m", "cufa.measure.traces", str(counters.local_traces_dir())]
    command += ["--request", json.dumps(request)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TRACE_TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"The trace took longer than {_TRACE_TIMEOUT} s and was stopped."
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"The trace process ended with code {done.returncode}: {last}"
    return None
