"""Worker processes that train and evaluate: one torch thread each, started once, replaced when they die.

A pool serves one run after another: `begin` tells its workers which. Jobs are handed out in order and results come back
in order, whatever the number of workers, so nothing that is computed depends on it. A worker that dies (killed, out of
memory) loses nothing but time: its job is done again by a new one; a job that kills two workers is given up, as that
client's failure.
"""

import contextlib
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from fedfp8.errors import ConfigError, RunError
from fedfp8.fl.client import Assignment, Client, Reply
from fedfp8.fl.config import Config
from fedfp8.fl.devices import devices_of
from fedfp8.fl.evaluate import evaluate_piece
from fedfp8.fl.examples import Items, Loader, Stream
from fedfp8.fl.federation import Federation
from fedfp8.fl.handover import hand_over, take_over
from fedfp8.fl.memory import keep_freed_memory
from fedfp8.fl.wires import wire_for
from fedfp8.link.history import History
from fedfp8.link.store import read_state
from fedfp8.model.state import Values
from fedfp8.nn import load_state

__all__ = ["Evaluation", "Pool", "pool_of", "refuse_in_worker"]

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


Job = Assignment | Evaluation


class Executor:
    """Does jobs, in a worker process or in this one."""

    def __init__(self, config: Config, federation: Federation, folder: Path) -> None:
        self.config, self.history = config, History(config.seed, folder)
        self.client = Client(config, federation, self.held)
        self.network = federation.network(config)
        self.loaded = b""  # fingerprint of the model in `network`

    def __call__(self, job: Job) -> Any:
        try:
            return self.client.train(job) if isinstance(job, Assignment) else self.evaluate(job)
        except Exception as error:  # whatever a client's training raises is that client's failure, not the run's
            reason = f"{type(error).__name__}: {error}"
            return Reply(job.client, error=reason) if isinstance(job, Assignment) else Failure(reason)

    def held(self, assignment: Assignment) -> list[Values]:
        """A client's disk: what it received on its last visits, made again from the server's models of those rounds."""
        wire = wire_for(self.config, self.client.federation.formats[assignment.client])
        entries = self.history.entries | {entry.number: entry for entry, _ in assignment.held}
        self.history.entries = entries
        if len(entries) > 2 * self.config.wire.history:  # now and then: files of forgotten models must not stay mapped
            self.history.keep_only(sorted(entries)[-self.config.wire.history :])
        held: list[Values] = []
        for entry, place in assignment.held:
            with contextlib.suppress(RunError):  # its file is damaged: the server does without it, too
                held.append(self.history.sent(entry.number, wire, place))
        return held

    def evaluate(self, job: Evaluation) -> tuple[float, float, float, int]:
        if self.loaded != job.model:
            load_state(self.network, read_state(job.path))
            self.loaded = job.model
        return evaluate_piece(self.network, self.client.federation, job.piece)


def _worker(connection: Any, device: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    executor: Executor | str = ""
    with contextlib.suppress(EOFError, OSError):  # the server is gone
        while (message := connection.recv()) is not None:
            if isinstance(message, Path):  # the next run
                executor = ""  # frees the run before
                executor = _begun(message, device)
                connection.send(executor if isinstance(executor, str) else "")
            elif isinstance(executor, Executor):
                connection.send(executor(message))


def _begun(given: Path, device: str) -> Executor | str:
    """What does the jobs of a run, or why this process cannot do them."""
    try:
        config, federation, folder = take_over(given)
        return Executor(config, federation.to(device), folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


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
    """`workers` processes, or with 0 this very process (same results, nothing to start), for one run after another.

    with Pool(2) as pool:
        histories = [fedfp8.run(config, workers=pool) for config in configs]

    device: "cpu" (default), "auto", "cuda", "mps", or several such as "cuda:0,cuda:1" that workers are spread over.
    """

    def __init__(self, workers: int, device: str | torch.device | None = None) -> None:
        self.workers, self.devices = workers, devices_of(device)
        self.notes: list[str] = []  # what went wrong with workers, for the round's record
        self._processes: list[Any] = []  # and their connections
        self._busy: set[int] = set()  # workers that owe a result

    def begin(self, config: Config, federation: Federation, folder: Path) -> "Pool":
        """From now on, jobs are of this run. Starts what is not running yet, or is still busy with another run."""
        self.federation = federation
        if self.workers == 0:
            self._inline = Executor(config, federation.to(self.devices[0]), folder)
            return self
        check_importable(federation)
        self._run = config, federation, folder
        self._processes += [self._start(worker) for worker in range(len(self._processes), self.workers)]
        for worker in sorted(self._busy):
            self._end(worker)
            self._processes[worker] = self._start(worker)
        self._busy.clear()
        self._begin(range(self.workers))
        return self

    def train(self, assignments: Iterable[Assignment]) -> Iterator[Reply]:
        """Replies in the order of the tasks."""
        return self._map(assignments)

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
        for _, connection in self._processes:
            with contextlib.suppress(OSError):
                connection.send(None)
        for worker, (process, _) in enumerate(self._processes):
            if worker not in self._busy:
                process.join(5)
            self._end(worker)
        self._processes = []
        self._busy.clear()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, worker: int) -> tuple[Any, Any]:
        context = torch.multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self.devices[worker % len(self.devices)])
        process = context.Process(target=_worker, args=arguments, daemon=True)
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

    def _begin(self, workers: Iterable[int]) -> None:
        """Tell workers which run it is."""
        with hand_over(*self._run) as given:
            for worker in workers:
                self._tell(worker, given)

    def _tell(self, worker: int, given: Path) -> None:
        for _ in range(ATTEMPTS):
            process, connection = self._processes[worker]
            with contextlib.suppress(EOFError, OSError):
                connection.send(given)
                if problem := connection.recv():
                    raise RunError(f"worker {worker} cannot start: {problem}")
                return
            process.join()
            if process.exitcode > 0:  # not killed from outside
                early = f"worker {worker} ended (exit code {process.exitcode}) as it started; see what it printed"
                raise RunError(GUARD if process.exitcode == UNGUARDED else early)
            self._processes[worker] = self._start(worker)
        raise RunError(f"worker {worker} was killed {ATTEMPTS} times as it started; is there enough memory?")

    def _end(self, worker: int) -> None:
        process, connection = self._processes[worker]
        process.kill()
        process.join()
        connection.close()

    def _map(self, jobs: Iterable[Job]) -> Iterator[Any]:
        if self.workers == 0:
            yield from map(self._inline, jobs)
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

    def _send(self, worker: int, job: Job) -> None:
        self._busy.add(worker)
        with contextlib.suppress(OSError):  # it died; _collect sees its end and repeats the job
            self._processes[worker][1].send(job)

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
            except (EOFError, OSError):
                result = self._replace(worker, job, attempt)
            self._busy.discard(worker)
            if result is None:
                waiting.appendleft((index, job, attempt + 1))
            else:
                finished[index] = result

    def _replace(self, worker: int, job: Job, attempt: int) -> Reply | None:
        """Start a new worker; None if the job should be tried again."""
        process, connection = self._processes[worker]
        process.join()
        connection.close()
        what = f"client {job.client}" if isinstance(job, Assignment) else "evaluation"
        again = attempt < ATTEMPTS
        self.notes.append(
            f"worker {worker} died (exit code {process.exitcode}) during {what}; restarted"
            + (", its work is done again" if again else ", given up after two workers")
        )
        self._processes[worker] = self._start(worker)
        self._begin([worker])
        if again:
            return None
        if isinstance(job, Evaluation):
            raise RunError(
                f"evaluation killed {ATTEMPTS} workers (exit code {process.exitcode}); is there enough memory?"
            )
        return Reply(job.client, error=f"worker died {ATTEMPTS} times (exit code {process.exitcode})")


def pool_of(workers: int | Pool, device: str | torch.device | None) -> contextlib.AbstractContextManager[Pool]:
    """A run's own pool, closed after it, or one that it shares with others."""
    if not isinstance(workers, Pool):
        return Pool(workers, device)
    if device is not None:
        raise ConfigError(f"device={device} was given beside a pool, which has its devices: Pool(2, device={device!r})")
    return contextlib.nullcontext(workers)
