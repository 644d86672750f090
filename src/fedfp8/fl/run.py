"""A whole run: rounds, evaluation, records, checkpoints. `fedfp8.run` and `fedfp8 run` end up here."""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedfp8.errors import ConfigError, RunError
from fedfp8.fl.checkpoint import RunFolder
from fedfp8.fl.config import Config, cohort_size
from fedfp8.fl.federation import FP32, Examples, Federation, build, from_tensors
from fedfp8.fl.payloads import keep_payloads, message_layouts, write_tensors
from fedfp8.fl.pool import Pool
from fedfp8.fl.simulate import Record, Server, Workers, run_round
from fedfp8.fl.summary import summarize
from fedfp8.fl.wires import server_link, wire_for
from fedfp8.link import ServerLink
from fedfp8.link.history import Entry, quantize_down
from fedfp8.link.store import write_atomic, write_state
from fedfp8.model.state import State, dequantize_state
from fedfp8.nn import state_of

__all__ = ["History", "execute", "resume", "run"]

OnRound = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class History:
    """The records of a run: one dict per round (as in history.jsonl), the summary, and the final model."""

    rounds: list[dict[str, Any]]
    summary: dict[str, Any]
    state: State
    folder: Path | None

    @property
    def accuracy(self) -> float:
        return float(self.summary["accuracy"])


def run(
    config: Config,
    *,
    model: nn.Module | None = None,
    clients: Sequence[Examples] | None = None,
    test: Examples | None = None,
    out: str | os.PathLike[str] | None = None,
    workers: int = 0,
    overwrite: bool = False,
    on_round: OnRound | None = None,
) -> History:
    """Run a federation and return its history.

    Without `model`, `clients` and `test` everything follows from the config (data set, partition, network). With them
    the run is on your own: a float ``nn.Module``, a list with (x, y) of every client, and (x, y) to test on.

    workers: processes that train clients; 0 trains in this process. Results do not depend on it. With workers, a script
    needs the usual ``if __name__ == "__main__":``. out: run folder (records, checkpoint); None keeps nothing.
    """
    federation = _federation(config, model, clients, test)
    with contextlib.ExitStack() as stack:
        path = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = stack.enter_context(RunFolder.create(path, config, overwrite=overwrite))
        history = execute(folder, federation, workers, on_round)
        return history if out is not None else History(history.rounds, history.summary, history.state, None)


def resume(
    out: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    clients: Sequence[Examples] | None = None,
    test: Examples | None = None,
    workers: int = 0,
    on_round: OnRound | None = None,
) -> History:
    """Continue an interrupted run to the same bytes as one that was never interrupted."""
    with RunFolder.open(Path(out)) as folder:
        return execute(folder, _federation(folder.config, model, clients, test), workers, on_round)


def _federation(
    config: Config, model: nn.Module | None, clients: Sequence[Examples] | None, test: Examples | None
) -> Federation:
    if model is None and clients is None and test is None:
        return build(config)
    if model is None or clients is None or test is None:
        raise ConfigError(
            "model, clients and test belong together: give all three, or none to use the config's data set"
        )
    return from_tensors(config, model, clients, test)


def execute(
    folder: RunFolder,
    federation: Federation,
    workers: int,
    on_round: OnRound | None = None,
    *,
    trainers: Callable[[ServerLink], Workers] | None = None,
) -> History:
    """Run the rounds that are still to do. Clients train in the pool that evaluates, or with `trainers` (Flower)."""
    config = folder.config
    initial, notes = state_of(federation.network(config)), _left_out(config, federation)
    link = server_link(config, federation, initial, folder.models)
    server = _saved(folder, initial, link)
    if server is not None and server.round >= config.round.count:
        return _finish(folder, config, server)
    with Pool(config, federation, folder.models, workers) as pool, _interruptible() as stop:
        trainer = pool if trainers is None else trainers(link)
        clients = keep_payloads(trainer, folder.path, config.round.keep_payloads)
        if server is None:
            server = Server(0, initial)
            line = _line(folder, config, pool, server, link, Record(0, [], notes=notes), 0, time.perf_counter())
            _commit(folder, server, link, line, on_round)
        total = folder.history()[-1]["bytes_total"]
        while server.round < config.round.count and not stop.is_set():
            begin = time.perf_counter()
            server, record = run_round(server, config, federation, clients, link)
            for source in {id(w): w for w in (pool, trainer)}.values():
                record.notes += source.notes
                source.notes.clear()
            line = _line(folder, config, pool, server, link, record, total, begin)
            total = line["bytes_total"]
            _commit(folder, server, link, line, on_round)
    return _finish(folder, config, server)


def _saved(folder: RunFolder, initial: State, link: ServerLink) -> Server | None:
    """The server as last saved, if it is of the same model."""
    server = folder.load(link)
    if server is not None and server.state.layout != initial.layout:
        raise RunError(
            f"the checkpoint in {folder.path} is of another model than the one to continue with; a run on your own "
            "data is resumed with fedfp8.fl.resume(out, model=..., clients=..., test=...)"
        )
    return server


def _left_out(config: Config, federation: Federation) -> list[str]:
    """Says once which clients never take part; raises if none can."""
    few = len(federation.parts) - len(federation.eligible(config))
    if few == len(federation.parts):
        raise RunError(
            f"none of the {few} clients has clients.min_examples={config.clients.min_examples} examples; lower it, or "
            "use fewer clients"
        )
    few_of = f"{few} of {len(federation.parts)} clients"
    return [f"{few_of} have fewer than {config.clients.min_examples} examples and never take part"] if few else []


def _finish(folder: RunFolder, config: Config, server: Server) -> History:
    history = folder.history()
    summary = summarize(history, config, server.state)
    write_atomic(folder.path / "summary.json", summary.to_json())
    write_tensors(folder.path / "payloads", message_layouts(config, server.state.layout))
    return History(history, summary.values, server.state, folder.path)


def _commit(
    folder: RunFolder, server: Server, link: ServerLink, line: dict[str, Any], on_round: OnRound | None
) -> None:
    folder.save(server, link, line)
    if on_round is not None:
        on_round(line)


def _line(
    folder: RunFolder,
    config: Config,
    pool: Pool,
    server: Server,
    link: ServerLink,
    record: Record,
    total: int,
    begin: float,
) -> dict[str, Any]:
    """The history line of a round, evaluated if it is its turn."""
    line = asdict(record)
    losses = line.pop("losses")
    line["train_loss"] = sum(losses) / len(losses) if losses else None
    line["bytes_total"] = total + record.bytes_down + record.bytes_up
    line["model"] = server.state.fingerprint.hex()
    if config.wire.client_cache:
        model_bytes = sum(t.numel() * t.element_size() for t in server.state.values())
        line["cache"] = {"client_bytes": model_bytes, "server_bytes": link.history.size()}
    if record.round % config.round.eval_every == 0 or record.round == config.round.count:
        start = time.perf_counter()
        line |= _evaluate(folder, config, pool, server)
        line["seconds"]["evaluate"] = time.perf_counter() - start
    line["seconds"]["total"] = time.perf_counter() - begin
    return line


def _evaluate(folder: RunFolder, config: Config, pool: Pool, server: Server) -> dict[str, float]:
    write_state(folder.model_path, server.state, sync=False)
    accuracy, loss = pool.evaluate(folder.model_path, server.state.fingerprint)
    result = {"accuracy": accuracy, "loss": loss}
    if config.round.eval_sent and config.down.rounding != "none":
        cohort = cohort_size(config, len(pool.federation.eligible(config)))
        wire = wire_for(config, config.qat.format if config.prepared else FP32)
        entry = Entry(server.round + 1, b"", cohort, wire.places(cohort))
        sent = dequantize_state(quantize_down(server.state, entry, wire, 0, config.seed))
        write_state(folder.model_path, sent, sync=False)
        result["accuracy_sent"] = pool.evaluate(folder.model_path, sent.fingerprint)[0]
    return result


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C asks the run to stop after the round, the second stops it at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(signum: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        sys.stderr.write("\nfinishing this round and writing the checkpoint; Ctrl-C again stops at once\n")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
