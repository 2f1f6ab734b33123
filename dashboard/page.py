"""Elements of every page: a title, verdicts in words, figures with descriptions."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from cufa.dashboard import glossary, pace
from cufa.dashboard.model import source
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import DARK, LIGHT, Palette

_CONFIG = {
    "displaylogo": False,
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"],
    "responsive": True,
}

_ROW, _GAP, _NARROWEST = 896, 16, 124
"""Pixels: a line of controls in a window of 1,360, the gap between two controls, the narrowest control."""

_STYLE = """
<style>
.block-container {{ padding-top: 2.6rem; max-width: 1280px; }}
.cufa-verdict {{ font-size: 1.32rem; line-height: 1.35; font-weight: 600; margin: 0 0 .35rem 0; color: {text};
  border-left: 4px solid {accent}; padding: .1rem 0 .1rem .7rem; }}
.cufa-verdict.small {{ font-size: 1.06rem; border-left-width: 3px; }}
.cufa-verdict.good {{ border-color: {measured}; }}
.cufa-verdict.warn {{ border-color: {warn}; }}
.cufa-verdict.alarm {{ border-color: {alarm}; }}
.cufa-tag {{ display: inline-block; font-size: .72rem; font-weight: 650; letter-spacing: .05em;
  text-transform: uppercase; border: 1px solid currentColor; border-radius: 4px; padding: 0 .38rem;
  margin-right: .45rem; vertical-align: .12em; }}
.cufa-tag.predicted {{ color: {predicted}; border-style: dashed; }}
.cufa-tag.measured, .cufa-tag.recorded {{ color: {measured}; }}
.cufa-tag.published {{ color: {muted}; }}
[data-testid="stBaseButton-primary"]:not(:disabled), [data-testid="stMultiSelect"] [data-tag],
[data-testid="stMultiSelect"] [data-tag] * {{ color: {background}; }}
[class*="st-key-describe-"] {{ margin: -.8rem 0 -.35rem 0; }}
[class*="st-key-describe-"] button {{ opacity: .75; }}
.cufa-lead {{ color: {muted}; margin: -.4rem 0 1rem 0; max-width: 62rem; }}
.cufa-lead, .cufa-verdict {{ position: relative; }}
.cufa-term {{ border-bottom: 1px dotted {muted}; cursor: help; outline-offset: 2px; }}
.cufa-term:hover::after, .cufa-term:focus::after {{ content: attr(data-tip); position: absolute; left: 0;
  top: calc(100% + .3rem); z-index: 999; box-sizing: border-box; width: max-content; max-width: min(30rem, 100%);
  font-size: .9rem; font-weight: 400; line-height: 1.4; color: {text}; background: {panel};
  border: 1px solid {grid}; border-radius: 6px; padding: .45rem .7rem; box-shadow: 0 4px 14px #0002; }}
.cufa-listing {{ max-height: 380px; overflow: auto; margin: 0; padding: .8rem; border-radius: 6px; font-size: .85rem;
  line-height: 1.5; color: {text}; background: {panel}; font-family: "Source Code Pro", monospace; }}
[data-testid="stSidebarNavLink"]:focus-visible, [data-testid="stPageLink-NavLink"]:focus-visible {{
  outline: 2px solid {accent}; outline-offset: -2px; }}
[data-testid="stHtml"]:has(.cufa-term) {{ overflow: visible; }}
[data-testid="stMarkdown"] table {{ display: block; max-width: 100%; overflow-x: auto; }}
</style>
"""


def palette() -> Palette:
    """The palette of the browser's theme."""
    theme = getattr(st.context, "theme", None)
    return DARK if getattr(theme, "type", None) == "dark" else LIGHT


def begin(name: str, title: str, lead: str) -> tuple[Controls, Palette]:
    """Title and one sentence. Returns the page's controls, which have its name, and its figures' colours."""
    pace.begin_page()
    colours = palette()
    st.html(_STYLE.format(**vars(colours)))
    st.title(title, anchor=False)
    st.html(f'<p class="cufa-lead">{glossary.explained(lead)}</p>')
    return Controls(name), colours


def header(text: str, *, small: bool = False) -> None:
    """A heading, with help on its glossary terms."""
    write = st.subheader if small else st.header
    write(text, anchor=False, help=glossary.help_text(text))


def control_box() -> DeltaGenerator:
    """The box of a page's controls, for lines of :func:`fields`."""
    return st.container(border=True, key="controls")


def fields(*weights: float) -> list[DeltaGenerator]:
    """Places for controls side by side, with these relative widths; in a narrow window the line wraps."""
    line = st.container(horizontal=True)
    shares = (_ROW * weight / sum(weights) - _GAP for weight in weights)
    return [line.container(width=max(_NARROWEST, round(share))) for share in shares]


def line_of_fields(*widths: int) -> Iterator[DeltaGenerator]:
    """Places with widths in pixels, each created on demand, for an unknown number of controls."""
    line = st.container(horizontal=True)
    return (line.container(width=width) for width in widths)


def verdict(text: str, tone: str = "", tag: str = "", small: bool = False) -> None:
    """The sentence above a figure that states its result.

    ``tone`` is "", "good", "warn" or "alarm"; ``tag`` is the origin of the numbers: "predicted", "computed",
    "executed", "measured", "recorded" or "published".
    """
    label = f'<span class="cufa-tag {tag}">{tag}</span>' if tag else ""
    classes = " ".join(x for x in ("cufa-verdict", tone, "small" if small else "") if x)
    role = ' role="alert"' if tone == "alarm" else ""
    st.html(f'<p class="{classes}"{role}>{label}{glossary.explained(text)}</p>')
    pace.sent(pace.SENTENCE)


def origin_tag(origin: str) -> str:
    """ "measured" on this machine, or "recorded" on another machine and shipped."""
    return "recorded" if origin == "recorded" else "measured"


def figure(fig: go.Figure, key: str, alt: str, *, describe: bool = True, **options: Any) -> Any:
    """A figure with a description for screen readers; ``describe``: a button shows the description to all."""
    # Streamlit's client passes each new figure to Plotly twice, the second time as a copy. A constant revision keeps
    # Plotly from drawing the copy again.
    fig.update_layout(datarevision=0)
    event = st.plotly_chart(fig, key=key, theme=None, config=_CONFIG, alt=alt, **options)
    pace.sent(pace.FIGURE)
    if describe:
        with st.container(key=f"describe-{key}", horizontal=True, gap="small"):
            with st.popover("Describe this figure", type="tertiary", icon=":material/notes:"):
                st.write(alt)
            if key in source.FIGURES:
                with st.popover(
                    "The kernel's lines", type="tertiary", icon=":material/code:", width="content"
                ):
                    show_lines(source.FIGURES[key])
        pace.sent(pace.DESCRIPTION)
    return event


def button(label: str, key: str, icon: str, action: Callable[..., None], *args: Any, **options: Any) -> None:
    """A button that calls ``action(*args)`` before the next run of the page."""
    st.button(label, key=key, icon=f":material/{icon}:", on_click=action, args=args, **options)


def on_demand(
    label: str, key: str, icon: str, of: object, make: Callable[[], Any], *,
    refused: str | None, help: str | None = None,
) -> Any:  # fmt: skip
    """A button for ``make``; returns what it made for the subject ``of``, or None. ``refused``: why it is disabled."""
    pressed = st.button(
        label, key=key, icon=f":material/{icon}:", disabled=refused is not None, help=help or refused
    )
    if pressed:
        with st.spinner("Compiling and executing the kernel's source on this CPU…"):
            st.session_state[f"{key}.made"] = of, make()
    made_of, made = st.session_state.get(f"{key}.made", (None, None))
    return made if made_of == of else None


def download(
    label: str,
    make: str | Callable[[], str | bytes],
    name: str,
    mime: str,
    key: str,
    icon: str,
    **options: Any,
) -> None:
    """A download: ``make`` is a text, or a function called at the click. The page does not run again."""
    st.download_button(
        label, make, name, mime, key=key, icon=f":material/{icon}:", on_click="ignore", **options
    )


def not_measured(text: str) -> None:
    """The reason for a missing measurement, in its place."""
    st.info(f"**Measured:** {text}", icon=":material/info:")


def listing(text: str) -> None:
    """Plain text. (``st.code`` loads half a megabyte of syntax highlighting, which delays the first figure.)"""
    st.html(f'<pre class="cufa-listing" tabindex="0">{html.escape(text)}</pre>')


def table(lines: Sequence[Mapping[str, str]]) -> None:
    """A small table of text. (``st.dataframe`` loads a megabyte of scripts, which delays the first figure.)"""
    columns = list(lines[0])
    rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line.values()] for line in lines]
    st.markdown("\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows]))


def show_lines(excerpts: Iterable[source.Excerpt]) -> None:
    """CUDA source lines with their numbers."""
    for excerpt in excerpts:
        st.markdown(excerpt.heading)
        st.code(excerpt.numbered, language="cpp")
