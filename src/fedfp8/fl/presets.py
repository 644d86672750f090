"""Named settings: the digits demo, and one preset for every cell of the paper's Table 1 (section 5.1)."""

import difflib
from typing import Any

from fedfp8.errors import ConfigError
from fedfp8.fl.config import Config, from_dict, to_dict, with_method, with_settings

__all__ = ["PRESETS", "from_file", "preset"]

# 20 clients that each see few classes, 5 of them a round
DIGITS: dict[str, Any] = {"data.name": "digits", "model.name": "digits", "local.batch_size": 20}

# K = 100, C = 0.1, 1000 rounds, batches of 50, 5 local epochs, SGD 0.1 with weight decay 0.001, crop and flip
IMAGES: dict[str, Any] = {
    "clients.count": 100, "clients.fraction": 0.1, "round.count": 1000, "round.eval_every": 5,
    "local.batch_size": 50, "local.epochs": 5, "local.lr": 0.1, "local.weight_decay": 0.001,
}  # fmt: skip

# AdamW 0.001 with cosine decay and weight decay 0.1, SpecAugment; the rest as for images
SPEECH: dict[str, Any] = IMAGES | {
    "data.name": "speech_commands", "local.optimizer": "adamw", "local.lr": 0.001, "local.schedule": "cosine",
    "local.weight_decay": 0.1,
}  # fmt: skip

# One client per speaker (2,112 in v2), C = 0.01, 500 rounds, 50 local updates
SPEAKER: dict[str, Any] = {
    "data.partition": "group", "clients.fraction": 0.01, "round.count": 500, "local.epochs": 0, "local.steps": 50,
}  # fmt: skip


def _paper_cells() -> dict[str, dict[str, Any]]:
    cells: dict[str, dict[str, Any]] = {}
    for data in ("cifar10", "cifar100"):
        for model in ("lenet", "resnet18"):
            base = IMAGES | {"data.name": data, "model.name": model}
            cells[f"{model}-{data}-iid"] = base | {"data.partition": "iid"}
            cells[f"{model}-{data}-dir"] = base | {"data.partition": "dirichlet", "data.concentration": 0.3}
    for model, features in (("matchboxnet", "matchboxnet"), ("kwt1", "kwt")):
        base = SPEECH | {"model.name": model, "data.features": features}
        cells[f"{model}-speech-iid"] = base | {"data.partition": "iid"}
        cells[f"{model}-speech-speaker"] = base | SPEAKER
    return cells


# "own": model, clients and test set are the caller's (fedfp8.run(config, model=...), or --task)
PRESETS: dict[str, dict[str, Any]] = {"digits": DIGITS} | _paper_cells() | {"own": {}}


def preset(name: str = "digits", method: str = "uq", **settings: Any) -> Config:
    """The config of a preset and a method; `settings` as in ``with_settings`` with ``__`` for the dot."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1, 0.4)
        raise ConfigError(
            f"unknown preset {name!r}; {f'did you mean {near[0]}? ' if near else ''}known: {', '.join(PRESETS)}"
        )
    config = with_settings(Config(preset=name), PRESETS[name])
    return with_settings(with_method(config, method), {k.replace("__", "."): v for k, v in settings.items()})


def from_file(values: dict[str, Any]) -> Config:
    """The config of a file's nested dicts: what the file leaves out comes from the preset and method it names."""
    complete = to_dict(preset(str(values.get("preset", "digits")), str(values.get("method", "uq"))))
    for section, content in values.items():
        known = complete.get(section)
        complete[section] = known | content if isinstance(known, dict) and isinstance(content, dict) else content
    return from_dict(complete)
