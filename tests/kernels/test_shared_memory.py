"""Shared memory as one list of buffers: Python lays them out, the sources use the offsets and check the sizes."""

from __future__ import annotations

import dataclasses

import pytest
import syntax

from cufa.build.compiler import translation_unit
from cufa.build.static_compile import CompileError, static_compile
from cufa.gpu.architectures import find_architecture
from cufa.kernels import KERNELS
from cufa.kernels.config import Buffer, constants, layout, tile_pitch
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


def test_buffers_lie_one_behind_the_other_each_on_its_alignment():
    offsets, total = layout((Buffer("A", 20), Buffer("B", 8, align=8), Buffer("C", 100, align=1024)))
    assert offsets == {"A": 0, "B": 24, "C": 1024}
    assert total == 1124


def test_a_buffer_over_another_takes_its_place_and_that_of_those_behind_it():
    buffers = (
        Buffer("A", 32),
        Buffer("B", 64),
        Buffer("C", 16),
        Buffer("OVER", 200, over="B"),
        Buffer("D", 16),
    )
    offsets, total = layout(buffers)
    assert offsets == {"A": 0, "B": 32, "C": 96, "OVER": 32, "D": 240}
    assert total == 256
    smaller = dataclasses.replace(buffers[3], size=8)
    assert layout((*buffers[:3], smaller, buffers[4]))[0]["D"] == 112


def test_the_source_is_given_an_offset_and_a_size_by_name():
    assert constants((Buffer("A", 20), Buffer("NONE", 0))) == {
        "SMEM_BYTES": 32,
        "A_OFFSET": 0,
        "A_BYTES": 20,
        "NONE_OFFSET": 32,
        "NONE_BYTES": 0,
    }


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ((Buffer("A", 1), Buffer("A", 1)), "two buffers are called 'A'"),
        ((Buffer("A", 1, over="B"), Buffer("B", 1)), "'A' lies over 'B', which does not come before it"),
        (
            (Buffer("A", 16), Buffer("B", 16), Buffer("C", 8, 128, over="B")),
            "at offset 16: no multiple of its align=128",
        ),
    ],
)
def test_lists_that_cannot_be_laid_out(buffers, message):
    with pytest.raises(ValueError, match=message):
        layout(buffers)


@pytest.mark.parametrize("spec", KERNELS.values(), ids=KERNELS)
def test_buffers_overlap_only_where_they_say_so(spec):
    for config in spec.configs:
        for head_dim in range(config.min_head_dim, config.max_head_dim + 1, 8):
            buffers = spec.shared_memory(config, head_dim)
            offsets, total = layout(buffers)
            assert (
                max(offsets[x.name] + x.size for x in buffers) <= total == spec.shared_bytes(config, head_dim)
            )
            for y, later in enumerate(buffers):
                for earlier in buffers[:y]:
                    if offsets[later.name] < offsets[earlier.name] + earlier.size:
                        assert later.over is not None, (earlier, later)


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
        assert layout(tuple(larger if x == buffer else x for x in buffers))[1] > given["SMEM_BYTES"]


@pytest.mark.usefixtures("nvrtc")
def test_balanced_decoding_does_not_compile_with_a_merge_in_clusters():
    """The thread blocks that share a work item are not one cluster there."""
    spec = KERNELS["decode_balanced_tma"]
    problem = next(iter(OPERATIONS[spec.operation].compiled(spec, 128)))
    given = spec.constants(problem, next(c for c in spec.configs if c.fits(128)))
    with pytest.raises(CompileError, match="are not one cluster"):
        static_compile(spec.source, {**given, "TRACE": False, "CLUSTER_MERGE": True}, find_architecture(90))
