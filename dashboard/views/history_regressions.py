"""The page History: regressions between two commits."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import engine, page, sentences
from cufa.dashboard.model import regressions
from cufa.dashboard.model.many import grouped
from cufa.dashboard.model.measurements import Measurement, in_words
from cufa.dashboard.model.regressions import BEFORE, Change, Group
from cufa.dashboard.state import Controls

_MOST = 40


def show(controls: Controls, measured: Sequence[Measurement]) -> None:
    """Every row that two versions measured on one machine, grouped by kernel and suite."""
    page.header("Regressions")
    if not controls.flag("regressions", "Find the rows that became slower between two commits"):
        return
    machines = grouped([m for m in (*engine.past(), *measured) if m.is_gpu], lambda m: m.machine)
    machines = {name: rows for name, rows in machines.items() if len(regressions.versions(rows)) > 1}
    if not machines:
        page.verdict("No machine has measurements of two versions: a comparison needs two.", small=True)
        return
    columns = page.fields(1.4, 2, 2)
    most = max(machines, key=lambda name: len(machines[name]))
    machine = controls.choice("rm", "Machine", list(machines), most, local=True, at=columns[0])
    words = regressions.versions(machines[machine])
    b = controls.choice("rv", "Commit", words, local=True, at=columns[2])
    earlier = {BEFORE: "the row's last measurement"} | {name: x for name, x in words.items() if name != b}
    a = controls.choice("ro", "Against", earlier, local=True, at=columns[1])
    changed = regressions.changes(machines[machine], a, b)
    ranked = regressions.groups(changed)
    if not ranked:
        page.verdict(
            "The two commits have no row of a cufa kernel in common: choose another pair.", "warn", small=True
        )
        return
    _show_verdict(ranked, changed, machine)
    page.table([_line(group) for group in ranked])
    slow = [x for group in ranked for x in group.changes]
    slow.sort(key=lambda x: (not x.is_regression, -x.slower))
    _show_rows(slow)
    _show_commits(slow[0])


def _show_verdict(ranked: Sequence[Group], changed: Sequence[Change], machine: str) -> None:
    counted = [x for group in ranked for x in group.counted]
    slower = sum(x.is_regression for x in counted)
    faster = sum(x.ratio.low > 1 for x in counted)
    heaviest = ranked[0]
    text = f"{slower} of {sentences.count(len(counted), 'row')} are slower, {faster} faster"
    if heaviest.weight > 0:
        text += f"; the heaviest: {heaviest.name}, {heaviest.mean:+.1%} on average"
    page.verdict(f"{text}.", "warn" if slower > faster else "", "recorded", small=True)
    drift = regressions.drift(changed)
    control = "No other library has times of both versions as a control: the machine itself may have changed."
    if drift is not None:
        control = f"Control: other libraries, whose code did not change, moved by {drift:+.1%} in the median."
    bound = sum(x.host_bound for x in changed)
    if bound:
        control += f" {sentences.count(bound, 'host-bound row').capitalize()} left out of counts and means."
    st.caption(
        f"{machine}. Slower or faster: the 95% interval of the ratio excludes 1; regimes are never mixed. {control} "
        "Groups are ranked by the sum of the logarithms of their slowdowns."
    )


def _line(group: Group) -> dict[str, str]:
    regressed = sum(x.is_regression for x in group.changes)
    worst = group.counted[0] if group.counted else None
    return {
        "kernel, suite, regime": group.name,
        "rows": str(len(group.changes)),
        "slower": str(regressed),
        "mean": f"{group.mean:+.1%}",
        "worst row": "host-bound" if worst is None else f"{worst.slower:+.1%}: {_shape(worst.after)}",
        "commits": " → ".join(dict.fromkeys((_ends(group, "before"), _ends(group, "after")))),
    }


def _ends(group: Group, name: str) -> str:
    return ", ".join(dict.fromkeys(regressions.version(getattr(x, name)) for x in group.changes))


def _shape(m: Measurement) -> str:
    return f"{m.label}, {in_words(m.problem, m.row.case)}"


def _show_rows(slow: Sequence[Change]) -> None:
    lines = [
        {
            "slower": f"{x.slower:+.1%}",
            "kernel and problem": _shape(x.after),
            "regime": str(x.after.regime),
            "before": seconds_text(x.before.seconds),
            "after": seconds_text(x.after.seconds),
            "ratio": str(x.ratio),
            "host-bound": "yes" if x.host_bound else "",
            "commits": f"{regressions.version(x.before)} → {regressions.version(x.after)}",
            "days": f"{x.before.recorded[:10]} → {x.after.recorded[:10]}",
        }
        for x in slow[:_MOST]
    ]
    with st.expander(f"The {len(lines)} rows that slowed down most", icon=":material/trending_down:"):
        page.table(lines)


def _show_commits(worst: Change) -> None:
    a, b = regressions.version(worst.before), regressions.version(worst.after)
    commits = regressions.commits_between(a, b)
    if commits:
        title = f"Commits between {a} and {b} that touch kernels or plans"
        with st.expander(title, icon=":material/commit:"):
            page.listing("\n".join(commits))
    else:
        st.caption(f"`git log {a}..{b}` lists the commits between, in a checkout that has both.")
