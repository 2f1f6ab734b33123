"""`cufa emulate`: its options reach the kernel, wrong ones are refused as the public call refuses them, and a wrong
result fails."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from evidence import counting

import cufa
from cufa.build import compiler
from cufa.commands import emulate as command
from cufa.problem.mask import Mask
from cufa.run.emulate import blind_spots


@pytest.fixture
def run():
    def invoke(*arguments: str):
        return CliRunner().invoke(command.emulate_command, arguments, catch_exceptions=False)

    return invoke


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        (["--causal"], cufa.masks.causal()),
        (["--window", "20,0", "--softcap", "2"], cufa.masks.window(20, 0)),
        (["--window", "none,3", "--diagonal", "top-left"], cufa.masks.window(None, 3, "top-left")),
        (["--causal", "--window", "20,none", "--diagonal", "-7"], cufa.masks.window(20, 0, -7)),
    ],
)
def test_masks_and_caps_reach_the_kernel(run, options, mask):
    result = run("--seqlen", "70", "--seqlen-k", "90", "--heads", "1", "--mode", "plain", "--json", *options)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert Mask.from_json(document["problem"]["mask"]) == mask
    assert document["problem"]["softcap"] == (2.0 if "--softcap" in options else None)
    assert document["max_error"] < 5e-3
    assert document["max_lse_error"] < 5e-3


def test_tiles_are_taken(run):
    arguments = ("--seqlen", "70", "--heads", "1", "--mode", "plain", "--config", "64x32")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "64×32" in result.stdout
    assert "tiles counted by the kernel equal the schedule" in result.stdout
    assert "of out " in result.stdout and "of lse " in result.stdout


def test_checked_mode_says_what_it_cannot_see(run):
    arguments = ("--seqlen", "40", "--heads", "1", "--mode", "checked")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "nothing found. What checked mode cannot see:" in result.stdout
    listed = [line[2:] for line in result.stdout.splitlines() if line.startswith("- ")]
    assert listed == blind_spots.as_lines() == json.loads(run(*arguments, "--json").stdout)["cannot_see"]
    assert "cannot_see" not in json.loads(run(*arguments[:-1], "plain", "--json").stdout)


def test_every_primitive_without_effect_is_listed():
    """A host twin with nothing in it: leaving the call out could not be found."""
    headers = (compiler.SOURCE_DIR / "host").glob("*_host.h")
    text = "".join(path.read_text(encoding="utf-8") for path in headers)
    empty = set(re.findall(r"DEVICE void (\w+)\([^;{]*\) \{\}", text))
    assert {"wgmma_registers", "pair_registers"} <= empty
    assert {name for name in empty if name not in " ".join(blind_spots.as_lines())} == set()


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward(run, deterministic):
    options = ("--deterministic",) if deterministic else ()
    shape = ("--seqlen", "70", "--seqlen-k", "150", "--heads", "2", "--kv-heads", "1", "--causal")
    result = run("backward", *shape, "--mode", "checked", *options, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["problem"]["operation"] == "backward"
    assert document["problem"]["deterministic"] is deterministic
    assert all(0 < document[f"max_{name}_error"] < 0.05 for name in ("dq", "dk", "dv"))
    assert document["findings"] == []


def spoil(monkeypatch, change):
    """``change`` the results of the kernel."""
    real = command._execute

    def spoiled(*given, **how):
        done, expected = real(*given, **how)
        return dataclasses.replace(
            done, results={name: change(name, x) for name, x in done.results.items()}
        ), expected

    monkeypatch.setattr(command, "_execute", spoiled)


@pytest.mark.parametrize(
    ("operation", "result"), [("forward", "out"), ("forward", "lse"), ("backward", "dv")]
)
def test_a_wrong_result_fails(run, monkeypatch, operation, result):
    spoil(monkeypatch, lambda name, x: x + x.dtype.type(name == result))
    done = run(operation, "--seqlen", "40", "--heads", "1", "--mode", "plain")
    assert done.exit_code == 1 and f"{result} is wrong: off by 1.0e+00" in done.stderr


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize(
    ("dtype", "lost"), [("float32", 2**-13), ("tf32", 2**-7), ("float16", 2**-8), ("bfloat16", 2**-5)]
)
def test_lost_bits_fail_and_rounding_does_not(run, monkeypatch, operation, dtype, lost):
    """Half of float32's bits is an error of 1e-4, which float16 may have."""
    dtype_options = ("--dtype", "float32", "--precision", "tf32") if dtype == "tf32" else ("--dtype", dtype)
    shape = [
        "--seqlen", "70", "--seqlen-k", "90", "--heads", "2", "--kv-heads", "1", "--causal", "--softcap",
        "5",
    ]  # fmt: skip
    arguments = (operation, *shape, *dtype_options, "--mode", "plain")
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    spoil(
        monkeypatch, lambda name, x: x if x is None else (x.astype(np.float32) * (1 + lost)).astype(x.dtype)
    )
    done = run(*arguments)
    assert done.exit_code == 1 and "rounding explains" in done.stderr


def test_rows_that_see_nothing_agree_and_nan_does_not():
    nothing = np.array([-np.inf, 1.0], np.float32)
    assert command._largest(nothing, nothing.astype(np.float64)) == 0
    assert np.isnan(command._largest(np.array([np.nan, 1.0]), nothing.astype(np.float64)))
    assert command._largest(np.array([0.0, 1.0]), nothing.astype(np.float64)) == np.inf


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--window", "-1,0"], "left must be at least 0"),
        (["--window", "5"], "it is a pair (left, right)"),
        (["--window", "a,0"], "not 'a'"),
        (["--causal", "--window", "5,3"], "window=(5, 3) lets queries see keys after their own"),
        (["--diagonal", "4"], "add --causal or --window"),
        (["--causal", "--diagonal", "upwards"], "diagonal='upwards' is not known"),
        (["--softcap", "0"], "softcap=0.0 must be finite and above 0"),
        (["--softcap", "nan"], "softcap=nan must be finite"),
        (["--config", "1x1"], "has at head dim 64 only 128x64"),
        (["--algorithm", "auto"], "auto"),
        (["--dtype", "float64"], "'float64' is not one of 'float16', 'bfloat16', 'float32'"),
        (["--schedule", "²"], "'²': 'ascending', 'descending' or a number (a seed)"),
        (["--schedule", "-1"], "'-1': 'ascending', 'descending' or a number (a seed) below 2**32"),
        (
            ["--schedule", str(2**32)],
            "'4294967296': 'ascending', 'descending' or a number (a seed) below 2**32",
        ),
        (["--schedule", "9" * 5000], "or a number (a seed) below 2**32"),
    ],
)
def test_wrong_usage_is_exit_status_2_in_the_calls_words(run, options, words):
    result = run(*options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_recorded_counters_are_shown(run):
    result = run("--recorded")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "Not measured on a GPU" in text
    # 128 × 64 scores of head dim 64, and as many exponentials.
    assert "fa2_forward 128×64, 4 warps, 2 stages d64 1,048,576 8,192" in text
    document = json.loads(run("--recorded", "--json").stdout)
    assert set(document["kernels"]) == set(counting.KERNELS)
