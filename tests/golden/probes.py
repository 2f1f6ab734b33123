"""Inputs of the golden vectors, made of bits alone so that they are the same everywhere.

``record.py`` runs them on a GPU, ``tests/kernels/test_emulate_golden.py`` on the CPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from cufa.build import compiler

#: The probes' sources; their paths are absolute, for they lie outside of cuda_src.
FOLDER = Path(__file__).parents[1] / "probes"
SOURCE = str(FOLDER / "primitive_probes.cu")
HOPPER_SOURCE = str(FOLDER / "hopper_probes.cu")
DECODE_SOURCE = str(FOLDER / "decode_probes.cu")
TILE_SOURCE = str(FOLDER / "hopper_tile_probes.cu")
CLUSTER_SOURCE = str(FOLDER / "cluster_probes.cu")
REDUCTION_SOURCE = str(FOLDER / "reduction_probes.cu")
BACKWARD_SOURCE = str(FOLDER / "backward_probes.cu")
STAMP_SOURCE = str(FOLDER / "stamp_probes.cu")


class ProbeParams(ctypes.Structure):
    _fields_ = [("in_", ctypes.c_void_p), ("out", ctypes.c_void_p)]


def random_words(name: str, count: int) -> np.ndarray:
    """``count`` random u32, seeded by ``name`` (splitmix64)."""
    x = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 20)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x >> np.uint64(32)).astype(np.uint32)


def random_normals(name: str, count: int) -> np.ndarray:
    """Nearly normal float64 of variance 1: sums of twelve uniforms."""
    return random_words(name, count * 12).reshape(count, 12).astype(np.float64).sum(1) / 2**32 - 6


_FUNCTION = re.compile(
    r"^(?:static )?DEVICE [\w:]+ (\w+)(?:<[^>]*>)?\(.*?(?:^}|}$)", re.MULTILINE | re.DOTALL
)


#: Fences, hints and register budgets: a GPU acts on them, and no result of theirs can be recorded.
UNOBSERVABLE = {
    "async_proxy_fence", "computed_here", "global_proxy_fence", "grid_await_previous", "grid_release_next",
    "mbarrier_init_fence", "mma_fence", "opaque", "pair_registers", "registers_raise_to",
    "registers_release_to", "wgmma_fence", "wgmma_registers",
}  # fmt: skip


#: Added since the vectors were recorded last: until then only compared with what NumPy expects.
NOT_YET_RECORDED: set[str] = {"red_add_u64"}

#: Those of their probes that golden.npz has not.
AWAITED_PROBES: set[str] = {"red_add_u64"}


def primitive_digests() -> dict[str, str]:
    """A digest of each primitive's definitions: what has to be recorded anew when it changes."""
    texts: dict[str, str] = {}
    for file in sorted((compiler.SOURCE_DIR / "primitives").glob("*.cuh")):
        for match in _FUNCTION.finditer(file.read_text(encoding="utf-8")):
            texts[match[1]] = texts.get(match[1], "") + "".join(match[0].split())
    warpgroup = (compiler.SOURCE_DIR / "primitives/wgmma.cuh").read_text(encoding="utf-8")
    texts["Wgmma"] = "".join(warpgroup.partition("struct Wgmma;")[2].split())  # macros, no functions
    transposed = (compiler.SOURCE_DIR / "primitives/wgmma_transposed.cuh").read_text(encoding="utf-8")
    texts["WgmmaTransposedB"] = "".join(transposed.partition("struct WgmmaTransposedB;")[2].split())
    return {
        name: hashlib.sha256(text.encode()).hexdigest()[:16]
        for name, text in texts.items()
        if name not in UNOBSERVABLE
    }


@dataclasses.dataclass(frozen=True)
class Probe:
    name: str
    inputs: np.ndarray
    """u32."""
    outputs: int
    """u32 words."""
    blocks: int
    threads: int = 32
    source: str = SOURCE
    shared_bytes: int = 4096
    tensors: tuple[tuple[np.ndarray, int], ...] = ()
    """Three (tensor, rows of a box): the tensor maps that follow the parameters."""
    constants: tuple[tuple[str, int | bool], ...] = ()
    entry_name: str = ""
    """When it is not the probe's own."""
    output_tensor: tuple[tuple[int, ...], int] | None = None
    """Instead of ``tensors``: (shape, rows of a box) of the output as float16, for stores by tensor map."""
    cluster: int = 1
    """Blocks of a cluster: the kernel says it too."""

    @property
    def entry(self) -> str:
        return f"probe_{self.entry_name or self.name}"

    @property
    def capability(self) -> int:
        return {SOURCE: 80, DECODE_SOURCE: 89}.get(self.source, 90)


#: Zero, the smallest and largest numbers, one, infinity, NaN, limits and ties of the narrower formats.
_SPECIAL_BITS = """00000000 00000001 007fffff 00800000 3f800000 7f7fffff 7f800000 7fc00000 33000000 33000001
    38800000 477fe000 477ff000 3f800fff 3f801000 3f808000 3f818000 42fc0000 43160000"""
_SPECIAL = np.array([int(x, 16) for x in _SPECIAL_BITS.split()], np.uint32)


def scalars(name: str, count: int = 1024) -> np.ndarray:
    """Float32 bits: special values of both signs, random bits, and numbers of the softmax's range."""
    normals = (random_normals(name, count // 2) * 20).astype(np.float32).view(np.uint32)
    special = np.concatenate([_SPECIAL, _SPECIAL | np.uint32(0x80000000)])
    bits = random_words(name, count - normals.size - special.size)
    return np.concatenate([special, normals, bits])


def _pairs(name: str) -> np.ndarray:
    first, second = scalars(name), np.roll(scalars(name + "'"), 7)
    return np.stack([first, second], 1).ravel()


_KINDS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn}


def _products(kind: str) -> np.ndarray:
    """Ten words a lane (A, B, D) for four products: normal numbers, exact small integers, numbers of very
    different size, and normal numbers with D = 0."""
    dtype, words = np.dtype(_KINDS[kind]), []
    for block in range(4):
        name = f"mma_{kind}_{block}"
        ab = random_normals(name, 32 * 6 * (4 // dtype.itemsize)) * 3
        d = random_normals(name + "d", 32 * 4) * 3
        if block == 1:
            ab, d = np.round(ab), np.round(d)
        if block == 2:
            ab = ab * np.exp2(np.round(random_normals(name + "e", ab.size) * 2))
        if block == 3:
            d = d * 0
        if kind == "e4m3":
            ab = ab.clip(-448, 448)
        ab32 = ab.astype(dtype).view(np.uint32).reshape(32, 6)
        words.append(np.concatenate([ab32, d.astype(np.float32).view(np.uint32).reshape(32, 4)], 1).ravel())
    return np.concatenate(words)


def probes() -> Iterator[Probe]:
    scalar = ["ex2", "lg2", "rcp", "fmaxf", "fminf", "fmaf", "fma_sat"]
    convert = ["cvt_f16x2", "cvt_f16x2_satfinite", "cvt_bf16x2", "cvt_f32_f16", "cvt_f32_bf16", "cvt_tf32"]
    for name in [*scalar, *convert]:
        yield Probe(name, _pairs(name), 1024, 32)
    yield Probe("shared", random_words("shared", 128), 7 * 128, 1)
    yield Probe("global", random_words("global", 512), 512, 1)
    yield Probe("special_registers", random_words("special", 32), 33, 1)
    yield Probe("cp_async", random_words("cp_async", 128), 3 * 128, 1)
    yield Probe("ldmatrix", random_words("ldmatrix", 128), 3 * 128, 1)
    for kind in ("f16", "bf16", "tf32"):
        yield Probe(f"mma_{kind}", _products(kind), 4 * 128, 4)
    yield Probe("shuffle", random_words("shuffle", 256), 2 * 4 * 128, 2)
    yield Probe("barriers", random_words("barriers", 64), 64, 1, threads=64)


def decode_probes() -> Iterator[Probe]:
    """Of primitives that decoding and e4m3 add: every e4m3 number (not NaN, whose bits nothing depends on) in either
    half, the way back, products, bytes by any selector, a counter."""
    low, high = np.arange(1024, dtype=np.uint32) % 256, random_words("e4m3", 1024) % 256
    low, high = (np.where(x % 128 == 127, x - 1, x) for x in (low, high))
    pairs = low | high << 8
    yield Probe("cvt_f16x2_e4m3x2", pairs, 1024, 32, source=DECODE_SOURCE)
    yield Probe("cvt_e4m3x2", _pairs("cvt_e4m3x2"), 1024, 32, source=DECODE_SOURCE)
    yield Probe("mma_e4m3", _products("e4m3"), 4 * 128, 4, source=DECODE_SOURCE)
    words = random_words("permute", 3 * 256)
    words[2::3] &= 0x7777
    yield Probe("byte_permute", words, 256, 8, source=DECODE_SOURCE)
    yield Probe("atomic_inc_wrap", np.array([19], np.uint32), 21, 3, source=DECODE_SOURCE)


def all_probes() -> list[Probe]:
    return [
        *probes(),
        *decode_probes(),
        *reduction_probes(),
        *backward_probes(),
        *hopper_probes(),
        *cluster_probes(),
        Probe("stamps", random_words("stamps", 32), 96, 1, 32, STAMP_SOURCE),
    ]


def reduction_probes() -> Iterator[Probe]:
    """Sums of small integers, which are exact in any order; a semaphore handed on by three blocks; stmatrix."""
    numbers = (random_words("red_add", 3 * 64 * 7) % 2001).astype(np.float32) - 1000
    yield Probe("red_add", numbers.view(np.uint32), 32, 3, 64, REDUCTION_SOURCE)
    yield Probe("red_add_u64", random_words("red_add_u64", 3 * 64 * 2), 8, 3, 64, REDUCTION_SOURCE)
    yield Probe("red_max", random_words("red_max", 3 * 64), 4, 3, 64, REDUCTION_SOURCE)
    yield Probe("semaphore", random_words("semaphore", 64), 1 + 3 * 64, 3, 64, REDUCTION_SOURCE)
    yield Probe("stmatrix", random_words("stmatrix", 128), 256, 1, 32, REDUCTION_SOURCE)


def backward_probes() -> Iterator[Probe]:
    """Sums by the copy engine, of small integers; A (64 × 64) V (64 × 32) with V mn-major from its column 32 on."""
    numbers = (random_words("bulk_add", 3 * 128) % 2001).astype(np.float32) - 1000
    yield Probe("bulk_add", numbers.view(np.uint32), 192, 3, 64, BACKWARD_SOURCE)
    words = random_normals("wgmma_transposed", 2 * 64 * 64).astype(_KINDS["bf16"]).view(np.uint32)
    yield Probe("wgmma_transposed", words, 16 * 128, 1, 128, BACKWARD_SOURCE, 2 * 64 * 128 + 1024)


def cluster_probes() -> Iterator[Probe]:
    """Twelve words of each thread to other blocks, in two clusters of four blocks; a KiB from block to block of two
    pairs, twice."""
    words = random_words("cluster", 8 * 64 * 12)
    yield Probe("cluster", words, 8 * 64 * 13, 8, 64, CLUSTER_SOURCE, 64 * 48 + 8, cluster=4)
    words = random_words("cluster_copy", 4 * 2 * 64 * 4)
    yield Probe("cluster_copy", words, words.size, 4, 64, CLUSTER_SOURCE, 2 * 64 * 16 + 16, cluster=2)


def hopper_probes() -> Iterator[Probe]:
    """Of sm_90a's primitives."""
    words = random_words("hopper", 128)

    def tensor(name: str, kind: str, shape: tuple[int, ...]) -> np.ndarray:
        return random_normals(name, int(np.prod(shape))).reshape(shape).astype(_KINDS[kind])

    def probe(
        name: str, outputs: int, threads: int, shared_bytes: int, *tensors: tuple[np.ndarray, int]
    ) -> Probe:
        return Probe(name, words, outputs, 1, threads, HOPPER_SOURCE, shared_bytes, tensors)

    clipped = tensor("tma", "f16", (2, 2, 20, 80))
    yield probe("tma", 1024, 64, 8192, *[(clipped, 16)] * 3)
    yield probe("mbarrier", 64, 64, 2048, *[(clipped, 16)] * 3)
    yield probe("elect", 64, 64, 2048, *[(clipped, 16)] * 3)
    for kind in ("f16", "bf16"):
        shapes = {"A": (1, 1, 64, 64), "B": (1, 1, 32, 64), "V": (1, 1, 64, 64)}
        tensors = [(tensor(f"wgmma {x} {kind}", kind, shape), shape[2]) for x, shape in shapes.items()]
        yield probe(f"wgmma_{kind}", 64 * 128, 128, 24576, *tensors)


def tile_probe(kind: str, columns: int, depth: int) -> Probe:
    """A (64 × depth) with B (columns × depth), k-major, and V (depth × columns), mn-major: small integers,
    whose products are exact."""

    def tensor(name: str, rows: int, width: int) -> np.ndarray:
        words = random_words(f"{name} {columns} {depth}", rows * width) % 17
        return (words.astype(np.float32) - 8).reshape(1, 1, rows, width).astype(_KINDS[kind])

    steps, atoms = -(-depth // 16), lambda width: -(-width // 64)
    shared = 128 * ((64 + columns) * atoms(depth) + 16 * steps * atoms(columns)) + 8
    boxes = ((tensor("A", 64, depth), 64), (tensor("B", columns, depth), columns))
    values = (tensor("V", depth, columns), 16 * steps)
    return Probe(
        f"wgmma_tiles_{kind}_n{columns}_k{depth}", np.zeros(1, np.uint32), 3 * 64 * columns, 1, 128,
        TILE_SOURCE, shared, (*boxes, values),
        (("COLUMNS", columns), ("DEPTH", depth), ("BFLOAT16", kind == "bf16")), "wgmma_tiles",
    )  # fmt: skip


def tile_shapes() -> Iterator[tuple[int, int]]:
    """(columns, depth): every N with a ragged depth, and what the registry's configs use: S = Q K^T has N =
    block_kv and depth = head_dim, O = P V has N = head_dim and depth = block_kv."""
    from cufa.kernels import KERNELS

    yield from ((columns, 72) for columns in range(8, 257, 8))
    used = {
        shape
        for config in KERNELS["fa3_forward"].configs
        for d in (config.min_head_dim, config.max_head_dim)
        for shape in ((config.block_kv, d), (d, config.block_kv))
    }
    yield from sorted(used)


def tma_boxes_probe() -> Probe:
    """Boxes inside a tensor and over its ends, on each axis and each side, and wholly outside."""
    tensor = random_normals("boxes", 2 * 3 * 40 * 80).reshape(2, 3, 40, 80).astype(np.float16)
    firsts = [
        (0, 0, 0, 0), (0, 8, 1, 1),  # inside
        (0, 30, 1, 0), (0, -6, 1, 1),  # rows after the last, before the first
        (64, 3, 2, 0), (-24, 3, 0, 1),  # columns
        (64, 33, 0, 0), (-8, -9, 2, 1),  # both
        (0, 0, 3, 0), (0, 0, -1, 1),  # heads
        (0, 0, 0, 2), (0, 0, 0, -1),  # batches
        (80, 0, 0, 0), (0, 40, 0, 0),  # just past the end
    ]  # fmt: skip
    rows = 24
    inputs = np.concatenate([[len(firsts)], np.array(firsts).ravel()]).astype(np.int32).view(np.uint32)
    return Probe(
        "tma_boxes", inputs, len(firsts) * rows * 32, 1, 64, TILE_SOURCE, 2 * rows * 128 + 8,
        ((tensor, rows),) * 3, (("COLUMNS", 64), ("DEPTH", rows), ("BFLOAT16", False)),
    )  # fmt: skip


def tma_store_probe() -> Probe:
    """Boxes stored side by side: inside a tensor, over its last column and row, and past its last row:
    what kernels ask for. None begins before the tensor, where the copy engine may refuse."""
    firsts = [
        (0, 3, 0, 0), (64, 3, 0, 0),  # inside, over the last column
        (0, 30, 1, 0), (64, 36, 2, 1),  # over the last row, a corner
        (0, 40, 0, 1), (64, 56, 1, 1),  # outside
    ]  # fmt: skip
    rows, shape = 24, (2, 3, 40, 80)
    inputs = np.concatenate([[len(firsts)], np.array(firsts).ravel()]).astype(np.int32).view(np.uint32)
    return Probe(
        "tma_store", inputs, int(np.prod(shape)) // 2, 1, 64, TILE_SOURCE, rows * 128,
        constants=(("COLUMNS", 64), ("DEPTH", rows), ("BFLOAT16", False)), output_tensor=(shape, rows),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A tiny attention call whose GPU output is recorded."""

    algorithm: str
    dtype: str
    causal: bool
    head_dim: int
    precision: str | None = None

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        parts = [self.algorithm, self.dtype, *([self.precision] if self.precision else []), mask]
        return "_".join([*parts, f"d{self.head_dim}"])

    def inputs(self) -> list[np.ndarray]:
        """q (1, 2, 35, d), k and v (1, 1, 70, d): tails on both sides, two heads on one key/value head."""
        dtype = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        shapes = [(1, 2, 35, self.head_dim), (1, 1, 70, self.head_dim), (1, 1, 70, self.head_dim)]
        return [
            random_normals(f"attention {x} {self.head_dim}", int(np.prod(s))).reshape(s).astype(dtype)
            for x, s in zip("qkv", shapes, strict=True)
        ]


def cases() -> Iterator[Case]:
    from cufa.kernels import kernels_of

    for spec in kernels_of("forward").values():
        for dtype in () if spec.scales else spec.dtypes:
            for precision in ("float32", "tf32") if dtype == "float32" else (None,):
                if precision and precision not in spec.precisions:
                    continue
                for causal in (False, True):
                    for head_dim in (64, 40) if causal else (64,):
                        yield Case(spec.algorithm, dtype, causal, head_dim, precision)
