"""`cufa bench fp8` on a GPU: every distribution, every recipe that a kernel serves, and the quantiser's own row."""

from __future__ import annotations

import dataclasses

import pytest

from cufa.measure.cases import Contender
from cufa.measure.distributions import DISTRIBUTIONS
from cufa.measure.float8_cases import accuracy
from cufa.measure.limits import Limits
from cufa.measure.quantized import QUANTIZE, Quantized
from cufa.measure.runner import run_case
from cufa.measure.suites import make

pytestmark = pytest.mark.gpu
LIMITS = Limits(2e12, {"bfloat16": 8e14, "float16": 8e14, "tf32": 4e14}, 4e12)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_errors_are_those_of_8_bits(name):
    from cufa.run.cuda import backend as cuda

    device = cuda.current_device()
    if device.arch.capability != 90:
        pytest.skip("the rows are of fa3_forward_fp8, which runs on sm_90")
    case = next(x for x in accuracy(make(1, 4, 512, 128, "bfloat16"), 4096, True) if x.distribution == name)
    cost = Contender(QUANTIZE, quantized=Quantized(rotated=True))
    case = dataclasses.replace(case, contenders=(*case.contenders, cost))
    rows, skipped = run_case(case, device, LIMITS, seconds=0.01)
    found = {row.label: row for row in rows}
    assert all("per token" in x.label for x in skipped), [x.reason for x in skipped]
    assert found[QUANTIZE].accuracy is None and found[QUANTIZE].seconds > 0
    exact = found["bfloat16"].accuracy
    for label, row in found.items():
        if label in ("bfloat16", QUANTIZE):
            continue
        fa2 = label.startswith("FA2")
        assert row.json["kernel"] == ("fa2_forward_fp8" if fa2 else "fa3_forward_fp8") and row.is_number
        assert exact.rmse < row.accuracy.rmse < 0.1, label
        assert row.accuracy.found == exact.found
