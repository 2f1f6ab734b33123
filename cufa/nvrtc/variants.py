"""Every build of every kernel that is checked without a GPU: kernel × config × dtype × mask × head dim.

All of :data:`HEAD_DIMS` are built for every architecture. What differs only in the source's own branches
(head dims that are not powers of two, copies narrower than 16 bytes, the trace build) is built for one
architecture, the first that the kernel serves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from ..core.architectures import COMPILED_ARCHITECTURES, Architecture, Device, find_architecture
from ..core.problem import ITEMSIZE, Problem, default_scale
from ..decode.problem import DecodeProblem
from ..kernels import REGISTRY, KernelSpec, Launch, TileConfig
from ..planner import fitting_configs

HEAD_DIMS = (64, 128, 256)
ODD_HEAD_DIMS = (40, 80, 96, 192)
"""Odd multiples of 8, 16, 32 and 64: the branches of a tiling that powers of two do not reach."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One translation unit for one architecture."""

    spec: KernelSpec
    config: TileConfig
    problem: Problem | DecodeProblem
    """Carries dtype, precision, mask, head dim and alignment; its lengths do not reach the compiler."""
    arch: Architecture
    trace: bool = False

    @property
    def source(self) -> str:
        """File under ``cuda_src``."""
        return f"kernels/{self.spec.source}"

    @property
    def constants(self) -> dict[str, int | bool]:
        return {**self.spec.constants(self.problem, self.config), "TRACE": self.trace}

    @property
    def skips(self) -> bool:
        """Whether any tile is ever skipped."""
        return self.spec.skip_masked_tiles and self.problem.causal

    @property
    def launches(self) -> tuple[Launch, ...]:
        shared_memory = self.spec.shared_memory(self.config, self.problem.head_dim)
        return self.spec.launches(self.problem, self.config, shared_memory)

    def __str__(self) -> str:
        p = self.problem
        parts = [self.arch.name, self.spec.name, str(self.config), f"head_dim {p.head_dim}", p.dtype]
        parts += [p.precision] * (p.precision != "native")
        parts += ["causal" if p.causal else "full"]
        if isinstance(p, DecodeProblem):
            parts += ["paged" if p.paged else "contiguous"] + ["append"] * (p.new_tokens > 0)
        parts += [f"{p.alignment}-byte copies"] * (p.alignment < 16)
        parts += ["trace"] * self.trace
        return ", ".join(parts)


def variants(
    archs: Sequence[int] = COMPILED_ARCHITECTURES,
    kernels: Iterable[str] | None = None,
    head_dims: Sequence[int] | None = None,
) -> Iterator[Variant]:
    """What ``cufa compile`` builds. ``kernels`` are names in the registry (default: all).

    ``head_dims`` replaces the standard set and is then built for every architecture, without the builds
    that are made for one architecture only.
    """
    built = set()
    for name in REGISTRY if kernels is None else kernels:
        for variant in _of_kernel(REGISTRY[name], archs, head_dims):
            # Without a mask there is nothing to skip: an ablation's unmasked builds are the kernel's own.
            constants = {**variant.constants, "SKIP_MASKED_TILES": variant.skips}
            key = (variant.source, variant.arch.capability, tuple(constants.items()))
            if key not in built:
                built.add(key)
                yield variant


def _of_kernel(spec: KernelSpec, archs: Sequence[int], head_dims: Sequence[int] | None) -> Iterator[Variant]:
    served = [find_architecture(arch) for arch in archs if spec.runs_on(arch)]
    for arch in served:
        for head_dim in head_dims or HEAD_DIMS:
            yield from _configs(spec, arch, head_dim)
    if head_dims is None and served:
        for head_dim in ODD_HEAD_DIMS:
            yield from _configs(spec, served[0], head_dim)
        yield from _other_branches(spec, served[0])
        yield from _left_out(spec, served)


def _configs(spec: KernelSpec, arch: Architecture, head_dim: int) -> Iterator[Variant]:
    for config in _fitting(spec, head_dim, arch):
        for problem in _problems(spec, head_dim):
            yield Variant(spec, config, problem, arch)


def _left_out(spec: KernelSpec, served: Sequence[Architecture]) -> Iterator[Variant]:
    """Configs that none of these head dims takes on an architecture where it fits: at their smallest."""
    reached = {config for arch in served for d in HEAD_DIMS for config in _fitting(spec, d, arch)}
    reached |= {config for d in ODD_HEAD_DIMS for config in _fitting(spec, d, served[0])}
    for config in (c for c in spec.configs if c not in reached):
        for arch in served:
            if config in _fitting(spec, config.min_head_dim, arch):
                for problem in _problems(spec, config.min_head_dim):
                    yield Variant(spec, config, problem, arch)
                break


def _fitting(spec: KernelSpec, head_dim: int, arch: Architecture) -> tuple[TileConfig, ...]:
    return fitting_configs(spec, head_dim, Device.typical(arch.capability))


def _other_branches(spec: KernelSpec, arch: Architecture) -> Iterator[Variant]:
    """Narrow copies, the trace build and other problems of decode kernels, at the smallest standard head dim
    and the preferred config."""
    head_dim = next(d for d in HEAD_DIMS if list(_problems(spec, d)))
    fitting = _fitting(spec, head_dim, arch)
    for problem in _problems(spec, head_dim):
        for config in fitting[:1]:
            yield Variant(spec, config, problem, arch, trace=True)
            for alignment in (8, 4, 2):
                narrow = dataclasses.replace(problem, alignment=alignment)
                if alignment >= ITEMSIZE[problem.dtype] and spec.takes(narrow):
                    yield Variant(spec, config, narrow, arch)
            if isinstance(problem, DecodeProblem):
                for other in _other_decode_problems(spec, problem):
                    yield Variant(spec, config, other, arch)


def _problems(spec: KernelSpec, head_dim: int) -> Iterator[Problem | DecodeProblem]:
    of_operation = _decode_problems if spec.operation == "decode" else _forward_problems
    return (problem for problem in of_operation(spec, head_dim) if spec.takes(problem))


def _decode_problems(spec: KernelSpec, head_dim: int) -> Iterator[DecodeProblem]:
    """One: dtypes differ by a conversion and the product's name, caches in the addresses of their copies."""
    yield DecodeProblem(
        batch=1,
        heads=8,
        kv_heads=1,
        tokens=1,
        capacity=1024,
        head_dim=head_dim,
        dtype=spec.dtypes[-1],
        cache_dtype=(spec.cache_dtypes or spec.dtypes)[-1],
        scale=default_scale(head_dim),
        page_size=64,
        max_pages=16,
        num_pages=16,
        ragged=True,
    )


def _other_decode_problems(spec: KernelSpec, problem: DecodeProblem) -> Iterator[DecodeProblem]:
    """The other dtypes; caches that are contiguous and full, and those that tokens are appended to."""
    for dtype in spec.dtypes[:-1]:
        cache_dtype = spec.cache_dtypes[-1] if spec.cache_dtypes else dtype
        yield dataclasses.replace(problem, dtype=dtype, cache_dtype=cache_dtype)
    contiguous = dataclasses.replace(problem, page_size=0, max_pages=0, num_pages=0)
    for tokens in (1, 4):
        yield dataclasses.replace(contiguous, ragged=False, tokens=tokens)
        for cache in (problem, contiguous):
            yield dataclasses.replace(cache, tokens=tokens, new_tokens=tokens)


def _forward_problems(spec: KernelSpec, head_dim: int) -> Iterator[Problem]:
    for dtype in spec.dtypes:
        for precision in spec.precisions:
            if (dtype == "float32") == (precision == "native"):
                continue  # a precision is a choice for float32 only
            for causal in (False, True):
                yield Problem(
                    batch=1,
                    heads=1,
                    kv_heads=1,
                    seqlen_q=1024,
                    seqlen_k=1024,
                    head_dim=head_dim,
                    dtype=dtype,
                    causal=causal,
                    scale=default_scale(head_dim),
                    precision=precision,
                )
