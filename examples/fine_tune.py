"""Fine-tuning a public checkpoint: ResNet18, trained on CIFAR-100, learns CIFAR-10 from 100 clients.

Whoever takes part has the checkpoint already, so it is a start that all share, and DQ codes every model given it.

    python examples/fine_tune.py   # makes the checkpoint: 20 minutes of a core; data are in $FEDFP8_DATA (docs/data.md)
    fedfp8 compare --task examples.fine_tune:task --methods fp32,uq,dq --rounds 40 --eval-every 5 \\
        --set clients.fraction=0.1 --set local.lr=0.03 --set local.epochs=1 --set local.batch_size=50
"""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import fedfp8
from fedfp8.data import load, transform_for
from fedfp8.models import build

CHECKPOINT = Path("runs/resnet18-cifar100.pt")
PICTURES = transform_for("cifar10")  # crops, flips and scales


def transform(batch, generator, train):
    return PICTURES(batch[0], generator, train), batch[1]


def task() -> fedfp8.Task:
    """The checkpoint with a new last layer; 100 clients with 500 pictures each."""
    model = build("resnet18", 10, seed=0, stem="imagenet")
    known = torch.load(CHECKPOINT, weights_only=True)
    model.load_state_dict({**known, **{name: w for name, w in model.state_dict().items() if name.startswith("fc.")}})
    data = load("cifar10")
    order = torch.randperm(len(data.train_y), generator=torch.Generator().manual_seed(0))
    clients = [(data.train_x[rows], data.train_y[rows]) for rows in order.chunk(100)]
    return fedfp8.Task(model, clients, (data.test_x, data.test_y), transform=transform, name="fine-tune")


def pretrain(epochs: int = 14, batch: int = 128) -> None:
    """As anybody would who publishes a checkpoint: all the data, float, no clients."""
    data, random = load("cifar100"), torch.Generator().manual_seed(0)
    model = build("resnet18", data.num_classes, seed=0, stem="imagenet").to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = epochs * (len(data.train_y) // batch)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    for step in range(steps):
        rows = torch.randint(len(data.train_y), (batch,), generator=random)
        loss = cross_entropy(model(PICTURES(data.train_x[rows], random, True)), data.train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.2f}", flush=True)
    CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), CHECKPOINT)


if __name__ == "__main__":
    pretrain()
