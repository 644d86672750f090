"""A user's own task: any data, loss, metric; recorded as such; what cannot work is said with its cause."""

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedfp8
from fedfp8.errors import ConfigError, Fedfp8Error, RunError
from fedfp8.fl import preset, resume
from fedfp8.fl.config import LocalConfig
from fedfp8.fl.devices import devices_of
from fedfp8.fl.examples import sources
from fedfp8.fl.federation import Federation, build, from_task
from fedfp8.fl.summary import metric_of
from fedfp8.nn import load_state
from fl_tools import comparable, own_data, own_tiny

ALL = {"clients__fraction": 1.0}
Pair = tuple[torch.Tensor, torch.Tensor]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def mse(model: nn.Module, batch: Pair) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def mae(model: nn.Module, batch: Pair) -> tuple[float, float]:
    return (model(batch[0]) - batch[1]).abs().mean().item(), len(batch[1])


def regression(clients: int = 3) -> list[Pair]:
    return [(x, x[:, :3] * 0.5) for x, _ in own_data(clients)]


def own(config=None, **task: Any) -> fedfp8.fl.History:
    given = {"clients": own_data(), "test": own_data(1, seed=9)[0]} | task
    model = given.pop("model", None) or network()
    return fedfp8.run(config or own_tiny("uq", 2, **ALL), model=model, **given)


# Data


class Rows(Dataset):
    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __len__(self) -> int:
        return len(self.pair[1])

    def __getitem__(self, i: int) -> Any:
        return self.pair[0][i].numpy(), int(self.pair[1][i])


def test_tensors_arrays_and_datasets_are_the_same_run() -> None:
    pairs, config = own_data(), own_tiny("dq", 2)
    wanted = comparable(own(config).rounds)
    as_arrays = [(x.double().numpy(), y.numpy()) for x, y in pairs]
    for clients in (
        as_arrays,
        [Rows(p) for p in pairs],
        [TensorDataset(*p) for p in pairs],
        [pairs[0], *map(Rows, pairs[1:])],
    ):
        assert comparable(own(config, clients=clients).rounds) == wanted
    assert comparable(own(config, test=Rows(own_data(1, seed=9)[0])).rounds) == wanted


def one_pass(pair: Pair, size: int) -> Iterator[dict[str, Any]]:
    for x, y in zip(pair[0].split(size), pair[1].split(size), strict=True):
        yield {"x": x, "more": [y, "text"]}


def nested_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["more"][0])


def test_functions_that_give_nested_batches() -> None:
    """The very steps of stored tensors, where one batch is all there is."""
    pairs, config = own_data(), own_tiny("fp32", 2, local__steps=3, local__batch_size=12, **ALL)
    streams = [functools.partial(one_pass, pair, 12) for pair in pairs]
    found = own(config, clients=streams, test=functools.partial(one_pass, own_data(1, seed=9)[0], 5), loss=nested_loss)
    wanted = own(config)
    for name, tensor in found.state.items():
        torch.testing.assert_close(tensor, wanted.state[name], rtol=1e-5, atol=1e-6)  # another order within the batch
    metric = found.summary["metric"]
    assert (metric["name"], metric["higher_is_better"]) == ("loss", False)
    assert metric["value"] == found.rounds[-1]["loss"] == pytest.approx(wanted.rounds[-1]["loss"], rel=1e-5)


def test_epochs_and_steps_of_a_stream() -> None:
    (stream,) = sources({"client 0": functools.partial(one_pass, own_data(1)[0], 5)})  # batches of 5, 5, 2
    assert stream.size == 12
    count = lambda **local: len(list(stream.batches(LocalConfig(**local), torch.Generator())))  # noqa: E731
    assert count(epochs=2) == 6 and count(epochs=0, steps=4) == 4


def test_integers_stay_integers_and_floats_become_float32() -> None:
    data = {"ids": np.arange(6, dtype=np.int32).reshape(3, 2), "x": np.zeros((3, 1)), "ok": np.array([True] * 3)}
    (source,) = sources({"client 0": data})
    (batch,) = source.piece(0, 10)
    assert {k: v.dtype for k, v in batch.items()} == {"ids": torch.int32, "x": torch.float32, "ok": torch.bool}


class Noisy(Dataset):
    """Draws from all three global generators, as augmentation does."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __len__(self) -> int:
        return len(self.pair[1])

    def __getitem__(self, i: int) -> Any:
        noise = torch.rand(()) + np.random.rand() + random.random()  # noqa: NPY002
        return (self.pair[0][i] + noise).float(), self.pair[1][i]


@pytest.mark.parametrize("loaders", [False, True])
def test_a_users_own_randomness_follows_from_the_seed(loaders: bool) -> None:
    """Dropout, augmentation and shuffling: the same for any number of workers, and the caller's generators go on."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    clients: list[Any] = [Noisy(pair) for pair in own_data(2)]
    if loaders:
        clients = [DataLoader(dataset, batch_size=5, shuffle=True) for dataset in clients]
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    runs = [own(own_tiny("uq", 2, **ALL), model=model, clients=clients, workers=n) for n in (0, 0, 2)]
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert comparable(runs[0].rounds) == comparable(runs[1].rounds) == comparable(runs[2].rounds)
    other = own(own_tiny("uq", 2, seed=1, **ALL), model=model, clients=clients)
    assert other.rounds[-1]["model"] != runs[0].rounds[-1]["model"]


class Endless(IterableDataset):
    def __iter__(self):
        yield 1


def test_data_that_is_refused() -> None:
    generator = DataLoader(Rows(own_data(1)[0]), generator=torch.Generator())
    for data, why in (
        (Endless(), r"client 1 is an IterableDataset.*functools.partial\(DataLoader"),
        (generator, "client 1 is a DataLoader with a generator of its own"),
        (3, "client 1 is a int; give a pair of tensors"),
        ("data.csv", "client 1 is a str; give a pair of tensors"),
        (["a", "b"], "client 1 is a list without tensors of examples"),
        (lambda: 3, "function of client 1 gave a int; it must give an iterable of batches"),
        ((torch.zeros(3, 5), torch.zeros(3), torch.zeros(2)), r"client 1 has tensors of \[3, 3, 2\] examples"),
        ((np.array(["a"]), np.array([1])), "an array of <U1 cannot become a tensor"),
    ):
        with pytest.raises(ConfigError, match=why):
            own(clients=[own_data(1)[0], data])
    with pytest.raises(ConfigError, match=r"model is a type; give an nn.Module, an instance"):
        own(model=nn.Linear)


# Loss and metric


def test_a_metric_with_a_name_and_a_direction(tmp_path: Path) -> None:
    clients, test = regression(), regression(1)[0]
    metric = fedfp8.Metric(mae, higher_is_better=False)
    config = own_tiny("dq", 4, local__epochs=5, local__steps=0, **ALL)
    history = own(config, clients=clients, test=test, loss=mse, metric=metric, name="halves", out=tmp_path)
    values = [line["metric"]["value"] for line in history.rounds]
    assert values[-1] < values[0] and history.metric == values[-1]
    line = json.loads((tmp_path / "history.jsonl").read_text().splitlines()[-1])
    assert line["metric"] == {
        "name": "mae",
        "value": values[-1],
        "higher_is_better": False,
        "sent": line["metric"]["sent"],
    }
    assert "accuracy" not in line and "accuracy" not in history.summary
    assert history.summary["metric"] == line["metric"] | {"best": min(values)} and history.summary["name"] == "halves"
    with pytest.raises(RunError, match=r"reports mae, not accuracy; use history.metric"):
        _ = history.accuracy
    # Weights and losses add up over the pieces as over the whole
    model = history.model()
    assert history.metric == pytest.approx(mae(model, test)[0], abs=0.02)  # the same weights, but not rounded to FP8


def test_accuracy_keeps_its_old_keys() -> None:
    history = own()
    line = history.rounds[-1]
    assert line["accuracy"] == line["metric"]["value"] and line["accuracy_sent"] == line["metric"]["sent"]
    assert history.accuracy == history.metric == history.summary["accuracy"]
    assert metric_of({"accuracy": 0.5}) == {"name": "accuracy", "value": 0.5, "higher_is_better": True}  # 0.1.0's
    assert metric_of({"round": 1}) is None


def test_pieces_of_the_test_set_are_weighted() -> None:
    """The whole test set at once, by hand; 23 examples in pieces of 8 (4 * batch_size)."""
    test = own_data(1, examples=23, seed=9)[0]
    history = own(own_tiny("fp32", 1, local__batch_size=2, **ALL), test=test)
    scores = history.model()(test[0])
    assert history.accuracy == int((scores.argmax(1) == test[1]).sum()) / 23
    assert history.rounds[-1]["loss"] == pytest.approx(F.cross_entropy(scores, test[1]).item(), rel=1e-5)


class PerToken(nn.Module):
    """Scores of every token: [N, T] numbers -> [N, T, 7]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


TOKENS = torch.arange(60).view(10, 6) % 7


@pytest.mark.parametrize(
    "model, data, line",
    [
        (
            nn.Linear(5, 1),
            (torch.randn(9, 5), torch.randn(9, 1)),
            r"y is torch.float32; for regression give loss=.*mse_loss\(model\(batch\[0\]\), batch\[1\]\)",
        ),
        (
            nn.Linear(5, 1),
            (torch.randn(9, 5), torch.randn(9)),
            r"mse_loss\(model\(batch\[0\]\).view_as\(batch\[1\]\), ",
        ),
        (
            nn.Linear(5, 1),
            (torch.randn(9, 5), torch.ones(9).long()),
            r"gives \(9, 1\).*binary_cross_entropy_with_logits",
        ),
        (PerToken(), (TOKENS, TOKENS), r"gives \(10, 6, 7\).*cross_entropy\(model\(batch\[0\]\).flatten\(0, -2\)"),
        (
            nn.Conv2d(1, 3, 1),
            (torch.randn(4, 1, 5, 5), torch.ones(4, 5, 5).long()),
            r"loss=.*cross_entropy\(model\(batch",
        ),
        (
            nn.Linear(5, 3),
            {"x": torch.randn(9, 5)},
            r"batches are dicts of x; give e.g. loss=.*model\(\*\*batch\).loss",
        ),
        (nn.Linear(5, 3), torch.randn(9, 5), r"batches are not pairs"),
    ],
)
def test_without_a_loss_only_classification_runs(model: nn.Module, data: Any, line: str) -> None:
    """What was silently wrong once: regression as cross-entropy, an "accuracy" of 7.0 for tokens."""
    with pytest.raises(ConfigError, match="no loss was given, and .*" + line):
        own(model=model, clients=[data, data], test=data)


def test_a_loss_and_a_metric_that_are_refused() -> None:
    for loss, why in (
        (lambda model, batch: 1.0, "gave a float"),
        (lambda model, batch: model(batch[0]).sum(1), r"gave a tensor of shape \(12,\)"),
        (lambda model, batch: torch.tensor(1.0), "gave a tensor that does not depend on the weights"),
    ):
        with pytest.raises(ConfigError, match=why):
            own(loss=loss)
    with pytest.raises(RunError, match=r"metric\(model, batch\) gave 0.5; a metric must give \(value, weight\)"):
        own(metric=lambda model, batch: 0.5)
    with pytest.raises(RunError, match=r"weights of the metric metric sum to 0\.0, not above 0"):
        own(metric=lambda model, batch: (0.5, 0))


PAIR = own_data(1)[0]


@pytest.mark.parametrize(
    "task, why",
    [
        ({"clients": {"a": PAIR}}, r"clients is a dict; give a list: list\(clients.values\(\)\)"),
        ({"clients": (pair for pair in [PAIR])}, "clients is a generator; give a list with the data of each client"),
        ({"clients": PAIR}, r"clients is a tuple of tensors; give a list .* \[\(x, y\), ...\]"),
        ({"clients": []}, "no clients were given"),
        ({"clients": [[PAIR, (PAIR[0][:3], PAIR[1][:3])]]}, "for a list of batches give a function that returns it"),
        ({"clients": [(PAIR[0], np.array(["a"] * 12))]}, "client 0: an array of <U1 cannot become a tensor"),
        ({"loss": "mse"}, r"loss is 'mse'; give a function loss\(model, batch\) that returns one number"),
        ({"metric": 3}, r"metric is 3; give a function metric\(model, batch\) that returns \(value, weight\)"),
        ({"transform": 3}, r"transform is 3; give a function transform\(batch, generator, train\)"),
        ({"loss": nn.CrossEntropyLoss()}, r"loss\(model, batch\) failed on a batch of the test set: TypeError"),
        ({"model": nn.Linear}, "model is a type; give an nn.Module, an instance and not its class"),
        ({"model": fedfp8.prepare(nn.Linear(5, 3))}, r"prepared already.*give fedfp8.restore\(model\)"),
        (
            {"clients": [(PAIR[0].byte(), PAIR[1])], "test": (PAIR[0].byte(), PAIR[1])},
            "inputs of torch.uint8 .* if it takes floats, convert x beforehand",
        ),
    ],
)
def test_what_is_refused_says_what_to_give(task: dict[str, Any], why: str) -> None:
    with pytest.raises(Fedfp8Error, match=why):
        own(**task)


def test_a_config_that_is_none_says_how_to_make_one() -> None:
    with pytest.raises(ConfigError, match=r'config is a str; give a Config, for example fedfp8.preset\("own", "dq"\)'):
        fedfp8.run("dq")


def test_class_numbers_of_any_integer_type() -> None:
    wanted = comparable(own().rounds)
    for dtype in (torch.int32, torch.int8, torch.uint8):
        clients, test = [(x, y.to(dtype)) for x, y in own_data()], own_data(1, seed=9)[0]
        assert comparable(own(clients=clients, test=(test[0], test[1].to(dtype))).rounds) == wanted


def test_wrong_labels_are_named() -> None:
    clients = own_data()
    clients[2][1][3] = 3
    with pytest.raises(ConfigError, match="client 2 has labels from 0 to 3, but the model gives 3 scores: use 0 to 2"):
        own(clients=clients)
    line = own(own_tiny("uq", 1, local__batch_size=12, **ALL), clients=[Rows(pair) for pair in clients]).rounds[-1]
    assert line["rejected"] == [
        {"client": 2, "reason": "DataError: labels from 0 to 3, but the model gives 3 scores: use 0 to 2"}
    ]
    test = own_data(1)[0]
    test[1][0] = -1
    with pytest.raises(ConfigError, match="the test set has labels from -1 to"):
        own(test=test)


def test_nan_and_divergence_are_named() -> None:
    clients = own_data()
    clients[1][0][:] = float("nan")
    (found,) = own(own_tiny("fp32", 1, **ALL), clients=clients).rounds[-1]["rejected"]
    assert found["client"] == 1 and found["reason"].endswith("in step 1: the client's data holds NaN or Inf")
    (found,) = own(own_tiny("uq", 1, **ALL), clients=clients).rounds[-1]["rejected"]  # here an FP8 layer meets it first
    assert found == {"client": 1, "reason": "DataError: the client's data holds NaN or Inf"}
    with pytest.raises(
        RunError, match=r"all 4 clients of the first round were rejected.*training diverged; lower local.lr"
    ):
        own(own_tiny("fp32", 1, local__lr=1e30, local__steps=8, **ALL))
    test = own_data(1)[0]
    test[0][0] = float("nan")
    with pytest.raises(RunError, match="the loss of the untrained model is nan on the test set"):
        own(own_tiny("fp32", 1), test=test)


def test_a_model_that_cannot_take_the_data() -> None:
    with pytest.raises(
        RunError, match=r"cannot take inputs of torch.int64 and shape \(12, 5\) from the test set: Runtime"
    ):
        own(test=(torch.ones(12, 5).long(), torch.zeros(12).long()))


# Ranges, frozen parameters, transform


def federation_of(model: nn.Module, data: Any, **task: Any) -> tuple[Any, Federation]:
    config = own_tiny("uq", 1)
    return config, from_task(config, fedfp8.Task(model, [data, data], data, **task))


def token_loss(model: nn.Module, batch: Pair) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def test_input_ranges_are_those_of_what_the_layer_sees() -> None:
    """Token numbers are not its input; a scaled copy of the data is."""
    config, federation = federation_of(PerToken(), (TOKENS * 0 + 6, TOKENS), loss=token_loss)
    assert federation.ranges == {}
    assert float(federation.network(config).head.beta.detach()) == 0.0  # not set: the first minibatch will

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.unused = nn.Linear(5, 3), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x / 1000)

    x, y = own_data(1)[0]
    config, federation = federation_of(Scaled(), (x * 1000, y))
    largest = float((x * 1000 / 1000).abs().max())
    assert federation.ranges == {"layer.beta": largest}
    assert float(federation.network(config).layer.beta.detach()) == largest


def test_frozen_parameters_do_not_travel(tmp_path: Path) -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    history = own(model=model, out=tmp_path, workers=1)
    assert [name for name in history.state if "weight" in name] == ["2.weight"]
    trained = history.model()
    assert torch.equal(trained[0].weight, model[0].weight) and not torch.equal(trained[2].weight, model[2].weight)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of the model has requires_grad=True"):
        own(model=model)


def doubled(batch: Pair, generator: torch.Generator | None, train: bool) -> Pair:
    assert train == (generator is not None)
    return batch[0] * 2, batch[1]


def test_a_transform_and_skip() -> None:
    pairs, test = own_data(), own_data(1, seed=9)[0]
    found = own(clients=pairs, test=test, transform=doubled)
    wanted = own(clients=[(x * 2, y) for x, y in pairs], test=(test[0] * 2, test[1]))
    assert comparable(found.rounds) == comparable(wanted.rounds)
    skipped = own(skip="0")
    assert [name for name in skipped.state if "alpha" in name] == ["2.alpha"]


# Records


def test_own_runs_are_recorded_as_such(tmp_path: Path) -> None:
    history = own(preset("digits", "uq", round__count=1), out=tmp_path / "a")
    config = fedfp8.fl.checkpoint.read_config(tmp_path / "a/config.toml")
    assert (config.preset, config.name, config.data.name) == ("own", "Sequential", "own")
    assert (config.model.name, config.clients.count) == ("Sequential", 4)
    assert history.summary["preset"] == "own"
    again = own(config, name="mine", out=tmp_path / "b")  # a recorded config can be used again
    assert again.summary["name"] == "mine" and comparable(again.rounds) == comparable(history.rounds)
    for setting in ({"data__limit": 5}, {"model__stem": "cifar"}, {"clients__count": 7}, {"data__partition": "iid"}):
        with pytest.raises(
            ConfigError, match=rf"{next(iter(setting)).replace('__', '.')}=.* means nothing in a run on your"
        ):
            own(preset("digits", "uq", **setting))


def stop_after_one(line: dict[str, Any]) -> None:
    if line["round"] == 1:
        raise ZeroDivisionError


def test_an_own_run_with_the_presets_layout_is_not_resumed_on_digits(tmp_path: Path) -> None:
    """It went on with the digits and said "finished"."""
    model = build(preset("digits")).model
    clients = [(torch.rand(12, 1, 8, 8), torch.arange(12) % 10) for _ in range(4)]
    given = {"model": model, "clients": clients, "test": clients[0]}
    with pytest.raises(ZeroDivisionError):
        fedfp8.run(preset("digits", "uq", round__count=2), **given, out=tmp_path, on_round=stop_after_one)
    with pytest.raises(RunError, match="own model and data, which are not in the folder"):
        resume(tmp_path)
    assert resume(tmp_path, **given).summary["finished"]
    with pytest.raises(ConfigError, match="preset 'own' has no data of its own"):
        fedfp8.run(preset("own"))


def test_a_preset_is_not_resumed_on_own_data(tmp_path: Path) -> None:
    config = preset("digits", "uq", round__count=1, data__limit=100, data__test_limit=50, clients__count=4)
    fedfp8.run(config, out=tmp_path)
    with pytest.raises(RunError, match="is a run of the preset 'digits'; resume it without model and data"):
        resume(tmp_path, model=network(), clients=own_data(), test=own_data(1)[0])


# Workers and scripts

SCRIPT = """
import torch, fedfp8
from torch import nn
from fedfp8.fl import preset
x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
config = preset("own", "uq", round__count=1)
pair = (x, x[:, :3].argmax(1))
fedfp8.run(config, model=nn.Linear(5, 3), clients=[pair, pair], test=pair, workers=2)
"""


def test_a_script_without_the_guard_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    found = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()[-1]
    assert 'put the call under `if __name__ == "__main__":`' in last and "memory" not in found.stderr


NOTEBOOK = (
    SCRIPT.replace("config =", "class Net(nn.Sequential): pass\nconfig =")
    .replace("model=nn.Linear", "model=Net")
    .replace("Net(5, 3)", "Net(nn.Linear(5, 3))")
)


def test_a_model_class_of_a_notebook_is_named() -> None:
    found = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=300)
    last = found.stderr.strip().splitlines()[-1]
    assert found.returncode == 1 and "Net is defined in a notebook or an interactive session" in last
    assert "workers=0" in last


def test_a_lambda_cannot_be_given_to_workers() -> None:
    with pytest.raises(
        ConfigError, match=r"worker processes cannot be given this run: .*<lambda>.*top level of a module"
    ):
        own(loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), workers=1)


class Local(Dataset):
    """Cannot be used in a worker process."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        raise OSError("no such file: picture.png")


def test_what_every_client_fails_with_stops_the_run() -> None:
    with pytest.raises(
        RunError, match=r"all 2 clients of the first round were rejected.*OSError: no such file: picture.png"
    ):
        own(clients=[Local(), Local()], workers=1)


# Devices


def test_devices() -> None:
    assert devices_of(None) == devices_of("cpu") == devices_of(torch.device("cpu")) == ["cpu"]
    assert devices_of("auto") and devices_of("cpu, cpu") == ["cpu", "cpu"]
    with pytest.raises(
        ConfigError, match=r"device 'cuda:99' is not on this machine, which has cpu.*auto, cpu, cuda, mps"
    ):
        own(device="cuda:99")
    assert comparable(own(device="cpu").rounds) == comparable(own().rounds)


def test_tensors_are_moved_once_and_batches_follow() -> None:
    """The meta device stands in for a GPU: it has shapes and places, but no values."""
    config, federation = federation_of(network(), own_data(1)[0])
    away = federation.to("meta")
    pool = away.clients[0].data
    assert pool[0].device.type == "meta" and all(client.data is pool for client in away.clients)
    assert federation.clients[0].data[0].device.type == "cpu" and federation.to("cpu") is federation
    assert {p.device.type for p in away.network(config).parameters()} == {"meta"}
    stream = federation_of(network(), functools.partial(list, [own_data(1)[0]]))[1].to("meta")
    (batch,) = stream.test_batches(0)
    assert batch[0].device.type == batch[1].device.type == "meta"


# The model back


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))[:, :3]


def test_the_model_comes_back_and_is_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    given = Tied()
    start = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    history = own(model=given, out=tmp_path / "run")
    model = history.model()
    assert type(model) is Tied and type(model.first) is nn.Linear and model.last.weight is model.first.weight
    assert all(torch.equal(tensor, start[name]) for name, tensor in given.state_dict().items())  # untouched
    assert not torch.equal(model.first.weight, given.first.weight) and int(model.norm.num_batches_tracked) > 0
    for name, tensor in model.state_dict().items():
        assert name == "last.weight" or torch.equal(tensor, history.state[name])
    found = command(tmp_path, "export", "run", "-o", "model.safetensors")
    assert found.returncode == 0, found.stderr
    loaded = Tied().eval()
    load_model(loaded, tmp_path / "model.safetensors")
    x = own_data(1)[0][0]
    assert torch.equal(loaded(x), model(x))


def test_the_model_comes_back_rounded(tmp_path: Path) -> None:
    """Its weights are those of the FP8 forward pass, which `restore` gives too."""
    from safetensors.torch import load_model

    config = own_tiny("uq", 2, **ALL)
    history = own(config, model=Tied(), out=tmp_path / "run")
    network = from_task(config, fedfp8.Task(Tied(), own_data(), own_data(1)[0])).network(config)
    load_state(network, history.state)
    model, wanted = history.model(rounded=True), fedfp8.restore(network, rounded=True).eval()
    x = own_data(1)[0][0]
    assert model.last.weight is model.first.weight and torch.equal(model.first.weight, wanted.first.weight)
    assert not torch.equal(model.first.weight, history.model().first.weight)
    assert torch.equal(model(x), wanted(x))
    found = command(tmp_path, "export", "run", "-o", "model.safetensors", "--rounded")
    assert found.returncode == 0, found.stderr
    load_model(loaded := Tied().eval(), tmp_path / "model.safetensors")
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(RunError, match="did not train in FP8"):
        own(own_tiny("fp32", 1, **ALL)).model(rounded=True)


# From the command line

TASK = """
import torch, fedfp8
from torch import nn
from torch.nn.functional import mse_loss

def loss(model, batch):
    return mse_loss(model(batch[0]), batch[1])

def make():
    torch.manual_seed(0)
    x = torch.randn(3, 20, 2)
    pairs = [(part, part.sum(1, keepdim=True)) for part in x]
    return {"model": nn.Linear(2, 1), "clients": pairs, "test": pairs[0], "loss": loss, "name": "sums"}

def wrong():
    return {"model": nn.Linear(2, 1)}
"""


def command(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-c", "from fedfp8.cli import main; main()", *arguments]
    return subprocess.run(line, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=300)


def scalars(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return set(EventAccumulator(str(folder / "tb")).Reload().Tags()["scalars"])


def test_a_task_on_the_command_line(fedfp8_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--task", "my_task:make", "--rounds", "2", "--workers", "1"]
    found = command(tmp_path, "compare", *options, "--methods", "fp32,dq", "--name", "adding", "--out", "all")
    assert found.returncode == 0, found.stderr
    assert "adding" in (tmp_path / "all/compare.md").read_text() and "loss" in (tmp_path / "all/compare.md").read_text()
    code, _, err = fedfp8_command("compare", *options, "--methods", "fp32,dq", "--name", "adding", "--out", "all")
    assert code == 0, err  # finished runs are recognised
    found = command(tmp_path, "run", *options, "--method", "dq", "--device", "cpu", "--tensorboard")
    assert found.returncode == 0, found.stderr
    folder = tmp_path / "runs/sums-dq-seed0"
    assert scalars(folder) >= {"loss", "loss_sent", "bytes_total"}
    assert json.loads((folder / "summary.json").read_text())["metric"]["name"] == "loss"
    assert fedfp8_command("resume", str(folder), "--rounds", "3", "--workers", "0")[0] == 0
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 3


def test_tasks_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_other_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for path, why in (
        ("my_other_task", "not of the form package.module:function"),
        ("my_missing_task:make", "cannot be imported: No module named 'my_missing_task'"),
        ("my_other_task:nothing", "my_other_task has no function 'nothing'"),
        ("my_other_task:wrong", "returned a dict of model; it has model, clients, test, loss"),
        ("my_other_task:nn.Linear", "has no function"),
    ):
        with pytest.raises(ConfigError, match=why):
            fedfp8.run(preset("own", task=path))


def test_a_task_on_flower_sends_the_same_bytes(fedfp8_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="needs `pip install fedfp8[flower]`")
    (tmp_path / "my_flower_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = preset("own", "dq", round__count=2, task="my_flower_task:make")
    options = ["--task", "my_flower_task:make", "--rounds", "2", "--method", "dq"]
    code, out, err = fedfp8_command("flower", "run", *options, "--engine", "grid", "--nodes", "2", "--out", "flower")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("sums, method dq, seed 0: 2 rounds with 1 of 3 clients each, Flower's engine grid;")
    assert lines[-2].startswith("sums / dq: loss ") and lines[-1] == "records: flower"
    here = fedfp8.run(config, out=tmp_path / "here")
    lines = [json.loads(line) for line in (tmp_path / "flower/history.jsonl").read_text().splitlines()]
    assert comparable(lines) == comparable(here.rounds)
    assert (tmp_path / "flower/config.toml").read_bytes() == (tmp_path / "here/config.toml").read_bytes()
