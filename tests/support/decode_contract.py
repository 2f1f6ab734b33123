"""What the files of decoding's contract share: a call held to float64, kernels by backend, cases that are executed."""

from __future__ import annotations

import numpy as np
import pytest
from backends import CPU, EMULATE, GPU, MARKS
from decode_kernel_support import assert_spans, cache_of, splits
from decode_support import Case

import cufa
from cufa.kernels import TileConfig, kernels_of

#: Small tiles of the CPU path, so that small caches have edges.
SMALL = TileConfig(block_q=4, block_kv=8, num_warps=0)
SCHEDULES = {"cpu": ("decode_split", "decode_balanced"), "gpu": tuple(kernels_of("decode"))}
PAGE_SIZES = (0, 1, 3, 16, 64, 128, 256)
BOTH = (False, True)
#: Executed: one build of each branch.
CASES = {
    # Pages of whole boxes, several tokens of which some are appended.
    "decode_split_tma": {"lengths": [2, 9, 150, 333], "tokens": 4, "new": 2, "head_dim": 64, "page_size": 16},
    # Odd pages; more appended than a window shows; a head dim with half a k16 step; merged in the same launch.
    "decode_balanced": {"lengths": [40, 333, 41, 150], "tokens": 2, "new": 40, "head_dim": 72, "page_size": 3},
    # 64 rows: warps share keys; merged by a second launch.
    "decode_balanced_tma": {"lengths": [150, 0, 1, 333], "heads": 40, "kv_heads": 1, "head_dim": 64},
    # Several blocks of rows, of which one stores what is appended.
    "decode_split": {
        "lengths": [20, 150, 333], "tokens": 4, "new": 20, "heads": 40, "kv_heads": 1, "head_dim": 64
    },
    "decode_split_tma_fp8": {
        "lengths": [0, 1, 150, 333], "tokens": 4, "head_dim": 128, "fp8": True, "dtype": "bfloat16"
    },
    "decode_split_fp8": {"lengths": [150, 2, 333], "head_dim": 80, "fp8": True, "new": 1, "page_size": 16},
    # Scales of tokens, appended in pages of whole boxes; of blocks, appended over their border; of pages.
    "decode_split_tma_fp8_scaled": {
        "lengths": [3, 150, 333], "head_dim": 64, "fp8": "token", "new": 3, "page_size": 16, "dtype": "bfloat16"
    },
    "decode_balanced_tma_fp8_scaled": {"lengths": [170, 5, 333], "head_dim": 128, "fp8": "block", "new": 5},
    "decode_split_fp8_scaled": {"lengths": [150, 9, 333], "head_dim": 80, "fp8": "block", "new": 9, "page_size": 3},
    "decode_balanced_fp8_scaled": {
        "lengths": [150, 0, 333], "tokens": 4, "heads": 40, "kv_heads": 1, "head_dim": 64, "fp8": "token"
    },
}  # fmt: skip


def check(backend, case: Case, kernel=None, num_splits=None, *, config=None, trace=None, **how):
    """Decoded once; with more than one split asked for, the shares of a balanced kernel are many enough."""
    trace = backend is EMULATE if trace is None else trace
    if backend is CPU:
        config = SMALL if config is None else config
    elif kernel is not None and num_splits is not None:
        num_splits = splits(kernel, num_splits)
    changed = {"window", "mask"} & case.options.keys()
    given = case.hidden() if changed else case
    done = backend.decode(given, kernel, num_splits, config=config, trace=trace, **how)
    case.check(done.out, done.lse)
    given.assert_stored(done.results)
    if trace:
        assert_spans(done.plan, case.lengths, done.records)
    return done


def check_call(backend, case: Case, layout: str = "bhsd", **options):
    """The public call, right in out and lse. Returns its arrays and options, where the backend computes."""
    arrays, given = case.arguments(layout, **options, device=backend.call_device)
    given = {name: backend.array(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    arrays = [*map(backend.array, arrays)]
    out, lse = cufa.flash_decode(*arrays, **given, return_lse=True)
    assert type(out) is type(lse) is type(arrays[0])
    case.check(backend.host(out), backend.host(lse), layout)
    return arrays, given


def each(*names: str, kernels=None):
    """Parametrise over backend and kernel: NumPy has one per schedule, a GPU all, the executor those named."""
    found = [
        pytest.param(backend, kernel, id=f"{backend}-{kernel}", marks=MARKS[backend.name])
        for backend in (CPU, EMULATE, GPU)
        if backend.name in names
        for kernel in (kernels or SCHEDULES[backend.name])
    ]
    return pytest.mark.parametrize(("backend", "kernel"), found)


def of_kernel(kernel: str) -> dict[str, object]:
    return {"fp8": cache_of(kernel), "dtype": kernels_of("decode")[kernel].dtypes[-1]}
