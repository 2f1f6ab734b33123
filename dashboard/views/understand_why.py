"""Understand: why the online softmax is right, with the numbers of the page's own tile; and who shares K and V."""

from __future__ import annotations

import functools

import streamlit as st

from cufa.dashboard import page, sentences
from cufa.dashboard.charts import cells
from cufa.dashboard.model import softmax_row
from cufa.dashboard.model.eight_bits import EightBits
from cufa.dashboard.model.walkthrough import Walk
from cufa.dashboard.theme import Palette
from cufa.gpu.architectures import Device
from cufa.kernels.decode import items
from cufa.measure.decode_cases import make_decode
from cufa.measure.suites import make
from cufa.plan.planner import make_plan

_HEADS, _LENGTH, _HEAD_DIM = 8, 4096, 128
_KV_HEADS = (8, 4, 2, 1)


def show(walk: Walk, at: int, palette: Palette) -> None:
    """The derivations for the step ``at``, from 0, one tab each."""
    row, sections = softmax_row.row_of(walk, at), sentences.sections("understand.md")
    e4m3 = EightBits(row)
    values = softmax_row.values(row) | e4m3.values() | {"heads": str(_HEADS)}
    tabs_text = {name: text.format(**values) for name, (_, text) in sections.items()}
    names = ("passes", "maximum", "sum", "gqa", "e4m3")
    for name, tab in zip(names, st.tabs([sections[name][0] for name in names]), strict=True):
        with tab:
            st.markdown(tabs_text[name])
            if name == "passes":
                page.table(softmax_row.passes(row))
                st.markdown(tabs_text["same"])
            elif name == "e4m3":
                page.table(e4m3.lines())
                st.markdown(tabs_text["rounded"])
            elif name == "gqa":
                _show_sharing(palette)
                page.table(sharing())
                st.markdown(tabs_text["shared"])


def _show_sharing(palette: Palette) -> None:
    """Each query head with the number of its K/V head, for each number of K/V heads."""
    owners = {kv: [head * kv // _HEADS for head in range(_HEADS)] for kv in _KV_HEADS}
    colours = palette.idle, palette.scale[1]
    shown = [[(colours[n % 2], str(n)) for n in line] for line in zip(*owners.values(), strict=True)]
    alt = "; ".join(f"{kv} K/V heads: query heads 0 to {_HEADS - 1} read {own}" for kv, own in owners.items())
    rows, columns = [f"query head {head}" for head in range(_HEADS)], [f"{kv} K/V" for kv in _KV_HEADS]
    st.html(cells.picture(shown, alt, palette, 26, rows, columns))


@functools.cache
def sharing() -> list[dict[str, str]]:
    """A line for each number of K/V heads, from the planner's tiles for an H100."""
    device, lines = Device.typical("sm_90"), []
    for kv in _KV_HEADS:
        decode = make_decode(1, _HEADS, kv, _LENGTH, head_dim=_HEAD_DIM)
        prefill = make(1, _HEADS, _LENGTH, _HEAD_DIM, "bfloat16", kv_heads=kv)
        bytes_of_key = 2 * _HEAD_DIM * decode.k_element.itemsize
        blocks = items(decode, make_plan(decode, device).config) // kv
        tiles = prefill.group_size * make_plan(prefill, device).schedule.num_q_blocks
        lines.append(
            {
                "K/V heads": f"{kv} ({'MHA' if kv == _HEADS else 'GQA' if kv > 1 else 'MQA'})",
                "K/V cache of a token": f"{kv * bytes_of_key:,} B",
                "decode: rows of a tile of Q": f"{decode.rows}",
                "decode: FLOP per byte of K/V": f"{4 * _HEAD_DIM * decode.rows / bytes_of_key:g}",
                "decode: requests of a K/V tile": f"{blocks}",
                f"prefill of {_LENGTH:,}: requests of a K/V tile": f"{tiles}",
            }
        )
    return lines
