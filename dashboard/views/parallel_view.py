"""The page Several GPUs: the schedule of a parallel call, and its predicted time."""

from __future__ import annotations

import functools

import streamlit as st

from cufa.commands.common import bytes_text, seconds_text
from cufa.dashboard import page
from cufa.dashboard.charts import ranks as charts
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import mask_control
from cufa.dashboard.views.shape_controls import HEAD_DIMS, choose_kv_heads
from cufa.parallel import Prediction, plan
from cufa.parallel.placement import KINDS
from cufa.parallel.prediction import BACKWARD_FLOPS, FORWARD_FLOPS, LINKS
from cufa.parallel.schemes import SCHEMES

_MOST_RANKS, _PRINTED = 16, 8
_LINKS = {
    "nvlink4": "NVLink 4, measured",
    "pcie5": "PCIe 5, nominal",
    "infiniband400": "InfiniBand 400, nominal",
}
_DIRECTIONS = {"forward": "Forward", "backward": "Backward"}
_plan = functools.lru_cache(64)(plan)


def show(controls: Controls, palette: Palette) -> None:
    """The whole page; without a valid scheme the reason."""
    with page.control_box():
        columns = page.fields(1, 1, 1, 1.2, 1, 1.6)
        ranks = controls.integer("ranks", "Ranks", 2, 1, _MOST_RANKS, at=columns[0])
        heads = controls.integer("heads", "Heads", 16, 1, 128, at=columns[1])
        kv_heads = choose_kv_heads(controls, heads, at=columns[2])
        tokens = controls.integer("tokens", "Tokens", 32768, 1, 1 << 20, step=1024, at=columns[3])
        head_dim = int(controls.choice("d", "Head dim", HEAD_DIMS, "128", at=columns[4]))
        link = controls.choice("link", "Link", {name: _LINKS[name] for name in LINKS}, at=columns[5])
        mask, _ = mask_control.choose(controls)
        columns = page.fields(1.3, 1.6, 1.6, 1.3)
        placement = controls.choice("placement", "Placement", KINDS, "zigzag", at=columns[0])
        scheme = controls.choice("scheme", "Scheme", SCHEMES, at=columns[1])
        direction = controls.choice("direction", "Direction", _DIRECTIONS, segmented=True, at=columns[2])
        backward = direction == "backward"
        normal = round((BACKWARD_FLOPS if backward else FORWARD_FLOPS) / 1e12)
        help = "TFLOP/s of one GPU for this shape, from `cufa bench`."
        label = "Rate of one GPU"
        rate = controls.integer("rate", label, normal, 1, 10_000, step=10, help=help, at=columns[3])
    try:
        result = _plan(
            (1, heads, tokens, head_dim), (1, kv_heads, tokens, head_dim), ranks=ranks, placement=placement,
            scheme=scheme, mask=mask, backward=backward, link=link, rate=rate * 1e12,
        )  # fmt: skip
    except ValueError as error:
        page.verdict("This scheme cannot use this placement.", "warn")
        st.info(str(error))
        return
    _show(result, palette)


def _show(result: Prediction, palette: Palette) -> None:
    schedule = result.schedule
    page.verdict(
        f"{schedule.scheme} on {schedule.ranks} ranks: {seconds_text(result.seconds)}, {result.efficiency:.1%} of one "
        f"GPU's rate on the same work per GPU. A rank receives up to {bytes_text(result.received)}.",
        "good" if result.efficiency > 0.9 else "warn",
        "predicted",
    )
    st.caption(
        "Arithmetic over the schedule, no measurement: `cufa parallel bench` measures on the GPUs of a machine."
    )
    page.figure(charts.timeline(result, palette), "parallel.timeline", charts.describe_timeline(result))
    page.header("Where the time of each rank goes", small=True)
    page.figure(charts.split(result, palette), "parallel.split", charts.describe_split(result))
    page.header("Who computes which scores", small=True)
    page.figure(charts.owners(result, palette), "parallel.owners", charts.describe_owners(result))
    if schedule.ranks <= _PRINTED:
        page.header("What travels, step by step", small=True)
        page.listing(str(schedule))
