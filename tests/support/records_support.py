"""What tests of measurements share: rows measured on the CPU, rows made up, and a card of them."""

from __future__ import annotations

import copy
import functools
import json

from card_support import lines_of

from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, kernels_of
from cufa.measure import cards
from cufa.measure.cards import of_lines
from cufa.measure.cases import READ, Case, Work, contenders, one_item_a_block
from cufa.measure.limits import Limits
from cufa.measure.measured import row_of
from cufa.measure.predictions import with_needs
from cufa.measure.regimes import Regime
from cufa.measure.runner import run_case
from cufa.measure.suites import make
from cufa.measure.timing import Timing
from cufa.plan.planner import make_plan

FORWARD, DECODE = (kernels_of(name) for name in ("forward", "decode"))
H200 = Device.typical("sm_90")
#: What is shipped. Parsing it takes a tenth of a second, so it is done once per process; tests do not change it.
SHIPPED = cards.load_all()
LIMITS = Limits(1e10, {"float32": 1e11, "float64": 5e10}, 1e9)


@functools.cache
def _versions():
    """Every version of the algorithm on two shapes, measured here, on the CPU."""
    rows = []
    for seqlen in (600, 1100):
        problem = make(1, 2, seqlen, 32, "float32", True)
        case = Case(problem, contenders("naive", "fa1", "fa2_noskip", "fa2"))
        got, skipped = run_case(case, None, LIMITS, seconds=0.05)
        assert not skipped
        rows += got
    return [row.json for row in rows]


def versions_rows():
    return copy.deepcopy(_versions())


ENVIRONMENT = {
    "device": "Test GPU",
    "arch": "sm_90",
    "recorded": "2026-01-02T03:04:05+00:00",
    "nvrtc": "13.0",
    "versions": {},
}
CEILINGS = {"copy_bytes": 4e12, "flops": {"float16": 6e14}, "exponentials": 4e12}


def made_up_card(suites=None, environment=ENVIRONMENT, ceilings=CEILINGS, **tests):
    """A card as a GPU run would leave it, with rows from the CPU, or with the rows given by suite."""
    if suites is None:
        rows = versions_rows()
        # The CPU plans every algorithm under one kernel; a GPU has a row of each.
        suites = {"versions": rows, "quick": [{**rows[0], "label": name, "kernel": name} for name in FORWARD]}
    passed = {
        "passed": 9,
        "failed": 0,
        "skipped": 1,
        "failures": [],
        "passed_by_kernel": dict.fromkeys(KERNELS, 5),
    }
    others = [
        {"what": "tests", **passed, **tests},
        {
            "what": "host",
            "calls": [{"call": "f(x)", "p10_us": 1.0, "p50_us": 2.0, "p90_us": 3.0}],
            "first_result": {"cold": 6.0, "warm": 1.5},
        },
        *({"what": "compile", "kernel": name, "seconds": 3.0, "of": "tiles"} for name in FORWARD),
    ]
    return of_lines("test-gpu", lines_of(suites, environment, ceilings, *others))


def as_json(record):
    """Tuples become lists on the way."""
    return json.loads(json.dumps(record))


def fa3_row(contender, seconds, **sustained):
    """A row of FA3 on an H200, as a run there would leave it."""
    limits = Limits(4e12, {"bfloat16": 1e15}, 4e12, sustained)
    problem = make(4, 16, 7680, 128, "bfloat16")  # every tiling divides it
    plan = make_plan(problem, H200, "fa3", contender.config)
    if contender.one_item_a_block:
        plan = one_item_a_block(plan)
    return with_needs(measured_row(contender.label, problem, seconds, plan), H200, limits)


def measured_row(label, problem, seconds, plan=None, case="", load=None, lengths=None):
    """Twenty samples of the same length."""
    timing = Timing((seconds,) * 20, Regime.SUSTAINED if load else Regime.IN_TURNS, load=load)
    error, work = None if label == READ else 1e-3, Work.of(problem, lengths)
    floor = 1e-4, "memory"
    return row_of(case, label, problem, timing, work, floor, error=error, plan=plan, lengths=lengths)


def rows_json(rows):
    return [as_json(row.json) for row in rows]
