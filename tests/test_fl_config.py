"""Settings: presets, recipes, suggestions, contradictions, files."""

import re
import tomllib
from pathlib import Path

import pytest

from fedfp8.errors import ConfigError, RunError
from fedfp8.fl import METHODS, PRESETS, Config, from_dict, preset, to_toml, with_method, with_settings
from fedfp8.fl.checkpoint import read_config
from fedfp8.fl.federation import client_formats
from fedfp8.fl.presets import from_file
from fedfp8.fl.settings import parse_assignment


def test_the_papers_cells_are_presets() -> None:
    assert len(PRESETS) == 14 and next(iter(PRESETS)) == "digits"
    lenet = preset("lenet-cifar10-dir", "uq+")
    assert (lenet.clients.count, lenet.clients.fraction, lenet.round.count) == (100, 0.1, 1000)
    assert (lenet.local.lr, lenet.local.weight_decay, lenet.local.batch_size, lenet.local.epochs) == (0.1, 0.001, 50, 5)
    assert (lenet.data.partition, lenet.data.concentration) == ("dirichlet", 0.3)
    speaker = preset("kwt1-speech-speaker")
    assert (speaker.clients.fraction, speaker.round.count, speaker.local.steps) == (0.01, 500, 50)
    assert (speaker.local.optimizer, speaker.local.schedule, speaker.local.lr) == ("adamw", "cosine", 0.001)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_every_preset_with_every_method_survives_a_toml_file(name: str, method: str) -> None:
    config = preset(name, method, seed=2**62 + 1)
    values = tomllib.loads(to_toml(config))
    assert from_dict(values) == config == from_file(values)
    assert config.method == method and config.preset == name


def test_any_text_survives_a_toml_file() -> None:
    """Quotes, backslashes, line ends, controls and every plane of Unicode in a path; numbers to the last digit."""
    for text in ('a "b" \\c', "".join(map(chr, range(128))), "größe 模 \U0001f600", "[x]\r\n= 1 # no"):
        for rate in (0.1, 1e-7, 1e22, 5e-324, 1 / 3):
            config = with_settings(Config(), {"data.dir": text, "local.lr": rate})
            assert from_dict(tomllib.loads(to_toml(config))) == config


def test_recipes() -> None:
    links = {m: (c.qat.rounding, c.up.rounding, c.down.rounding) for m in METHODS for c in [preset("digits", m)]}
    assert links["fp32"] == ("off", "none", "none")
    assert links["bq"] == ("nearest", "nearest", "nearest")
    assert links["uq"] == links["uq+"] == ("nearest", "stochastic", "stochastic")
    assert links["dq"] == ("nearest", "dithered", "dithered")
    assert [m for m in METHODS if preset("digits", m).server.optimize] == ["uq+"]


@pytest.mark.parametrize("first", METHODS)
@pytest.mark.parametrize("second", METHODS)
def test_a_method_leaves_nothing_of_the_one_before_it(first: str, second: str) -> None:
    assert with_method(preset("digits", first), second) == preset("digits", second)


def test_partial_file_takes_the_rest_from_its_preset_and_method(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('preset = "lenet-cifar10-iid"\nmethod = "dq"\n[dq]\nkappa_up = 4\n')
    assert read_config(path) == preset("lenet-cifar10-iid", "dq", dq__kappa_up=4.0)
    path.write_text("[round]\ncount = 3\n")
    assert read_config(path) == preset("digits", "uq", round__count=3)


@pytest.mark.parametrize(
    "text, says",
    [
        ("[rounds]\ncount = 3", "round.count"),
        ("[dq]\nkappa = 4", "dq.kappa_up"),
        ("sed = 4", "seed"),
        ('preset = "digit"', "did you mean digits"),
        ('method = "uq++"', "choose one of"),
        ("[round]\ncount = 1.5", "whole number"),
        ("round = 3", "round"),
        ('[wire]\nlossless = "maybe"', "true or false"),
    ],
)
def test_files_with_mistakes(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_config(path)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    for content in (b"a = = b", b"\xff\xfe"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(RunError, match="cannot be read as a config"):
            read_config(tmp_path / "x")
    with pytest.raises(RunError, match="cannot be read as a config"):
        read_config(tmp_path / "absent")


@pytest.mark.parametrize(
    "key, near",
    [("dq.kapa_up", "dq.kappa_up"), ("local.learning_rate", "local."), ("rounds", "round."), ("count", "count"),
     ("wire.cache", "wire.client_cache"), ("dq", "dq."), ("", "known|mean")],
)  # fmt: skip
def test_unknown_settings_suggest_the_right_one(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting {key!r}; .*{near}"):
        with_settings(Config(), {key: 1})


def test_labels_are_no_settings() -> None:
    """`--set method=dq` would rename the run and go on running UQ."""
    for key in ("method", "preset"):
        with pytest.raises(ConfigError, match=f"use --{key}"):
            with_settings(Config(), {key: "dq"})


@pytest.mark.parametrize(
    "key, text, value",
    [("round.count", "7", 7), ("round.count", "1e2", 100), ("local.lr", "1", 1.0), ("wire.lossless", "off", False),
     ("wire.lossless", "Yes", True), ("clients.formats", "FP32:1", "FP32:1"), ("seed", "9007199254740993", 2**53 + 1),
     ("seed", "-3", -3)],
)  # fmt: skip
def test_text_takes_the_type_of_the_setting(key: str, text: str, value: object) -> None:
    section, _, name = key.rpartition(".")
    config = with_settings(Config(), {key: text})
    found = getattr(getattr(config, section) if section else config, name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "key, text",
    [("round.count", "inf"), ("round.count", "nan"), ("round.count", "2.5"), ("round.count", "ten"),
     ("round.count", "0"), ("local.lr", "fast"), ("local.lr", "inf"), ("local.lr", "-1"),
     ("local.weight_decay", "nan"), ("local.prox", "-1"),
     ("local.steps", "-1"), ("wire.lossless", "2"), ("clients.fraction", "1.5"), ("clients.fraction", "0"),
     ("round.min_clients", "-1"), ("wire.history", "0"), ("qat.format", "E9M9"), ("qat.rounding", "up"),
     ("up.rounding", "floor"), ("down.format", "fp8"), ("local.optimizer", "adam"), ("server.choose", "best"),
     ("dq.kappa_up", "0"), ("data.concentration", "0"), ("data.limit", "-1")],
)  # fmt: skip
def test_values_out_of_range_are_refused(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):  # by the name the user gave it
        with_settings(Config(), {key: text})


@pytest.mark.parametrize(
    "settings, names",
    [
        ({"server.optimize": True, "down.rounding": "dithered"}, ["server.optimize", "down.rounding"]),
        ({"qat.rounding": "off"}, ["qat.rounding", "up.rounding"]),
        ({"up.format": "E5M2", "up.rounding": "dithered"}, ["up.format", "up.rounding"]),
        ({"local.epochs": 2, "local.steps": 3}, ["local.epochs", "local.steps"]),
        ({"local.epochs": 0}, ["local.epochs", "local.steps"]),
        ({"clients.formats": "FP32:1", "qat.rounding": "off", "up.rounding": "none", "down.rounding": "none"},
         ["clients.formats", "qat.rounding"]),
    ],
)  # fmt: skip
def test_contradictions_name_both_settings(settings: dict[str, object], names: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        with_settings(Config(), settings)
    assert all(name in str(error.value) for name in names)


def test_settings_are_applied_at_once() -> None:
    """Each alone would contradict what is there."""
    config = with_settings(Config(), {"qat.rounding": "off", "up.rounding": "none", "down.rounding": "none"})
    assert not config.prepared
    assert with_settings(Config(), {"local.steps": 4, "local.epochs": 0}).local.steps == 4


def test_assignments() -> None:
    assert parse_assignment(" dq.kappa_up = 4 ") == ("dq.kappa_up", "4")
    assert parse_assignment("clients.formats=0=FP32") == ("clients.formats", "0=FP32")
    for bad in ("dq.kappa_up", "=4", ""):
        with pytest.raises(ConfigError, match=r"section\.field=value"):
            parse_assignment(bad)


def test_formats_of_clients() -> None:
    def formats(text: str, count: int = 8) -> list[str]:
        return client_formats(preset("digits", clients__formats=text), count)

    assert formats("") == ["E4M3"] * 8
    assert client_formats(preset("digits", "fp32"), 2) == ["FP32"] * 2
    assert formats("0=FP32, 7=e5m2") == ["FP32", *["E4M3"] * 6, "E5M2"]
    shared = formats("E4M3:2,FP32:1,E5M2:1")
    assert [shared.count(f) for f in ("E4M3", "FP32", "E5M2")] == [4, 2, 2]
    assert shared == formats("E4M3:2,FP32:1,E5M2:1") and shared != sorted(shared)
    assert formats("E4M3,FP32").count("FP32") == 4
    for bad, says in [("9=FP32", "0 to 7"), ("x=FP32", "'x'"), ("E9M9:1", "9, 9"), ("0=FP32,E4M3:1", "0=FP32"),
                      ("E4M3:none", "share"), ("E4M3:0", "share"), ("E4M3:-1,FP32:2", "share")]:  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            formats(bad)
