"""What the paper reports, and how each number is asked for here. Data only; no torch.

Wang, Berg, Acar, Zhou: "Towards Federated Learning with on-device Training and Communication in 8-bit Floating Point".
Accuracies in percent with the standard deviation over three seeds; gains against FP32 FedAvg. `SETUPS` holds section
5.1's hyper-parameters as written in the paper; the presets are checked against it by a test, and reports use it to say
where a run departs from the paper.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ALL", "CELLS", "SETUPS", "TABLES", "Cell", "PaperTable", "Reported", "deviations", "not_preset"]


@dataclass(frozen=True)
class Reported:
    accuracy: float
    std: float
    gain: float | None = None

    def text(self) -> str:
        accuracy = f"{self.accuracy:.1f} ± {self.std:.1f}"
        return accuracy if self.gain is None else f"{accuracy} / {self.gain:.1f}×"


@dataclass(frozen=True)
class Cell:
    """A row of Table 1; its name is the preset's."""

    name: str
    model: str
    data: str
    setting: str


@dataclass(frozen=True)
class PaperTable:
    """A table (or Figure 4): which cells, which methods, and what the paper found."""

    name: str
    title: str
    methods: tuple[str, ...]
    numbers: Mapping[str, Mapping[str, Reported]]  # cell -> method -> number

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(self.numbers)


CELLS: dict[str, Cell] = {
    cell.name: cell
    for cell in (
        Cell("lenet-cifar10-iid", "LeNet", "CIFAR10", "i.i.d."),
        Cell("lenet-cifar10-dir", "LeNet", "CIFAR10", "Dir(0.3)"),
        Cell("resnet18-cifar10-iid", "ResNet18", "CIFAR10", "i.i.d."),
        Cell("resnet18-cifar10-dir", "ResNet18", "CIFAR10", "Dir(0.3)"),
        Cell("lenet-cifar100-iid", "LeNet", "CIFAR100", "i.i.d."),
        Cell("lenet-cifar100-dir", "LeNet", "CIFAR100", "Dir(0.3)"),
        Cell("resnet18-cifar100-iid", "ResNet18", "CIFAR100", "i.i.d."),
        Cell("resnet18-cifar100-dir", "ResNet18", "CIFAR100", "Dir(0.3)"),
        Cell("matchboxnet-speech-iid", "MatchboxNet", "SpeechCommands", "i.i.d."),
        Cell("matchboxnet-speech-speaker", "MatchboxNet", "SpeechCommands", "speaker-id"),
        Cell("kwt1-speech-iid", "KWT-1", "SpeechCommands", "i.i.d."),
        Cell("kwt1-speech-speaker", "KWT-1", "SpeechCommands", "speaker-id"),
    )
}

Triple = tuple[float, float, float | None]


def _numbers(methods: tuple[str, ...], rows: Mapping[str, tuple[Triple, ...]]) -> dict[str, dict[str, Reported]]:
    return {cell: {m: Reported(*v) for m, v in zip(methods, row, strict=True)} for cell, row in rows.items()}


M1 = ("fp32", "uq", "uq+")
TABLE1 = _numbers(M1, {
    "lenet-cifar10-iid": ((82.1, 0.1, 1.0), (82.0, 0.1, 4.1), (82.2, 0.3, 4.7)),
    "lenet-cifar10-dir": ((77.1, 0.4, 1.0), (77.3, 0.9, 3.9), (77.7, 0.5, 3.9)),
    "resnet18-cifar10-iid": ((92.0, 0.1, 1.0), (91.1, 0.2, 3.4), (92.0, 0.1, 3.9)),
    "resnet18-cifar10-dir": ((85.5, 0.5, 1.0), (87.4, 0.7, 5.2), (87.5, 0.5, 5.2)),
    "lenet-cifar100-iid": ((43.0, 0.3, 1.0), (44.8, 0.4, 6.0), (44.9, 0.5, 6.0)),
    "lenet-cifar100-dir": ((38.3, 0.7, 1.0), (41.1, 0.3, 9.1), (41.3, 0.7, 9.5)),
    "resnet18-cifar100-iid": ((64.6, 0.3, 1.0), (64.0, 0.2, 3.5), (64.6, 0.1, 4.0)),
    "resnet18-cifar100-dir": ((56.1, 0.7, 1.0), (55.4, 0.6, 3.6), (55.5, 0.6, 3.6)),
    "matchboxnet-speech-iid": ((91.5, 0.3, 1.0), (90.0, 0.4, 3.5), (90.8, 0.4, 3.4)),
    "matchboxnet-speech-speaker": ((79.6, 0.7, 1.0), (75.4, 0.6, 3.1), (77.0, 1.3, 3.3)),
    "kwt1-speech-iid": ((91.4, 0.4, 1.0), (89.2, 0.3, 2.3), (90.7, 0.2, 2.9)),
    "kwt1-speech-speaker": ((83.2, 0.2, 1.0), (79.6, 0.5, 2.9), (82.4, 0.8, 3.7)),
})  # fmt: skip
AVERAGE_GAIN = {"uq": 4.2, "uq+": 4.5}

M2 = ("fp32", "qat-nearest", "qat-stochastic")
TABLE2 = _numbers(M2, {
    "lenet-cifar10-iid": ((82.1, 0.1, None), (82.1, 0.2, None), (82.0, 0.2, None)),
    "resnet18-cifar10-iid": ((92.0, 0.1, None), (91.9, 0.2, None), (91.8, 0.3, None)),
    "lenet-cifar100-iid": ((43.0, 0.3, None), (44.4, 0.5, None), (43.7, 0.6, None)),
    "resnet18-cifar100-iid": ((64.6, 0.3, None), (64.5, 0.1, None), (63.5, 0.5, None)),
})  # fmt: skip

# ResNet18 on CIFAR10 with random CQ is 91.7 here and 91.1 in Table 1: the paper's own two numbers for the same method.
M3 = ("fp32", "bq", "uq")
TABLE3 = _numbers(M3, {
    "lenet-cifar10-iid": ((82.1, 0.1, None), (80.1, 0.1, None), (82.0, 0.1, None)),
    "resnet18-cifar10-iid": ((92.0, 0.1, None), (91.1, 0.1, None), (91.7, 0.2, None)),
    "lenet-cifar100-iid": ((43.0, 0.3, None), (38.0, 0.4, None), (44.8, 0.4, None)),
    "resnet18-cifar100-iid": ((64.6, 0.3, None), (62.5, 0.9, None), (64.0, 0.2, None)),
})  # fmt: skip

# The caption names the methods but not the cells: the four i.i.d. image cells, where the paper has all of them.
FIGURE4 = {cell: TABLE1[cell] | {"bq": TABLE3[cell]["bq"]} for cell in TABLE3}

TABLES: dict[str, PaperTable] = {
    "table1": PaperTable("table1", "Table 1: final test accuracy and communication gain", M1, TABLE1),
    "table2": PaperTable("table2", "Table 2: nearest / stochastic FP8 training, float communication", M2, TABLE2),
    "table3": PaperTable("table3", "Table 3: nearest / stochastic FP8 communication", M3, TABLE3),
    "figure4": PaperTable("figure4", "Figure 4: accuracy against bytes", ("fp32", "bq", "uq", "uq+"), FIGURE4),
}
ALL = (*TABLES, "figure3", "theory")

_IMAGES: dict[str, Any] = {
    "clients.count": 100, "clients.fraction": 0.1, "round.count": 1000, "local.batch_size": 50, "local.epochs": 5,
    "local.steps": 0, "local.optimizer": "sgd", "local.lr": 0.1, "local.schedule": "constant",
    "local.weight_decay": 0.001, "local.augment": True, "data.limit": 0, "data.test_limit": 0,
}  # fmt: skip
_SPEECH = _IMAGES | {
    "local.optimizer": "adamw", "local.lr": 0.001, "local.schedule": "cosine", "local.weight_decay": 0.1,
}  # fmt: skip
_SPEAKER = {k: v for k, v in _SPEECH.items() if k != "clients.count"} | {  # one client per speaker: 2,112 in v2
    "clients.fraction": 0.01, "round.count": 500, "local.epochs": 0, "local.steps": 50,
}  # fmt: skip


def _setup(cell: str) -> dict[str, Any]:
    if cell.endswith("-speaker"):
        return _SPEAKER
    setup = _SPEECH if "-speech-" in cell else _IMAGES
    return setup | ({"data.concentration": 0.3} if cell.endswith("-dir") else {})


SETUPS: dict[str, dict[str, Any]] = {cell: _setup(cell) for cell in CELLS}


# What the paper leaves open, as our presets have it: no departures, but a command needs them to run the same again
OPEN: dict[str, Any] = {"model.stem": "", "round.eval_every": 5}


def not_preset(cell: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which a run departs from the cell's preset, those that the paper leaves open included."""
    return {key: ours for key, (ours, _) in _apart(config, SETUPS.get(cell, {}) | OPEN).items()}


def deviations(cell: str, config: Mapping[str, Any]) -> list[str]:
    """What a run does otherwise than the paper, in words: ``["round.count 60 (paper: 1000)"]``."""
    departures = _apart(config, SETUPS.get(cell, {}))
    return [f"{key} {ours} (paper: {theirs})" for key, (ours, theirs) in departures.items()]


def _apart(config: Mapping[str, Any], setup: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> (the run's, the setup's) where they differ."""
    given = {key: config[key.partition(".")[0]][key.partition(".")[2]] for key in setup}
    return {key: (given[key], wanted) for key, wanted in setup.items() if given[key] != wanted}
