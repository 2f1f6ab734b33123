"""Links from each page to the other pages, with the same subject.

A link sets all controls of its target page that would otherwise have defaults or values of an earlier visit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from cufa.dashboard.link import several
from cufa.dashboard.model import devices, evidence, launch, mask_settings, presets
from cufa.dashboard.model.asked import Asked, figures
from cufa.dashboard.model.compiled import compiled_problems
from cufa.dashboard.model.configs import config_key
from cufa.dashboard.model.subject import Subject, problem_key
from cufa.dashboard.state import said
from cufa.dashboard.views import mask_control
from cufa.dashboard.views.masked_controls import DRAWN, MAX_LENGTH, masked_dtype
from cufa.dashboard.views.occupancy_choice import inputs_key, lengths_words
from cufa.dashboard.views.run_controls import tilings
from cufa.dashboard.views.shape_controls import capability_of, device_of
from cufa.gpu.architectures import Device, find_architecture
from cufa.plan.candidates import serving_configs
from cufa.plan.operation import OPERATIONS
from cufa.plan.planner import fitting_configs
from cufa.problem.lengths import DENSE, Cached, Lengths
from cufa.problem.problem import Problem

_CACHED = ("run", "decode", "occupancy", "machine_code", "roofline")
_DENSE = ("run", "masked_work", "occupancy", "machine_code", "roofline")


def link(page: str, subject: Subject) -> dict[str, str]:
    """Query parameters with which a page shows the subject. Raises ValueError with the reason if the page cannot."""
    kind = subject.problem.lengths.kind
    if kind != DENSE.kind:
        raise ValueError(f"{kind.capitalize()} sequences are not shown on that page.")
    return {name: said(value) for name, value in _PAGES[page][2](subject).items()}


def pages_of(subject: Subject) -> tuple[str, ...]:
    """The pages that can show this kind of subject."""
    return _CACHED if isinstance(subject.problem.lengths, Cached) else _DENSE


def show(here: str, subject: Subject, words: str = "") -> None:
    """Links to the other pages; a page that cannot show the subject has a disabled link with the reason."""
    with st.container(horizontal=True, key=f"links-{here}{'-' + words if words else ''}"):
        if words:
            st.caption(f"{words}:", width="content")
        for page in pages_of(subject):
            if page == here:
                continue
            label, icon, _ = _PAGES[page]
            look: dict[str, Any] = {"label": label, "icon": f":material/{icon}:"}
            try:
                st.page_link(f"screens/{page}.py", query_params=link(page, subject), **look)
            except ValueError as error:
                st.page_link(f"screens/{page}.py", disabled=True, help=str(error), **look)


def _shape(p: Problem) -> dict[str, Any]:
    values = {"batch": p.batch, "heads": p.heads, "kv": p.kv_heads, "sq": p.seqlen_q, "sk": p.seqlen_k}
    return {**values, "d": p.head_dim}


def _mask(p: Problem) -> dict[str, Any]:
    """Controls of :mod:`mask_control` for a mask. Raises ValueError for a mask that they cannot set."""
    try:
        settings = mask_control.settings(p.mask, p.softcap)
    except TypeError as error:
        raise ValueError(f"The mask {p.mask} cannot be set on that page.") from error
    names = {"mask", "softcap"}
    cached = isinstance(p.lengths, Cached)
    if cached and settings["mask"] == "full":
        settings["mask"] = "causal"  # no key comes after the last tokens
    if settings["mask"] == "window":
        names |= {"left"} if cached else {"left", "right"}
    if settings["mask"] != "full" and not cached:
        names |= {"diag"} | ({"at"} if settings["diag"] == "at" else set())
    return {name: value for name, value in settings.items() if name in names}


def _card(subject: Subject) -> dict[str, Any]:
    return {"card": subject.card} if subject.card else {}


def _capability(subject: Subject) -> int:
    """Compute capability of the card, or the newest on which the kernel runs."""
    if subject.card:
        return capability_of(subject.card)
    return 90 if subject.spec is None or subject.spec.runs_on(90) else subject.spec.min_capability


def _masked_work(subject: Subject) -> dict[str, Any]:
    p, spec, config = subject.problem, subject.spec, subject.config
    if max(p.seqlen_q, p.seqlen_k) > MAX_LENGTH:
        raise ValueError(f"Lengths over {MAX_LENGTH:,} are not drawn on that page.")
    known = launch.algorithms(p.operation, p.dtype, p.head_dim)
    if p.operation not in DRAWN:
        raise ValueError(f"{OPERATIONS[p.operation].title} is not drawn on that page.")
    if spec is not None and spec.algorithm not in known:
        raise ValueError(f"{spec.name} does not visit tiles by a schedule that the page can draw.")
    cap = {"softcap": p.softcap}
    mask = {**mask_settings.settings(p), **cap} if p.mask.irregular_kind else _mask(p)
    values = {"two": 0, "op": p.operation, **_shape(p), "dtype": masked_dtype(p), **mask, **_card(subject)}
    if spec is None:
        return values
    values["alg"] = spec.algorithm
    device = Device.typical(_capability(subject))
    serving = serving_configs(spec, p, device)
    if config is None:
        config = spec.choose(p, serving, device)
    if config_key(config) in map(config_key, serving):
        return values | {"tiles": config_key(config)}
    sizes = {"bq": config.block_q, "bkv": config.block_kv, "per_sm": config.blocks_per_sm}
    return values | {"tiles": "custom", **sizes}


def _run(subject: Subject) -> dict[str, Any]:
    p, spec = subject.problem, subject.spec
    on = next(iter(devices.run_devices()))
    device = devices.device_of(on)
    shapes = presets.presets(p.operation)
    if not shapes:
        raise ValueError(f"{OPERATIONS[p.operation].title} cannot be run from that page.")
    of_shape = next((name for name, preset in shapes.items() if preset.problem == p), next(iter(shapes)))
    values: dict[str, Any] = {"on": on, "op": p.operation, "preset": of_shape, **_shape(p), "dtype": p.dtype}
    values |= _mask(p) | {"also": "", "tiles": "planner"}
    if isinstance(p.lengths, Cached):
        values |= {"pages": p.cache.page_size, "cache": p.k_dtype or "same"}
        if device is None and p.k_dtype:
            raise ValueError(f"A cache of {p.k_dtype} can only be timed on a GPU.")
    elif p.dtype == "float32" and device is not None:
        values["precision"] = p.precision
    if spec is None:
        return values
    fitting = tilings(spec.algorithm, p, device)
    if subject.config is not None:
        names = config_key(subject.config), f"{subject.config.block_q}x{subject.config.block_kv}"
        values["tiles"] = next((name for name in names if name in fitting), "planner")
    return values | {"kernels": spec.algorithm}


def _decode(subject: Subject) -> dict[str, Any]:
    p = subject.problem
    if p.dtype not in ("bfloat16", "float16") or (p.k_dtype and p.dtype != "bfloat16"):
        raise ValueError("Decoding with these types is not predicted.")
    values = _shape(p) | _mask(p) | _card(subject)
    values |= {"cached": values.pop("sk"), "tokens": values.pop("sq")}
    values["dtype"] = ".".join(filter(None, (p.dtype, p.k_dtype)))
    return values


def _occupancy(subject: Subject) -> dict[str, Any]:
    p, spec = subject.problem, subject.spec
    if spec is None:
        raise ValueError("This is not a kernel of cufa.")
    of_inputs = [x for x in compiled_problems(spec, p.head_dim) if inputs_key(x) == inputs_key(p)]
    same = [x for x in of_inputs if x.mask_kind == p.mask_kind]
    if not same:
        raise ValueError(f"{spec.name} is not built for {p}.")
    values: dict[str, Any] = {
        "kernel": spec.name,
        "d": p.head_dim,
        "dtype": inputs_key(p),
        "mask": p.mask_kind,
    }
    if len({x.softcap is None for x in same}) > 1:
        values["softcap"] = int(p.softcap is not None)
        same = [x for x in same if (x.softcap is None) == (p.softcap is None)]
    kinds = {lengths_words(x): _kind(x.lengths) for x in same}
    if len(kinds) > 1:
        values["cache"] = next((n for n, kind in enumerate(kinds.values()) if kind == _kind(p.lengths)), 0)
    capability = _capability(subject)
    if not spec.runs_on(capability):
        capability = _capability(Subject(p, spec.name))
    values["arch"] = find_architecture(capability).capability
    if subject.config is not None:
        fitting = fitting_configs(spec, p.head_dim, Device.typical(capability))
        if config_key(subject.config) in map(config_key, fitting):
            values["tiles"] = config_key(subject.config)
    return values | {"of": problem_key(p)}


def _kind(lengths: Lengths) -> tuple[object, ...]:
    """The properties of lengths that select a build; the page size is not among them."""
    if not isinstance(lengths, Cached):
        return ()
    return lengths.paged, lengths.given, lengths.new_tokens > 0


def _roofline(subject: Subject) -> dict[str, Any]:
    """Parameters of the shape, and of its recorded row."""
    p = subject.problem
    values: dict[str, Any] = {"of": problem_key(p)}
    if subject.kernel is not None:
        values["kernel"] = subject.kernel
    if subject.config is not None and subject.spec is not None:
        values["tiles"] = config_key(subject.config)
    try:
        records = evidence.measurements()
    except ValueError:  # the page says so
        return values
    device = device_of(subject.card)
    asked = Asked(p, subject.kernel, card=device.name if device else "")
    row = next((m for m in figures(records, asked) if m.limits is not None), None)
    if row is None:
        return values
    beside = (m for m in records if (m.source, m.suite, m.regime) == (row.source, row.suite, row.regime))
    shown = several(dict.fromkeys(m.label for m in beside))
    here = {"machine": row.source, "suite": row.suite, "regime": row.regime}
    return values | here | {"mask": "all", "show": shown}


_PAGES: dict[str, tuple[str, str, Callable[[Subject], dict[str, Any]]]] = {
    "run": ("Run this", "play_arrow", _run),
    "masked_work": ("Masked work of this", "grid_on", _masked_work),
    "decode": ("Splits of this", "call_split", _decode),
    "occupancy": ("Occupancy of this tile", "stacks", _occupancy),
    "machine_code": ("Machine code of this", "code", _occupancy),
    "roofline": ("Roofline of this", "roofing", _roofline),
}
"""By page: label and icon of the link, and the function that gives a subject's parameters."""
