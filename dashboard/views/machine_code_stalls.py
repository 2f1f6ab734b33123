"""The page Machine code: stall reasons by source line, from a report of Nsight Compute."""

from __future__ import annotations

import tempfile
from pathlib import Path

import streamlit as st

from cufa.build.machine_code import Code
from cufa.dashboard import page
from cufa.dashboard.model import stalls
from cufa.dashboard.model.listed import source_lines
from cufa.dashboard.model.stalls import EXCESSIVE, EXECUTED, WAVEFRONTS, NotStallsError, Profiled, Sampled
from cufa.dashboard.sentences import share

_MOST = 60


def show(code: Code, entry: str, file: str) -> None:
    """Attach a report, and see its samples beside the SASS compiled here."""
    page.header("Stalls by line")
    st.caption(
        f"On a machine with a GPU and Nsight Compute, `{stalls.HOW}` profiles a recorded row and writes "
        "`report.ncu-rep` and `report.csv`. Nothing leaves this machine."
    )
    given = st.file_uploader("Report of Nsight Compute (.ncu-rep, or its source page as CSV)", key="code.ncu")
    if given is None:
        return
    try:
        kernels = _read(given.name, given.getvalue())
    except (NotStallsError, UnicodeDecodeError) as error:
        why = error if isinstance(error, NotStallsError) else f"it is not text. Make one with: {stalls.HOW}"
        page.verdict("This file is not a report with source counters.", "alarm", small=True)
        st.error(str(why), icon=":material/broken_image:")
        return
    found = next((x for x in kernels if x.is_of(code)), None)
    if found is None:
        found = next((x for x in kernels if entry in x.kernel), kernels[0])
        page.verdict(
            f"The report's {found.kernel or 'kernel'} has other instructions than this build: choose the kernel, tiles "
            "and architecture that were profiled. Its own instructions follow.",
            "warn",
            small=True,
        )
        hot = sorted(found.instructions, key=lambda x: -x.samples)[:_MOST]
        st.dataframe([{"SASS": x.text, **_cells(x, found)} for x in hot], hide_index=True)
        return
    text = ""
    for reason, count in found.reasons.most_common(1):
        text = f"{share(count / found.samples)} of {found.samples:,} warp samples: {reason}"
    if place := found.hottest(code):
        text += f"; the hottest line is {place.file}:{place.line}."
    page.verdict(text, "", "measured", small=True)
    by_line, source = found.by_line(code, file), dict(enumerate(source_lines(file), 1))
    hot_lines = sorted(by_line, key=lambda n: -by_line[n].samples)[:_MOST]
    lines = [{"line": n, "source": source.get(n, "").strip(), **_cells(by_line[n], found)} for n in hot_lines]
    st.dataframe(lines, hide_index=True)
    of_shared = ""
    if waves := found.total(WAVEFRONTS):
        excess = share(found.total(EXCESSIVE) / waves)
        of_shared = f" Shared memory: {waves:,} wavefronts, {excess} of them excessive."
    st.caption(
        f"Lines of {file}, by warp samples; the reasons are Nsight Compute's names. A sample counts a warp, issued or "
        f"stalled.{of_shared} The page Run shows a report's traffic and hit rates beside predicted levels."
    )


def _read(name: str, content: bytes) -> list[Profiled]:
    if not name.endswith(".ncu-rep"):
        return stalls.parse(content.decode("utf-8-sig"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.ncu-rep")
        file.write_bytes(content)
        return stalls.of_report(file)


def _cells(x: Sampled, kernel: Profiled) -> dict[str, object]:
    reasons = x.reasons.most_common(3) if x.samples else []
    return {
        "samples": x.samples,
        "of all": share(x.samples / kernel.samples),
        "stalls": ", ".join(f"{name} {share(n / x.samples)}" for name, n in reasons),
        "executed": x.counters.get(EXECUTED),
        "shared wavefronts": x.counters.get(WAVEFRONTS),
        "excessive": x.counters.get(EXCESSIVE),
    }
