"""Recording evidence goes on after a lost machine, or where the time that was given has ended."""

# ruff: noqa: F811 - fixtures are imported, and asked for by their names

from __future__ import annotations

import copy

import pytest
from records_support import H200, as_json
from renewal_support import (  # noqa: F401 - fixtures among them
    FIRST_DAY,
    NAMES,
    PARTS,
    SECOND_DAY,
    card,
    change,
    record,
    run,
)

from cufa.measure import evidence, part_run, renewal


class TestGoingOn:
    def test_a_ceiling_that_older_records_lack_is_added_and_the_others_stay(self, record):
        assert record["limits"]["mma_flops"] == {"tf32": 3e14}
        kept = record["limits"].copy()
        kept.pop("mma_flops")
        record["limits"] = kept.copy()
        found = run(begun=record)
        assert found["limits"] == {**kept, "mma_flops": {"bfloat16": 6e14}, "launch_seconds": 2e-6}
        assert as_json(run(begun=as_json(found)))["limits"] == found["limits"]

    def test_a_lost_machine_costs_no_part_that_was_done(self, card):
        kept = []

        def keep(record):
            kept.append(copy.deepcopy(record))
            if len(kept) == 2:
                raise ConnectionError("the machine is gone")

        with pytest.raises(ConnectionError):
            run(keep)
        assert kept[-1]["parts"] == NAMES[:2]
        record = run(kept.append, begun=kept[-1])
        assert card.measured == NAMES == record["parts"]

    @pytest.mark.parametrize("day", [FIRST_DAY, SECOND_DAY])
    def test_nor_a_case_that_was_done_on_the_same_day(self, card, monkeypatch, day):
        """What a part has of another day is measured anew."""
        monkeypatch.setattr(part_run, "KEEP_SECONDS", 0.0)
        cases, run_case, kept = [], card.run_case, []

        def lost(case, device, limits, *, seed, **options):
            if len(cases) == 4 and not kept[-1].get("resumed"):
                raise ConnectionError("the machine is gone")
            cases.append((options["regime"], case.name, str(case.problem)))
            return run_case(case, device, limits, seed=seed, **options)

        monkeypatch.setattr(part_run, "run_case", lost)
        with pytest.raises(ConnectionError):
            run(lambda record: kept.append(as_json(record)))
        begun = kept[-1]["begun"]["cases"]
        assert kept[-1]["parts"] == [] and begun == 4
        card.day, left = day, {**kept[-1], "resumed": True}
        kept.append(left)
        whole = run(begun=as_json(left))
        assert "begun" not in whole and whole["parts"] == NAMES
        assert len(cases) == len(set(cases)) + (0 if day == FIRST_DAY else begun)
        expected = run()["suites"]
        assert {name: len(x["rows"]) for name, x in whole["suites"].items()} == {
            name: len(x["rows"]) for name, x in expected.items()
        }

    @pytest.mark.parametrize("slow", [*NAMES, "tests"])
    def test_what_would_end_after_the_limit_is_not_begun(self, card, monkeypatch, slow):
        def usual(what):
            return 1e6 if what == slow else 0.0

        monkeypatch.setattr(renewal, "usual_seconds", lambda part, device, recorded: usual(part.name))
        monkeypatch.setattr(renewal, "usual_test_seconds", lambda recorded: usual("tests"))
        kept, done = [], NAMES if slow == "tests" else NAMES[: NAMES.index(slow)]
        what = "testing" if slow == "tests" else slow
        with pytest.raises(
            evidence.OutOfTime, match=rf"{what} usually takes \d{{4,7}} s, and \d+ s are left"
        ):
            run(kept.append, limit=1000.0)
        assert card.measured == kept[-1]["parts"] == done
        assert not card.tested
        assert run(begun=as_json(kept[-1]))["parts"] == NAMES  # without a limit it ends
        assert card.compiled and len(set(card.compiled)) == len(card.compiled), "kernels are timed once"

    def test_a_part_usually_takes_what_it_took_and_at_least_what_its_regime_does(self):
        part, least = PARTS[0], renewal.least_seconds(PARTS[0], H200)
        measured = {part.kept_in: {"measured": {part.regime.value: {"seconds": least + 70.0}}}}
        recorded = [{"suites": measured, "tests": {"seconds": 9.0}}, {"suites": {}, "tests": None}]
        assert renewal.usual_seconds(part, H200, recorded) == least + 70.0
        assert renewal.usual_test_seconds(recorded) == 9.0
        assert renewal.usual_seconds(part, H200, []) == least
        assert renewal.usual_test_seconds([]) == 0.0

    def test_a_record_of_another_gpu_is_not_gone_on_with(self, card):
        with pytest.raises(ValueError, match="the record is of A100, this GPU is H200"):
            run(begun={"environment": {"device": "A100"}, "kernels": {}})
        assert not card.measured

    def test_nor_one_of_other_kernels(self, card, record):
        with pytest.raises(
            ValueError, match="naive changed since the record was made; `cufa evidence --renew`"
        ):
            run(begun=change(record, "naive"))
        assert not card.measured
