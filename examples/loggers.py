"""`on_round` hands over the record of every round: three loggers in a few lines each.

A record is a line of history.jsonl: ``round``, ``train_loss``, ``bytes_down``, ``bytes_up``, ``bytes_total``,
``clients``, ``rejected``, ``seconds``, and in evaluated rounds ``loss`` and ``metric`` (name, value, higher_is_better).

    fedfp8.run(config, on_round=tensorboard("runs/tb"))
"""

from collections.abc import Callable
from typing import Any

Record = dict[str, Any]


def numbers(record: Record) -> dict[str, float]:
    """What of a record can be drawn."""
    found = {key: record.get(key) for key in ("loss", "train_loss", "bytes_down", "bytes_up", "bytes_total")}
    if metric := record.get("metric"):
        found[metric["name"]] = metric["value"]
    return {key: value for key, value in found.items() if value is not None}


def tensorboard(folder: str) -> Callable[[Record], None]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    def on_round(record: Record) -> None:
        for key, value in numbers(record).items():
            writer.add_scalar(key, value, record["round"])
        writer.flush()

    return on_round


def weights_and_biases(**options: Any) -> Callable[[Record], None]:
    import wandb

    run = wandb.init(**options)
    return lambda record: run.log(numbers(record), step=record["round"])


def mlflow_run() -> Callable[[Record], None]:
    """Inside ``with mlflow.start_run():``"""
    import mlflow

    return lambda record: mlflow.log_metrics(numbers(record), step=record["round"])
