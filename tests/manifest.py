"""The manifest of the redesign: for each build of the covering set, a digest of its machine code under one NVRTC.

`python tests/manifest.py write` records it, `check [kernel ...]` compiles again and names the builds that differ.
A step that only moves or renames code leaves every digest as it is. The file goes when the redesign is done.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cufa.build.static_compile import code_digest

MANIFEST = Path(__file__).with_name("manifest.json")


def main() -> int:
    action, kernels = sys.argv[1], sys.argv[2:] or None
    builds = _builds(kernels)
    with ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count() or 1))) as pool:
        digests = dict(zip(builds, pool.map(_digest, builds.values()), strict=True))
    if action == "write":
        MANIFEST.write_text(
            json.dumps({"nvrtc": _nvrtc(), "builds": digests}, indent=0, sort_keys=True) + "\n"
        )
        print(f"{len(digests)} builds")
        return 0
    recorded = json.loads(MANIFEST.read_text())
    if recorded["nvrtc"] != _nvrtc():
        print(f"manifest is of NVRTC {recorded['nvrtc']}, this is {_nvrtc()}")
        return 2
    names = {name.split(", ")[1] for name in builds}
    expected = {k: v for k, v in recorded["builds"].items() if k.split(", ")[1] in names}
    differ = sorted(k for k in expected if k in digests and digests[k] != expected[k])
    missing, new = sorted(expected.keys() - digests.keys()), sorted(digests.keys() - expected.keys())
    for title, found in (("differs", differ), ("missing", missing), ("new", new)):
        for name in found:
            print(f"{title}: {name}")
    print(f"{len(expected)} builds: {len(differ)} differ, {len(missing)} missing, {len(new)} new")
    return bool(differ or missing)


def _builds(kernels):
    try:
        from cufa.build.variants import variants
    except ImportError:
        from cufa.nvrtc.variants import variants
    found = {}
    for variant in variants(kernels=kernels):
        name = f"{variant}; {' '.join(map(str, dataclasses.asdict(variant.config).values()))}"
        assert name not in found, name
        found[name] = variant
    return found


def _digest(variant) -> str:
    try:
        from cufa.build import static_compile
    except ImportError:
        from cufa.nvrtc import static_compile
    try:
        report = static_compile.static_compile(variant.source, variant.constants, variant.arch)
    except static_compile.CompileError as error:
        return f"does not compile: {error.summary}"
    return code_digest(report)


def _nvrtc() -> str:
    from cuda.bindings import nvrtc

    return ".".join(map(str, nvrtc.nvrtcVersion()[1:]))


if __name__ == "__main__":
    sys.exit(main())
