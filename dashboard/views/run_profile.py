"""The page Run: counters of NVIDIA's profiler, attached to a run, beside cufa's counters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import engine, page
from cufa.dashboard.charts.work import si
from cufa.dashboard.model import ncu
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.model.ncu import SHOWN, NotNcuError, Profile
from cufa.dashboard.worker.run import Run
from cufa.measure.costs import cost_on

_FILE = "ncu.csv"


def show(run: Run, measured: Sequence[Measurement]) -> None:
    """The attached file, or how to attach one."""
    file = engine.store().folder(run.id) / _FILE
    with st.expander(
        "Counters of NVIDIA's profiler", icon=":material/troubleshoot:", expanded=file.is_file()
    ):
        st.caption(f"Attach the output of `ncu --csv` for the same kernel: `{ncu.HOW}`")
        upload = st.file_uploader("Output of ncu --csv", type=["csv", "txt", "log"], key=f"run.ncu.{run.id}")
        if upload is not None:
            _attach(file, upload.getvalue())
        if file.is_file():
            _show_attached(file, measured)


def _attach(file: Path, content: bytes) -> None:
    """Keep a readable file; show the error of any other file."""
    try:
        text = content.decode("utf-8-sig")
        ncu.parse(text)
    except (NotNcuError, UnicodeDecodeError) as error:
        why = error if isinstance(error, NotNcuError) else f"it is not text. Create a file with: {ncu.HOW}"
        page.verdict("This file is not attached.", "alarm", small=True)
        st.error(str(why), icon=":material/broken_image:")
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        st.error(
            f"The file cannot be saved in `{file.parent}`: {error.strerror or error}.",
            icon=":material/report:",
        )


def _show_attached(file: Path, measured: Sequence[Measurement]) -> None:
    try:
        profiles = ncu.parse(file.read_text(encoding="utf-8"))
    except (NotNcuError, OSError, UnicodeDecodeError) as error:
        st.error(f"The attached file cannot be read: {error}", icon=":material/broken_image:")
        return
    ours = next((m for m in measured if _profile_of(m, profiles) is not None), measured[0])
    labels = [m.label for m in measured]
    label = st.selectbox(
        "Measurement of cufa", labels, labels.index(ours.label), key=f"run.ncu.row.{file.parent.name}"
    )
    m = measured[labels.index(label)]
    numbers = list(range(len(profiles)))
    match = _profile_of(m, profiles)
    chosen = st.selectbox(
        "Launch in the file",
        numbers,
        0 if match is None else profiles.index(match),
        format_func=lambda n: f"{profiles[n].number}: {profiles[n].kernel}",
        key=f"run.ncu.launch.{file.parent.name}.{label}",
    )
    profile = profiles[chosen]
    if match is None:
        page.verdict(f"The file has no launch of {m.label}: all names differ.", "warn", small=True)
    st.dataframe(lines(profile, m), hide_index=True, height="content")
    st.caption(
        "**cufa**: the measured time; bytes requested by the kernel's loops; for device memory, every operand once. "
        "The profiler runs a kernel alone and repeatedly; its options decide about the caches."
    )
    page.button("Remove the file", f"run.ncu.drop.{file.parent.name}", "delete", file.unlink, True)


def _profile_of(m: Measurement, profiles: Sequence[Profile]) -> Profile | None:
    """The launch of the row's kernel over tiles."""
    spec = m.subject.spec
    return next((p for p in profiles if spec is not None and spec.entry in p.kernel), None)


def lines(profile: Profile, m: Measurement) -> list[dict[str, str]]:
    """Counters of the profiler and of cufa, line by line."""
    spec, config = m.subject.spec, m.subject.config
    cost = cost_on(m.problem, spec, config) if spec is not None and config is not None else None
    ours: dict[str, float | None] = {
        "time": m.seconds,
        "device memory, read": None,
        "requested from L2, read": None if cost is None else cost.read,
        "requested from L2, written": None if cost is None else cost.written,
    }
    total = [profile.first(SHOWN[name]) for name in ("device memory, read", "device memory, written")]
    rows = [_line(name, profile.first(metrics), ours.get(name)) for name, metrics in SHOWN.items()]
    if None not in total:
        rows.append(_line("device memory, total", sum(x or 0.0 for x in total), float(m.problem.io_bytes)))
    return [line for line in rows if line["ncu"] != "–"]


def _line(name: str, counted: float | None, ours: float | None) -> dict[str, str]:
    words: Callable[[float], str] = functools.partial(si, unit="B")
    if name == "time":
        words = seconds_text
    elif name.startswith("registers"):
        words = "{:,.0f}".format
    elif name.endswith(("achieved", "busy")):
        words = "{:.0%}".format
    ratio = f"{counted / ours:.2f}×" if counted is not None and ours else "–"
    return {
        "": name,
        "ncu": "–" if counted is None else words(counted),
        "cufa": "–" if ours is None else words(ours),
        "ncu ÷ cufa": ratio,
    }
