"""What was measured to be fastest: kernels, from the records, and tiles, from `cufa tune`."""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner
from evidence import fastest
from records_support import (
    H200,
    LIMITS,
    made_up_card,
    measured_row,
    rows_json,
)

from cufa.calls import tuning
from cufa.commands import tune as command
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, TileConfig
from cufa.measure import cards, measured
from cufa.measure.decode_cases import make_decode
from cufa.measure.power import Power
from cufa.measure.regimes import Regime
from cufa.measure.suites import make
from cufa.measure.timing import Load
from cufa.plan.candidates import tuning_key
from cufa.plan.operation import Tuned
from cufa.plan.planner import fitting_configs, make_plan
from cufa.problem.mask import Band


class TestFastest:
    def card(self, problem, times):
        rows = [
            measured_row(name, problem, seconds, make_plan(problem, H200, name))
            for name, seconds in times.items()
        ]
        return made_up_card({"forward": rows_json(rows)})

    def test_what_was_measured_to_be_fastest_is_taken(self):
        """Without the planner's first choice in the race, nothing is decided."""
        problem = make(1, 8, 1024, 64, "bfloat16", Band(100, 0))
        found = fastest.fastest(self.card(problem, {"fa3": 2e-3, "fa2": 1e-3, "fa1": 5e-3}))
        assert set(found.values()) == {"fa2_forward"}
        assert make_plan(problem, H200, fastest=found).spec.name == "fa2_forward"
        assert fastest.fastest(self.card(problem, {"fa2": 1e-3, "fa1": 5e-3})) == {}

    def test_kernels_that_there_are_no_more_and_entries_that_are_no_names_are_left_out(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(tuning, "RECORDED", tmp_path)
        tuning.fastest_kernels.cache_clear()
        entries = {"kept": "fa2_forward", "gone": "fa0_forward", "no name": 5, "null": None}
        tuning.recorded_path("NVIDIA Y").write_text(json.dumps(entries))
        assert tuning.fastest_kernels("NVIDIA Y") == {"kept": "fa2_forward"}

    def test_the_shipped_files_are_of_the_measurements(self):
        for card in cards.load_all().values():
            kept = dict(tuning.fastest_kernels(card.environment["device"]))
            assert kept == fastest.fastest(card), "run `python -m tests.evidence fastest`"


#: A field that configs do not have, fields that are missing, a kernel that there is not, no config, none that could
#: be one, and no entry at all.
DAMAGED = """{
    "naive/field": {"config": {"block_q": 64, "block_kv": 64, "num_warps": 4, "no_such_field": 1}},
    "naive/missing": {"config": {"block_q": 64}}, "k": {"config": {}}, "naive/none": {},
    "naive/number": {"config": 5}, "naive/null": {"config": null}, "naive/list": {"config": [64, 64, 4]}, "naive/x": 3
}"""


class TestTuning:
    @pytest.fixture(autouse=True)
    def own_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "cache"))
        tuning.load.cache_clear()
        yield
        tuning.load.cache_clear()

    def test_kept_and_found_again(self):
        assert tuning.load("NVIDIA H200") == {}
        a, b = TileConfig(64, 64, 4), TileConfig(128, 32, 8, num_stages=2)
        file = tuning.save("NVIDIA H200", "naive/one", a, {"seconds": 1e-3})
        tuning.save("NVIDIA H200", "naive/two", b, {})
        tuning.save("NVIDIA H200", "naive/one", b, {})
        assert tuning.load("NVIDIA H200") == {"naive/one": Tuned(b), "naive/two": Tuned(b)}
        assert tuning.load("NVIDIA A100") == {}
        assert [f.name for f in file.parent.iterdir()] == ["tuned-nvidia-h200.json"], "a file is left"

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b"3", b"\xff\xfe{}", b"[" * 200_000, DAMAGED.encode()]
    )
    def test_a_damaged_file_means_untuned(self, content):
        file = tuning.path("GPU")
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        assert tuning.load("GPU") == {}
        tuning.save("GPU", "naive/key", TileConfig(64, 64, 4), {})
        assert tuning.load("GPU") == {"naive/key": Tuned(TileConfig(64, 64, 4))}

    def test_what_is_damaged_spoils_nothing_else(self):
        good = TileConfig(64, 64, 4)
        file = tuning.save("GPU", "naive/key", good, {})
        file.write_text(json.dumps({**json.loads(DAMAGED), **json.loads(file.read_text())}))
        tuning.load.cache_clear()
        assert tuning.load("GPU") == {"naive/key": Tuned(good)}

    def test_tiles_that_do_not_fit_are_passed_over(self):
        device = Device.typical("sm_90")
        problem = make(1, 8, 4096, 64, "float16", True)
        plan = make_plan(problem, device)
        for field, value in (("block_q", 4096), ("block_kv", 0), ("num_warps", "8")):
            wrong = dataclasses.replace(plan.config, **{field: value})
            tuning.save(device.name, tuning_key(plan.spec, problem), wrong, {})
            assert make_plan(problem, device, tuned=tuning.load(device.name)).config == plan.config

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({}, "1.04× as fast as "),
            ({"over_planned": 1.0}, "none was faster"),
            ({"digest": "0" * 64}, None),  # the kernel has changed since
            ({"over_planned": "much"}, None),
            ({"planned": 3}, None),
            ({"recorded": None}, None),
        ],
    )
    def test_the_planner_takes_the_winner_and_says_where_it_was_found(self, changes, text):
        """Planned tiles that nothing beat are said to be measured."""
        problem = make(1, 8, 4096, 64, "float16", True)
        plan = make_plan(problem, H200)
        other = next(c for c in fitting_configs(plan.spec, problem.head_dim, H200) if c != plan.config)
        winner = plan.config if changes == {"over_planned": 1.0} else other
        evidence = {
            "planned": dataclasses.asdict(plan.config), "over_planned": 1.0432, "regime": "in turns",
            "device": "NVIDIA H200", "recorded": "2026-01-02T03:04:05+00:00", "digest": measured.digest(plan.spec),
        }  # fmt: skip
        tuning.save(H200.name, tuning_key(plan.spec, problem), winner, {**evidence, **changes})
        found = tuning.load(H200.name)
        tuned = make_plan(problem, H200, tuned=found)
        if text is None:
            assert found == {}
            return
        assert tuned.config == winner
        of = f"{text}{plan.config}" if winner == other else text
        assert f"tuned on NVIDIA H200, 2026-01-02: {of}, in turns" in str(tuned)


def rows_of(case, device, regime, seconds_of):
    """Rows of our contenders, whose plans take ``seconds_of(plan)``."""
    load = Load(9, 1, 1.0, 0.0, Power(650.0, 1500.0, 0.5)) if regime is Regime.SUSTAINED else None
    plans = {x.label: x.plan(case.problem, device) for x in case.contenders if x.is_ours}
    return [measured_row(n, p.problem, seconds_of(p), p, load=load) for n, p in plans.items()], []


class TestCommand:
    """`cufa tune` with measuring replaced: what makes a winner."""

    @pytest.fixture
    def tune(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(command.common, "find_device", lambda choice: H200)
        monkeypatch.setattr(command, "measure_limits", lambda device: LIMITS)

        def run(*gains):
            """The second config that fits is faster than the first (planned) by these factors, look for look."""
            looks = iter(gains)

            def run_case(case, device, limits, *, regime, seconds, seed=0):
                seconds_of = {other: 1e-3 / next(looks), planned: 1e-3}
                return rows_of(case, device, regime, lambda plan: seconds_of.get(plan.config, 2e-3))

            monkeypatch.setattr(command, "run_case", run_case)
            found = CliRunner().invoke(command.tune_command, ["--head-dim", "64"])
            assert found.exit_code == 0, found.output
            assert next(looks, None) is None, "looked less often"
            tuning.load.cache_clear()
            (entry,) = tuning.load(H200.name).values()
            return entry

        problem = make(1, 8, 4096, 64, "float16")
        planned = make_plan(problem, H200).config
        other = next(c for c in fitting_configs(KERNELS["fa3_forward"], 64, H200) if c != planned)
        run.planned, run.other = planned, other
        return run

    def test_faster_twice_and_never_slower_is_kept(self, tune):
        entry = tune(1.05, 1.04, 1.0)
        assert (entry.config, entry.planned) == (tune.other, tune.planned)
        assert "1.05× as fast as" in entry.found

    @pytest.mark.parametrize(
        "gains", [(0.9,), (1.015,), (1.05, 1.01), (1.05, 1.04, 0.99)],
        ids=["slower", "noise", "not again", "slower at the power limit"],
    )  # fmt: skip
    def test_anything_else_leaves_the_planned_tiles(self, tune, gains):
        entry = tune(*gains)
        assert entry.config == entry.planned == tune.planned
        assert "none was faster" in entry.found

    def test_a_cut_of_a_cache_is_kept_and_planned(self, tune, monkeypatch):
        """Splits merged in clusters of 8, faster in every look. A maximum by bound, twice as fast, is shown but not
        kept."""
        problem = make_decode(1, 32, 8, 128 << 10)

        def seconds_of(plan):
            if plan.problem.softmax_max:
                return 0.5e-3
            return 1e-3 / (1 + 0.05 * (plan.launches[0].cluster == 8 and plan.config.num_warps == 8))

        def run_case(case, device, limits, *, regime, seconds, seed=0):
            return rows_of(case, device, regime, seconds_of)

        monkeypatch.setattr(command, "run_case", run_case)
        shape = ["--heads=32", "--kv-heads=8", "--seqlen-k=131072", "--head-dim=128", "--dtype=bfloat16"]
        found = CliRunner().invoke(command.tune_command, ["decode", *shape])
        assert found.exit_code == 0 and "maximum by bound" in found.output, found.output
        tuning.load.cache_clear()
        plan = make_plan(problem, H200, tuned=tuning.load(H200.name))
        assert plan.launches[0].cluster == plan.num_splits == 8 and "1.05× as fast" in str(plan)
