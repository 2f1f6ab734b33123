"""What the files of the forward's contract share: a call held to float64, and which kernels and tiles."""

from __future__ import annotations

from backends import CPU, EMULATE
from cpu_support import SMALL
from support import assert_attention, assert_tiles

from cufa.gpu.architectures import Device
from cufa.kernels import Kernel, TileConfig
from cufa.plan.planner import fitting_configs
from cufa.run.emulate.calls import Execution

BOTH = (False, True)
PLAIN = Execution("plain")


def check(
    backend, spec, precision, q, k, v, *, trace=None, config=None, blocks=None, execution=None, **options
):
    """One call, held to float64; executed kernels are traced, and their tiles held to the schedule."""
    trace = backend is EMULATE if trace is None else trace
    config = SMALL if backend is CPU and config is None else config
    how = {"trace": trace, "config": config, "blocks": blocks, "execution": execution}
    done = backend.forward(q, k, v, algorithm=spec.algorithm, precision=precision, **how, **options)
    assert_attention(done.out, done.lse, q, k, v, precision=precision, **options)
    assert backend is CPU or done.plan is None or done.plan.spec is spec
    if trace:
        assert_tiles(done.plan, done.records)
    return done


def one_dtype(backend, spec, dtype, precision, *_) -> bool:
    """Of each kernel the first dtype, of float32 the exact precision."""
    return dtype == spec.dtypes[0] and precision != "tf32"


def smallest(spec: Kernel, head_dim: int = 64) -> TileConfig:
    """The config with the smallest tiles: the most tiles for the length."""
    fitting = fitting_configs(spec, head_dim, Device.typical("sm_90"))
    return min(fitting, key=lambda c: (c.block_q * c.block_kv, str(c)))
