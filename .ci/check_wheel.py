"""An installed cufa works on its own: run by .ci/run where only the wheel is installed."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import numpy as np

import cufa
from cufa.build.compiler import SOURCE_DIR, choices, config_file, included_files, translation_unit
from cufa.kernels import KERNELS

package = Path(cufa.__file__).parent


def example_of(source: str) -> dict[str, int | bool]:
    """The values of a kernel's example build."""
    config = config_file(source)
    assert config is not None, source
    return {name: {"true": True, "false": False}.get(x, x) for name, x in choices(config).items()}


assert sys.prefix in str(package), f"imported from {package}, not from the environment"
assert package / "cuda_src" == SOURCE_DIR, SOURCE_DIR
assert (package / "py.typed").exists()
for spec in KERNELS.values():
    assert len(included_files(spec.source)) > 1, spec.name
    for source in spec.sources:
        assert f'#include "{source}"' in translation_unit(source, example_of(source)), spec.name

heavy = {"cupy", "torch", "streamlit", "plotly", "cuda"} & {name.split(".")[0] for name in sys.modules}
assert not heavy, f"import cufa loaded {heavy}"
installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
assert "cupy-cuda13x" not in installed, "this environment is not empty"

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 70, 32), np.float32)
error = np.abs(
    cufa.flash_attention(q, k, v, causal=True) - cufa.attention_reference(q, k, v, causal=True)
).max()
assert error < 1e-5, error
print(cufa.plan((1, 8, 4096, 128), causal=True, device="sm_90"))
for command in ([], ["doctor"], ["bench", "--help"], ["compile", "--help"]):
    subprocess.run(
        [sys.executable, "-m", "cufa", *(command or ["--help"])], check=True, stdout=subprocess.DEVNULL
    )
print(f"wheel {cufa.__version__}: import, plan, attention and command line work; error {error:.1e}")
