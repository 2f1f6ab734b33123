"""Which rows and traces are of the machine code that today's sources give under the pinned NVRTC."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cufa.build.code_digest import code_digest
from cufa.build.compiler import trace_constants, translation_unit
from cufa.build.static_compile import CompileError, compile_text, nvrtc_version
from cufa.gpu.architectures import Architecture, find_architecture
from cufa.kernels import KERNELS
from cufa.measure import cards, inside, traces
from cufa.measure.measured import digest
from cufa.problem.problem import Problem

from .card_file import CardFile


@dataclasses.dataclass(frozen=True)
class Build:
    """One translation unit, for one architecture; None: today's kernel has no such tiles."""

    unit: str
    arch: Architecture


def build_of(kernel: str, problem: Problem, config: Any, arch: str, **trace: bool) -> Build | None:
    """``config``: tiles, or their JSON; ``trace``: what :func:`~cufa.build.compiler.trace_constants` takes."""
    try:
        spec = KERNELS[kernel]
        tiles = spec.read_config(config) if isinstance(config, dict) else config
        constants = {**spec.constants(problem, tiles), **trace_constants(**{"trace": False, **trace})}
        return Build(translation_unit(spec.source_of(tiles), constants), find_architecture(arch))
    except (KeyError, TypeError, ValueError):
        return None


def stamped() -> Iterator[tuple[str, Build | None]]:
    """Digest and build of each row and trace that has a digest."""
    for card in cards.load_all().values():
        for row in card.rows:
            if row.is_ours and row.json.get("code"):
                json = row.json
                yield (
                    json["code"],
                    build_of(json["kernel"], row.problem, json["config"], card.environment["arch"]),
                )
    for module, folder, how in (
        (traces, traces.TRACES_DIR, {"trace": True}),
        (inside, inside.INSIDE_DIR, {"inside": True}),
    ):
        for t in module.load_all(folder).values():
            if t.code:
                yield t.code, build_of(t.kernel, t.problem, t.config, t.environment["arch"], **how)


def distinct() -> dict[str, Build | None]:
    """A build for each digest."""
    return dict(stamped())


def digest_of(build: Build | None) -> str:
    """Compiles, 1.5 s; "" where that fails."""
    try:
        return code_digest(compile_text(build.unit, build.arch)) if build else ""
    except CompileError:
        return ""


def compiled(builds: Iterable[Build | None], jobs: int) -> dict[Build | None, str]:
    todo = list(dict.fromkeys(builds))
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(todo, pool.map(digest_of, todo), strict=True))


def pinned_nvrtc() -> str:
    """The version that gave the digests."""
    return str(json.loads(cards.CURRENT.read_text(encoding="utf-8"))["nvrtc"])


def wrong(sample: Iterable[str], jobs: int = 1) -> list[str]:
    """Digests of the sample that ``machine_code.json`` calls current and are not, or the other way round."""
    builds, current = distinct(), cards.current_code()
    wanted = {code: builds[code] for code in sample}
    found = compiled(wanted.values(), jobs)
    return [code for code, build in wanted.items() if (found[build] == code) != (code in current)]


def stamp(jobs: int) -> str:
    """Give rows and traces of today's sources their digest, and write which digests are current."""
    for name, card in cards.load_all().items():
        fresh = [r for r in card.rows if r.is_ours and "code" not in r.json and _is_of_today(r.json)]
        arch = card.environment["arch"]
        builds = {id(r.json): build_of(r.json["kernel"], r.problem, r.json["config"], arch) for r in fresh}
        codes = compiled(builds.values(), jobs)
        keys = {_row_key(r.json): codes[builds[id(r.json)]] for r in fresh}
        file = CardFile(cards.RECORDS_DIR / f"{name}.jsonl", {})
        file.rewrite(
            lambda x, keys=keys: {**x, "code": keys[_row_key(x)] or None} if _row_key(x) in keys else x
        )
    for module, folder, how in (
        (traces, traces.TRACES_DIR, {"trace": True}),
        (inside, inside.INSIDE_DIR, {"inside": True}),
    ):
        for t in module.load_all(folder).values():
            if t.code is None and t.digest == digest(KERNELS[t.kernel]):
                build = build_of(t.kernel, t.problem, t.config, t.environment["arch"], **how)
                module.save(dataclasses.replace(t, code=digest_of(build)), folder)
    builds = distinct()
    found = compiled(builds.values(), jobs)
    current = sorted(code for code, build in builds.items() if found[build] == code)
    text = json.dumps({"nvrtc": nvrtc_version(), "current": current}, indent=0)
    cards.CURRENT.write_text(text + "\n", encoding="utf-8")
    cards.current_code.cache_clear()
    return f"{len(current)} of {len(builds)} builds give the same machine code"


def _is_of_today(row: dict[str, Any]) -> bool:
    return row["kernel"] in KERNELS and row["digest"] == digest(KERNELS[row["kernel"]])


def _row_key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line.get(x) for x in ("what", "suite", "regime", "case", "problem", "label", "recorded"))
