"""Build many variants without a GPU and judge each: registers, occupancy, findings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from ..gpu.occupancy import Occupancy, occupancy
from ..kernels import Launch
from ..kernels.config import SplitConfig
from .static_compile import (
    CompileError,
    CompileReport,
    EntryReport,
    check_report,
    nvrtc_version,
    static_compile,
)
from .variants import Variant


@dataclasses.dataclass(frozen=True)
class BuiltEntry:
    """One kernel launch of a variant: its compile report and its occupancy."""

    launch: Launch
    report: EntryReport
    occupancy: Occupancy


@dataclasses.dataclass(frozen=True)
class Build:
    """The result of building one variant."""

    variant: Variant
    report: CompileReport | None
    """None: it did not compile; see ``error``."""
    entries: tuple[BuiltEntry, ...]
    findings: tuple[str, ...]
    """Findings that must not ship, one line each."""
    error: CompileError | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One JSON-ready record per kernel launch; one without figures for a variant that does not compile."""
        v, p = self.variant, self.variant.problem
        common = {
            "kernel": v.spec.name,
            "arch": v.arch.nvrtc_name,
            "config": dataclasses.asdict(v.config),
            "head_dim": p.head_dim,
            "dtype": p.dtype,
            "k_dtype": p.k_element.name,
            "precision": p.precision,
            "mask": p.mask_kind,
            "softcap": p.softcap is not None,
            **v.spec.own_constants(p),
            "alignment": p.alignment,
            "trace": v.trace,
            "inside": v.inside,
            "findings": list(self.findings),
            "seconds": None if self.report is None else round(self.report.seconds, 3),
        }
        return [{**common, **_figures(entry)} for entry in self.entries] or [common]


def build(variant: Variant) -> Build:
    """Compile one variant. Never raises for a bad kernel: that is a finding.

    Raises :class:`~cufa.build.static_compile.MissingCompilerError` without NVRTC.
    """
    try:
        report = static_compile(variant.source, variant.constants, variant.arch)
    except CompileError as error:
        return Build(variant, None, (), (f"does not compile: {error.summary}",), error)
    findings = list(check_report(report, spills_up_to=_spills_allowed(variant)))
    entries = []
    # A launch repeated over chunks of the problem is one kernel.
    for launch in {launch.entry: launch for launch in variant.launches}.values():
        try:
            compiled = report.entry(launch.entry)
        except KeyError as error:
            findings.append(f"launches a kernel that {variant.source} does not define: {error.args[0]}")
            continue
        entry = BuiltEntry(launch, compiled, _occupancy(variant, launch, compiled))
        if entry.occupancy.blocks == 0:
            findings.append(f"{launch.entry}: no block fits an SM of {variant.arch.name}")
        entries.append(entry)
    return Build(variant, report, tuple(entries), tuple(findings))


def _spills_allowed(variant: Variant) -> float:
    """Bytes per thread that a build may spill. Trace builds: any number. Some builds for irregular masks of FA2 in
    float32 and of its backward, and of decoding an e4m3 cache with ALiBi, spill up to 16 and were measured so. FA3's
    builds with split keys spill up to 32 with a soft cap above head dim 128, FA2's up to 36, with dropout both up to
    72. FA3's forward spills up to 68 under an irregular mask with lengths. FA3's backward spills up to 24 at head dim
    128 with ALiBi or under an irregular mask, and with dropout under an irregular mask. With lengths in a fixed order,
    the backward of wide heads spills up to 16, FA2's up to 44. FA2 spills up to 8 over packed sequences and with
    dropout. On sm_90 and sm_100, FA2 in e4m3 spills up to 32: 8-bit operands are unpacked to float16 there."""
    if variant.trace:
        return math.inf
    problem, name = variant.problem, variant.spec.name
    if isinstance(variant.config, SplitConfig) and variant.config.split_keys:
        if problem.dropped:
            return 72
        if name == "fa2_forward":
            return 36
        return 32 if problem.softcap is not None and problem.head_dim > 128 else 4
    if name == "fa2_forward_fp8":
        return 32 if variant.arch.capability in (90, 100) else 0
    if name == "fa3_backward" and (problem.head_dim == 128 or problem.dropped):
        alibi_at_128 = problem.alibi and problem.head_dim == 128
        return 24 if alibi_at_128 or problem.mask.irregular_kind else 0
    if name == "fa3_forward" and problem.mask.irregular_kind and problem.lengths.ragged:
        return 68
    in_fixed_order = {"fa2_backward": 44, "fa3_backward_wide": 16}
    if problem.deterministic and problem.lengths.ragged and name in in_fixed_order:
        return in_fixed_order[name]
    decodes_alibi = problem.operation == "decode" and problem.alibi
    if problem.mask.irregular_kind or decodes_alibi:
        return 16
    return 8 if name.startswith("fa2_") and (problem.lengths.kind == "packed" or problem.dropped) else 0


def build_all(variants: Sequence[Variant], jobs: int) -> Iterator[Build]:
    """Builds in the order in which they finish, ``jobs`` at a time (NVRTC compiles outside Python's lock).

    Raises :class:`~cufa.build.static_compile.MissingCompilerError` before the first one without NVRTC.
    """
    nvrtc_version()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(build, variant) for variant in variants]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # a caller that stops early does not wait


def _occupancy(variant: Variant, launch: Launch, compiled: EntryReport) -> Occupancy:
    return occupancy(
        variant.arch,
        registers=compiled.registers,
        threads=launch.num_threads,
        shared_memory=launch.shared_memory + compiled.static_shared_bytes,
        barriers=compiled.barriers,
    )


def _figures(entry: BuiltEntry) -> dict[str, Any]:
    o = entry.occupancy
    return {
        "entry": entry.launch.entry,
        "threads": o.threads,
        "registers": entry.report.registers,
        "spill_store_bytes": entry.report.spill_store_bytes,
        "spill_load_bytes": entry.report.spill_load_bytes,
        "stack_bytes": entry.report.stack_bytes,
        "barriers": entry.report.barriers,
        "shared_bytes": o.shared_memory,
        "blocks_per_sm": o.blocks,
        "warps_per_sm": o.warps,
        "limiters": [str(resource) for resource in o.limiters],
        "occupancy": round(o.fraction, 4),
        "one_more_block": o.advice,
    }
