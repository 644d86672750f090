"""What goes wrong with a client stays with that client; what is wrong with a folder is said before anything is lost."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fedfp8
from fedfp8.errors import ConfigError, RunError
from fedfp8.fl import resume
from fedfp8.fl.checkpoint import RunFolder
from fedfp8.fl.client import Reply
from fedfp8.nn import prepare
from fedfp8.packing import pack
from fl_tools import Inline, Touchy, comparable, own_data, own_tiny, rounds_with, start, tiny

ALL = {"clients__fraction": 1.0}


def own(config, clients, **options):
    return fedfp8.run(config, model=Touchy(), clients=clients, test=own_data(1, seed=9)[0], **options)


# Clients


@pytest.mark.parametrize(
    "method, value", [(m, float("nan")) for m in ("fp32", "bq", "uq", "dq")] + [("fp32", float("inf"))]
)
def test_bad_numbers_in_one_clients_data(method: str, value: float) -> None:
    clients = own_data()
    clients[2][0][:, 1] = value
    line = own(own_tiny(method, 1, **ALL), clients).rounds[-1]
    assert [r["client"] for r in line["rejected"]] == [2]
    assert any(word in line["rejected"][0]["reason"] for word in ("NaN", "nan", "inf", "Inf"))
    assert line["train_loss"] is not None and line["accuracy"] >= 0


def test_fp8_clips_an_infinite_input() -> None:
    """To the range of the data, so the client's update is as good as any."""
    clients = own_data()
    clients[2][0][:, 1] = float("inf")
    history = own(own_tiny("uq", 1, **ALL), clients)
    assert history.rounds[-1]["rejected"] == []
    assert all(bool(t.isfinite().all()) for t in history.state.values())


def test_an_exception_in_one_clients_training() -> None:
    clients = own_data()
    clients[1][0][0, 0] = 1000
    spoiled = own(own_tiny("uq", 2, **ALL), clients)
    assert [line["rejected"] for line in spoiled.rounds[1:]] == [
        [{"client": 1, "reason": "RuntimeError: a value of 1000"}]
    ] * 2
    assert spoiled.summary["rejected"] == 2


def other_model_payload() -> bytes:
    return pack(prepare(nn.Sequential(nn.Linear(5, 2))), seed=1)


def spoilers(good: dict[int, Reply]) -> dict[str, Reply]:
    """Replies of client 1 that cannot be used."""
    payload = good[1].payload
    flipped = bytearray(payload)
    flipped[len(payload) // 2] ^= 1
    return {
        "error": replace(good[1], payload=b"", error="out of battery"),
        "nothing": replace(good[1], payload=b""),
        "no message": replace(good[1], payload=bytes(range(200))),
        "truncated": replace(good[1], payload=payload[:-7]),
        "one bit": replace(good[1], payload=bytes(flipped)),
        "too long": replace(good[1], payload=payload + b"\0"),
        "other model": replace(good[1], payload=other_model_payload()),
        "other client": replace(good[0], client=1),
    }


@pytest.mark.parametrize("method", ["fp32", "uq", "dq"])
def test_unusable_updates_leave_the_mean_untouched(method: str, tmp_path: Path) -> None:
    """Whatever client 1 sends, the result is the same as if it had reported an error."""
    config = tiny(method, **ALL)
    federation, server, link = start(config, tmp_path)
    workers = Inline(config, federation, tmp_path)
    good: dict[int, Reply] = {}
    workers.changed = lambda task, reply: good.setdefault(task.client, reply)
    undisturbed, _ = rounds_with(workers, config, federation, server, link, 1)
    after_one = link.meta()
    earlier = good[1]
    results, reasons = {}, {}
    for name, bad in spoilers(good).items():
        workers.changed = lambda task, reply, bad=bad: bad if task.client == 1 else reply
        _, _, link = start(config, tmp_path / name, federation)
        after, (record,) = rounds_with(workers, config, federation, server, link, 1)
        results[name] = after.state.fingerprint
        assert [r["client"] for r in record.rejected] == [1], name
        reasons[name] = record.rejected[0]["reason"]
        assert len(record.losses) == 5 and record.bytes_up == sum(map(len, workers.up[-6:]))
    assert len(set(results.values())) == 1 and undisturbed.state.fingerprint not in results.values()
    assert reasons["error"] == "out of battery" and "another round, client or run" in reasons["other client"]
    assert "layout fingerprint" in reasons["other model"]
    # A message of an earlier round, replayed
    _, _, link = start(config, tmp_path, federation)
    link.load_meta(after_one)
    workers.changed = lambda task, reply: earlier if task.client == 1 else reply
    _, (record,) = rounds_with(workers, config, federation, undisturbed, link, 1)
    assert [r["client"] for r in record.rejected] == [1]


class Failing:
    """Batches of a client's examples until a round, then none."""

    def __init__(self, examples, passes: int) -> None:
        self.examples, self.passes = examples, passes

    def __call__(self):
        self.passes -= 1
        if self.passes < 0:
            raise OSError("disk gone")
        yield self.examples


def test_a_round_without_a_valid_update_keeps_the_model_and_says_so() -> None:
    clients = [Failing(examples, passes=2) for examples in own_data()]  # one is counted, one trained on
    history = own(own_tiny("uq", 3, local__steps=1, **ALL), clients)
    start, first, *after = history.rounds
    assert first["model"] != start["model"] and first["rejected"] == []
    for line in after:
        assert line["model"] == first["model"] and line["train_loss"] is None
        assert [r["reason"] for r in line["rejected"]] == ["OSError: disk gone"] * 4
        assert line["notes"] == ["no valid update in this round: the server keeps its model"]


def test_a_first_round_without_a_valid_update_stops_the_run(tmp_path: Path) -> None:
    clients = [(torch.full_like(x, float("nan")), y) for x, y in own_data()]
    # They share their reason, which is said once
    with pytest.raises(RunError, match=r"all 4 clients of the first round were rejected.* client 0: [^;]*NaN or Inf$"):
        own(own_tiny("fp32", 2, **ALL), clients, out=tmp_path / "run")
    assert json.loads((tmp_path / "run/checkpoint/state.json").read_text())["round"] == 0


def test_min_clients_stops_the_run_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    clients = own_data()
    clients[3][0][:] = float("nan")
    with pytest.raises(RunError, match=r"round 1: 3 valid updates of 4, fewer than round.min_clients=4.*'client': 3"):
        own(own_tiny("uq", 3, round__min_clients=4, **ALL), clients, out=tmp_path / "run")
    assert json.loads((tmp_path / "run/checkpoint/state.json").read_text())["round"] == 0
    # The client has mended its data: the run goes on from there.
    mended, test = own_data(), own_data(1, seed=9)[0]
    found = resume(tmp_path / "run", model=Touchy(), clients=mended, test=test)
    assert found.summary["finished"] and found.summary["rejected"] == 0


def test_clients_with_too_few_examples_never_take_part_and_it_is_said_once() -> None:
    clients = own_data()
    clients[0] = (clients[0][0][:1], clients[0][1][:1])
    clients[2] = (clients[2][0][:0], clients[2][1][:0])
    history = own(own_tiny("uq", 2, **ALL), clients)
    assert [line["clients"] for line in history.rounds[1:]] == [[1, 3], [1, 3]]
    notes = [note for line in history.rounds for note in line["notes"]]
    assert notes == ["2 of 4 clients have fewer than 2 examples and never take part"]
    with pytest.raises(RunError, match=r"none of the 4 clients has clients.min_examples=100"):
        own(own_tiny("uq", 2, clients__min_examples=100), clients)


def test_own_data_that_does_not_fit_together() -> None:
    clients, test = own_data(), own_data(1)[0]
    config = own_tiny("uq", 1)
    with pytest.raises(ConfigError, match="belong together"):
        fedfp8.run(config, model=Touchy(), clients=clients)
    with pytest.raises(ConfigError, match="no clients"):
        fedfp8.run(config, model=Touchy(), clients=[], test=test)
    with pytest.raises(ConfigError, match="client 1 has 12 examples and 11 labels"):
        fedfp8.run(config, model=Touchy(), clients=[clients[0], (clients[1][0], clients[1][1][:-1])], test=test)
    with pytest.raises(ConfigError, match="the test set has 12 examples and 2 labels"):
        fedfp8.run(config, model=Touchy(), clients=clients, test=(test[0], test[1][:2]))
    with pytest.raises(ConfigError, match="test set is empty"):
        fedfp8.run(config, model=Touchy(), clients=clients, test=(test[0][:0], test[1][:0]))


# Folders


def test_a_run_is_never_overwritten_unasked(tmp_path: Path) -> None:
    fedfp8.run(tiny("uq", 1), out=tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(RunError, match=r"holds a run already.*fedfp8 resume.*--overwrite"):
        fedfp8.run(tiny("dq", 1), out=tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    again = fedfp8.run(tiny("dq", 1), out=tmp_path, overwrite=True)
    assert comparable(again.rounds) == comparable(fedfp8.run(tiny("dq", 1)).rounds)
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 2


def test_a_history_without_its_config_is_not_overwritten_either(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text("mine\n")
    with pytest.raises(RunError, match="holds a run already"):
        fedfp8.run(tiny("uq", 1), out=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be made a run folder"):
        fedfp8.run(tiny("uq", 1), out=tmp_path / "file" / "run")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    fedfp8.run(tiny("uq", 1), out=tmp_path)
    with RunFolder.open(tmp_path):
        with pytest.raises(RunError, match="in use by another fedfp8 process"):
            resume(tmp_path)
        with pytest.raises(RunError, match="in use by another fedfp8 process"):
            fedfp8.run(tiny("uq", 1), out=tmp_path, overwrite=True)
    resume(tmp_path)


def test_a_run_that_raised_can_be_resumed_in_the_same_process(tmp_path: Path) -> None:
    def stop(line):
        if line["round"] == 1:
            raise ZeroDivisionError

    try:
        fedfp8.run(tiny("uq", 2), out=tmp_path, on_round=stop)
    except ZeroDivisionError:  # its traceback still holds the frames of the run
        assert resume(tmp_path).summary["finished"]


def unfinished(tmp_path: Path) -> Path:
    def stop(line):
        if line["round"] == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fedfp8.run(tiny("uq", 4), out=tmp_path, on_round=stop)
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"round": "x"}', b"\xff"])
def test_a_damaged_state_file(content: bytes, tmp_path: Path) -> None:
    (unfinished(tmp_path) / "state.json").write_bytes(content)
    with pytest.raises(RunError, match=r"state.json is damaged.*--overwrite"):
        resume(tmp_path)


def test_a_damaged_model_is_found(tmp_path: Path) -> None:
    model = next(unfinished(tmp_path).glob("server-*.safetensors"))
    data = model.read_bytes()
    for damaged in (data[:-5] + bytes([data[-5] ^ 1]) + data[-4:], data[:1000], b""):
        model.write_bytes(damaged)
        with pytest.raises(RunError, match=r"server-000002.safetensors (is damaged|cannot be read)"):
            resume(tmp_path)
    model.unlink()
    with pytest.raises(RunError, match="cannot be read as a model"):
        resume(tmp_path)
    model.write_bytes(data)
    assert resume(tmp_path).summary["finished"]


def test_a_damaged_reference_is_found_and_costs_bytes(tmp_path: Path) -> None:
    unfinished(tmp_path / "whole")
    for path in (unfinished(tmp_path / "damaged") / "models").iterdir():
        data = path.read_bytes()
        path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    whole, damaged = (resume(tmp_path / name).rounds for name in ("whole", "damaged"))
    assert [line["model"] for line in whole] == [line["model"] for line in damaged]
    assert damaged[-1]["bytes_total"] > whole[-1]["bytes_total"]
    assert any("is damaged: its values are not those saved" in note for line in damaged for note in line["notes"])
    assert not any(line["notes"] for line in whole)


def test_a_history_that_lost_lines_is_found(tmp_path: Path) -> None:
    unfinished(tmp_path)
    history = tmp_path / "history.jsonl"
    data = history.read_bytes()
    history.write_bytes(data[:-10])
    with pytest.raises(RunError, match=r"history.jsonl is shorter"):
        resume(tmp_path)
    history.write_bytes(data + b'{"round": 3, "torn')  # of a round that was never committed
    assert [line["round"] for line in resume(tmp_path).rounds] == [0, 1, 2, 3, 4]


def test_folders_that_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not a run folder.*fedfp8 run --out"):
        resume(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "config.toml").write_text("[round]\nconut = 3\n")
    with pytest.raises(ConfigError, match=r"did you mean round.count"):
        resume(tmp_path)


def test_resuming_with_another_model_is_refused(tmp_path: Path) -> None:
    """A run on own data cannot be continued on the data set that its config happens to name."""
    own(own_tiny("uq", 1), own_data(), out=tmp_path)
    with pytest.raises(RunError, match=r"own model and data, which are not in the folder.*model=\.\.\., clients="):
        resume(tmp_path)
    rest = {"clients": own_data(), "test": own_data(1, seed=9)[0]}
    with pytest.raises(RunError, match=r"a run of Touchy with 4 clients; Sequential with 4 was given"):
        resume(tmp_path, model=nn.Sequential(nn.Linear(5, 3)), **rest)
    with pytest.raises(RunError, match=r"a run of Touchy with 4 clients; Touchy with 3 was given"):
        resume(tmp_path, model=Touchy(), clients=own_data(3), test=rest["test"])
