"""`fedfp8 inspect`, `models`, `presets`, `settings`, `reproduce --dry-run` and shell completion."""

import json
from pathlib import Path

import pytest

import fedfp8
from fedfp8 import models
from fedfp8.fl import PRESETS
from fedfp8.paper import paper
from fl_tools import tiny


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    fedfp8.run(tiny("dq", 1, round__keep_payloads=1), out=folder)
    return folder


def test_inspect_shows_the_tensors_of_a_kept_message(fedfp8_command, kept: Path) -> None:
    payload = next((kept / "payloads/round-1").glob("up-*"))
    code, out, err = fedfp8_command("inspect", str(payload), "--layout", str(kept))
    assert code == 0, err
    assert "6.weight" in out and f"{payload.stat().st_size:,} bytes" in out
    code, by_name, _ = fedfp8_command("inspect", str(payload), "--layout", "digits")
    assert code == 0 and by_name == out
    code, out, _ = fedfp8_command("inspect", str(payload), "--layout", "digits", "--json")
    content = json.loads(out)
    assert content["bytes"] == payload.stat().st_size
    assert [row["elements"] for row in content["tensors"] if "small" in row["name"]] == [784, 122]  # of 4 and 2 tensors
    assert len(content["tensors"]) == 16 - 2 - 4 + 2 + 6  # one of them is 7 diagonals of 4 x 4 frequencies


def test_inspect_of_a_link_with_a_format_of_its_own(fedfp8_command, tmp_path: Path) -> None:
    fedfp8.run(tiny("uq", 1, round__keep_payloads=1, up__format="E5M2"), out=tmp_path)
    payload = next((tmp_path / "payloads/round-1").glob("up-*"))
    code, out, err = fedfp8_command("inspect", str(payload), "--layout", str(tmp_path))
    assert code == 0 and "6.weight" in out, err
    tensors = json.loads((tmp_path / "payloads/tensors.json").read_text())["tensors"]
    assert tensors["6.weight"]["up"] > 0 and tensors["6.weight"]["down"] > 0


def test_inspect_says_what_is_wrong(fedfp8_command, kept: Path, tmp_path: Path) -> None:
    data = next((kept / "payloads/round-1").glob("down-*")).read_bytes()
    for name, damaged in (("short", data[:-9]), ("flipped", data[:70] + bytes([data[70] ^ 4]) + data[71:])):
        (tmp_path / name).write_bytes(damaged)
        code, out, err = fedfp8_command("inspect", str(tmp_path / name), "--layout", str(kept))
        assert (
            code == 1 and out == "" and f"{tmp_path / name} is not a whole fedfp8 message" in "".join(err.split("\n"))
        )
    assert "cannot be read" in fedfp8_command("inspect", str(tmp_path / "nothing"))[2]
    (tmp_path / "whole").write_bytes(data)
    assert "neither a run folder nor one of" in fedfp8_command("inspect", str(tmp_path / "whole"), "--layout", "vgg")[2]
    code, _, err = fedfp8_command("inspect", str(tmp_path / "whole"), "--layout", "digits:7")
    assert code == 1 and "is not a message of --layout digits:7: layout fingerprint" in "".join(err.split("\n"))
    code, out, _ = fedfp8_command("inspect", str(tmp_path / "whole"))
    assert code == 0 and "--layout RUN" in out  # how to see its tensors


def test_models_lists_every_network(fedfp8_command) -> None:
    code, out, _ = fedfp8_command("models")
    assert code == 0 and all(name in out for name in models.MODELS)


def test_presets_lists_every_preset_with_its_settings(fedfp8_command) -> None:
    code, out, _ = fedfp8_command("presets")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == list(PRESETS)
    assert "model.name=kwt1" in out and "--task" in out.splitlines()[-1]


def test_settings_lists_every_key_with_its_value_and_meaning(fedfp8_command) -> None:
    code, out, _ = fedfp8_command("settings")
    assert code == 0 and "dq.kappa_up" in out and "seed = 0" in out
    code, out, _ = fedfp8_command("settings", "local", "--preset", "lenet-cifar10-iid", "--json")
    found = {item["key"]: item for item in json.loads(out)}
    assert code == 0 and found["local.batch_size"]["value"] == 50 and all(key.startswith("local.") for key in found)
    assert all(item["meaning"] for item in found.values())
    assert "no setting contains" in fedfp8_command("settings", "nonsense")[2]


def test_dry_run_of_a_reproduction_prints_the_plan_and_writes_nothing(fedfp8_command, tmp_path, monkeypatch) -> None:
    numbers = {"digits": {"fp32": paper.Reported(90.0, 1.0, 1.0), "uq": paper.Reported(89.0, 1.0, 4.0)}}
    monkeypatch.setitem(paper.CELLS, "digits", paper.Cell("digits", "CNN", "digits", "i.i.d."))
    monkeypatch.setitem(paper.TABLES, "table1", paper.PaperTable("table1", "Table 1", ("fp32", "uq"), numbers))
    out_folder = tmp_path / "paper"
    code, out, err = fedfp8_command(
        "reproduce", "table1", "--dry-run", "--rounds", "7", "--seeds", "0,1", "--out", str(out_folder)
    )
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()[2:6]]
    assert [row[:5] for row in rows] == [["digits", m, s, "new", "0/7"] for m in ("fp32", "uq") for s in "01"]
    assert "In all about" in out and not out_folder.exists()
    code, out, _ = fedfp8_command("reproduce", "figure3", "--dry-run", "--out", str(out_folder))
    assert code == 0 and "trains no network" in out and not out_folder.exists()
    assert "unknown experiment" in fedfp8_command("reproduce", "table9")[2]


def test_the_shell_can_complete_commands_and_options(fedfp8_command, monkeypatch) -> None:
    monkeypatch.setenv("_FEDFP8_COMPLETE", "complete_bash")
    for words, word, expected in (
        ("fedfp8 re", 1, {"report", "reproduce", "resume"}),
        ("fedfp8 run --keep", 2, {"--keep-payloads"}),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(word))
        code, out, _ = fedfp8_command()
        assert code == 0 and set(out.split()) == expected


def test_settings_fit_a_terminal(fedfp8_command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes the output for a terminal
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = fedfp8_command("settings", "dq")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert any(line.startswith(" " * 35) for line in out.splitlines())  # a long meaning goes on below itself
