"""Every kernel over small shapes, for compute-sanitizer: `make sanitize`.

CuPy's memory pool is off, or an access past the end of an array would land in the same allocation and pass.

    compute-sanitizer --tool racecheck python tests/sanitize.py [KERNEL ...]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import cupy
import numpy as np

from cufa.backends import cuda
from cufa.bench.runner import max_error, poison, random_inputs, sampled_reference
from cufa.bench.suites import make
from cufa.kernels import KERNELS
from cufa.planner import Plan, fitting_configs, make_plan

#: (queries, keys): shorter than a tile, over its end, several tiles, queries that see no key.
LENGTHS = ((1, 1), (33, 150), (200, 130))
TOLERANCE = {"float16": 1e-2, "bfloat16": 8e-2, "float32": 1e-4}


def plans(names: list[str]) -> Iterator[Plan]:
    device = cuda.current_device()
    for name in names:
        spec = KERNELS[name]
        for dtype in spec.dtypes:
            for precision in spec.precisions:
                for head_dim, causal in ((64, True), (40, False)):
                    config = fitting_configs(spec, head_dim, device)[0]
                    for seqlen_q, seqlen_k in LENGTHS:
                        problem = make(
                            1,
                            2,
                            seqlen_q,
                            head_dim,
                            dtype,
                            causal,
                            kv_heads=1,
                            seqlen_k=seqlen_k,
                            precision=None if precision == "native" else precision,
                        )
                        yield make_plan(problem, device, spec.algorithm, config=config)


def main() -> None:
    cupy.cuda.set_allocator(None)
    todo = list(plans(sys.argv[1:] or list(KERNELS)))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        prepared = list(pool.map(cuda.prepare, todo))
    wrong = 0
    for seed, (plan, ready) in enumerate(zip(todo, prepared, strict=True)):
        q, k, v = random_inputs(plan.problem, on_gpu=True, seed=seed)
        out = cupy.empty_like(q)
        poison(out)
        lse = cupy.empty(q.shape[:3], np.float32)
        ready.launch(q, k, v, out, lse)
        error = max_error(out, sampled_reference(plan.problem, q, k, v))
        tolerance = 1e-2 if plan.problem.precision == "tf32" else TOLERANCE[plan.problem.dtype]
        if not error <= tolerance:
            wrong += 1
            print(f"WRONG {error:.1e} {plan.spec.name}: {plan.problem}")
    print(f"{len(todo)} launches of {len({p.spec.name for p in todo})} kernels, {wrong} wrong results")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
