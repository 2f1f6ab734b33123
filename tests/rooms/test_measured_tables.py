"""What is shown of measurements: tables, ratios in both regimes, the README's part."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from evidence import overview, report
from evidence.recorder import problems_with
from records_support import (
    FORWARD,
    H200,
    SHIPPED,
    fa3_row,
    made_up_card,
    measured_row,
    rows_json,
    versions_rows,
)

from cufa.kernels import KERNELS
from cufa.measure.cases import READ, Contender
from cufa.measure.decode_cases import make_decode
from cufa.measure.ladder import ladder
from cufa.measure.measured import by_case
from cufa.measure.power import Power
from cufa.measure.suites import make
from cufa.measure.timing import Load, speedup
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL


def tables_of(**suites):
    """Lines of the page of a card with these rows."""
    return report.markdown({"x": made_up_card(suites)}).splitlines()


def test_markdown_shows_ratios_beside_predictions():
    text = report.markdown({"test-gpu": made_up_card()})
    line = next(line for line in text.splitlines() if line.startswith("| 1 × 2 × 1100"))
    assert "| 1.67× |" in line  # 5 query blocks × 3 key blocks, of which 1 + 1 + 2 + 2 + 3 are visited
    assert "9 GPU tests passed, 0 failed, 1 skipped." in text
    assert all(name in text for name in FORWARD)


def test_markdown_puts_fa3_over_the_fastest_peer():
    """And names shapes in full where batch, heads and both lengths vary."""
    row = versions_rows()[0]
    row["problem"] |= {"heads": 8, "kv_heads": 2, "seqlen_q": 128, "seqlen_k": 8192}
    times = {"fa3": 1000, "fa2": 2000, "torch flash": 3000, "torch cudnn": 1100}
    rows = [row | {"label": x, "samples_ns": [t] * 20, "p50_ns": t} for x, t in times.items()]
    for peer in rows[2:]:
        del peer["kernel"]
    lines = tables_of(awkward=rows)
    header = next(line for line in lines if line.startswith("| batch"))
    assert header.endswith(
        "| mask | fa3 | fa2 | torch flash | torch cudnn | fa3 over torch cudnn | fa2 over torch flash |"
    )
    line = lines[lines.index(header) + 2]
    assert line.startswith("| 1 × 8/2 × 128×8192 | 32 | causal |")
    assert line.endswith("| 1.10× (1.10–1.10) | 1.50× (1.50–1.50) |")


def test_markdown_has_the_ladder_with_what_was_predicted():
    rungs = ladder("fa3", next(c for c in KERNELS["fa3_forward"].configs if c.fits(128)))
    measured = [fa3_row(rung, 1e-3 / (1 + n)) for n, rung in enumerate(rungs)]
    rows = rows_json(measured)
    items = 64 * 7680 // rungs[0].config.block_q
    assert [row["grid"] for row in rows] == [[[items, 1, 1]]] * (len(rungs) - 1) + [[[132, 1, 1]]]
    lines = tables_of(ladder=rows)
    header = next(line for line in lines if line.startswith("| head dim"))
    assert header == f"| head dim | seq | mask | {' | '.join(r.label for r in rungs)} |"
    cells = lines[lines.index(header) + 2].split(" | ")
    assert cells[:3] == ["| 128", "7680", "full"]
    assert cells[4].split(" · ")[1].startswith("2.00× (")


def test_what_each_resource_would_need_is_recorded_and_shown(capsys):
    from cufa.commands.rows import print_needs

    row = fa3_row(Contender("fa3"), 4e-3)
    print_needs([row])
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("128, 7680×7680, full", "48%", "24%", "2.33 ms"))
    lines = tables_of(forward=rows_json([row]))
    header = next(line for line in lines if "| exponentials |" in line)
    assert "power" not in header
    # 4 · 128 flops of 4 · 16 · 7680² scores at 1e15/s, and the scores at 4e12/s, in four milliseconds
    assert lines[lines.index(header) + 2].startswith("| fa3 | 128 | 7680 | full | 483 | 48% | 24% |")
    loaded = fa3_row(Contender("fa3"), 4e-3, bfloat16=8e14)
    text = "\n".join(tables_of(forward=rows_json([loaded])))
    assert "| products | power | exponentials |" in text
    assert "| fa3 | 128 | 7680 | full | 483 | 48% | 60% | 24% |" in text


def test_update_writes_between_the_markers_only():
    def page(tables):
        return f"before\n{report.BEGIN}\n{tables}\n{report.END}\nafter\n"

    new = report.update(page("old"), SHIPPED)
    assert new == page("\n".join(overview.speed(SHIPPED)))
    assert report.update(new, SHIPPED) == new
    with pytest.raises(ValueError, match="no lines"):
        report.update("nothing here", SHIPPED)


def test_the_overview_claims_the_lower_regime_and_hides_no_loss():
    """Means of both regimes, with the least and the most; the claim is the lower mean."""

    def beside(regime, *times):
        row = versions_rows()[0] | {"regime": regime}
        rows = []
        for seqlen, (ours, peer) in enumerate(times, 1000):
            at = copy.deepcopy(row)
            at["problem"] |= {"seqlen_q": seqlen, "seqlen_k": seqlen}
            rows += [at | {"label": "fa2", "p50_ns": ours}, at | {"label": "torch flash", "p50_ns": peer}]
            del rows[-1]["kernel"]
        return rows

    rows = [*beside("in turns", (1000, 800), (1000, 1800)), *beside("sustained", (1000, 1100))]
    (line,) = (
        x for x in overview.overview({"x": made_up_card({"forward": rows})}) if x.startswith("| FA2, 1k")
    )
    assert line == "| FA2, 1k to 16k | PyTorch's FA2 | 1.20× (0.80–1.80) | 1.10× | 1.10× |"


class TestRegimes:
    @pytest.fixture
    def rows(self):
        """FA3 is 1.5 times as fast in turns, 1.2 times alone."""
        problem = make(4, 16, 4096, 128, "bfloat16", CAUSAL)
        load = Load(1000, 1, 3.0, 0.0, Power(650.0, 1500.0, 0.5))
        plan = make_plan(problem, H200, "fa3")
        rows = [measured_row("fa3", problem, 1e-3, plan), measured_row("torch cudnn", problem, 1.5e-3)]
        rows += [
            measured_row("fa3", problem, 1.25e-3, plan, load=load),
            measured_row("torch cudnn", problem, 1.5e-3, load=load),
        ]
        return rows_json(rows)

    def test_stand_side_by_side_and_the_lower_one_is_claimed(self, rows):
        found = {"x": made_up_card({"forward": rows})}
        overall = "\n".join(overview.overview(found))
        assert "| FA3, 1k to 16k | cuDNN | 1.50× | 1.20× | 1.20× |" in overall
        assert "| FA3, 1k to 16k | cuDNN | 1.50× | 1.20× |" in "\n".join(overview.speed(found))
        lines = report.markdown(found).splitlines()
        line = next(x for x in lines if x.startswith("| 4 × 16 × 4096, d128, causal |"))
        assert "| 1.50× (1.50–1.50) | 1.20× (1.20–1.20) |" in line and "· 1500" in line

    def test_what_waited_for_the_host_is_no_claim(self, rows):
        rows[-1]["load"]["host_bound"] = True
        found = {"x": made_up_card({"forward": rows})}
        assert "| FA3, 1k to 16k | cuDNN | 1.50× | – |" in "\n".join(overview.speed(found))
        assert "host-bound" in report.markdown(found)

    def test_a_row_says_all_of_its_load(self, rows):
        row = rows[2]
        flops = row["flops"]
        assert row["regime"] == "sustained" and row["load"]["joules"] == 0.5
        assert row["load"]["tflop_per_joule"] == pytest.approx(flops / 0.5e12, rel=1e-3)
        assert (row["load"]["clock_mhz"], row["load"]["watts"]) == (1500, 650)

    def test_rows_of_different_regimes_are_not_compared(self, rows):
        rows = made_up_card({"forward": rows}).rows
        with pytest.raises(ValueError, match="in turns is not compared with one measured sustained"):
            speedup(rows[0].timing, rows[2].timing)
        assert [list(found) for found in by_case(rows)] == [["fa3", "torch cudnn"]] * 2


class TestDecode:
    @pytest.fixture
    def card(self):
        """A published shape with peers, and a ragged batch."""
        shape, lengths = make_decode(1, 32, 8, 8 << 10), (100, 4000)
        ragged = make_decode(2, 32, 8, 4096, lengths_given=True)
        rows = [
            measured_row("flash_decode", shape, 2e-5, make_plan(shape, H200), "1 × 32/8 × 8k"),
            measured_row("torch flash", shape, 4e-5, None, "1 × 32/8 × 8k"),
            measured_row("torch cudnn", shape, 5e-5, None, "1 × 32/8 × 8k"),
            measured_row(READ, shape, 1e-5, None, "1 × 32/8 × 8k"),
            measured_row(
                "balanced", ragged, 2e-5, make_plan(ragged, H200, "balanced"), "ragged", None, lengths
            ),
            measured_row(READ, ragged, 1e-5, None, "ragged", None, lengths),
        ]
        return made_up_card({"decode": rows_json(rows)})

    def test_rows_are_as_those_of_any_operation(self, card):
        rows = card.rows
        assert rows[0].problem == make_decode(1, 32, 8, 8 << 10) and rows[0].problem.operation == "decode"
        assert rows[0].json["split"] == dataclasses.asdict(make_plan(rows[0].problem, H200).split)
        assert rows[4].json["lengths"] == [100, 4000] and rows[4].json["max_error"] == 1e-3
        assert rows[4].gbytes == pytest.approx(rows[4].json["io_bytes"] / 2e-5 * 1e-9, abs=1e-3)
        assert rows[3].json["max_error"] is None and problems_with(card) != []
        assert not any("NaN" in problem for problem in problems_with(card))

    def test_tables(self, card):
        lines = report.markdown({"x": card}).splitlines()
        compared = next(line for line in lines if line.startswith("| 1 × 32/8 × 8k |"))
        assert "| 50% |" in compared and "2.00×" in compared
        assert any(line.startswith("| ragged | balanced |") for line in lines)
        assert "| decoding, one token | the faster of PyTorch's two | 2.00× |" in "\n".join(
            overview.speed({"x": card})
        )
