"""The examples run, learn something, and stay short; those that need a package that is missing are skipped."""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import fedfp8
from fedfp8.fl import preset

EXAMPLES = Path(__file__).parents[1] / "examples"
OWN = ["regression", "next_character", "segmentation", "transformer", "lora", "loggers", "fine_tune"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str, *needed: str) -> Any:
        for package in needed:
            pytest.importorskip(package, reason=f"the example needs `pip install {' '.join(needed)}`")
        return importlib.import_module(name)

    return load


@pytest.mark.parametrize("name", OWN)
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


def values(history: fedfp8.fl.History) -> list[float]:
    return [line["metric"]["value"] for line in history.rounds]


def test_regression(example) -> None:
    module = example("regression")
    config = preset("own", "dq", round__count=4, clients__fraction=0.5, local__batch_size=20)
    found = values(fedfp8.run(config, **vars(module.make())))
    assert found[-1] < 0.6 * found[0]


def test_next_character(example) -> None:
    module = example("next_character")
    torch.manual_seed(0)
    given = {"model": module.Speaker(), "loss": module.loss, "metric": module.accuracy}
    clients = [module.Windows(text) for text in module.SPEAKERS]
    config = preset("own", "dq", round__count=3, clients__fraction=1.0, local__lr=1.0, local__batch_size=10)
    history = fedfp8.run(config, clients=clients, test=module.Windows(module.UNSEEN), **given)
    kinds = {spec.name: spec.kind for spec in history.state.layout}
    assert kinds["embedding.weight"] == "float" and kinds["head.weight"] == "fp8"
    assert history.accuracy > 3 / len(module.ALPHABET)  # always "space" or "e" is right more often than chance too


def test_segmentation(example) -> None:
    from functools import partial

    module = example("segmentation")
    torch.manual_seed(0)
    clients = [partial(module.scenes, k, 2) for k in range(2)]
    config = preset("own", "dq", round__count=6, clients__fraction=1.0, local__lr=0.3, local__epochs=4)
    given = {"model": module.DownAndUp(), "loss": module.loss, "metric": module.iou}
    history = fedfp8.run(config, clients=clients, test=partial(module.scenes, 99, 2), **given)
    lines = history.rounds
    assert history.summary["metric"]["name"] == "iou" and lines[-1]["loss"] < 0.7 * lines[0]["loss"]


def test_transformer(example) -> None:
    module = example("transformer", "transformers")
    history = module.main(rounds=3)
    assert history.rounds[-1]["train_loss"] < history.rounds[1]["train_loss"]
    assert type(history.model()).__name__ == "BertForSequenceClassification"


def test_lora(example) -> None:
    module = example("lora", "transformers", "peft")
    model = module.adapted()
    history = module.main(rounds=1, model=model)
    coded = {spec.name for spec in history.state.layout if spec.kind in ("fp8", "float")}
    assert coded and all("lora_" in name or "classifier" in name for name in coded)
    trained = history.model().state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained[name]) == (name not in coded), name


# on_round


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    pair = (x, x.argmax(1))
    config = preset("own", "uq", round__count=2, round__eval_every=2)
    fedfp8.run(config, model=torch.nn.Linear(3, 3), clients=[pair, pair], test=pair, on_round=found.append)
    return found


def test_numbers_of_a_record(example, records) -> None:
    numbers = example("loggers").numbers
    sizes = {"bytes_down", "bytes_up", "bytes_total"}
    assert set(numbers(records[0])) == sizes | {"loss", "accuracy"}
    assert set(numbers(records[1])) == sizes | {"train_loss"}
    assert numbers(records[2])["accuracy"] == records[2]["metric"]["value"]


def test_tensorboard(example, records, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the example needs `pip install tensorboard`")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = example("loggers").tensorboard(str(tmp_path))
    for record in records:
        log(record)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in read.Scalars("accuracy")] == [0, 2]
    assert [e.value for e in read.Scalars("bytes_total")] == [r["bytes_total"] for r in records]


def test_weights_and_biases_and_mlflow(example, records, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the two functions that the examples call."""
    logged: list[Any] = []
    run = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)))
    wandb = types.SimpleNamespace(init=lambda **options: run if options == {"project": "p"} else None)
    mlflow = types.SimpleNamespace(log_metrics=lambda values, step: logged.append((step, values)))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    loggers = example("loggers")
    for log in (loggers.weights_and_biases(project="p"), loggers.mlflow_run()):
        for record in records:
            log(record)
    assert logged == [(r["round"], loggers.numbers(r)) for r in records] * 2


def test_fine_tuning_starts_from_the_checkpoint(example, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With random pictures in place of CIFAR: what is pretrained is what clients begin with, but for the last layer."""
    module = example("fine_tune")
    random = torch.Generator().manual_seed(0)

    def load(name: str) -> types.SimpleNamespace:
        classes = {"cifar10": 10, "cifar100": 100}[name]
        x = torch.randint(0, 256, (200, 3, 32, 32), dtype=torch.uint8, generator=random)
        y = torch.randint(0, classes, (200,), generator=random)
        return types.SimpleNamespace(train_x=x, train_y=y, test_x=x[:20], test_y=y[:20], num_classes=classes)

    monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(module, "CHECKPOINT", tmp_path / "runs/checkpoint.pt")
    module.pretrain(epochs=1, batch=50)
    known = torch.load(module.CHECKPOINT, weights_only=True)
    task = module.task()
    assert len(task.clients) == 100 and task.model.fc.out_features == 10
    found = task.model.state_dict()
    assert all(torch.equal(found[name], w) for name, w in known.items() if not name.startswith("fc."))
    config = preset("own", "dq", round__count=1, clients__fraction=0.02, local__epochs=1)
    history = fedfp8.run(config, **vars(task))
    assert history.summary["bytes_total"] > 0 and not history.rounds[-1]["rejected"]
