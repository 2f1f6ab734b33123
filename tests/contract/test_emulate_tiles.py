"""What ties masks, schedule and kernels together: for any band, length and tiling, every score one by one, the
schedule in Python and the records that the kernels write of themselves agree on every tile, and the result is
right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_support import BANDS, tiles_of
from support import assert_attention, assert_tiles, forward_operands, make_inputs, make_problem

from cufa.gpu.architectures import Device
from cufa.kernels import kernels_of
from cufa.plan.planner import fitting_configs, make_plan
from cufa.run.emulate.calls import Execution, run_plan
from cufa.schedule.schedule import Tile

H200 = Device.typical("sm_90")
#: Of each kernel the smallest tiling: small problems have many tiles. One build per kind of mask.
KERNELS = [
    pytest.param(spec, min(fitting_configs(spec, 64, H200), key=lambda c: (c.block_q * c.block_kv, str(c))), id=name)
    for name, spec in kernels_of("forward").items()
]  # fmt: skip


@pytest.mark.sampled(fixed=2, dated=1)
@pytest.mark.parametrize(("spec", "config"), KERNELS)
def test_every_tile(spec, config):
    @given(mask=BANDS, seqlen_q=st.integers(1, 200), seqlen_k=st.integers(1, 300), seed=st.integers(0, 9))
    @settings(max_examples=15)
    def run(mask, seqlen_q, seqlen_k, seed):
        inputs = make_inputs(1, 2, 1, seqlen_q, seqlen_k, 64, spec.dtypes[-1], seed=seed)
        plan = make_plan(make_problem(*inputs, mask=mask), H200, config=config, kernel=spec.name)
        done = run_plan(plan, forward_operands(*inputs), Execution("plain", schedule=seed))
        assert_attention(done.out, done.lse, *inputs, mask=mask)
        assert_tiles(plan, done.records)
        assert_scores(plan, mask.dense(seqlen_q, seqlen_k), done.records)

    run()


def assert_scores(plan, seen: np.ndarray, records: np.ndarray) -> None:
    """The tiles of the schedule and of the kernel's records are those of the scores themselves."""
    schedule = plan.schedule
    some, clear = tiles_of(seen, schedule.block_q, schedule.block_kv)
    visited = some if schedule.skip_masked_tiles else np.ones_like(some)
    np.testing.assert_array_equal(schedule.tiles != Tile.SKIPPED, visited)
    tile = np.arange(schedule.num_kv_blocks)
    for record in records:
        first, first_clear = int(record["first_tile"]), int(record["first_clear"])
        inside = (tile >= first) & (tile < first + int(record["tiles_visited"]))
        np.testing.assert_array_equal(inside, visited[record["q_block"]])
        free = (tile >= first_clear) & (tile < first_clear + int(record["tiles_clear"]))
        np.testing.assert_array_equal(free, clear[record["q_block"]])
