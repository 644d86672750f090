"""`fedfp8 run`, `resume`, `compare`, `demo` as a user meets them: exit codes, files, JSON lines, messages."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fedfp8
from fedfp8.fl import Config, from_dict, with_settings
from fedfp8.fl.describe import describe, to_toml
from fl_tools import TINY, command, comparable, settings_of, tiny


def test_run_writes_its_records_and_one_json_line_a_round(fedfp8_command, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--method", "dq", "--rounds", "2", "--seed", "3", "--workers", "0", "--out", str(folder), *settings_of()]
    code, out, err = fedfp8_command("run", "--json", *options)
    assert code == 0 and err == ""
    lines = [json.loads(line) for line in out.splitlines()]
    written = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in line.items() if k != "run"} for line in lines] == written
    assert {line["run"] for line in lines} == {"digits dq seed 3"} and [line["round"] for line in lines] == [0, 1, 2]
    for line in written:
        assert {"round", "bytes_down", "bytes_up", "bytes_total", "clients", "rejected", "seconds"} <= set(line)
    assert {"train", "server", "evaluate", "total"} <= set(written[-1]["seconds"])
    assert from_dict(tomllib.loads((folder / "config.toml").read_text())) == tiny("dq", 2, seed=3)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"] and summary["accuracy"] == written[-1]["accuracy"]
    assert summary["bytes_down"] + summary["bytes_up"] == summary["bytes_total"] == written[-1]["bytes_total"]
    assert comparable(written) == comparable(fedfp8.run(tiny("dq", 2, seed=3)).rounds)
    code, out, _ = fedfp8_command("resume", str(folder), "--json", "--workers", "0")
    assert code == 0 and out == ""  # nothing was left to do
    code, _, err = fedfp8_command("run", *options)
    assert code == 1 and "holds a run already" in err and "Traceback" not in err


def test_without_a_terminal_there_is_a_short_line_a_round_and_a_summary(fedfp8_command, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--method", "uq", "--rounds", "2", "--workers", "0", "--out", str(folder), *settings_of()]
    code, out, err = fedfp8_command("run", *options)
    assert code == 0 and err == ""
    lines = out.splitlines()
    about = f"digits, method uq, seed 0: 2 rounds with 3 of 6 clients each, in this process; records in {folder}"
    assert lines[0] == about  # what it is about to do
    assert [re.search(r"^uq  round (\d)/2  accuracy [\d.]+ %", line)[1] for line in lines[1:4]] == ["0", "1", "2"]
    assert all(len(line) <= 100 for line in lines[1:4]) and "  done  " in lines[3]
    assert lines[-2].startswith("digits / uq: accuracy ") and lines[-1] == f"records: {folder}"
    assert not any(line.startswith("{") for line in lines)


def test_resume_goes_on_past_the_planned_end(fedfp8_command, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--workers", "0", "--out", str(folder), *settings_of()]
    assert fedfp8_command("run", "--rounds", "1", *options)[0] == 0
    (folder / "sizes.json").write_text("{}")
    code, out, err = fedfp8_command("resume", str(folder), "--rounds", "2", "--workers", "0")
    assert code == 0 and "rounds 2 to 2" in out, err
    written = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert comparable(written) == comparable(fedfp8.run(tiny("uq", 2)).rounds)  # as one run of that length
    assert not (folder / "sizes.json").exists()
    code, _, err = fedfp8_command("resume", str(folder), "--rounds", "1")
    assert code == 1 and "has 2 rounds already" in err
    code, out, _ = fedfp8_command("resume", str(folder), "--workers", "0")
    assert code == 0 and f"all 2 rounds are done; go on past them with: fedfp8 resume {folder} --rounds N" in out
    cosine = [*options, "--overwrite", "--set", "local.schedule=cosine"]
    assert fedfp8_command("run", "--rounds", "1", *cosine)[0] == 0
    code, _, err = fedfp8_command("resume", str(folder), "--rounds", "2")
    assert code == 1 and "would be another run" in " ".join(err.split())


def test_overwriting_leaves_nothing_of_the_old_run(fedfp8_command, tmp_path: Path) -> None:
    """sizes.json stayed: the raw gain and the date were then those of the old run."""
    folder = tmp_path / "run"
    options = ["run", "--rounds", "1", "--workers", "0", "--out", str(folder), *settings_of()]
    assert fedfp8_command(*options, "--keep-payloads", "1")[0] == 0
    assert len(list((folder / "payloads/round-1").iterdir())) == 6  # three clients, both ways
    (folder / "sizes.json").write_text('{"down_raw": 1, "up_raw": 1, "date": "2000-01-01"}')
    assert fedfp8_command(*options, "--overwrite")[0] == 0
    assert not (folder / "sizes.json").exists() and not (folder / "payloads").exists()


def test_the_kept_messages_are_those_that_were_counted(fedfp8_command, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["run", "--rounds", "2", "--workers", "0", "--method", "dq", "--out", str(folder), *settings_of()]
    assert fedfp8_command(*options, "--keep-payloads", "2")[0] == 0
    line = json.loads((folder / "history.jsonl").read_text().splitlines()[-1])
    for way in ("down", "up"):
        kept = {p.name: p.read_bytes() for p in (folder / "payloads/round-2").glob(f"{way}-*")}
        assert set(kept) == {f"{way}-client{k}.bin" for k in line["clients"]}
        assert sum(map(len, kept.values())) == line[f"bytes_{way}"]
    tensors = json.loads((folder / "payloads/tensors.json").read_text())
    assert tensors["round"] == 2
    # the tensors' own bytes, without header, plans and checksum
    coded = sum(row["elements"] * row["up"] / 8 for row in tensors["tensors"].values()) * len(line["clients"])
    assert 0.9 * line["bytes_up"] < coded < line["bytes_up"]


def test_config_toml_says_what_every_setting_means(fedfp8_command, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--rounds", "1", "--workers", "0", "--out", str(folder), *settings_of()]
    assert fedfp8_command("run", *options)[0] == 0
    text = (folder / "config.toml").read_text()
    for setting in describe():
        assert setting.meaning, f"{setting.key} has no comment beside it in fl/config.py"
        assert f"# {setting.meaning}\n" in text
    odd = with_settings(Config(), {"data.dir": 'a "b" \\ c # d', "local.lr": 1e-5})
    assert from_dict(tomllib.loads(to_toml(odd))) == odd


def test_two_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    """The second one comes in the middle of the round that the first one lets end, or right after it."""
    folder = tmp_path / "run"
    slow = settings_of(**{"local.steps": 200, "clients.fraction": 1.0})
    process = command("run", "--rounds", "500", "--workers", "1", "--out", str(folder), *slow)
    while "round 1/500" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGINT)
    while "finishing this round" not in process.stderr.readline():
        pass
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert f"Continue with: fedfp8 resume {folder}" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    "name, hint",
    [
        ("run", "fedfp8 resume {}"),
        ("compare", "The same command again continues where it was ({})"),
        ("demo", "The same command begins anew ({})"),
    ],
)
def test_a_second_ctrl_c_still_says_how_to_go_on(name, hint, fedfp8_command, tmp_path, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedfp8.fl.run", interrupted)
    options = [] if name == "demo" else settings_of()
    code, _, err = fedfp8_command(name, "--workers", "0", "--out", str(tmp_path / "x"), *options)
    assert code == 130 and "Stopped at once" in err and hint.format(tmp_path / "x") in err


def test_how_to_go_on_is_the_last_thing_on_the_terminal(fedfp8_command, tmp_path, monkeypatch) -> None:
    """What is printed while the lines of the runs are live comes above them."""

    def left(*_: object) -> None:
        print("(lines end)", file=sys.stderr)

    monkeypatch.setattr("fedfp8.paper.reproduce.run_job", lambda *_, **__: False)
    monkeypatch.setattr("fedfp8.cli.display.Display.__exit__", left)
    code, _, err = fedfp8_command("compare", "--workers", "0", "--out", str(tmp_path), *settings_of())
    assert code == 130 and err.startswith("(lines end)\nStopped. The same command again")


def test_run_from_a_config_file(fedfp8_command, tmp_path: Path) -> None:
    sections: dict[str, list[str]] = {}
    for key, value in TINY.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"{name} = {value}")
    text = 'method = "bq"\n' + "".join(f"[{s}]\n" + "\n".join(v) + "\n" for s, v in sections.items())
    (tmp_path / "mine.toml").write_text(text + "[round]\ncount = 5\n")
    out = ["--rounds", "1", "--workers", "0", "--no-lossless", "--eval-every", "7", "--out", str(tmp_path / "run")]
    code, _, err = fedfp8_command("run", str(tmp_path / "mine.toml"), *out)
    assert code == 0, err
    written = from_dict(tomllib.loads((tmp_path / "run/config.toml").read_text()))
    assert written == tiny("bq", 1, wire__lossless=False, round__eval_every=7)
    # Its own config.toml is complete: the same run again, under another method
    code, _, err = fedfp8_command(
        "run", str(tmp_path / "run/config.toml"), "--method", "fp32", "--workers", "0", "--out", str(tmp_path / "again")
    )
    assert code == 0, err
    assert json.loads((tmp_path / "again/summary.json").read_text())["method"] == "fp32"


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["run", "--preset", "digit"], "did you mean digits"),
        (["run", "--method", "uq++"], "choose one of fp32, bq, uq"),
        (["run", "--set", "dq.kapa_up=4"], "did you mean dq.kappa_up"),
        (["run", "--set", "dq.kappa_up"], "section.field=value"),
        (["run", "--set", "method=dq"], "use --method"),
        (
            ["run", "--set", "server.optimize=true", "--method", "dq"],
            "server.optimize=true and down.rounding='dithered'",
        ),
        (["run", "nowhere.toml"], "nowhere.toml cannot be read as a config"),
        (["run", "x.toml", "--preset", "digits"], "choose one to start from"),
        (["resume", "nowhere"], "nowhere is not a run folder"),
        (["compare", "--methods", ","], "give lists such as"),
        (["compare", "--seeds", "0,x"], "are not whole numbers"),
        (["compare", "--methods", "fp32,xq"], "method 'xq' is unknown"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_1(arguments, says, fedfp8_command, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = fedfp8_command(*arguments)
    assert code == 1 and out == "" and err.startswith("error: ") and "Traceback" not in err
    assert says in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []


def test_options_that_do_not_exist(fedfp8_command) -> None:
    code, _, err = fedfp8_command("run", "--round", "3")
    assert code == 2 and "--rounds" in err
    assert fedfp8_command("run", "--rounds", "0")[0] == 2


@pytest.mark.parametrize("name", ["run", "resume", "compare", "demo"])
def test_help(name: str, fedfp8_command) -> None:
    code, out, _ = fedfp8_command(name, "--help")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert code == 0 and "--workers" in plain and plain == re.sub(r"\x1b\[[0-9;]*m", "", fedfp8_command(name, "-h")[1])
    if name == "resume":
        assert "The run folder." in plain  # of the argument: lost with click 8.5
    if name == "run":
        assert all(word in plain for word in ("--set", "--method", "--preset", "--no-lossless", "fp32", "dq"))


def test_compare_runs_all_methods_and_resumes(fedfp8_command, tmp_path: Path) -> None:
    out = tmp_path / "all"
    arguments = [
        "compare",
        "--methods",
        "fp32,dq",
        "--seeds",
        "0,1",
        "--rounds",
        "2",
        "--workers",
        "0",
        "--out",
        str(out),
    ]
    code, text, err = fedfp8_command(*arguments, *settings_of())
    assert code == 0, err
    for name in ("compare.md", "compare.png", "compare.json"):
        assert (out / name).stat().st_size > 0 and str(out / name) in text
    assert re.search(r"^4/4 dq seed 1  round 2/2  accuracy [\d.]+ %  done", text, re.M)
    folders = [out / "digits" / f"{m}-seed{s}" for m in ("fp32", "dq") for s in (0, 1)]
    before = [(f / "history.jsonl").read_bytes() for f in folders]
    totals = [json.loads((f / "summary.json").read_text())["bytes_total"] for f in folders]
    assert min(totals[:2]) > 5 * max(totals[2:])
    code, _, _ = fedfp8_command(*arguments, *settings_of())  # finished runs are not repeated
    assert code == 0 and [(f / "history.jsonl").read_bytes() for f in folders] == before
    code, _, err = fedfp8_command(*arguments, *settings_of(**{"local.steps": 3}))
    assert code == 1 and "holds a run with other settings" in err
    methods = json.loads((out / "compare.json").read_text())
    assert "fp32" in json.dumps(methods) and "dq" in json.dumps(methods)


def test_compare_takes_variants_with_their_own_labels(fedfp8_command, tmp_path: Path) -> None:
    methods = "fp32,dq,dq:dq.kappa_up=16:dq.kappa_down=1"
    options = ["--rounds", "1", "--workers", "0", "--out", str(tmp_path), *settings_of()]
    code, out, err = fedfp8_command("compare", "--methods", methods, *options)
    assert code == 0, err
    assert "2/3 dq  round 1/1" in out and "3/3 dq:dq.kappa_up=16:dq.kappa_down=1  round 1/1" in out
    content = json.loads((tmp_path / "compare.json").read_text())
    assert list(content) == methods.split(",")
    config = from_dict(tomllib.loads((tmp_path / f"digits/{methods.split(',')[2]}-seed0/config.toml").read_text()))
    assert (config.dq.kappa_up, config.dq.kappa_down) == (16, 1)
    assert content["dq"]["bytes"] > content[methods.split(",")[2]]["bytes"]
    assert content["dq"]["gain"] is None and "not learned yet" in out  # one round of two steps
    assert (tmp_path / "report.html").exists()
    code, _, err = fedfp8_command("compare", "--methods", "fp32,dq:kappa=1", *options)
    assert code == 1 and "unknown setting 'kappa'" in err


def test_demo(fedfp8_command, tmp_path: Path) -> None:
    code, out, err = fedfp8_command("demo", "--rounds", "1", "--workers", "0", "--out", str(tmp_path / "demo"))
    assert code == 0, err
    assert out.startswith("Five ways") and (tmp_path / "demo/compare.png").exists()
    assert len(list((tmp_path / "demo/digits").iterdir())) == 5
    assert len(out) < 3000 and f"report: {tmp_path / 'demo/report.html'}" in out
    assert "0.weight" in (tmp_path / "demo/report.html").read_text()  # bits per weight, tensor by tensor
    code, out, err = fedfp8_command("report", str(tmp_path / "demo"))
    assert code == 0 and not (tmp_path / "demo/digits/compare.json").exists()


def test_tensorboard_scalars(fedfp8_command, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["run", "--tensorboard", "--rounds", "2", "--workers", "0", "--out", str(folder), *settings_of()]
    assert fedfp8_command(*options)[0] == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder / "tb")).Reload()
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for name in ("accuracy", "bytes_total"):
        found = [(e.step, e.value) for e in log.Scalars(name)]
        assert [step for step, _ in found] == [0, 1, 2]
        assert [value for _, value in found] == pytest.approx([line[name] for line in history])
    events = sorted(folder.glob("tb/*"))
    assert fedfp8_command(*options)[0] == 1  # refused: and nothing is added to the log of the run that is there
    assert sorted(folder.glob("tb/*")) == events


def test_the_installed_command_in_its_own_process(tmp_path: Path) -> None:
    """With a worker, and a pipe for a terminal: with --json nothing else."""
    process = command(
        "run", "--json", "--rounds", "1", "--workers", "1", "--out", str(tmp_path / "run"), *settings_of()
    )
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0 and err == ""
    assert [json.loads(line)["round"] for line in out.splitlines()] == [0, 1]


def test_the_example_with_own_model_and_data() -> None:
    script = Path(__file__).parents[1] / "examples/own_model.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    accuracy = float(re.search(r"accuracy ([\d.]+)%", done.stdout)[1])
    assert accuracy > 80
