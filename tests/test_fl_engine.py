"""The same history for any number of workers, any coding of the bytes, and after any interruption."""

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import fedfp8
from fedfp8.errors import ConfigError, RunError
from fedfp8.fl import resume
from fedfp8.fl.checkpoint import RunFolder
from fedfp8.fl.federation import from_tensors
from fedfp8.fl.local import local_update
from fedfp8.fl.pool import Pool
from fedfp8.fl.simulate import run_round
from fedfp8.wire import header
from fl_tools import (
    Inline,
    Touchy,
    command,
    comparable,
    models,
    own_data,
    own_tiny,
    rounds_with,
    settings_of,
    start,
    tiny,
)

MIXED = {"clients__formats": "E4M3:2,FP32:1,E5M2:1"}
ROUNDS, SLOW = 12, settings_of(**{"local.steps": 8})  # of runs that are interrupted from outside


# Workers


def test_history_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    runs = [fedfp8.run(tiny("uq", 2, **MIXED), out=tmp_path / str(n), workers=n) for n in (0, 1, 2)]
    first = runs[0]
    for other in runs[1:]:
        assert comparable(other.rounds) == comparable(first.rounds)
        assert other.state.fingerprint == first.state.fingerprint
    assert (tmp_path / "0/config.toml").read_bytes() == (tmp_path / "2/config.toml").read_bytes()


class Single(torch.nn.Linear):
    """A layer that works with one thread only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.get_num_threads() != 1:
            raise RuntimeError(f"{torch.get_num_threads()} threads")
        return super().forward(x)


@pytest.mark.parametrize("workers", [0, 1])
def test_training_and_evaluation_take_one_thread_wherever_they_happen(workers: int, tmp_path: Path) -> None:
    """Then float sums, and all that follows from them, do not depend on the number of cores. The caller's stays."""
    torch.set_num_threads(3)
    config = own_tiny("fp32", 1, clients__fraction=1.0)
    history = fedfp8.run(config, model=Single(5, 3), clients=own_data(), test=own_data(1)[0], workers=workers)
    assert history.rounds[-1]["rejected"] == [] and torch.get_num_threads() == 3
    local_update(Single(5, 3), from_tensors(config, Single(5, 3), own_data(), own_data(1)[0]), 0, config.local, 0.1,
                 torch.Generator())  # fmt: skip
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("threads", [2, 4])
def test_history_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    config = tiny("uq", 2, local__batch_size=40)
    torch.set_num_threads(1)
    alone = fedfp8.run(config)
    torch.set_num_threads(threads)
    assert comparable(fedfp8.run(config).rounds) == comparable(alone.rounds)


def test_history_follows_from_the_seed() -> None:
    one, again, other = (fedfp8.run(tiny("dq", 2, seed=s)) for s in (1, 1, 2))
    assert comparable(one.rounds) == comparable(again.rounds)
    assert one.rounds[-1]["model"] != other.rounds[-1]["model"]


class Killer(Pool):
    """A pool whose first worker is killed while it trains."""

    def train(self, tasks):
        def disturbed():
            for index, task in enumerate(tasks):
                if index == 1:  # the first task was handed out before the second is asked for
                    os.kill(self._processes[0][0].pid, signal.SIGKILL)
                yield task

        return super().train(disturbed())


def test_killing_a_worker_in_mid_round_changes_nothing_but_a_note(tmp_path: Path) -> None:
    config = tiny("uq", local__steps=5)
    federation, server, link = start(config, tmp_path / "calm")
    with Pool(0).begin(config, federation, tmp_path / "calm") as pool:
        wanted, record = run_round(server, config, federation, pool, link)
    federation, server, link = start(config, tmp_path / "disturbed")
    with Killer(1).begin(config, federation, tmp_path / "disturbed") as pool:
        found, disturbed = run_round(server, config, federation, pool, link)
        assert len(pool.notes) == 1 and "worker 0 died (exit code -9) during client" in pool.notes[0]
    assert found.state.fingerprint == wanted.state.fingerprint
    assert (disturbed.digest_up, disturbed.bytes_up, disturbed.rejected) == (record.digest_up, record.bytes_up, [])


def processes(pool: Pool) -> list[int]:
    return [process.pid for process, _ in pool._processes]


def test_runs_share_a_pool_and_get_what_each_would_get_alone(tmp_path: Path) -> None:
    """Other method, seed, format, data and model: nothing of a run is left in the workers that do the next."""
    own = {"model": Touchy(), "clients": own_data(), "test": own_data(1)[0]}
    runs = [(tiny("uq", 2, **MIXED), {}), (tiny("dq", 1, seed=1), {}), (own_tiny("fp32", 1), own)]
    alone = [fedfp8.run(config, **task) for config, task in runs]
    with Pool(2) as pool:
        assert processes(pool) == []  # they start when there is something to do
        shared = [fedfp8.run(config, **task, workers=pool) for config, task in runs[:1]]
        first = processes(pool)
        shared += [fedfp8.run(config, **task, workers=pool) for config, task in runs[1:]]
        assert processes(pool) == first and len(first) == 2
    for one, other in zip(shared, alone, strict=True):
        assert comparable(one.rounds) == comparable(other.rounds)
        assert one.state.fingerprint == other.state.fingerprint


def test_a_pool_outlives_a_run_that_failed_and_workers_that_died_between_runs(tmp_path: Path) -> None:
    def stop(line: dict) -> None:
        raise ZeroDivisionError

    wanted = comparable(fedfp8.run(tiny("uq", 1)).rounds)
    with Pool(2) as pool:
        with pytest.raises(ZeroDivisionError):
            fedfp8.run(tiny("dq", 2), workers=pool, on_round=stop)
        first = processes(pool)
        os.kill(first[0], signal.SIGKILL)
        pool._send(1, None)  # as a run that was given up in mid-round leaves it: a job handed out, its result not read
        assert comparable(fedfp8.run(tiny("uq", 1), workers=pool).rounds) == wanted
        assert set(processes(pool)).isdisjoint(first)
    with pytest.raises(ConfigError, match=r"device=cpu was given beside a pool.*Pool\(2, device='cpu'\)"):
        fedfp8.run(tiny("uq", 1), workers=pool, device="cpu")


@pytest.mark.parametrize("method", ["fp32", "uq", "dq"])
def test_batch_statistics_are_averaged_without_noise(method: str) -> None:
    """Dithered, a small variance could come out negative, and evaluation as NaN."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    clients = [(x * torch.tensor([1e-3, 1.0, 1.0, 1.0, 30.0]), y) for x, y in own_data(examples=40)]
    config = own_tiny(method, 3, clients__fraction=1.0, local__batch_size=40, local__steps=1)
    history = fedfp8.run(config, model=model, clients=clients, test=clients[0], workers=0)
    values = dict(history.state)
    # Three rounds of one batch each, momentum 0.1: var = 0.9**3 + 0.1 * (1 + 0.9 + 0.81) * (mean of the clients' own)
    own = torch.stack([x.var(0) for x, _ in clients]).mean(0)
    torch.testing.assert_close(values["0.running_var"], 0.729 + 0.271 * own, rtol=1e-5, atol=1e-6)
    assert all(line["loss"] == line["loss"] for line in history.rounds if "loss" in line)


def test_a_client_that_kills_its_workers_is_given_up(tmp_path: Path) -> None:
    clients = own_data()
    clients[1][0][0, 0] = 2000
    config = own_tiny("uq", 1, clients__fraction=1.0)
    history = fedfp8.run(config, model=Touchy(), clients=clients, test=own_data(1)[0], workers=1)
    line = history.rounds[-1]
    assert line["rejected"] == [{"client": 1, "reason": "worker died 2 times (exit code 9)"}]
    assert len([note for note in line["notes"] if "died (exit code 9) during client 1" in note]) == 2
    assert line["train_loss"] is not None


def test_an_evaluation_that_fails_says_why(tmp_path: Path) -> None:
    test = own_data(1)[0]
    test[0][0, 0] = 1000
    for workers in (0, 1):
        with pytest.raises(RunError, match="test set: RuntimeError: a value of 1000"):
            fedfp8.run(own_tiny("uq", 1), model=Touchy(), clients=own_data(), test=test, workers=workers)


# Lossless stage and client cache


@pytest.mark.parametrize("method", ["bq", "uq", "uq+", "dq"])
def test_the_lossless_stage_and_the_cache_change_bytes_only(method: str) -> None:
    full = fedfp8.run(tiny(method, 4))
    raw = fedfp8.run(tiny(method, 4, wire__lossless=False))
    stateless = fedfp8.run(tiny(method, 4, wire__client_cache=False))
    short = fedfp8.run(tiny(method, 4, wire__history=1))
    assert models(full.rounds) == models(raw.rounds) == models(stateless.rounds) == models(short.rounds)
    down = [sum(line["bytes_down"] for line in h.rounds) for h in (full, short, stateless, raw)]
    if method == "dq":  # after four rounds the shared start is the better reference still: the cache brings nothing yet
        assert max(down[:3]) < 1.01 * min(down[:3]) < down[3]
    else:
        assert down == sorted(down) and down[0] < down[2] < down[3]
    up = [sum(line["bytes_up"] for line in h.rounds) for h in (full, stateless, raw)]
    assert up[0] == up[1] < up[2]
    assert "cache" not in stateless.rounds[-1]


def test_bytes_are_the_lengths_of_payloads(tmp_path: Path) -> None:
    for method in ("fp32", "dq"):
        config = tiny(method)
        federation, server, link = start(config, tmp_path / method)
        workers = Inline(config, federation, tmp_path / method)
        _, records = rounds_with(workers, config, federation, server, link, 2)
        assert sum(r.bytes_down for r in records) == sum(map(len, workers.down))
        assert sum(r.bytes_up for r in records) == sum(map(len, workers.up))
        history = fedfp8.run(tiny(method, 2))
        assert [line["bytes_up"] for line in history.rounds[1:]] == [r.bytes_up for r in records]
        assert history.summary["bytes_total"] == history.rounds[-1]["bytes_total"]
        assert history.rounds[-1]["bytes_total"] == sum(map(len, workers.down + workers.up))


def test_the_shared_start_is_reported_apart() -> None:
    """What it would cost to send the initial model, as it was sent in a run without the shared start."""
    shared, sent = fedfp8.run(tiny("dq", 1)), fedfp8.run(tiny("dq", 1, dq__start=False))
    start = shared.summary["start"]
    assert sent.summary["start"] is None and start["clients"] == 3
    # Payloads of other places differ by some bytes
    assert abs(3 * start["bytes_each"] - sent.summary["bytes_down"]) < 0.01 * sent.summary["bytes_down"]
    assert start["bytes_total_if_sent"] == shared.summary["bytes_total"] + 3 * start["bytes_each"]
    assert models(shared.rounds) == models(sent.rounds)


def test_the_memory_of_the_cache_is_bounded_and_reported(tmp_path: Path) -> None:
    for history, most in ((1, 1), (2, 2), (40, 6)):  # six rounds have six models
        run = fedfp8.run(tiny("uq", 6, wire__history=history), out=tmp_path / str(history))
        kept = list((tmp_path / str(history) / "checkpoint/models").iterdir())
        assert 1 <= len(kept) <= most
        cache = run.rounds[-1]["cache"]
        assert cache["server_bytes"] == sum(path.stat().st_size for path in kept)
        assert cache["client_bytes"] == sum(t.numel() * t.element_size() for t in run.state.values())
        assert run.summary["cache"] == cache
        saved = json.loads((tmp_path / str(history) / "checkpoint/state.json").read_text())
        numbers = {entry[0] for entry in saved["link"]["entries"]}
        assert {f"model-{n:08d}.safetensors" for n in numbers} == {path.name for path in kept}
        assert {number for _, *visits in saved["link"]["held"] for number, _ in visits} <= numbers


def test_a_client_that_failed_gets_its_next_model_without_a_reference(tmp_path: Path) -> None:
    """It may have lost what it had: coded against that, it would fail in every round to come."""
    config = tiny("uq", clients__fraction=1.0)
    federation, server, link = start(config, tmp_path)
    workers = Inline(config, federation, tmp_path)
    server, _ = rounds_with(workers, config, federation, server, link, 1)
    assert set(link.held) == set(range(6))
    workers.changed = lambda task, reply: type(reply)(2, error="lost") if task.client == 2 else reply
    server, _ = rounds_with(workers, config, federation, server, link, 1)
    assert set(link.held) == {0, 1, 3, 4, 5}
    rounds_with(workers, config, federation, server, link, 1)
    assert [header(p).reference_fingerprint is None for p in workers.down[-6:]] == [k == 2 for k in range(6)]


# Interruptions


def finish_and_compare(folder: Path, *dropped: str) -> None:
    config = RunFolder(folder).config
    found = resume(folder)
    assert comparable(found.rounds, *dropped) == comparable(fedfp8.run(config).rounds, *dropped)
    assert found.summary["finished"]


@pytest.mark.parametrize("after", [0, 2])
def test_resume_after_an_exception_between_rounds(after: int, tmp_path: Path) -> None:
    """Also right after round 0, which must not be written twice."""

    def stop(line):
        if line["round"] == after:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        fedfp8.run(tiny("uq", 3), out=tmp_path / "run", on_round=stop)
    assert not (tmp_path / "run/summary.json").exists()
    finish_and_compare(tmp_path / "run")


@pytest.mark.parametrize("where", ["model", "history", "state", "clean"])
@pytest.mark.parametrize("round", [0, 2])
def test_a_crash_at_every_step_of_a_checkpoint(where: str, round: int, tmp_path: Path, monkeypatch) -> None:
    """Stops the run before the model is written, before the history, before state.json, and before old files go."""
    import fedfp8.fl.checkpoint as checkpoint

    class Crash(BaseException):
        pass

    target, name = {
        "model": (checkpoint, "write_state"), "history": (checkpoint.json, "dumps"),
        "state": (checkpoint, "write_atomic"), "clean": (fedfp8.link.history.History, "clean"),
    }[where]  # fmt: skip
    original, save = getattr(target, name), RunFolder.save

    def crash(*_, **__):
        raise Crash

    def crashing_save(self, server, link, line):
        if server.round == round:
            monkeypatch.setattr(target, name, crash)
        save(self, server, link, line)

    monkeypatch.setattr(RunFolder, "save", crashing_save)
    with pytest.raises(Crash):
        fedfp8.run(tiny("dq", 3), out=tmp_path / "run")
    monkeypatch.setattr(target, name, original)
    monkeypatch.setattr(RunFolder, "save", save)
    finish_and_compare(tmp_path / "run")


def test_resuming_a_finished_run_only_reads_it(tmp_path: Path) -> None:
    done = fedfp8.run(tiny("uq", 2), out=tmp_path)
    before = (tmp_path / "history.jsonl").read_bytes()
    again = resume(tmp_path, workers=2)
    assert (tmp_path / "history.jsonl").read_bytes() == before
    assert again.summary == done.summary and again.state.fingerprint == done.state.fingerprint


def test_ctrl_c_finishes_the_round_and_says_how_to_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = command("run", "--json", "--rounds", str(ROUNDS), "--workers", "1", "--out", str(folder), *SLOW)
    lines = [process.stdout.readline() for _ in range(2)]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    rest, errors = process.communicate(timeout=600)
    lines += rest.splitlines()
    assert process.returncode == 130, errors
    assert "finishing this round" in errors and f"fedfp8 resume {folder}" in errors and "Traceback" not in errors
    shown = [json.loads(line) for line in lines]
    written = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in shown] == [line["round"] for line in written] == list(range(len(written)))
    assert len(written) < ROUNDS and not json.loads((folder / "summary.json").read_text())["finished"]
    finish_and_compare(folder)


def kill_at_random(random_: random.Random, *arguments: str, alone: bool) -> None:
    """Start a command and kill -9 it, a random while after it began or after a random round: the server alone, whose
    workers must then end by themselves and quietly, or all its processes."""
    process = command(*arguments, "--workers", "1")
    if random_.random() < 0.8:
        for _ in range(random_.randint(1, 3)):
            process.stdout.readline()
        time.sleep(random_.uniform(0, 0.3))
    else:
        time.sleep(random_.uniform(0, 8))
    if alone:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(600)
        wait_for_the_end_of(process.pid)
    else:
        os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in process.communicate(timeout=600)[1]


def wait_for_the_end_of(group: int) -> None:
    until = time.monotonic() + 600
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)
        pytest.fail("a worker is still there ten minutes after its server was killed")


def interrupted_run(folder: Path, kills: int, seed: int, method: str) -> None:
    random_ = random.Random(seed)
    for kill in range(kills):
        new = not (folder / "config.toml").exists()
        begin = ["run", "--method", method, "--rounds", str(ROUNDS), "--out", str(folder), *SLOW] if new else None
        kill_at_random(random_, *(begin or ["resume", str(folder)]), alone=kill % 2 == 0)
    finish_and_compare(folder)


def test_two_kills_of_the_whole_run(tmp_path: Path) -> None:
    interrupted_run(tmp_path / "run", 2, 7, "dq")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["uq+", "dq"])
def test_ten_kills_of_the_whole_run(method: str, tmp_path: Path) -> None:
    interrupted_run(tmp_path / "run", 10, 1, method)
