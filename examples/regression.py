"""Regression: a loss and a metric of one's own, for which lower is better."""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fedfp8


def examples(client: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """y = sin(3 x0) + x1^2 with a little noise; each client sees its own part of the plane."""
    random = np.random.default_rng(client)
    x = random.uniform(-1, 1, (count, 2)) * 0.7 + 0.3 * np.array([np.cos(client), np.sin(client)])
    return x, (np.sin(3 * x[:, :1]) + x[:, 1:] ** 2 + 0.05 * random.normal(size=(count, 1)))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return mse_loss(model(x), y)


def rmse(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    return loss(model, batch).sqrt().item(), len(batch[0])


def make() -> fedfp8.Task:
    """For `fedfp8 run --task regression:make` in this folder."""
    torch.manual_seed(0)
    return fedfp8.Task(
        model=nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)),
        clients=[examples(k, 100) for k in range(8)],
        test=examples(99, 500),
        loss=loss,
        metric=fedfp8.Metric(rmse, higher_is_better=False),
        name="sine",
    )


if __name__ == "__main__":
    config = fedfp8.preset("own", "dq", round__count=30, clients__fraction=0.5, local__batch_size=20)
    history = fedfp8.run(config, **vars(make()))
    print(f"rmse {history.metric:.3f} for {history.summary['bytes_total']:,} bytes")
    model = history.model()  # a plain nn.Sequential again
    print(f"sin(3 * 0.2) + 0.3^2 = {np.sin(0.6) + 0.09:.2f}; the model: {model(torch.tensor([0.2, -0.3])).item():.2f}")
