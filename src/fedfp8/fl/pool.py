"""Worker processes that train and evaluate: one torch thread each, started once, replaced when they die.

Jobs are handed out in order and results come back in order, whatever the number of workers, so nothing that is computed
depends on it. A worker that dies (killed, out of memory) loses nothing but time: its job is done again by a new one; a
job that kills two workers is given up and reported as that client's failure.
"""

import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from fedfp8.errors import ConfigError, RunError
from fedfp8.fl.client import Client, Reply, Task
from fedfp8.fl.config import Config
from fedfp8.fl.evaluate import evaluate_piece
from fedfp8.fl.examples import Items, Loader, Stream
from fedfp8.fl.federation import Federation
from fedfp8.fl.handover import read_handover, write_handover
from fedfp8.fl.memory import keep_freed_memory
from fedfp8.fl.wires import wire_for
from fedfp8.link.history import History
from fedfp8.link.store import read_state
from fedfp8.model.state import State
from fedfp8.nn import load_state

__all__ = ["Evaluation", "Pool", "refuse_in_worker"]

ATTEMPTS = 2
UNGUARDED = 113  # exit code of a worker that found fedfp8.run at the top level of the script it imports
GUARD = (
    "worker processes import the script that starts the run, and this one calls fedfp8 again as it is imported; put "
    'the call under `if __name__ == "__main__":`, or train in this process with workers=0'
)


@dataclass(frozen=True)
class Evaluation:
    """One piece of the test set, for the model in a file; `model` is its fingerprint."""

    path: Path
    model: bytes
    piece: int


@dataclass(frozen=True)
class Failure:
    """Why an evaluation has no result."""

    reason: str


@dataclass(frozen=True)
class Started:
    """The first word of a worker; `error` says why it cannot work."""

    error: str = ""


Job = Task | Evaluation


class Executor:
    """Does jobs, in a worker process or in this one."""

    def __init__(self, config: Config, federation: Federation, folder: Path) -> None:
        self.config, self.history = config, History(config.seed, folder)
        self.client = Client(config, federation, self.held)
        self.network = federation.network(config)
        self.loaded = b""  # fingerprint of the model in `network`

    def __call__(self, job: Job) -> Any:
        try:
            return self.client.train(job) if isinstance(job, Task) else self.evaluate(job)
        except Exception as error:  # whatever a client's training raises is that client's failure, not the run's
            reason = f"{type(error).__name__}: {error}"
            return Reply(job.client, error=reason) if isinstance(job, Task) else Failure(reason)

    def held(self, task: Task) -> State | None:
        """A client's disk: what it received last, made again from the server's model of that round."""
        if task.held is None:
            return None
        entry, place = task.held
        self.history.entries[entry.number] = entry
        return self.history.sent(
            entry.number, wire_for(self.config, self.client.federation.formats[task.client]), place
        )

    def evaluate(self, job: Evaluation) -> tuple[float, float, float, int]:
        if self.loaded != job.model:
            load_state(self.network, read_state(job.path))
            self.loaded = job.model
        return evaluate_piece(self.network, self.client.federation, job.piece)


def _worker(connection: Any, given: Path, folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        try:
            config, federation = read_handover(given)
            executor = Executor(config, federation.to(device), folder)
        except Exception as error:
            connection.send(Started(f"{type(error).__name__}: {error}"))
            return
        connection.send(Started())
        while (job := connection.recv()) is not None:
            connection.send(executor(job))
    except (EOFError, OSError):  # the server is gone
        return


def refuse_in_worker() -> None:
    """Ends a worker process that is still importing the user's script, and finds it starting a run."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(UNGUARDED)


def check_importable(federation: Federation) -> None:
    """Workers import what they are given: nothing of it may live in a notebook or an interactive session."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is not None and os.path.exists(file):
        return
    given: list[Any] = [federation.objective.loss, federation.objective.metric.function, federation.transform]
    given += [type(module) for module in federation.model.modules()]
    for source in (*federation.clients, federation.test):
        data = source.dataset if isinstance(source, Items) else source.function if isinstance(source, Stream) else None
        data = data.loader.dataset if isinstance(data, Loader) else data
        given += [data, type(data)]
    for thing in given:
        if getattr(thing, "__module__", "") == "__main__":
            name = getattr(thing, "__qualname__", type(thing).__name__)
            raise ConfigError(
                f"{name} is defined in a notebook or an interactive session, which worker processes cannot import; "
                "move it to a .py file and import it from there, or train in this process with workers=0"
            )


class Pool:
    """`workers` processes, or with 0 this very process (same results, nothing to start)."""

    def __init__(
        self, config: Config, federation: Federation, folder: Path, workers: int, devices: Sequence[str] = ("cpu",)
    ) -> None:
        self.federation, self.workers, self.devices = federation, workers, devices
        self.notes: list[str] = []  # what went wrong with workers, for the round's record
        self._inline = Executor(config, federation.to(devices[0]), folder) if workers == 0 else None
        self._arguments = folder.with_suffix(".workers"), folder
        if workers:
            check_importable(federation)
            write_handover(self._arguments[0], config, federation)
        self._started: set[int] = set()  # workers that have said so
        self._processes: list[Any] = [self._start(worker) for worker in range(workers)]

    def train(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        """Replies in the order of the tasks."""
        return self._map(tasks)

    def evaluate(self, path: Path, model: bytes) -> tuple[float, float]:
        """(metric, mean loss) on the test set of the model in `path`, whose fingerprint is `model`."""
        results = list(self._map(Evaluation(path, model, piece) for piece in range(self.federation.pieces)))
        if failures := [result for result in results if isinstance(result, Failure)]:
            raise RunError(f"the model cannot be evaluated on the test set: {failures[0].reason}")
        value, weight, loss, examples = (sum(column) for column in zip(*results, strict=True))
        if not weight > 0:
            raise RunError(
                f"the weights of the metric {self.federation.objective.metric.name} sum to {weight}, not above 0"
            )
        return value / weight, loss / examples

    def close(self) -> None:
        for process, connection in self._processes:
            try:
                connection.send(None)
            except OSError:
                pass
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = []
        self._arguments[0].unlink(missing_ok=True)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, worker: int) -> tuple[Any, Any]:
        context = torch.multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, *self._arguments, self.devices[worker % len(self.devices)])
        process = context.Process(target=_worker, args=arguments, daemon=True)
        self._started.discard(worker)
        # Ctrl-C on a terminal reaches all processes. It is the server's to handle: it finishes the round. Blocked from
        # the start, because importing torch takes a worker seconds in which it could not ignore it yet. (The tracker's
        # own start would unblock it, so that comes first.)
        multiprocessing.resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        return process, ours

    def _map(self, jobs: Iterable[Job]) -> Iterator[Any]:
        if self._inline is not None:
            yield from self._map_here(jobs)
            return
        waiting, todo = deque[tuple[int, Job, int]](), enumerate(jobs)
        running: dict[int, tuple[int, Job, int]] = {}  # worker -> index, job, attempt
        finished: dict[int, Any] = {}
        next_out, next_in = 0, 0

        def prepare() -> None:
            """Have a job ready, but not far ahead of the oldest open one: results that wait for their turn stay few."""
            nonlocal next_in
            if not waiting and next_in < next_out + 4 * self.workers and (item := next(todo, None)) is not None:
                waiting.append((*item, 1))
                next_in = item[0] + 1

        while True:
            for worker in (w for w in range(self.workers) if w not in running):
                prepare()
                if waiting:
                    running[worker] = waiting.popleft()
                    self._send(worker, running[worker][1])
            while next_out in finished:
                yield finished.pop(next_out)
                next_out += 1
            prepare()  # encodes for the next client while the workers train
            if running:
                self._collect(running, finished, waiting)
            elif not waiting:
                return

    def _map_here(self, jobs: Iterable[Job]) -> Iterator[Any]:
        assert self._inline is not None
        for job in jobs:
            yield self._inline(job)

    def _send(self, worker: int, job: Job) -> None:
        try:
            self._processes[worker][1].send(job)
        except OSError:
            pass  # it died; _collect sees its end and repeats the job

    def _collect(self, running: dict[int, Any], finished: dict[int, Any], waiting: deque[Any]) -> None:
        """Wait for at least one worker to finish or die."""
        by_handle: dict[Any, int] = {}
        for worker in running:
            process, connection = self._processes[worker]
            by_handle[connection] = by_handle[process.sentinel] = worker
        ready = {by_handle[handle] for handle in multiprocessing.connection.wait(list(by_handle))}
        for worker in sorted(ready):
            index, job, attempt = running.pop(worker)
            try:
                result = self._processes[worker][1].recv()
                if isinstance(result, Started):
                    if result.error:
                        raise RunError(f"worker {worker} cannot start: {result.error}")
                    self._started.add(worker)
                    running[worker] = index, job, attempt
                else:
                    finished[index] = result
            except (EOFError, OSError):
                result = self._replace(worker, job, attempt)
                if result is None:
                    waiting.appendleft((index, job, attempt + 1))
                else:
                    finished[index] = result

    def _replace(self, worker: int, job: Job, attempt: int) -> Reply | None:
        """Start a new worker; None if the job should be tried again."""
        process, connection = self._processes[worker]
        process.join()
        connection.close()
        if worker not in self._started and process.exitcode > 0:  # not killed from outside
            early = f"worker {worker} ended (exit code {process.exitcode}) before it could start; see what it printed"
            raise RunError(GUARD if process.exitcode == UNGUARDED else early)
        what = f"client {job.client}" if isinstance(job, Task) else "evaluation"
        again = attempt < ATTEMPTS
        self.notes.append(
            f"worker {worker} died (exit code {process.exitcode}) during {what}; restarted"
            + (", its work is done again" if again else ", given up after two workers")
        )
        self._processes[worker] = self._start(worker)
        if again:
            return None
        if isinstance(job, Evaluation):
            raise RunError(
                f"evaluation killed {ATTEMPTS} workers (exit code {process.exitcode}); is there enough memory?"
            )
        return Reply(job.client, error=f"worker died {ATTEMPTS} times (exit code {process.exitcode})")
