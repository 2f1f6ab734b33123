"""PTX and SASS of real builds, without a GPU: counted per source line and per loop."""

from __future__ import annotations

import functools
import json

import pytest

pytest.importorskip("cuda.bindings", reason="compiling needs NVRTC: pip install 'cufa[cuda13]'")

from click.testing import CliRunner
from sampling import of_today

from cufa.build import sass
from cufa.build.flow import Jump, Loop, loops_of
from cufa.build.machine_code import KINDS, Code, flops_of
from cufa.build.ptx import parse_ptx
from cufa.build.sass import Listing, listing
from cufa.build.static_compile import compile_text, static_compile, warpgroup_instructions
from cufa.build.variants import Variant
from cufa.cli import main
from cufa.commands import compile as compile_module
from cufa.gpu.architectures import Device, find_architecture
from cufa.kernels import KERNELS
from cufa.plan.operation import OPERATIONS
from cufa.plan.planner import fitting_configs

needs_nvdisasm = pytest.mark.skipif(sass.find_nvdisasm() is None, reason=f"SASS: {sass.ADVICE}")
#: A day has one of the first two for all tests of this file, which run in one process: taking a build apart takes
#: seconds. One test is of the last one too.
BUILDS = [("fa2_forward", 64, 80), ("fa3_forward", 64, 90), ("fa2_forward_f32", 64, 80)]
OF_TODAY = of_today(BUILDS[:2], "build that is taken apart", fixed=0)
ANY_OF_TODAY = of_today([*OF_TODAY, *BUILDS[2:]], "any build", fixed=0)


@functools.cache
def variant(kernel: str, head_dim: int, arch: int) -> Variant:
    spec = KERNELS[kernel]
    problems = OPERATIONS[spec.operation].compiled(spec, head_dim)
    problem = next(p for p in problems if p.mask_kind == "causal" and p.softcap is None)
    config = fitting_configs(spec, head_dim, Device.typical(arch))[0]
    return Variant(spec, config, problem, find_architecture(arch))


@functools.cache
def built(kernel: str, head_dim: int, arch: int) -> Listing:
    return listing(variant(kernel, head_dim, arch))


def languages(found: Listing) -> list[Code]:
    return [next(iter(codes.values())) for codes in (found.ptx, found.sass) if codes]


@pytest.mark.in_turn
@pytest.mark.parametrize("build", OF_TODAY, ids=str)
@pytest.mark.slow
def test_what_loops_multiply_is_what_a_tile_needs(build: tuple[str, int, int]) -> None:
    """4 · head_dim floating-point operations a score, in every loop over tiles."""
    v = variant(*build)
    config, head_dim = v.config, v.problem.head_dim
    warps = min(config.num_warps, config.block_q // 16)
    tile = 4 * config.block_q * config.block_kv * head_dim
    codes = languages(built(*build))
    assert len(codes) == (2 if sass.find_nvdisasm() else 1)
    for code in codes:
        over_tiles = [loop for loop in code.tile_loops() if loop.flops * warps == tile]
        assert len(over_tiles) >= 2, [
            loop.flops * warps / tile for loop in code.tile_loops()
        ]  # masked and clear ones
        for loop in over_tiles:
            scores = config.block_q * config.block_kv // (32 * warps)  # of a thread
            assert scores <= loop.kinds["exp"] <= scores + 8  # and what rescales its rows


@pytest.mark.parametrize("build", ANY_OF_TODAY, ids=str)
def test_every_instruction_has_its_lines(build: tuple[str, int, int]) -> None:
    for code in languages(built(*build)):
        own = variant(*build).source
        assert sum(code.kinds().values()) == len(code.instructions)
        assert set(code.kinds()) <= set(KINDS)
        assert code.files[own] > 0.9 * len(code.instructions)
        lines = code.lines(own)
        assert sum(cost.count for cost in lines.values()) == code.files[own]
        for line in list(lines)[:20]:
            assert len(code.of_line(own, line)) == lines[line].count
        products = [i for i in code.instructions if i.kind == "tensor"]
        assert products
        # Of a few, nvdisasm 13.5 names the innermost place's file for all places that it was inlined in.
        assert sum(i.line_in(own) is None for i in products) <= len(products) // 10
        assert Code.from_json(json.loads(json.dumps(code.as_json()))) == code


@pytest.mark.in_turn
@needs_nvdisasm
@pytest.mark.parametrize("build", OF_TODAY, ids=str)
@pytest.mark.slow
def test_line_numbers_change_no_instruction_and_registers_are_those_reported(
    build: tuple[str, int, int],
) -> None:
    v = variant(*build)
    plain = static_compile(v.source, v.constants, v.arch)
    ((name, listed),) = built(*build).sass.items()  # what else the file defines is not launched
    code = sass.disassemble(plain.cubin)[name]
    assert [i.text for i in code.instructions] == [i.text for i in listed.instructions]
    assert [i.live for i in code.instructions] == [i.live for i in listed.instructions]
    assert not code.files  # nothing says where they come from
    entry = plain.entry(name)
    assert listed.live is not None
    assert (
        0.75 * entry.registers < listed.live <= max(entry.registers, 240)
    )  # Hopper's consumers ask for more


@needs_nvdisasm
def test_spills_are_seen_on_their_line() -> None:
    values = 96
    unit = "\n".join(
        [
            '#line 1 "spilling.cu"',
            'extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x) {',
            f"  float a[{values}];",
            f"  for (int i = 0; i < {values}; ++i) a[i] = x[i * 1024 + threadIdx.x];",
            "  __syncthreads();",
            f"  for (int i = 0; i < {values}; ++i) x[i * 1024 + threadIdx.x] = a[i] * a[{values - 1} - i];",
            "}",
        ]
    )
    report = compile_text(unit, find_architecture(80), line_info=True)
    (entry,) = report.entries
    assert entry.spill_store_bytes
    (code,) = sass.disassemble(report.cubin).values()
    spilled = {
        line: cost.kinds["spill"] for line, cost in code.lines("spilling.cu").items() if "spill" in cost.kinds
    }
    assert set(spilled) <= {3, 5}
    assert sum(spilled.values()) == code.kinds()["spill"]
    assert code.live is not None
    assert code.live <= entry.registers


def test_without_a_disassembler_there_is_ptx_and_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: None)
    found = listing(variant("fa2_forward", 64, 80))
    assert found.ptx
    assert not found.sass
    assert found.missing is not None
    assert sass.ADVICE in found.missing
    assert Listing.from_json(json.loads(json.dumps(found.as_json()))) == found


PTX = """
.version 9.0
.visible .entry one(
\t.param .u64 one_param_0
)
{
\t.reg .pred \t%p<3>;
\t.loc\t1 10 3
\tmov.u32 \t%r1, 0;
$L__BB0_1:
\tadd.s32 \t%r2, %r2, 1;
\t.loc\t1 12 5
\t.loc\t2 7 3, function_name $L__info_string0, inlined_at 1 12 5
\t.loc\t3 4 1, function_name $L__info_string1, inlined_at 2 7 3
\t// begin inline asm
\t{.reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%r1], %r2; @done bra READY; bra WAIT; READY:}
\t// end inline asm
\tmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1,%f2,
\t  %f3,%f4}, {%r3,%r4,%r5,%r6}, {%r7,%r8}, {%f1,%f2,%f3,%f4};
\t{.reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%r1], %r2; @done bra READY; bra WAIT; READY:}
\t.loc\t1 0 5
\tst.local.f32 [%r1], %f1;
\t.loc\t1 14 3
\t@%p1 bra \t$L__BB0_1;
\tex2.approx.ftz.f32 \t%f5, %f6;
\tret;
}
.visible .entry two()
{
\tld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd1];
\tret;
}
.file\t1 "/somewhere/kernels/one.cu"
.file\t2 "/somewhere/two.cuh"
.file\t3 "three.cuh"
"""


def test_reading_ptx() -> None:
    found = parse_ptx(PTX)
    assert list(found) == ["one", "two"]
    one = found["one"]
    assert one.kinds() == {"tensor": 1, "exp": 1, "spill": 1, "wait": 2, "branch": 6, "other": 2}
    product = next(i for i in one.instructions if i.kind == "tensor")
    assert [(p.file, p.line) for p in product.places] == [("three.cuh", 4), ("two.cuh", 7), ("one.cu", 12)]
    assert next(i for i in one.instructions if i.kind == "spill").places == ()
    # Labels of one name in two scopes: each waits in a loop of its own, inside the one that multiplies.
    assert [len(loop) for loop in one.loops] == [10, 3, 3]
    (cost,) = one.tile_loops("one.cu")
    assert (cost.slots, cost.flops) == (4, 2 * 16 * 8 * 16)
    assert cost.place is not None
    assert cost.place.line == 14
    assert found["two"].kinds() == {"global": 1, "branch": 1}


def test_reading_sass() -> None:
    text = "\n".join(
        [
            '\t.section\t.text.toy,"ax",@progbits',
            "toy:",
            '\t//## File "/x/inner.cuh", line 5 inlined at "/x/toy.cu", line 9',
            '\t//## File "/x/toy.cu", line 9',
            "        /*0000*/                   HGMMA.64x128x16.F32 R24, gdesc[UR4], R24, gsb0 ;",
            ".L_x_1:",
            '\t//## File "/x/toy.cu", line 10',
            "        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;",
            "        /*0020*/              @P0 BRA `(.L_x_2) ;",
            "        /*0030*/             @!UP1 STL [R1+0x8], R3 ;",
            "        /*0040*/                   BRA `(.L_x_1) ;",
            ".L_x_2:",
            "        /*0050*/                   EXIT ;",
            ".L_x_3:",
            "        /*0060*/                   BRA `(.L_x_3);",
            "        /*0070*/                   NOP;",
        ]
    )
    live = "\t.section\t.text.toy\n        /*0010*/      HMMA.16816.F32 R4, R8, R12, R4 ;   // |  17   |   1    |"
    code = sass.parse_sass(text, live)["toy"]
    assert code.kinds() == {"tensor": 2, "spill": 1, "branch": 3}
    assert code.loops == (Loop(1, ((1, 4),)),)
    assert [i.live for i in code.instructions] == [None, 17, None, None, None, None]
    assert code.instructions[0].line_in("toy.cu") == 9
    assert code.lines("toy.cu")[10].live == 17
    assert flops_of(code.instructions[0].text) == 2 * 64 * 128 * 16 // 4
    assert flops_of(code.instructions[1].text) == 2 * 16 * 8 * 16


def test_loops_are_found_wherever_their_parts_lie() -> None:
    # 0, then a loop of 1, 2 whose unlikely part, 5, was put behind the end at 4 and jumps back into it.
    jumps = [Jump(1, 5, False), Jump(3, 1, False), Jump(4, None, True), Jump(5, 2, True)]
    assert loops_of(6, jumps) == (Loop(1, ((1, 3), (5, 5))),)
    # A part that jumps backwards without closing a loop is none.
    assert loops_of(4, [Jump(0, 3, True), Jump(1, None, True), Jump(3, 1, True)]) == ()
    # One in another, and one that nothing reaches.
    nested = [Jump(2, 2, False), Jump(3, 1, False), Jump(4, None, True), Jump(5, 5, True)]
    assert loops_of(6, nested) == (Loop(1, ((1, 3),)), Loop(2, ((2, 2),)))


@pytest.mark.in_turn
def test_the_command_prints_a_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "take_apart", functools.cache(listing))  # printed twice
    narrow = ["compile", "--kernel", "fa2_forward", "--arch", "sm_80", "--head-dim", "64", "--listing"]
    told = CliRunner().invoke(main, [*narrow, "--json"])
    assert told.exit_code == 0, told.output
    record = json.loads(told.stdout)
    (code,) = record["ptx"].values()
    assert code["instructions"] == sum(code["kinds"].values())
    assert code["loops"]
    assert any("tensor" in line for line in code["lines"].values())
    assert bool(record["sass"]) == (sass.find_nvdisasm() is not None)
    shown = CliRunner().invoke(main, narrow)
    assert shown.exit_code == 0
    assert "whole kernel" in shown.stdout
    assert "loop, line" in shown.stdout


@pytest.mark.in_turn
@needs_nvdisasm
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_what_measures_shared_memory_reads_it_each_time(arch: str) -> None:
    """An iteration loads four times and multiplies by 3 once: what one has read must not be kept for the next."""
    report = static_compile("limits/memory.cu", {}, find_architecture(arch))
    codes = sass.disassemble(report.cubin)
    loops = [
        [i.text for i in codes["shared_limit"].instructions[first : last + 1]]
        for loop in codes["shared_limit"].loops
        for first, last in loop.parts
    ]
    assert loops
    for texts in loops:
        loads = sum("LDS.128" in text for text in texts)
        assert loads == 4 * sum("IMAD" in text and ", 0x3, " in text for text in texts) > 0


@pytest.mark.in_turn
@needs_nvdisasm
@pytest.mark.slow
def test_products_of_wgmma_and_fences_are_those_of_the_disassembly() -> None:
    v = variant("fa3_backward", 64, 90)
    cubin = static_compile(v.source, v.constants, v.arch).cubin
    listed = [x.text for code in sass.disassemble(cubin).values() for x in code.instructions]
    products, fences = (sum(name in text for text in listed) for name in ("HGMMA", "WARPGROUP.ARRIVE"))
    assert warpgroup_instructions(cubin) == (products, fences) and products > 4 * fences > 0
