"""Suites of benchmark cases: each can be planned, and covers what it is for. Nothing is measured."""

from __future__ import annotations

import dataclasses

import pytest

from cufa.gpu.architectures import Device
from cufa.kernels import kernels_of
from cufa.measure import suites
from cufa.measure.suites import BLOCK_LOSERS, BLOCK_WINNER
from cufa.plan.operation import OPERATIONS
from cufa.problem.element import ELEMENTS
from cufa.problem.lengths import Packed
from cufa.problem.mask import FULL


class TestSuites:
    @pytest.mark.parametrize("name", suites.SUITES)
    @pytest.mark.parametrize(
        "device", [None, Device.typical("sm_90"), Device.typical("sm_86")], ids=["cpu", "h200", "a10"]
    )
    def test_every_kernel_in_it_can_be_planned(self, name, device):
        if suites.SUITES[name].gpu_only and device is None:
            device = Device.typical("sm_80")
        for case in suites.SUITES[name].cases(device):
            labels = [c.label for c in case.contenders]
            assert len(set(labels)) == len(labels), "labels tell contenders apart"
            for contender in case.contenders:
                if contender.is_ours and not _needs_8_bits(case, contender, device):
                    plan = contender.plan(case.problem, device)
                    assert contender.algorithm in ("auto", plan.spec.algorithm)

    def test_views_of_a_case_are_of_its_keys_and_values(self):
        for suite in suites.SUITES.values():
            for case in suite.cases(Device.typical("sm_90")):
                for p in (case.problem_of(c) for c in case.contenders):
                    assert (p.kv_heads, p.head_dim) == (case.problem.kv_heads, case.problem.head_dim)
                    if isinstance(p.lengths, Packed):
                        assert p.tokens == case.problem.tokens
                    else:
                        assert p.batch == case.problem.batch and p.seqlen_k <= case.problem.seqlen_k

    def test_ladder_is_hoppers(self):
        assert list(suites.SUITES["ladder"].cases(Device.typical("sm_80"))) == []
        cases = list(suites.SUITES["ladder"].cases(Device.typical("sm_90")))
        assert {case.problem.head_dim for case in cases} == {64, 128, 256}
        assert all(len(case.contenders) >= 3 for case in cases)

    def test_every_operation_has_a_suite(self):
        for name in OPERATIONS:
            suite = next(s for s in suites.SUITES.values() if s.operation == name)
            assert next(suite.cases(Device.typical("sm_90"))).problem.operation == name

    def test_masks_covers_every_kind(self):
        problems = [c.problem for c in suites.SUITES["masks"].cases(Device.typical("sm_90"))]
        dense = [p for p in problems if not OPERATIONS[p.operation].memory_bound]
        for operation in ("forward", "backward"):
            kinds = {p.mask_kind for p in dense if p.operation == operation}
            assert kinds >= {"band", "sets", "columns"}
        assert any(p.softcap for p in dense)
        assert all(p.visible_scores < p.seqlen_q * p.seqlen_k for p in dense if p.mask != FULL)
        assert any(p.edges[0] is not None for p in problems if p not in dense), "windows in decoding"

    def test_documents_are_the_same_in_columns_and_packed(self):
        """As many scores."""
        device = Device.typical("sm_90")
        cases = [case for case in suites.SUITES["masks"].cases(device) if "documents" in case.name]
        assert [case.problem.operation for case in cases] == ["forward", "backward"]
        for case in cases:
            views = {c.label: case.problem_of(c).all_visible_scores for c in case.contenders}
            assert len(set(views.values())) == 1
            packed = {label.removesuffix(" packed") for label in views if label.endswith(" packed")}
            assert packed and packed < views.keys(), "each beside the same kernel on columns"

    def test_half_of_all_scores_is_half_of_them(self):
        cases = {case.name: case.problem for case in suites.SUITES["masks"].cases(Device.typical("sm_90"))}
        problem, whole = cases["half of all scores, backward"], cases["no mask, backward"]
        assert 2 * problem.visible_scores == whole.visible_scores
        assert dataclasses.replace(problem, mask=FULL) == whole

    @pytest.mark.parametrize(("arch", "dtype"), [("sm_86", "float16"), ("sm_90", "float32")])
    def test_the_fa1_sweep_has_the_published_blocks(self, arch, dtype):
        """In float32 all of them, and nothing else, on the published shapes."""
        cases = suites.SUITES["fa1-blocks"].cases(Device.typical(arch))
        of_type = [case for case in cases if case.problem.dtype == dtype]
        found = {(c.config.block_q, c.config.block_kv, c.config.num_warps) for c in of_type[0].contenders}
        known = {BLOCK_WINNER, *BLOCK_LOSERS}
        assert known <= found
        if dtype == "float32":
            assert known == found
            assert [x.problem.seqlen_q for x in of_type] == [512, 1024, 2048, 4096]
            assert {(x.problem.batch, x.problem.heads, x.problem.head_dim) for x in of_type} == {(2, 4, 64)}


def _needs_8_bits(case, contender, device):
    """Older GPUs have no e4m3, and Hopper's kernel does not take every scale."""
    if contender.quantized and device is not None:
        problem, kernels = contender.problem_of(case.problem), kernels_of("forward").values()
        return all(kernel.refuses(problem, device.arch.capability) for kernel in kernels)
    return case.problem.k_element is ELEMENTS["float8_e4m3"] and device.arch.capability < 89
