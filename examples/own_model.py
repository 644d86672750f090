"""My model, my data sets per client: federated FP8 training in twenty lines."""

import torch
from torch import nn

import fedfp8


def examples(client: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the plane labelled by quadrant; each client sees its own part of it."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(client)) + torch.tensor([client % 3 - 1.0, 0.0])
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 4))
    config = fedfp8.preset("digits", "dq", round__count=10, clients__fraction=0.5)
    history = fedfp8.run(config, model=model, clients=[examples(k, 100) for k in range(8)], test=examples(99, 500))
    print(f"accuracy {history.accuracy:.1%} for {history.summary['bytes_total']:,} bytes")
