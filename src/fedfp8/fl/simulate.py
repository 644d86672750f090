"""One round of FP8FedAvg (algorithm 3), and nothing else: the screen to read first.

dataset -> partition -> local update -> quantize -> encode -> bytes -> decode -> aggregate -> optimise -> evaluate
"""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fedfp8.errors import Fedfp8Error, RunError
from fedfp8.fl.aggregate import WeightedMean
from fedfp8.fl.client import Assignment, Reply
from fedfp8.fl.config import Config, cohort_size
from fedfp8.fl.federation import Federation
from fedfp8.fl.server_opt import server_optimize
from fedfp8.link import ServerLink
from fedfp8.model.state import State
from fedfp8.rng import derive_seed, generator
from fedfp8.wire import CHECKSUM

__all__ = ["Record", "Server", "Workers", "run_round", "sample", "server_step"]


@dataclass(frozen=True)
class Server:
    """The server's model after a round. Who holds what is its link's to remember."""

    round: int
    state: State


class Workers(Protocol):
    """Whoever lets clients train: processes of this machine, or Flower."""

    notes: list[str]  # what went wrong on the way, for the round's record

    def train(self, assignments: Iterator[Assignment]) -> Iterator[Reply]: ...


@dataclass
class Record:
    """What happened in a round; becomes a line of history.jsonl."""

    round: int
    clients: list[int]
    bytes_down: int = 0
    bytes_up: int = 0
    rejected: list[dict[str, Any]] = field(default_factory=list)  # {"client": id, "reason": text}
    losses: list[float] = field(default_factory=list)
    server_opt: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    digest_down: str = ""  # of the checksums of all payloads of the round, in client order
    digest_up: str = ""
    seconds: dict[str, float] = field(default_factory=dict)


def run_round(
    server: Server, config: Config, federation: Federation, workers: Workers, link: ServerLink
) -> tuple[Server, Record]:
    """Server in, server out."""
    begin = time.perf_counter()
    cohort = sample(config, federation.eligible(config), server.round + 1)
    record, down, up = Record(server.round + 1, cohort), _digest(), _digest()
    mean = WeightedMean(server.state.layout)
    round = link.open(server.state, cohort)

    def assignment(client: int) -> Assignment:
        held = link.usable(client)
        payload = round.payload(client)  # quantized, encoded: bytes leave the server
        down.update(payload[-CHECKSUM:])
        entries = tuple((link.history.entries[number], place) for number, place in held)
        return Assignment(record.round, client, payload, round.orders(client), entries)

    # client: decode, LocalUpdate, quantize, encode; bytes come back, in client order
    for reply in workers.train(assignment(client) for client in cohort):
        up.update(reply.payload[-CHECKSUM:])
        try:
            if reply.error:
                raise RunError(reply.error)
            update = round.receive(reply.client, reply.payload)  # decoded, checked, in the server's frame
        except Fedfp8Error as error:
            record.rejected.append({"client": reply.client, "reason": str(error)})
            continue
        mean.add(update, weight=federation.size(reply.client))
        record.losses.append(reply.loss)
    trained = time.perf_counter()
    record.notes += round.notes.values()
    record.bytes_down = sum(round.traffic["down"].values()) + sum(round.traffic["resent"].values())
    record.bytes_up = sum(round.traffic["up"].values())
    record.digest_down, record.digest_up = down.hexdigest(), up.hexdigest()
    state = server_step(config, server.state, mean, record)
    link.close()
    record.seconds = {"train": trained - begin, "server": time.perf_counter() - trained}
    return Server(record.round, state), record


def _digest() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=8)


def sample(config: Config, eligible: list[int], round: int) -> list[int]:
    """The cohort of a round, in client order."""
    size = cohort_size(config, len(eligible))
    order = torch.randperm(len(eligible), generator=generator(config.seed, "sample", round))
    return sorted(eligible[i] for i in order[:size].tolist())


def server_step(config: Config, state: State, mean: WeightedMean, record: Record) -> State:
    """UQ+: ServerOptimize. The others: the weighted mean; for DQ that is the server's model plus the mean change."""
    if mean.count < config.round.min_clients:
        raise RunError(
            f"round {record.round}: {mean.count} valid updates of {len(record.clients)}, fewer than round.min_clients="
            f"{config.round.min_clients}; rejected: {record.rejected[:3]}. The run stops before this round is applied"
        )
    if mean.count == 0:
        record.notes.append("no valid update in this round: the server keeps its model")
        return state
    if config.server.optimize:
        optimized, gain = server_optimize(mean, config.server, derive_seed(config.seed, "server", record.round))
        record.server_opt = gain.to_dict()
        return optimized
    return mean.result()
