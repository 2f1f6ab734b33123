"""`cufa.emulate_backward`, the call: arguments, layouts, counters, what it never reads. The kernels themselves are in
test_emulate_backward.py."""

from __future__ import annotations

import numpy as np
import pytest
from backward_support import NAMES, assert_gradients, make_case

import cufa


def test_layout_bshd():
    case = make_case(2, 4, 2, 70, 90, 64, "float16", causal=True)
    arrays = (*(np.ascontiguousarray(x.swapaxes(1, 2)) for x in case.arrays[:5]), case.lse)
    run = cufa.emulate_backward(*arrays, causal=True, layout="bshd", mode="checked")
    assert not run.findings
    assert_gradients([run.results[name].swapaxes(1, 2) for name in NAMES], case)


def test_the_gradient_of_lse_of_rows_that_see_nothing_is_not_read():
    case = make_case(1, 2, 1, 150, 60, 64, "float16", causal=True, dlse=True)
    dlse = case.dlse.copy()
    dlse[:, :, :90] = np.nan
    run = cufa.emulate_backward(*case.arrays, causal=True, dlse=dlse, mode="checked")
    assert not run.findings
    assert_gradients([run.results[name] for name in NAMES], case)


def test_counters():
    """Bytes follow from the arrays, products from the tiles visited: five of a tile each."""
    case = make_case(1, 2, 2, 256, 256, 64, "float16", causal=True)
    run = cufa.emulate_backward(*case.arrays, causal=True, mode="counted")
    assert run.totals["bank_conflicts"] == 0
    assert run.totals["global_write_bytes"] >= sum(x.nbytes for x in run.results.values())
    for launch in run.plan.launches:
        assert len(run.counters[launch.entry]) == int(np.prod(launch.grid))
    config = run.plan.config
    per_tile = 5 * config.block_q * config.block_kv * 64
    assert run.totals["products"] == run.totals["tiles_visited"] * per_tile


def test_arguments_are_checked_as_the_calls_are():
    case = make_case(1, 2, 1, 20, 30, 64, "float16")
    with pytest.raises(TypeError, match="q is float64"):
        cufa.emulate_backward(*(x.astype(np.float64) for x in case.arrays))
    with pytest.raises(ValueError, match="lse has shape"):
        cufa.emulate_backward(*case.arrays[:5], case.lse[:, :, 1:])
    with pytest.raises(TypeError, match="deterministic must be"):
        cufa.emulate_backward(*case.arrays, deterministic="yes")
    with pytest.raises(ValueError, match="nothing to execute"):
        cufa.emulate_backward(*(x[:, :, :0] if x.shape[2] == 20 else x for x in case.arrays))
