"""Shared memory as one list of buffers: Python asks for their bytes, and the sources hold them to their own offsets."""

from __future__ import annotations

import dataclasses

import pytest
import syntax

from cufa.build.compiler import translation_unit
from cufa.build.static_compile import CompileError, static_compile
from cufa.gpu.architectures import find_architecture
from cufa.kernels import KERNELS
from cufa.kernels.config import Buffer, bytes_of, tile_pitch
from cufa.plan.operation import OPERATIONS


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("pad_to", [16, 32, 64])
def test_rows_of_a_tile_begin_in_different_banks(itemsize, pad_to):
    """An odd number of 16-byte units from row to row, the fewest that hold what products read."""
    for columns in range(8, 257, 8):
        read = -(-columns * itemsize // pad_to) * pad_to
        pitch = tile_pitch(columns, itemsize, pad_to)
        assert pitch % 32 == 16
        assert read <= pitch <= read + 16


@pytest.mark.parametrize(
    ("buffers", "total"),
    [
        ((Buffer("A", 20), Buffer("B", 8, align=8), Buffer("C", 100, align=1024)), 1124),
        ((Buffer("A", 20), Buffer("NONE", 0)), 32),
        ((Buffer("A", 32), Buffer("B", 64), Buffer("C", 16), Buffer("OVER_B", 200, over="B"), Buffer("D", 16)), 256),
        ((Buffer("A", 32), Buffer("B", 64), Buffer("C", 16), Buffer("OVER_B", 8, over="B"), Buffer("D", 16)), 128),
    ],
)  # fmt: skip
def test_buffers_lie_one_behind_the_other_or_over_another(buffers, total):
    assert bytes_of(buffers) == total


#: A config of each source that has every one of its buffers.
WHOLE = {
    "naive": lambda c: True,
    "fa1_forward": lambda c: True,
    "fa1_forward_f32": lambda c: True,
    "fa2_forward": lambda c: c.column_warps == 2,
    "fa2_forward_f32": lambda c: True,
    "fa3_forward": lambda c: True,
    "fa2_backward": lambda c: c.shared_keys,
    "fa3_backward": lambda c: c.bulk_add,
    "fa3_backward_wide": lambda c: True,
    "decode_split_tma": lambda c: c.cluster_merge,
    "decode_balanced": lambda c: True,
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_buffer_of_another_size_does_not_compile(name):
    """The source holds SMEM_BYTES to the sizes of its own types, and every buffer's size is in SMEM_BYTES."""
    spec = KERNELS[name]
    config = next(c for c in spec.configs if WHOLE[name](c))
    problem = next(iter(OPERATIONS[spec.operation].compiled(spec, config.max_head_dim)))
    given = {**spec.constants(problem, config), "TRACE": False}
    assert syntax.errors(translation_unit(spec.source, given)) == ""
    for change in (-8, 1 << 20):
        changed_unit = translation_unit(spec.source, {**given, "SMEM_BYTES": given["SMEM_BYTES"] + change})
        assert "static assertion failed" in syntax.errors(changed_unit)
    buffers = spec.shared_memory(config, config.max_head_dim)
    for buffer in buffers:
        larger = dataclasses.replace(buffer, size=buffer.size + (1 << 20))
        assert bytes_of(tuple(larger if x == buffer else x for x in buffers)) > given["SMEM_BYTES"]


@pytest.mark.usefixtures("nvrtc")
def test_balanced_decoding_does_not_compile_with_a_merge_in_clusters():
    """The thread blocks that share a work item are not one cluster there."""
    spec = KERNELS["decode_balanced_tma"]
    problem = next(iter(OPERATIONS[spec.operation].compiled(spec, 128)))
    given = spec.constants(problem, next(c for c in spec.configs if c.fits(128)))
    with pytest.raises(CompileError, match="are not one cluster"):
        static_compile(spec.source, {**given, "TRACE": False, "CLUSTER_MERGE": True}, find_architecture(90))
