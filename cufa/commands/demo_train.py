"""`cufa demo train`: the gradients at work."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import click
import numpy as np

from ..gpu.architectures import Device
from ..problem.checks import install
from . import common

_STEPS = {"cpu": 600, "cuda": 1000}
_SAMPLE = 400  # letters
_ROWS = 8  # of the loss table


@click.command("train")
@click.option(
    "--steps",
    type=click.IntRange(1),
    help=f"Steps of the optimiser.  [default: {_STEPS['cuda']} on a GPU, {_STEPS['cpu']} on the CPU]",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Seed of parameters, batches and sample.",
)
@common.device_option
@common.json_option
def train_command(steps: int | None, seed: int, device: str, as_json: bool) -> None:
    """Train a small language model of characters on seven chapters of Alice in Wonderland: two blocks with grouped
    heads, the first in a window, by thinc's layers and optimiser around flash_attention and flash_attention_backward.
    Prints the falling loss and a text that the model makes up.

    Needs the extra train; on a GPU train-cuda13, because thinc multiplies with cuBLAS.

    Exit codes: 0 the loss is finite; 1 it is not; 2 wrong usage; 3 no thinc, or no GPU where one was asked for.
    """
    try:
        import cufa.train  # noqa: F401
    except ImportError as error:
        common.fail(common.Exit.MISSING, str(error))
    target = _device(device)
    document = _run(target, steps or _STEPS["cpu" if target is None else "cuda"], seed)
    if as_json:
        common.print_json(document)
    else:
        _print(document)
    if not all(map(math.isfinite, document["losses"])):
        common.stderr().print("the loss is not finite", style="red")
        raise SystemExit(int(common.Exit.FAILED))


def _device(choice: str) -> Device | None:
    """thinc has no GPU without cuBLAS, which cufa itself does not need."""
    from thinc.util import has_cupy_gpu

    found = common.find_device(choice)
    if found is None or has_cupy_gpu:
        return found
    reason = (
        f"thinc needs cuBLAS to compute on the GPU. Fix: {install('train-cuda13')}, or nvidia-cublas-cu12"
    )
    if choice == "cuda":
        common.fail(common.Exit.MISSING, reason)
    common.stderr().print(f"{reason}. Training on the CPU.", markup=False)
    return None


def _run(target: Device | None, steps: int, seed: int) -> dict[str, Any]:
    from thinc.api import use_ops

    from ..train.characters import ON_A_GPU, CharacterModel, num_parameters

    model = CharacterModel() if target is None else ON_A_GPU
    with use_ops("numpy" if target is None else "cupy"), common.progress() as bar:
        np.random.seed(seed)  # noqa: NPY002 - thinc's initialisers draw from it
        network, losses = model.build(), []
        task = bar.add_task("training", total=steps)
        start, cpu_start = time.perf_counter(), time.process_time()
        for loss in model.train(network, steps, seed):
            losses.append(loss)
            bar.update(task, advance=1, description=f"training, loss {loss:.2f}")
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        bar.update(task, description="making up a text")
        sample = model.sample(network, _SAMPLE, seed)
    return {
        "device": "CPU" if target is None else target.name,
        "model": {**dataclasses.asdict(model), "parameters": num_parameters(network)},
        "text_letters": len(model.text),
        "steps": steps,
        "seed": seed,
        "losses": losses,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "sample": sample,
    }


def _print(document: dict[str, Any]) -> None:
    console, model, losses = common.stdout(), document["model"], document["losses"]
    where = "the CPU" if document["device"] == "CPU" else document["device"]
    console.print(
        f"A model of {model['parameters']:,} parameters, trained on {where} with {document['text_letters']:,} letters "
        f"of Alice in Wonderland, {model['batch']} × {model['context']} per step:",
        markup=False,
    )
    shown = common.table([], ["step", "loss, nats per letter"])
    for step in sorted({round(x) for x in np.linspace(1, len(losses), _ROWS)}):
        shown.add_row(f"{step:,}", f"{losses[step - 1]:.3f}")
    console.print(shown)
    seconds = document["seconds"]
    console.print(
        f"{common.seconds_text(seconds)}, {common.seconds_text(seconds / len(losses))} per step. The model makes up:\n"
    )
    console.print(document["sample"], markup=False)
