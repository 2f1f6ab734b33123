"""The language model of characters that `cufa demo train` trains, by thinc's layers and optimiser around our attention.

The text is chapters I to VII of *Alice's Adventures in Wonderland* (1865) by Lewis Carroll, who died in 1898: it is in
the public domain everywhere. Indentation and lines of stars were left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property, partial
from importlib import resources
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from thinc.api import (
    Adam,
    Embed,
    LayerNorm,
    Linear,
    Model,
    Ragged,
    Relu,
    Softmax,
    add,
    chain,
    residual,
    to_numpy,
    uniform_init,
    with_array,
)

from .attention import SelfAttention

Numbers = npt.NDArray[np.int32]
Network: TypeAlias = "Model[Ragged, Ragged]"
"""From letters and their places, a batch of sequences as Ragged, to every letter's probabilities of the next one."""


@dataclasses.dataclass(frozen=True)
class CharacterModel:
    """The model's shape, and how it is trained. These sizes are for a CPU."""

    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    context: int = 64
    """Letters that a prediction may look back on."""
    batch: int = 12
    learn_rate: float = 5e-3

    @cached_property
    def text(self) -> str:
        return resources.files(__package__).joinpath("alice.txt").read_text(encoding="ascii")

    @cached_property
    def letters(self) -> list[str]:
        return sorted(set(self.text))

    def numbers(self, text: str) -> Numbers:
        number = {letter: i for i, letter in enumerate(self.letters)}
        return np.array([number[letter] for letter in text], np.int32)

    # --- The network ------------------------------------------------------------------------------------------

    def build(self) -> Network:
        """The network on thinc's current ops. Like thinc's initialisers, it draws parameters from NumPy's global
        generator."""
        spread = partial(uniform_init, lo=-1, hi=1)  # as large as the blocks' outputs
        letters = Embed(self.width, len(self.letters), column=0, initializer=spread)
        places = Embed(self.width, self.context, column=1, initializer=spread)
        return chain(
            with_array(add(letters, places)),
            self._block(window=(3, 0)),  # a window of four letters learns the spelling much sooner
            self._block(causal=True),
            with_array(chain(LayerNorm(self.width), Softmax(len(self.letters), self.width))),
        ).initialize()

    def _block(self, **mask: Any) -> Network:
        width = self.width
        attention = SelfAttention(width, width, heads=self.heads, kv_heads=self.kv_heads, **mask)
        mix = chain(with_array(LayerNorm(width)), attention)
        think = with_array(chain(LayerNorm(width), Relu(4 * width, width), Linear(width, 4 * width)))
        return chain(residual(mix), residual(think))

    def input(self, network: Network, letters: Numbers) -> Ragged:
        """The tokens of letters (batch, seqlen), each a letter and its place."""
        batch, seqlen = letters.shape
        places = np.broadcast_to(np.arange(seqlen, dtype=np.int32), letters.shape)
        tokens = np.stack([letters, places], axis=-1).reshape(-1, 2)
        return Ragged(network.ops.asarray2i(tokens), np.full(batch, seqlen, np.int32))

    # --- Training and sampling --------------------------------------------------------------------------------

    def train(self, network: Network, steps: int, seed: int) -> Iterator[float]:
        """The loss of every step, once it is done: the mean of -log p(next letter), in nats."""
        rng, numbers = np.random.default_rng(seed), self.numbers(self.text)
        optimizer = Adam(self.learn_rate, use_averages=False)
        for _ in range(steps):
            starts = rng.integers(len(numbers) - self.context, size=(self.batch, 1))
            loss = self.gradients(network, numbers[starts + np.arange(self.context + 1)])
            network.finish_update(optimizer)
            yield loss

    def gradients(self, network: Network, letters: Numbers) -> float:
        """Add the gradients of letters (batch, context + 1) to those of the parameters; returns the loss."""
        guesses, backprop = network.begin_update(self.input(network, letters[:, :-1]))
        p, xp = guesses.data, network.ops.xp
        right = xp.arange(len(p)), network.ops.asarray1i(letters[:, 1:].ravel())
        loss = float(-xp.log(p[right]).mean())
        gradient = (
            p.copy()
        )  # with respect to the softmax's input: thinc's layer leaves this derivative to the loss
        gradient[right] -= 1
        backprop(Ragged(gradient / len(p), guesses.lengths))
        return loss

    def sample(self, network: Network, length: int, seed: int) -> str:
        """ "Alice " and ``length`` letters that the network makes up, at temperature 0.8."""
        rng, numbers = np.random.default_rng(seed), self.numbers("Alice ").tolist()
        for _ in range(length):
            last = np.array([numbers[-self.context :]], np.int32)
            weights = to_numpy(network.predict(self.input(network, last)).data[-1]).astype(np.float64) ** (
                1 / 0.8
            )
            numbers.append(int(rng.choice(len(weights), p=weights / weights.sum())))
        return "".join(self.letters[number] for number in numbers)


ON_A_GPU = CharacterModel(width=256, heads=8, kv_heads=2, context=256, batch=32, learn_rate=2e-3)


def num_parameters(network: Network) -> int:
    return sum(node.get_param(name).size for node in network.walk() for name in node.param_names)
