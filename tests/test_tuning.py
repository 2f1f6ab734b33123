"""What was measured to be fastest: kernels, from the records, and tiles, from `cufa tune`."""

from __future__ import annotations

import dataclasses
import json

import pytest
from records_support import (
    H200,
    measured_row,
    section,
)

from cufa import tuning
from cufa.bench import fastest, records
from cufa.bench.suites import make
from cufa.core.architectures import Device
from cufa.core.mask import CAUSAL, Band
from cufa.kernels import TileConfig
from cufa.planner import make_plan, tuning_key


class TestFastest:
    def record(self, problem, times):
        rows = [
            measured_row(name, problem, seconds, make_plan(problem, H200, name))
            for name, seconds in times.items()
        ]
        return {"environment": {"arch": "sm_90", "device": "X"}, "suites": {"forward": section(rows)}}

    def test_what_was_measured_to_be_fastest_is_taken(self):
        problem = make(1, 8, 1024, 64, "bfloat16", Band(100, 0))
        found = fastest.fastest(self.record(problem, {"fa3": 2e-3, "fa2": 1e-3, "fa1": 5e-3}))
        assert set(found.values()) == {"fa2_forward"}
        assert make_plan(problem, H200, fastest=found).spec.name == "fa2_forward"

    def test_a_race_without_the_first_choice_decides_nothing(self):
        problem = make(1, 8, 1024, 64, "bfloat16", CAUSAL)
        assert fastest.fastest(self.record(problem, {"fa2": 1e-3, "fa1": 5e-3})) == {}

    def test_kernels_that_there_are_no_more_and_entries_that_are_no_names_are_left_out(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(tuning, "RECORDED", tmp_path)
        tuning.fastest_kernels.cache_clear()
        entries = {"kept": "fa2_forward", "gone": "fa0_forward", "no name": 5, "null": None}
        tuning.recorded_path("NVIDIA Y").write_text(json.dumps(entries))
        assert tuning.fastest_kernels("NVIDIA Y") == {"kept": "fa2_forward"}

    def test_the_shipped_files_are_of_the_records(self):
        for record in records.load_all().values():
            kept = dict(tuning.fastest_kernels(record["environment"]["device"]))
            assert kept == fastest.fastest(record), "run `cufa evidence fastest`"


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
        monkeypatch.setattr(tuning, "TILES", tmp_path / "nothing ships")
        tuning.load.cache_clear()
        yield
        tuning.load.cache_clear()

    def test_nothing_tuned(self):
        assert tuning.load("NVIDIA H200") == {}

    def test_kept_and_found_again(self):
        a, b = TileConfig(64, 64, 4), TileConfig(128, 32, 8, num_stages=2)
        file = tuning.save("NVIDIA H200", "naive/one", a, {"seconds": 1e-3})
        tuning.save("NVIDIA H200", "naive/two", b, {})
        tuning.save("NVIDIA H200", "naive/one", b, {})
        assert tuning.load("NVIDIA H200") == {"naive/one": b, "naive/two": b}
        assert tuning.load("NVIDIA A100") == {}
        assert [f.name for f in file.parent.iterdir()] == ["tuned-nvidia-h200.json"], (
            "no temporary file is left"
        )

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b"3", b"\xff\xfe{}", b"[" * 200_000, DAMAGED.encode()]
    )
    def test_a_damaged_file_means_untuned(self, content):
        file = tuning.path("GPU")
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        assert tuning.load("GPU") == {}
        tuning.save("GPU", "naive/key", TileConfig(64, 64, 4), {})
        assert tuning.load("GPU") == {"naive/key": TileConfig(64, 64, 4)}

    def test_what_is_damaged_spoils_nothing_else(self):
        good = TileConfig(64, 64, 4)
        file = tuning.save("GPU", "naive/key", good, {})
        file.write_text(json.dumps({**json.loads(DAMAGED), **json.loads(file.read_text())}))
        tuning.load.cache_clear()
        assert tuning.load("GPU") == {"naive/key": good}

    def test_what_ships_is_taken_where_the_user_has_measured_nothing(self, tmp_path, monkeypatch):
        mine, shipped = TileConfig(64, 64, 4), TileConfig(128, 32, 8)
        file = tuning.save("NVIDIA H200", "naive/both", shipped, {})
        tuning.save("NVIDIA H200", "naive/shipped", shipped, {})
        monkeypatch.setattr(tuning, "TILES", tmp_path / "shipped")
        (tmp_path / "shipped").mkdir()
        file.rename(tmp_path / "shipped" / "h200.json")
        tuning.save("NVIDIA H200", "naive/both", mine, {})
        assert tuning.load("NVIDIA H200") == {"naive/both": mine, "naive/shipped": shipped}

    def test_tiles_that_do_not_fit_are_passed_over(self):
        device = Device.typical("sm_90")
        problem = make(1, 8, 4096, 64, "float16", True)
        plan = make_plan(problem, device)
        for field, value in (("block_q", 4096), ("block_kv", 0), ("num_warps", "8")):
            wrong = dataclasses.replace(plan.config, **{field: value})
            tuning.save(device.name, tuning_key(plan.spec, problem), wrong, {})
            assert make_plan(problem, device, tuned=tuning.load(device.name)).config == plan.config

    def test_the_planner_takes_the_winner(self):
        from cufa.core.architectures import Device
        from cufa.planner import fitting_configs, make_plan, tuning_key

        device = Device.typical("sm_90")
        problem = make(1, 8, 4096, 64, "float16", True)
        plan = make_plan(problem, device)
        other = next(c for c in fitting_configs(plan.spec, 64, device) if c != plan.config)
        tuning.save(device.name, tuning_key(plan.spec, problem), other, {})
        tuned = make_plan(problem, device, tuned=tuning.load(device.name))
        assert tuned.config == other
        assert "cufa tune" in str(tuned)
