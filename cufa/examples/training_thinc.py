"""Training in thinc, spaCy's framework, on sequences of different lengths."""

import numpy as np
from thinc.api import Adam, LayerNorm, Linear, Ragged, chain, residual, with_array

from cufa.train import SelfAttention


def main(steps: int = 30) -> tuple[float, float]:
    tokens = np.random.default_rng(0).standard_normal((300, 64)).astype("f")
    lengths = np.array([120, 100, 80])
    attend = SelfAttention(heads=8, kv_heads=2, causal=True)
    model = chain(residual(chain(with_array(LayerNorm()), attend)), with_array(Linear(64)))
    model.initialize(Ragged(tokens, lengths))
    optimiser, losses = Adam(0.01), []
    for _ in range(steps):
        out, backprop = model.begin_update(Ragged(tokens, lengths))
        losses.append(float((out.data**2).mean()))
        backprop(Ragged(2 * out.data / out.data.size, lengths))  # the gradient of the loss
        model.finish_update(optimiser)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
