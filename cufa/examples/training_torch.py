"""Training in PyTorch: a layer of self-attention on ``cufa.torch``."""

import torch

from cufa.torch import attention


class SelfAttention(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, seqlen, width)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.out(attention(q, k, v, layout="bshd", causal=True).flatten(2))


def main(steps: int = 40) -> tuple[float, float]:
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = SelfAttention(64, heads=4).to(device, dtype)
    x = torch.randn(4, 50, 64, device=device, dtype=dtype)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        loss = ((model(x) - x.roll(1, 1)) ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
