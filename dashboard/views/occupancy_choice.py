"""The pages Occupancy and Machine code: the choice of a build."""

from __future__ import annotations

import dataclasses

from cufa.build.variants import Variant
from cufa.dashboard import page
from cufa.dashboard.model import subject
from cufa.dashboard.model.compiled import compiled_problems
from cufa.dashboard.model.configs import config_key, config_words
from cufa.dashboard.model.subject import Subject
from cufa.dashboard.state import Controls
from cufa.dashboard.views import mask_control
from cufa.dashboard.views.shape_controls import HEAD_DIMS
from cufa.gpu.architectures import (
    ARCHITECTURES,
    COMPILED_ARCHITECTURES,
    Architecture,
    Device,
    find_architecture,
)
from cufa.kernels import KERNELS, Kernel, TileConfig
from cufa.plan.operation import OPERATIONS
from cufa.plan.planner import fitting_configs
from cufa.problem.problem import Problem

HEAD_DIM, ARCH = 128, 90
"""Defaults of the page."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One kernel for one kind of problem; ``arch`` and ``config`` select a build."""

    spec: Kernel
    problem: Problem
    """Its lengths do not matter."""
    arch: Architecture
    config: TileConfig | None
    shape: Problem | None = None
    """The shape in the link."""

    @property
    def head_dim(self) -> int:
        return self.problem.head_dim

    def variant(self, config: TileConfig, arch: Architecture) -> Variant:
        return Variant(self.spec, config, self.problem, arch)

    def configs(self, arch: Architecture) -> tuple[TileConfig, ...]:
        return fitting_configs(self.spec, self.head_dim, Device.typical(arch.capability))

    @property
    def rows(self) -> list[TileConfig]:
        """Tiles built for this head dim, on any card."""
        return [c for c in self.spec.configs if c.fits(self.head_dim)]

    @property
    def archs(self) -> list[Architecture]:
        served = [ARCHITECTURES[c] for c in COMPILED_ARCHITECTURES]
        return [a for a in served if self.spec.runs_on(a.capability)]


def begin() -> Variant:
    """The default build."""
    spec = next(iter(KERNELS.values()))
    problem = mask_control.usual(compiled_problems(spec, HEAD_DIM))
    choice = Choice(spec, problem, find_architecture(ARCH), None)
    return choice.variant(choice.configs(choice.arch)[0], choice.arch)


def choose(controls: Controls) -> Choice:
    """The controls of the page."""
    with page.control_box():
        columns = page.fields(4.2, 0.9, 1.5)
        words = {name: f"{OPERATIONS[x.operation].title}: {name}, {x.title}" for name, x in KERNELS.items()}
        spec = KERNELS[controls.choice("kernel", "Kernel", words, at=columns[0])]
        head_dim = int(controls.choice("d", "Head dim", HEAD_DIMS, str(HEAD_DIM), at=columns[1]))
        problems = compiled_problems(spec, head_dim)
        kinds = {inputs_key(p): _inputs_words(p) for p in problems}
        inputs = controls.choice("dtype", "Inputs", kinds, at=columns[2])
        problems = [p for p in problems if inputs_key(p) == inputs]
        columns = page.fields(1.9, 1.5, 1.2, 2)
        with columns[0]:
            problems = mask_control.choose_built(controls, problems)
        lengths = {str(n): text for n, text in enumerate(dict.fromkeys(map(lengths_words, problems)))}
        if len(lengths) > 1:
            wanted = lengths[controls.choice("cache", "Lengths", lengths, at=columns[1])]
            problems = [p for p in problems if lengths_words(p) == wanted]
        served = [a for a in ARCHITECTURES.values() if spec.runs_on(a.capability)]
        archs = {str(a.capability): f"{a.name} · {a.typical_card}" for a in served}
        arch = find_architecture(controls.choice("arch", "Architecture", archs, str(ARCH), at=columns[2]))
        shape = controls.carried("of", subject.problem_of, "a shape")
        choice = Choice(spec, problems[0], arch, None, shape)
        configs = {config_key(c): c for c in choice.configs(arch)}
        if not configs:
            columns[3].info(f"No tiles of {spec.name} fit {arch.name} at head dim {head_dim}.")
            return choice
        words = {key: config_words(c) for key, c in configs.items()}
        key = controls.choice("tiles", "Tiles (queries × keys)", words, at=columns[3])
    return dataclasses.replace(choice, config=configs[key])


def inputs_key(p: Problem) -> str:
    return ".".join((p.dtype, p.precision, *((p.k_dtype,) if p.k_dtype else ())))


def _inputs_words(p: Problem) -> str:
    text = p.dtype if p.precision == "native" else f"{p.dtype} ({p.precision})"
    return f"{text}, {p.k_element.name} keys" if p.k_dtype else text


def lengths_words(p: Problem) -> str:
    return f"{p.lengths}{', lengths given' if p.lengths.ragged else ''}"


def subject_of(choice: Choice) -> Subject:
    """Subject of the page: the shape of the link, adapted to the build."""
    built = choice.problem
    shape = choice.shape
    if shape is None or shape.operation != built.operation:
        shape = subject.sample(built.operation)
    same = ("head_dim", "scale", "dtype", "precision", "k_dtype", "v_dtype")
    shape = dataclasses.replace(shape, **{name: getattr(built, name) for name in same})
    if shape.mask_kind != built.mask_kind:
        shape = dataclasses.replace(shape, mask=built.mask)
    if (shape.softcap is None) != (built.softcap is None):
        shape = dataclasses.replace(shape, softcap=built.softcap)
    return Subject(shape, choice.spec.name, choice.config, str(choice.arch.capability))
