"""Training in JAX: a compiled step of gradient descent through ``cufa.jax``."""

from typing import Any

import jax
import jax.numpy as jnp

from cufa.jax import attention


def loss(weights: Any, x: Any) -> Any:
    q, k, v = ((x @ w).reshape(*x.shape[:2], 4, -1) for w in weights)
    out = attention(q, k, v, causal=True).reshape(x.shape)
    return ((out - jnp.roll(x, 1, 1)) ** 2).mean()


@jax.jit
def step(weights: Any, x: Any) -> tuple[Any, Any]:
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return value, [w - 3.0 * g for w, g in zip(weights, gradients, strict=True)]


def main(steps: int = 40) -> tuple[float, float]:
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (4, 50, 64)).astype(jnp.bfloat16)  # batch, seqlen, width
    weights = [(jax.random.normal(key, (64, 64)) / 8).astype(jnp.bfloat16) for key in keys[1:]]
    losses = []
    for _ in range(steps):
        value, weights = step(weights, x)
        losses.append(float(value))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
