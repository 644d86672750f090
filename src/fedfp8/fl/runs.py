"""A whole run: rounds, evaluation, records, checkpoints. `fedfp8.run` and `fedfp8 run` end up here."""

import contextlib
import copy
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfp8.errors import ConfigError, RunError
from fedfp8.fl.checkpoint import RunFolder
from fedfp8.fl.config import Config, cohort_size
from fedfp8.fl.export import rounded_state
from fedfp8.fl.federation import FP32, Federation, build, from_task
from fedfp8.fl.payloads import keep_payloads, message_layouts, write_tensors
from fedfp8.fl.pool import Pool, pool_of, refuse_in_worker
from fedfp8.fl.ranges import fallen_ranges
from fedfp8.fl.simulate import Record, Server, Workers, run_round
from fedfp8.fl.summary import summarize
from fedfp8.fl.task import OWN, Loss, Metric, Score, Task, own_config, task_of
from fedfp8.fl.wires import server_link, wire_for
from fedfp8.link import ServerLink
from fedfp8.link.history import Entry, quantize_down
from fedfp8.link.store import write_atomic, write_state
from fedfp8.model.quantized import QuantState, dequantize_state
from fedfp8.model.state import State
from fedfp8.nn import state_of
from fedfp8.wire import encode

__all__ = ["History", "execute", "resume", "run"]

OnRound = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class History:
    """The records of a run: one dict per round (as in history.jsonl), the summary, and the final model."""

    rounds: list[dict[str, Any]]
    summary: dict[str, Any]
    state: State
    folder: Path | None
    start: nn.Module = field(repr=False)  # the float model that the run began with

    @property
    def metric(self) -> float:
        """The metric of the last evaluated round; its name and direction are in ``summary["metric"]``."""
        return float(self.summary["metric"]["value"])

    @property
    def accuracy(self) -> float:
        if "accuracy" not in self.summary:
            raise RunError(f"this run reports {self.summary['metric']['name']}, not accuracy; use history.metric")
        return float(self.summary["accuracy"])

    def model(self, *, rounded: bool = False) -> nn.Module:
        """The trained model as plain layers, in the class it was given in.

        Weights are floats or, with `rounded`, the FP8 values that the forward pass uses, as in `fedfp8.restore`.
        """
        state = rounded_state(self.state) if rounded else self.state
        model = copy.deepcopy(self.start)
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                if name in state:
                    tensor.copy_(state[name])
        return model.eval()


def run(
    config: Config,
    *,
    model: nn.Module | None = None,
    clients: Sequence[Any] | None = None,
    test: Any = None,
    loss: Loss | None = None,
    metric: Metric | Score | None = None,
    transform: Callable[..., Any] | None = None,
    skip: Any = (),
    name: str = "",
    device: str | torch.device | None = None,
    out: str | os.PathLike[str] | None = None,
    workers: int | Pool = 0,
    overwrite: bool = False,
    on_round: OnRound | None = None,
) -> History:
    """Run a federation and return its history.

    Without `model`, `clients` and `test` everything follows from the config (data set, partition, network). With them
    the task is your own, and docs/guides/own-task.md tells more:

    model: a float ``nn.Module``; parameters with ``requires_grad=False`` stay as they are and are not sent.
    clients, test: for each client, and to test on, a pair (x, y) of tensors or arrays (or any nest of them), a torch
    ``Dataset``, or a function that gives an iterable of batches, one pass a call.
    loss: ``loss(model, batch)``, one number to minimise. metric: ``metric(model, batch) -> (value, weight)``, or a
    `fedfp8.Metric` that gives it a name and a direction. For (x, class number) and class scores the defaults are
    cross-entropy and accuracy; a metric that is not given is the loss.
    transform: ``transform(batch, generator, train) -> batch``. skip: layers that stay float, as in `prepare`.
    name: what tables and plots call the run.

    device: "cpu" (default), "auto", "cuda", "mps", or several such as "cuda:0,cuda:1" that workers are spread over.
    workers: processes that train clients, or a `fedfp8.fl.Pool` of them that several runs share; 0 trains in this
    process. Results do not depend on it. With workers, a script needs the usual ``if __name__ == "__main__":``.
    out: run folder (records, checkpoint); None keeps nothing.
    on_round: is called with the record of every round, as in history.jsonl, after it was saved.
    """
    refuse_in_worker()
    if not isinstance(config, Config):
        raise ConfigError(f'config is a {type(config).__name__}; give a Config, for example fedfp8.preset("own", "dq")')
    task = _task(model, clients, test, loss=loss, metric=metric, transform=transform, skip=skip, name=name)
    pool = pool_of(workers, device)
    config, federation = _federation(config if task or not name else replace(config, name=name), task)
    with contextlib.ExitStack() as stack:
        path = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = stack.enter_context(RunFolder.create(path, config, overwrite=overwrite))
        history = execute(folder, federation, pool, on_round)
        return history if out is not None else replace(history, folder=None)


def resume(
    out: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    clients: Sequence[Any] | None = None,
    test: Any = None,
    loss: Loss | None = None,
    metric: Metric | Score | None = None,
    transform: Callable[..., Any] | None = None,
    skip: Any = (),
    device: str | torch.device | None = None,
    workers: int | Pool = 0,
    on_round: OnRound | None = None,
) -> History:
    """Continue an interrupted run to the same bytes as one that was never interrupted.

    A run on your own model and data needs them again.
    """
    refuse_in_worker()
    task = _task(model, clients, test, loss=loss, metric=metric, transform=transform, skip=skip)
    pool = pool_of(workers, device)
    with RunFolder.open(Path(out)) as folder:
        return execute(folder, _same_federation(folder, task), pool, on_round)


def _same_federation(folder: RunFolder, task: Task | None) -> Federation:
    """The federation of a run that is in `folder`; refused if what is given is not what it was begun with."""
    config = folder.config
    if config.preset != OWN:
        if task is not None:
            raise RunError(f"{folder.path} is a run of the preset {config.preset!r}; resume it without model and data")
        return build(config)
    if task is None and not config.task:
        raise RunError(
            f"{folder.path} is a run on the caller's own model and data, which are not in the folder; resume it with "
            "fedfp8.resume(out, model=..., clients=..., test=..., and loss, metric, ... as it was begun)"
        )
    task = task or task_of(config)
    given, known = (type(task.model).__name__, len(task.clients)), (config.model.name, config.clients.count)
    if given != known:
        raise RunError(
            f"{folder.path} is a run of {known[0]} with {known[1]} clients; {given[0]} with {given[1]} was given to "
            "resume it"
        )
    return from_task(config, task)


def _task(model: nn.Module | None, clients: Sequence[Any] | None, test: Any, **rest: Any) -> Task | None:
    if model is not None and clients is not None and test is not None:
        return Task(model, clients, test, **rest)
    own = [key for key, value in rest.items() if key != "name" and value is not None and value != ()]
    if model is not None or clients is not None or test is not None or own:
        raise ConfigError(
            "model, clients and test belong together: give all three, or none to use the config's data set"
            + (f" (without {', '.join(own)})" if own else "")
        )
    return None


def _federation(config: Config, task: Task | None) -> tuple[Config, Federation]:
    """The config as it is recorded, and its federation."""
    if task is None and config.preset != OWN:
        return config, build(config)
    task = task or task_of(config)
    config = own_config(config, task)
    return config, from_task(config, task)


def execute(
    folder: RunFolder,
    federation: Federation,
    workers: contextlib.AbstractContextManager[Pool],
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
        return _finish(folder, federation, server)
    with workers as pool, _interruptible() as stop:
        pool.begin(config, federation, folder.models)
        clients = pool if trainers is None else trainers(link)
        clients = keep_payloads(clients, folder.path, config.round.keep_payloads)
        if server is None:
            server = Server(0, initial)
            line = _line(folder, config, pool, server, link, Record(0, [], notes=notes), 0, time.perf_counter())
            _check_start(line)
            if link.start is not None:
                line["start_bytes"] = _start_bytes(config, pool, initial)
            _commit(folder, server, link, line, on_round)
        total = folder.history()[-1]["bytes_total"]
        while server.round < config.round.count and not stop.is_set():
            begin = time.perf_counter()
            before = server.state
            server, record = run_round(server, config, federation, clients, link)
            record.notes += fallen_ranges(config, initial, before, server.state)
            for notes in {id(w.notes): w.notes for w in (pool, clients)}.values():
                record.notes += notes
                notes.clear()
            _check_first(record)
            line = _line(folder, config, pool, server, link, record, total, begin)
            total = line["bytes_total"]
            _commit(folder, server, link, line, on_round)
    return _finish(folder, federation, server)


def _check_start(line: dict[str, Any]) -> None:
    """An untrained model has a loss and a metric, unless the test set is damaged."""
    for name, value in ((line["metric"]["name"], line["metric"]["value"]), ("loss", line["loss"])):
        if not math.isfinite(value):
            raise RunError(
                f"the {name} of the untrained model is {value} on the test set; look for NaN or Inf in the test set, "
                "in the initial weights, or in the function that computes it"
            )


def _check_first(record: Record) -> None:
    """If no client can train at all, the cause is the task and not a client."""
    if record.round == 1 and len(record.rejected) == len(record.clients):
        first = {r["reason"]: r["client"] for r in reversed(record.rejected)}  # a reason once, with its first client
        reasons = "; ".join(f"client {client}: {reason}" for reason, client in list(reversed(first.items()))[:3])
        raise RunError(
            f"all {len(record.clients)} clients of the first round were rejected, so the run stops. {reasons}"
        )


def _saved(folder: RunFolder, initial: State, link: ServerLink) -> Server | None:
    """The server as last saved, if it is of the same model."""
    server = folder.load(link)
    if server is not None and server.state.layout != initial.layout:
        raise RunError(
            f"the checkpoint in {folder.path} is of another model than the one to continue with; a run on your own "
            "data is resumed with fedfp8.resume(out, model=..., clients=..., test=...)"
        )
    return server


def _left_out(config: Config, federation: Federation) -> list[str]:
    """Says once which clients never take part; raises if none can."""
    few = len(federation.clients) - len(federation.eligible(config))
    if few == len(federation.clients):
        raise RunError(
            f"none of the {few} clients has clients.min_examples={config.clients.min_examples} examples; lower it, or "
            "use fewer clients"
        )
    few_of = f"{few} of {len(federation.clients)} clients"
    return [f"{few_of} have fewer than {config.clients.min_examples} examples and never take part"] if few else []


def _finish(folder: RunFolder, federation: Federation, server: Server) -> History:
    history = folder.history()
    summary = summarize(history, folder.config, server.state)
    write_atomic(folder.path / "summary.json", summary.to_json())
    write_tensors(folder.path / "payloads", message_layouts(folder.config, server.state.layout))
    return History(history, summary.values, server.state, folder.path, federation.model)


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
        visits = max((len(visits) for visits in link.held.values()), default=1)
        line["cache"] = {"client_bytes": visits * model_bytes, "server_bytes": link.history.size()}
    if record.round % config.round.eval_every == 0 or record.round == config.round.count:
        start = time.perf_counter()
        line |= _evaluate(folder, config, pool, server)
        line["seconds"]["evaluate"] = time.perf_counter() - start
    line["seconds"]["total"] = time.perf_counter() - begin
    return line


def _evaluate(folder: RunFolder, config: Config, pool: Pool, server: Server) -> dict[str, Any]:
    write_state(folder.model_path, server.state, sync=False)
    value, loss = pool.evaluate(folder.model_path, server.state.fingerprint)
    metric = pool.federation.objective.metric
    found = {"name": metric.name, "value": value, "higher_is_better": metric.higher_is_better}
    if config.round.eval_sent and config.down.rounding != "none":
        sent = dequantize_state(_sent_next(config, pool, server.round, server.state))
        write_state(folder.model_path, sent, sync=False)
        found["sent"] = pool.evaluate(folder.model_path, sent.fingerprint)[0]
    result = {"metric": found, "loss": loss}
    if metric.name == "accuracy":
        result |= {"accuracy": value} | ({"accuracy_sent": found["sent"]} if "sent" in found else {})
    return result


def _sent_next(config: Config, pool: Pool, round: int, state: State) -> QuantState:
    """The server's model as it goes to the first place of the next round."""
    cohort = cohort_size(config, len(pool.federation.eligible(config)))
    wire = wire_for(config, config.qat.format if config.prepared else FP32)
    entry = Entry(round + 1, b"", cohort, wire.places(cohort))
    return quantize_down(state, entry, wire, 0, config.seed)


def _start_bytes(config: Config, pool: Pool, initial: State) -> int:
    """What a client that could not build the initial model would have to be sent instead."""
    return len(encode(_sent_next(config, pool, 0, initial)))


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
