"""Segmentation: which pixels belong to the disc? A network that goes down and up again, with ConvTranspose2d."""

from functools import partial

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import fedfp8

Batch = dict[str, torch.Tensor]


def scenes(client: int, count: int, size: int = 24) -> list[Batch]:
    """One pass: batches of noisy images with a disc, brighter or darker by client, and the mask of the disc."""
    random = torch.Generator().manual_seed(client)
    at = torch.arange(size)
    batches = []
    for _ in range(count):
        row, column, radius = torch.rand(3, 16, 1, 1, generator=random) * torch.tensor([16, 16, 5]).view(3, 1, 1, 1) + 4
        mask = (at.view(-1, 1) - row) ** 2 + (at - column) ** 2 < radius**2
        image = mask * (1.0 + 0.2 * (client % 4)) + 0.5 * torch.randn(16, size, size, generator=random)
        batches.append({"image": image[:, None], "mask": mask[:, None]})
    return batches


class DownAndUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(image))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return binary_cross_entropy_with_logits(model(batch["image"]), batch["mask"].float())


def iou(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """Intersection over union, weighted by the union."""
    found, mask = model(batch["image"]) > 0, batch["mask"]
    union = (found | mask).sum().item()
    return (found & mask).sum().item() / max(union, 1), union


if __name__ == "__main__":
    torch.manual_seed(0)
    config = fedfp8.preset("own", "dq", round__count=20, clients__fraction=0.5, local__lr=0.3, local__epochs=2)
    clients = [partial(scenes, k, 4) for k in range(6)]
    history = fedfp8.run(config, model=DownAndUp(), clients=clients, test=partial(scenes, 99, 8), loss=loss, metric=iou)
    print(f"intersection over union {history.metric:.2f} for {history.summary['bytes_total']:,} bytes")
