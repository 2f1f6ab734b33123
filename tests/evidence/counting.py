"""Counts the cost of a unit of work: each build of a kernel is executed on a few small shapes, and its counters are
solved for the cost of one visited tile, one query block, … (:mod:`cufa.measure.costs`).

Counters are linear in these units; :func:`count` raises ValueError where they are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from cufa.calls.tuning import write_json
from cufa.kernels import Kernel, TileConfig, kernels_of
from cufa.kernels.backward.fa3_config import Fa3BackwardConfig
from cufa.kernels.forward.fa3 import Fa3Config
from cufa.kernels.support import refusal
from cufa.measure import costs
from cufa.measure.costs import ONE_SM
from cufa.measure.inputs import Inputs, given_to
from cufa.measure.ladder import ladder, variations
from cufa.plan.planner import Plan, make_plan
from cufa.problem.problem import Problem
from cufa.run.cpu.blas import usable_cores
from cufa.run.emulate.launch import Execution
from cufa.run.emulate.run import Emulation, run_plan

#: The kernels that are counted: all whose inputs have no scales.
KERNELS = {name: x for name, x in (kernels_of("forward") | kernels_of("backward")).items() if not x.scales}
HEAD_DIMS = (64, 80, 96, 128, 192, 256)

_SHAPES = ((2, 2, 1), (2, 3, 1), (3, 2, 1), (3, 4, 1), (2, 2, 2), (3, 2, 2))
"""(query blocks, key blocks, heads): one shape more than units of work where tiles are whole."""
_SECTOR = 32
_EXACT, _CLOSE = 0.01, 0.005
"""Counts are exactly linear, but for persistent backward blocks, which read a few words more for some items: there the
solution is within 0.5% of every count."""
_ABOUT = (
    "Counters of one unit of work, from executing the kernels' CUDA source on a CPU (tests/evidence/counting.py). Not "
    "measured on a GPU. Wavefronts follow the model in cuda_src/host/bank_model.h."
)


def plan_of(kernel: Kernel, config: TileConfig, problem: Problem) -> Plan:
    """The plan of a problem on :data:`ONE_SM`, keys together."""
    return make_plan(problem, ONE_SM, config=config, kernel=kernel.name, num_splits=1)


def execute(plan: Plan) -> Emulation:
    """In counted mode, on random inputs, as a GPU runs it: without tile records."""
    arrays = Inputs(plan.problem, on_gpu=False, seed=0).arrays(plan.problem)
    return run_plan(plan, given_to(plan.operation, arrays), Execution("counted", threads=1), trace=False)


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
        "read": _bytes_read(run, run.counters.values()),
        "written": total["global_write_bytes"],
        "passes": _bytes_read(run, others) + sum(int(x["global_write_bytes"].sum()) for x in others),
    }


def _bytes_read(run: Emulation, launches: Iterable[npt.NDArray[Any]]) -> int:
    """Bytes that are asked for. Where threads load operands, sectors: lanes of a warp may ask for the same bytes."""
    if run.plan.spec.uses_copy_engine:
        return sum(int(counts["global_read_bytes"].sum()) for counts in launches)
    return _SECTOR * sum(int(counts["global_read_sectors"].sum()) for counts in launches)


def count(kernel: Kernel, config: TileConfig, head_dim: int, softcap: bool) -> dict[str, dict[str, int]]:
    """Counter → unit → count, of one build. Raises ValueError where a counter is not linear in the units."""
    seen, counted = [], []
    for problem in _problems(kernel, config, head_dim, softcap):
        plan = plan_of(kernel, config, problem)
        seen.append(costs.units(plan))
        counted.append(list(counters_of(execute(plan)).values()))
    found = {}
    for counter, column in zip(costs.COUNTERS, np.array(counted, np.float64).T, strict=True):
        units = np.array([list(each[counter].values()) for each in seen])
        if column.any():
            found[counter] = _solved(
                f"{kernel.name}, {config}, {counter}", list(seen[0][counter]), units, column
            )
    return found


def _problems(kernel: Kernel, config: TileConfig, head_dim: int, softcap: bool) -> Iterator[Problem]:
    idle = config.block_q - costs.GROUP_ROWS if isinstance(config, Fa3Config) else 0
    for queries, keys, heads, missing in [
        *((*shape, 0) for shape in _SHAPES),
        *[(2, 2, 1, idle)] * (idle > 0),
    ]:
        yield Problem(
            1, heads, heads, queries * config.block_q - missing, keys * config.block_kv, head_dim, kernel.dtypes[0],
            scale=head_dim**-0.5, softcap=30.0 if softcap else None, precision=kernel.precisions[0],
            operation=kernel.operation,
        )  # fmt: skip


def _solved(what: str, names: list[str], seen: npt.NDArray[Any], counted: npt.NDArray[Any]) -> dict[str, int]:
    """Least squares in as few units as explain the counts; in whole numbers."""
    used = [i for i in range(len(names)) if seen[:, i].any()]
    exact = _residual(seen[:, used], counted) < _EXACT
    tolerance = _EXACT if exact else _CLOSE * counted.max()
    for left_out in ("call", "head", "thread block", "key block", "idle warpgroup", "query block"):
        fewer = [i for i in used if names[i] != left_out]
        if len(fewer) < len(used) and _residual(seen[:, fewer], counted) < tolerance:
            used = fewer
    solution = np.linalg.lstsq(seen[:, used], counted, rcond=None)[0].round()
    if np.abs(seen[:, used] @ solution - counted).max() > tolerance + len(used):
        raise ValueError(f"{what}: not linear in {', '.join(names[i] for i in used)}")
    return {names[i]: int(x) for i, x in zip(used, solution, strict=True) if x}


def _residual(seen: npt.NDArray[Any], counted: npt.NDArray[Any]) -> float:
    return float(np.abs(seen @ np.linalg.lstsq(seen, counted, rcond=None)[0] - counted).max())


def configs_of(kernel: Kernel) -> list[TileConfig]:
    """The configs that plans take: the registered tiles, and the tiles of the suite "ladder"."""
    found: dict[tuple[str, int], TileConfig] = {}
    for config in kernel.configs:
        for each in (config, *_of_ladder(kernel, config)):
            found.setdefault((str(costs.key_of(each)), each.max_head_dim), each)
    return list(found.values())


def _of_ladder(kernel: Kernel, config: TileConfig) -> Iterator[TileConfig]:
    if not isinstance(config, Fa3Config | Fa3BackwardConfig):
        return
    head_dim = max(d for d in HEAD_DIMS if config.fits(d))
    plan = plan_of(kernel, config, next(_problems(kernel, config, head_dim, softcap=False)))
    for step in (*ladder(kernel.algorithm, config), *variations(plan)):
        if isinstance(step.config, kernel.config_class):
            yield step.config


def record() -> None:
    """Count every build anew and write :data:`cufa.measure.costs.PATH`: takes some minutes."""
    builds = [(kernel, config) for kernel in KERNELS.values() for config in configs_of(kernel)]
    with ThreadPoolExecutor(usable_cores()) as pool:  # compilers are processes of their own
        tables = list(pool.map(lambda build: _by_head_dim(*build), builds))
    kernels: dict[str, Any] = {kernel.name: {"configs": []} for kernel in KERNELS.values()}
    for (kernel, config), table in zip(builds, tables, strict=True):
        kernels[kernel.name]["configs"].append({"config": costs.key_of(config), "head_dims": table})
    write_json(costs.PATH, {"about": _ABOUT, "kernels": kernels})


def _by_head_dim(kernel: Kernel, config: TileConfig) -> dict[str, costs.Table]:
    """Costs with a soft cap are written where they differ from those without."""
    found: dict[str, costs.Table] = {}
    for head_dim in filter(config.fits, HEAD_DIMS):
        found[str(head_dim)] = plain = count(kernel, config, head_dim, softcap=False)
        if _takes(kernel, config, head_dim):
            capped = count(kernel, config, head_dim, softcap=True)
            found |= {f"{head_dim} softcap": capped} if capped != plain else {}
    return found


def _takes(kernel: Kernel, config: TileConfig, head_dim: int) -> bool:
    """Whether the config serves a soft cap."""
    return refusal(kernel, next(_problems(kernel, config, head_dim, softcap=True)), config=config) is None
