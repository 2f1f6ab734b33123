"""What a unit of work costs, counted: each build of a kernel is executed on a few small shapes, and its counters are
solved for the cost of one visited tile, one query block, … (:mod:`cufa.measure.costs`).

Counters are linear in these units: the solution is in whole numbers and exact, or :func:`count` raises ValueError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ...build.compiler import source_digest
from ...gpu.architectures import Device
from ...kernels import KernelSpec, TileConfig, kernels_of
from ...kernels.backward.fa3_config import Fa3BackwardConfig
from ...kernels.forward.fa3 import Fa3Config
from ...measure import costs
from ...measure.inputs import Inputs, given_to
from ...measure.ladder import ladder
from ...plan.planner import Plan, make_plan
from ...plan.tuning import write_json
from ...problem.problem import Problem
from .launch import Execution
from .run import Emulation, run_plan

#: The kernels that can be executed here.
KERNELS = kernels_of("forward") | kernels_of("backward")
HEAD_DIMS = (64, 80, 96, 128, 192, 256)

#: An H200 with two SMs, so that persistent blocks take several work items of a small shape.
DEVICE = dataclasses.replace(Device.typical("sm_90"), num_sms=2)

_SHAPES = ((2, 2, 1), (2, 3, 1), (3, 2, 1), (3, 4, 1), (2, 2, 2), (4, 3, 2), (5, 2, 3))
"""(query blocks, key blocks, heads): as many as there are units of work."""
_SECTOR = 32
_ABOUT = (
    "Counters of one unit of work, from executing the kernels' CUDA source on a CPU (cufa emulate --record). Not "
    "measured on a GPU. Wavefronts follow the model in cuda_src/host/bank_model.h."
)


def plan_of(spec: KernelSpec, config: TileConfig, problem: Problem) -> Plan:
    """The plan of a problem on :data:`DEVICE`, keys together."""
    whole = 1 if spec.split_configs else None
    return make_plan(problem, DEVICE, config=config, kernel=spec.name, num_splits=whole)


def execute(plan: Plan) -> Emulation:
    """In counted mode, on random inputs, as a GPU runs it: without tile records."""
    arrays = Inputs(plan.problem, on_gpu=False, seed=0).arrays(plan.problem)
    return run_plan(plan, given_to(plan.operation, arrays), Execution("counted"), trace=False)


def counters_of(run: Emulation) -> dict[str, int]:
    """By the names of :data:`cufa.measure.costs.COUNTERS`."""
    total, visits_tiles = run.totals, costs.main_launch(run.plan).entry
    others = [counts for entry, counts in run.counters.items() if entry != visits_tiles]
    return {
        "products": total["products"],
        "exponentials": total["exponentials"] + total["reciprocals"],
        "shared": 128 * total["shared_wavefronts"],
        "own_shared": 128 * (total["shared_wavefronts"] - total["engine_wavefronts"]),
        "added": np.dtype(np.float32).itemsize * total["reductions"],
        "read": _bytes_read(run.counters.values()),
        "written": total["global_write_bytes"],
        "passes": _bytes_read(others) + sum(int(x["global_write_bytes"].sum()) for x in others),
    }


def _bytes_read(launches: Iterable[npt.NDArray[Any]]) -> int:
    """Sectors of loads, since lanes of a warp may ask for the same ones; the bytes of a launch whose copies the copy
    engine makes."""
    return sum(int(x["global_read_sectors"].sum()) * _SECTOR or int(x["global_read_bytes"].sum()) for x in launches)


def count(spec: KernelSpec, config: TileConfig, head_dim: int, softcap: bool) -> dict[str, dict[str, int]]:
    """Counter → unit → count, of one build. Raises ValueError where a counter is not linear in the units."""
    seen, counted = [], []
    for problem in _problems(spec, config, head_dim, softcap):
        plan = plan_of(spec, config, problem)
        seen.append([list(units.values()) for units in costs.units(plan)])
        counted.append(list(counters_of(execute(plan)).values()))
    names = list(costs.units(plan)[0])
    return {
        counter: _solved(f"{spec.name}, {config}, {counter}", names, np.array(seen)[:, int(counter in costs.BEYOND_CHIP)], column)
        for counter, column in zip(costs.COUNTERS, np.array(counted, np.float64).T, strict=True)
        if column.any()
    }


def _problems(spec: KernelSpec, config: TileConfig, head_dim: int, softcap: bool) -> Iterator[Problem]:
    idle = config.block_q - costs.GROUP_ROWS if isinstance(config, Fa3Config) else 0
    for queries, keys, heads, missing in [*((*shape, 0) for shape in _SHAPES), *[(2, 2, 1, idle)] * (idle > 0)]:
        yield Problem(
            1, heads, heads, queries * config.block_q - missing, keys * config.block_kv, head_dim, spec.dtypes[0],
            scale=head_dim**-0.5, softcap=30.0 if softcap else None, precision=spec.precisions[0],
            operation=spec.operation,
        )  # fmt: skip


def _solved(what: str, names: list[str], seen: npt.NDArray[Any], counted: npt.NDArray[Any]) -> dict[str, int]:
    """Least squares, without the units that cost nothing. They are found one by one: a solution in fewer units is
    taken where it is exact."""
    used = [i for i in range(len(names)) if seen[:, i].any()]
    for left_out in ("call", "head", "thread block", "key block", "idle warpgroup", "query block"):
        fewer = [i for i in used if names[i] != left_out]
        if len(fewer) < len(used) and _residual(seen[:, fewer], counted) < 0.01:
            used = fewer
    solution = np.linalg.lstsq(seen[:, used], counted, rcond=None)[0].round()
    if np.abs(seen[:, used] @ solution - counted).max() > 0.01:
        raise ValueError(f"{what}: not linear in {', '.join(names[i] for i in used)}")
    return {names[i]: int(x) for i, x in zip(used, solution, strict=True) if x}


def _residual(seen: npt.NDArray[Any], counted: npt.NDArray[Any]) -> float:
    return float(np.abs(seen @ np.linalg.lstsq(seen, counted, rcond=None)[0] - counted).max())


def configs_of(spec: KernelSpec) -> list[TileConfig]:
    """What plans take: the registered tiles, and those of the steps of the suite "ladder"."""
    steps = (
        rung.config
        for config in spec.configs
        if isinstance(config, Fa3Config | Fa3BackwardConfig)
        for rung in ladder(spec.algorithm, config)
        if rung.config is not None
    )
    found: dict[str, TileConfig] = {}
    for config in (*spec.configs, *steps):
        found.setdefault(str(costs.key_of(config)) + str(config.max_head_dim), config)
    return list(found.values())


def record() -> None:
    """Count every build anew and write :data:`cufa.measure.costs.PATH`."""
    kernels = {
        spec.name: {
            "digest": source_digest(spec.source),
            "configs": [
                {"config": costs.key_of(config), "head_dims": _by_head_dim(spec, config)}
                for config in configs_of(spec)
            ],
        }
        for spec in KERNELS.values()
    }
    write_json(costs.PATH, {"about": _ABOUT, "kernels": kernels})


def _by_head_dim(spec: KernelSpec, config: TileConfig) -> dict[str, costs.Table]:
    """Costs with a soft cap are written where they differ from those without."""
    found: dict[str, costs.Table] = {}
    for head_dim in filter(config.fits, HEAD_DIMS):
        plain, capped = (count(spec, config, head_dim, softcap) for softcap in (False, True))
        found[str(head_dim)] = plain
        if capped != plain:
            found[f"{head_dim} softcap"] = capped
    return found
