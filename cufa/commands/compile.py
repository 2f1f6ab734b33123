"""`cufa compile`: build every kernel for every architecture without a GPU, and fail on builds that must not ship."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from ..build import ahead
from ..build.sass import listing as take_apart
from ..build.static_compile import MissingCompilerError, nvrtc_version
from ..build.sweep import Build, BuiltEntry, build_all
from ..build.variants import Variant, variants
from ..calls.backward import plan_backward
from ..calls.forward import plan
from ..gpu.architectures import COMPILED_ARCHITECTURES, find_architecture
from ..gpu.occupancy import Occupancy, Resource
from ..kernels import KERNELS, Kernel, TileConfig
from ..problem.problem import HEAD_DIM_STEP, MAX_HEAD_DIM
from ..run.cpu.blas import usable_cores
from . import common
from .listing_tables import listing_record, print_listing


def _architecture(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[int]:
    try:
        named = dict.fromkeys(find_architecture(value).capability for value in values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return list(named or COMPILED_ARCHITECTURES)


def _head_dims(
    context: click.Context, parameter: click.Parameter, values: tuple[int, ...]
) -> list[int] | None:
    for value in values:
        if value % HEAD_DIM_STEP:
            raise click.BadParameter(f"{value} is not a multiple of {HEAD_DIM_STEP}")
    return list(values) or None


def _shapes(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[Any]:
    """Shapes of q and k, from text such as "1,32/8,4096,128"."""
    matches = [re.fullmatch(r"(\d+),(\d+)(?:/(\d+))?,(\d+),(\d+)", value) for value in values]
    if None in matches:
        raise click.BadParameter(
            "a shape is batch,heads,seqlen,head_dim, such as 1,32,4096,128 or 1,32/8,4096,128"
        )
    sizes = [[int(x) for x in shape.groups(shape[2])] for shape in matches if shape]
    return [((b, heads, s, d), (b, kv_heads, s, d)) for b, heads, kv_heads, s, d in sizes]


def _part(context: click.Context, parameter: click.Parameter, value: str | None) -> slice:
    """Every N-th build, beginning with the K-th."""
    if value is None:
        return slice(None)
    k, _, n = value.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise click.BadParameter(f"{value!r} is not K/N with 1 <= K <= N, such as 1/3")
    return slice(int(k) - 1, None, int(n))


@click.command("compile")
@click.option("--arch", "archs", multiple=True, metavar="sm_90", callback=_architecture, help="Default: all.")
@click.option("--kernel", "kernels", multiple=True, type=click.Choice(list(KERNELS)), help="Default: all.")
@click.option(
    "--head-dim",
    "head_dims",
    multiple=True,
    type=click.IntRange(HEAD_DIM_STEP, MAX_HEAD_DIM),
    callback=_head_dims,
    help="Default: 64, 128, 256, and a few odd ones for one architecture.",
)
@click.option(
    "--for",
    "shapes",
    multiple=True,
    metavar="B,H,S,D",
    callback=_shapes,
    help="Only what a forward and a backward of this shape run, kept for programs. H/KV: grouped heads.",
)
@click.option("--dtype", default="bfloat16", show_default=True, help="With --for.")
@click.option("--causal", is_flag=True, help="With --for.")
@click.option(
    "--into", type=click.Path(file_okay=False), help="With --for: folder.  [default: the cache folder]"
)
@click.option("--all", "everything", is_flag=True, help="Every combination; takes hours, not minutes.")
@click.option("--part", metavar="K/N", callback=_part, help="Only each N-th build, from the K-th on.")
@click.option(
    "--listing", is_flag=True, help="Instructions of the loops and source lines of the first build."
)
@click.option("--jobs", type=click.IntRange(1), help="Builds at a time. Default: one per CPU.")
@common.json_option
def compile_command(
    archs: list[int], kernels: tuple[str, ...], head_dims: list[int] | None, everything: bool, part: slice,
    listing: bool, jobs: int | None, as_json: bool, **ahead_options: Any,
) -> None:  # fmt: skip
    """Build every kernel for every architecture. Needs NVRTC, no GPU.

    By default, the builds of a kernel contain every tile config, and every two values of its other choices together
    (architecture, head dim, element, mask, soft cap); --all builds every combination. --arch, --kernel and
    --head-dim narrow it, and may be repeated. --listing takes the first build apart instead: instructions, live
    registers and issue slots of its loops and source lines.

    --for compiles ahead of time what calls of one shape need, as cufa.compile(plan) does. Name the GPU with --arch
    (default: this machine's). The files serve other machines of the same kind: copy them to the folder kernels of the
    cache there (`cufa cache`).

    Exit status 1: a kernel spills, keeps arrays in local memory, does not compile, or ptxas ignored or serialised
    something.
    """
    if ahead_options["shapes"]:
        named = click.get_current_context().get_parameter_source("archs") == ParameterSource.COMMANDLINE
        _compile_ahead([f"sm_{x}" for x in archs] if named else [None], as_json, **ahead_options)
        return
    try:
        version = nvrtc_version()
    except MissingCompilerError as error:
        common.fail(common.Exit.MISSING, str(error))
    wanted = list(variants(archs, kernels or None, head_dims, everything=everything))[part]
    if not wanted:
        raise click.UsageError("no kernel config fits what was asked for; try another --arch or --head-dim")
    if listing:
        _list(wanted[0], as_json)
        return
    common.stderr().print(f"{len(wanted):,} builds of {len({v.spec.name for v in wanted})} kernels to make")
    start = time.perf_counter()
    builds = _with_progress(wanted, jobs or usable_cores())
    seconds = time.perf_counter() - start
    bad = [build for build in builds if build.findings]
    if as_json:
        common.print_json(
            {
                "nvrtc": version,
                "seconds": round(seconds, 1),
                "builds": len(builds),
                "builds_with_findings": len(bad),
                "kernels": [row for build in builds for row in build.rows()],
            }
        )
    else:
        _print_tables(builds)
    _print_warnings(builds)
    _print_findings(bad)
    verdict = f"{len(bad)} of them must not ship" if bad else _verdict(builds)
    common.stderr().print(f"{len(builds)} builds with NVRTC {version} in {seconds:.0f} s: {verdict}")
    if bad:
        raise SystemExit(int(common.Exit.FAILED))


def _compile_ahead(
    devices: Sequence[str | None], as_json: bool, shapes: Any, into: str | None, **options: Any
) -> None:
    files = []
    for (q, k), device, make in itertools.product(shapes, devices, (plan, plan_backward)):
        try:
            call_plan = make(q, k, device=device, **options)
            common.stderr().print(f"{call_plan.spec.name}, {call_plan.problem}", markup=False, soft_wrap=True)
            files.append(ahead.compile(call_plan, into))
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        except (MissingCompilerError, OSError) as error:
            common.fail(common.Exit.MISSING, str(error))
    if as_json:
        common.print_json({"files": [{"path": str(x), "bytes": x.stat().st_size} for x in files]})
        return
    for file in files:
        common.stdout().print(str(file), markup=False, soft_wrap=True)


def _verdict(builds: list[Build]) -> str:
    """The verdict on builds that may ship. A few known builds spill a little (:mod:`cufa.build.sweep`)."""
    spilling = [
        build
        for build in builds
        if not build.variant.trace and any(entry.report.spill_store_bytes for entry in build.entries)
    ]
    spills = f"{len(spilling)} known ones spill a little" if spilling else "nothing spills"
    return f"{spills}, nothing was ignored"


def _list(variant: Variant, as_json: bool) -> None:
    code = take_apart(variant)
    if as_json:
        common.print_json(listing_record(variant, code))
    else:
        print_listing(variant, code)


def _with_progress(wanted: Sequence[Variant], jobs: int) -> list[Build]:
    """Builds in the order of ``wanted``."""
    builds = {}
    with common.progress() as bar:
        task = bar.add_task("compiling", total=len(wanted))
        for build in build_all(wanted, jobs):
            builds[build.variant] = build
            bar.update(task, advance=1, description=str(build.variant))
    return [builds[variant] for variant in wanted]


def _print_warnings(builds: Sequence[Build]) -> None:
    """Warnings of the compiler, each once. A warning does not fail: newer compilers warn of more."""
    reports = (build.report for build in builds if build.report is not None)
    for warning in dict.fromkeys(warning for report in reports for warning in report.warnings):
        common.stderr().print(warning, style="yellow", markup=False, soft_wrap=True)


def _print_findings(bad: Sequence[Build]) -> None:
    """One line for each kind of finding. Only the first compiler error is printed in full: most others are equal."""
    refused = [build.error for build in bad if build.error is not None]
    if refused:
        common.stderr().print(str(refused[0]), style="red", markup=False, soft_wrap=True)
    alike: dict[tuple[str, str], list[Build]] = {}
    for build in bad:
        for finding in build.findings:
            alike.setdefault((build.variant.spec.name, finding), []).append(build)
    for (_, finding), builds in alike.items():
        others = f" (and {len(builds) - 1} more builds)" if len(builds) > 1 else ""
        common.stderr().print(
            f"{builds[0].variant}{others}: {finding}", style="red", markup=False, soft_wrap=True
        )


def _print_tables(builds: Sequence[Build]) -> None:
    """One table per architecture, memory in bytes. Builds of one config share a row, whatever their elements,
    mask, soft cap, width of copies, kind of cache and trace. The row shows the range of their registers and their
    lowest occupancy."""
    console = common.stdout(180)  # every row on one line
    by_arch: dict[str, dict[tuple[str, str, str], list[BuiltEntry]]] = {}
    for build in builds:
        v = build.variant
        rows = by_arch.setdefault(f"{v.arch.nvrtc_name} ({v.arch.typical_card})", {})
        for entry in build.entries:
            name = v.spec.name if len(build.entries) == 1 else entry.launch.entry
            precision = "" if v.problem.precision == "native" else v.problem.precision
            tiles = _tiles(v.spec, v.config, v.problem.head_dim)
            key = (f"{name} {precision}".rstrip(), tiles, str(v.problem.head_dim))
            rows.setdefault(key, []).append(entry)
    for title, rows in by_arch.items():
        figures = ("d", "regs", "spill", "stack", "shared", "blocks", "warps", "occupancy")
        shown = common.table(["kernel", "tiles"], figures, title, no_wrap=True)
        shown.pad_edge = False
        shown.add_column("limited by")
        shown.add_column("one more at")
        for key, entries in rows.items():
            shown.add_row(*key, *_cells(entries))
        console.print(shown)


def _tiles(spec: Kernel, config: TileConfig, head_dim: int) -> str:
    """The config in words, with the fields that distinguish it from configs of the same words."""
    others = [c for c in spec.configs if str(c) == str(config) and c.fits(head_dim)]
    words = [str(config)]
    if any(c.blocks_per_sm != config.blocks_per_sm for c in others):
        words.append(f"for {config.blocks_per_sm} an SM")
    for name, value in config.own.items():
        if value and any(c.own.get(name) != value for c in others):
            words.append(name.replace("_", " ") + ("" if value is True else f" {value}"))
    return ", ".join(words)


_SHORT = {Resource.REGISTERS: "regs", Resource.SHARED_MEMORY: "smem"}


def _cells(entries: Sequence[BuiltEntry]) -> list[str]:
    o = min((entry.occupancy for entry in entries), key=lambda o: (o.fraction, -o.registers))
    registers = sorted({entry.report.registers for entry in entries})
    spills = max(entry.report.spill_store_bytes + entry.report.spill_load_bytes for entry in entries)
    stack = max(entry.report.stack_bytes for entry in entries)
    return [
        str(registers[0]) if len(registers) == 1 else f"{registers[0]}–{registers[-1]}",
        f"[red]{spills}[/red]" if spills else "0",
        f"[red]{stack}[/red]" if stack else "0",
        f"{o.shared_memory:,}",
        str(o.blocks),
        str(o.warps),
        f"{100 * o.fraction:.1f} %",
        ", ".join(_SHORT.get(resource, str(resource)) for resource in o.limiters),
        _one_more_block(o),
    ]


def _one_more_block(o: Occupancy) -> str:
    needs = o.one_more_block
    if needs is None:
        return ""
    parts = [] if needs.registers is None else [f"{needs.registers} regs"]
    parts += [] if needs.shared_memory is None else [f"{needs.shared_memory:,} B"]
    return ", ".join(parts)
