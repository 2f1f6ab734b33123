"""Builds of kernels that are checked without a GPU: kernel × config × element × mask × head dim × architecture.

The whole product grows with every mask and element. By default a covering set is built (:mod:`cufa.build.covering`):
every config of each kernel, and every two values of :data:`PAIRED` choices together. Only the whole product has every
config with every mask: in the covering set a mask would cost a build per config.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence

from ..gpu.architectures import COMPILED_ARCHITECTURES, Architecture, Device, find_architecture
from ..kernels import KERNELS, Kernel, Launch, TileConfig
from ..kernels.support import refusal
from ..plan.operation import OPERATIONS
from ..problem.problem import Problem
from .compiler import keeps_logs, trace_constants
from .covering import covering

HEAD_DIMS = (64, 128, 256)
"""Built for every architecture; each is the largest of its class, for which tiles are made."""
ODD_HEAD_DIMS = (40, 80, 96, 192)
"""Odd multiples of 8, 16, 32 and 64, which take branches of a tiling that powers of two do not reach. Built for
one architecture, the first that the kernel serves; so are narrow copies and the trace build."""

PAIRED = ("architecture", "head dim class", "element", "mask", "softcap")
"""Every two values of two of these choices meet in some build of a kernel; so do values of its own constants."""
_MORE_PAIRS = (
    ("optional operands", "mask"),
    ("optional operands", "head dim class"),
    ("config", "softcap"),
    ("trace", "mask"),
    ("trace", "inside"),
    ("alignment", "item size"),
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One translation unit for one architecture."""

    spec: Kernel
    config: TileConfig
    problem: Problem
    """Carries elements, precision, mask, head dim and alignment; its lengths do not reach the compiler."""
    arch: Architecture
    trace: bool = False
    inside: bool = False
    """A trace build with stamps of each warp's phases."""

    @property
    def source(self) -> str:
        """File under ``cuda_src``."""
        return self.spec.source_of(self._built)

    @property
    def _built(self) -> TileConfig:
        config: TileConfig = self.spec.over_cache(self.config, self.problem)
        return config

    @property
    def constants(self) -> dict[str, int | bool]:
        return {**self.spec.constants(self.problem, self._built), **trace_constants(self.trace, self.inside)}

    @property
    def skips(self) -> bool:
        """Whether any tile is ever skipped."""
        return self.spec.skip_masked_tiles and self.problem.mask_kind != "full"

    @property
    def launches(self) -> tuple[Launch, ...]:
        shared_memory = self.spec.shared_bytes(self._built, self.problem.head_dim, self.problem.v_dim)
        return self.spec.launches(self.problem, self._built, shared_memory, None)

    @property
    def choices(self) -> dict[str, Hashable]:
        """The choices of this build by factor, for the covering set."""
        p = self.problem
        return {
            "architecture": self.arch.capability,
            "head dim class": next((d for d in HEAD_DIMS if p.head_dim <= d), HEAD_DIMS[-1]),
            "head dim": p.head_dim,
            "element": (p.dtype, p.k_element.name, p.precision),
            "mask": p.mask_kind,
            "softcap": p.softcap is not None,
            "optional operands": (p.lengths.compiled_kind, p.alibi, p.sink, p.dropped > 0),
            "config": self.config,
            "item size": p.itemsize,
            "alignment": p.alignment,
            "trace": self.trace,
            "inside": self.inside,
            **self.spec.own_constants(p),
        }

    def __str__(self) -> str:
        p = self.problem
        parts = [self.arch.name, self.spec.name, str(self.config), f"head_dim {p.dims_text}", p.dtype]
        parts += [p.precision] * (p.precision != "native")
        parts += [p.mask_kind, *["softcap"] * (p.softcap is not None)]
        parts += [p.lengths.compiled_kind] * p.lengths.ragged + ["ALiBi"] * p.alibi + ["sink"] * p.sink
        parts += ["dropout"] * (p.dropped > 0)
        parts += [name.lower() for name, on in self.spec.own_constants(p).items() if on]
        parts += [f"{p.alignment}-byte copies"] * (p.alignment < 16)
        return ", ".join([*parts, *["trace"] * self.trace, *["inside"] * self.inside])


def variants(
    archs: Sequence[int] = COMPILED_ARCHITECTURES,
    kernels: Iterable[str] | None = None,
    head_dims: Sequence[int] | None = None,
    *,
    everything: bool = False,
) -> Iterator[Variant]:
    """What ``cufa compile`` builds: of each kernel a covering set, or ``everything``. ``kernels`` are names in the
    registry (default: all).

    ``head_dims`` replaces the standard set and is then built for every architecture, without the builds
    that are made for one architecture only.
    """
    built: set[Hashable] = set()
    for name in KERNELS if kernels is None else kernels:
        found = (v for v in _builds(KERNELS[name], archs, head_dims) if _is_new(v, built))
        yield from found if everything else _covering(list(found))


def pairs_of(variant: Variant) -> list[tuple[str, str]]:
    """Pairs of choices. Every two values of a pair meet in some build of the variant's kernel."""
    own = variant.spec.own_constants(variant.problem)
    return [*itertools.combinations((*PAIRED, *own), 2), *_MORE_PAIRS]


def _covering(found: Sequence[Variant]) -> Iterator[Variant]:
    if found:
        chosen = covering([variant.choices for variant in found], pairs_of(found[0]))
        yield from (found[index] for index in chosen)


def _is_new(variant: Variant, built: set[Hashable]) -> bool:
    """Whether no earlier build has the same machine code. Without a mask there is nothing to skip: an
    ablation's unmasked builds are the kernel's own."""
    constants = {**variant.constants, "SKIP_MASKED_TILES": variant.skips}
    # Names and values apart: a hundred thousand builds would need two million pairs more.
    key = (variant.source, variant.arch.capability, tuple(constants), tuple(constants.values()))
    before = len(built)
    built.add(key)
    return len(built) > before


def _builds(spec: Kernel, archs: Sequence[int], head_dims: Sequence[int] | None) -> Iterator[Variant]:
    """Every build of a kernel."""
    served = [find_architecture(arch) for arch in archs if spec.runs_on(arch)]
    for arch in served:
        for head_dim in head_dims or HEAD_DIMS:
            yield from _configs(spec, arch, head_dim)
    if head_dims is None and served:
        for head_dim in ODD_HEAD_DIMS:
            yield from _configs(spec, served[0], head_dim)
        yield from _other_branches(spec, served[0])
        yield from _left_out(spec, served)


def _configs(spec: Kernel, arch: Architecture, head_dim: int) -> Iterator[Variant]:
    for config in _fitting(spec, head_dim, arch):
        for problem in _served(spec, config, head_dim):
            yield Variant(spec, config, problem, arch)


def _left_out(spec: Kernel, served: Sequence[Architecture]) -> Iterator[Variant]:
    """Configs that no standard head dim reaches, at their smallest head dim, on the first architecture where they
    fit."""
    reached = {config for arch in served for d in HEAD_DIMS for config in _fitting(spec, d, arch)}
    reached |= {config for d in ODD_HEAD_DIMS for config in _fitting(spec, d, served[0])}
    for config in (c for c in spec.configs + spec.split_configs if c not in reached):
        for arch in served:
            if config in _fitting(spec, config.min_head_dim, arch):
                for problem in _served(spec, config, config.min_head_dim):
                    yield Variant(spec, config, problem, arch)
                break


@functools.lru_cache(1024)
def _served(spec: Kernel, config: TileConfig, head_dim: int) -> tuple[Problem, ...]:
    """Problems that the config serves: some take no split keys, some not all tiles."""
    split = config in spec.split_configs
    return tuple(
        p for p in _problems(spec, head_dim) if refusal(spec, p, config=config, split_keys=split) is None
    )


def _other_branches(spec: Kernel, arch: Architecture) -> Iterator[Variant]:
    """The trace build and narrow copies, at the smallest standard head dim and the preferred config."""
    head_dim = next(d for d in HEAD_DIMS if _problems(spec, d) and _fitting(spec, d, arch))
    inside = keeps_logs(spec.source)
    for config in _fitting(spec, head_dim, arch)[:1]:
        for problem in _problems(spec, head_dim):
            yield Variant(spec, config, problem, arch, trace=True)
            if inside:
                yield Variant(spec, config, problem, arch, trace=True, inside=True)
            for alignment in (8, 4, 2):
                narrow = dataclasses.replace(problem, alignment=alignment)
                if alignment >= problem.itemsize and spec.refuses(narrow) is None:
                    yield Variant(spec, config, narrow, arch)


def _fitting(spec: Kernel, head_dim: int, arch: Architecture) -> tuple[TileConfig, ...]:
    """Tiles with split keys last."""
    return spec.fitting(spec.configs + spec.split_configs, head_dim, Device.typical(arch.capability))


@functools.lru_cache(256)
def _problems(spec: Kernel, head_dim: int) -> tuple[Problem, ...]:
    problems = OPERATIONS[spec.operation].compiled(spec, head_dim)
    return tuple(problem for problem in problems if spec.refuses(problem) is None)
