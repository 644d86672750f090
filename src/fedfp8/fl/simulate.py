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
from fedfp8.fl.broadcast import Broadcast, Server
from fedfp8.fl.client import Reply, Task
from fedfp8.fl.config import Config, cohort_size
from fedfp8.fl.federation import Federation
from fedfp8.fl.links import downlink, receive_up, uplink
from fedfp8.fl.server_opt import server_optimize
from fedfp8.fl.store import ModelStore
from fedfp8.model.state import State
from fedfp8.rng import derive_seed, generator
from fedfp8.wire import CHECKSUM

__all__ = ["Record", "Workers", "decode_update", "run_round", "sample", "server_step"]


class Workers(Protocol):
    """Whoever lets clients train: processes of this machine, or Flower."""

    notes: list[str]  # what went wrong on the way, for the round's record

    def train(self, tasks: Iterator[Task]) -> Iterator[Reply]: ...


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
    server: Server, config: Config, federation: Federation, workers: Workers, store: ModelStore
) -> tuple[Server, Record]:
    """Server in, server out."""
    begin = time.perf_counter()
    cohort = sample(config, federation.eligible(config), server.round + 1)
    record, digest = Record(server.round + 1, cohort), hashlib.blake2b(digest_size=8)
    broadcast = Broadcast(config, server, store)  # quantized once
    mean = WeightedMean(server.state.layout)
    links = {k: downlink(config, federation.formats[k]) for k in cohort}
    tasks = (Task(record.round, k, broadcast.payload(links[k], k)) for k in cohort)  # bytes leave the server
    # client: decode, LocalUpdate, quantize, encode; bytes come back, in client order
    for reply in workers.train(tasks):
        record.bytes_up += len(reply.payload)
        record.bytes_down += reply.resent
        digest.update(reply.payload[-CHECKSUM:])
        try:
            update = decode_update(reply, config, federation, broadcast)
        except Fedfp8Error as error:
            record.rejected.append({"client": reply.client, "reason": str(error)})
            continue
        mean.add(update, weight=federation.size(reply.client))
        broadcast.returned(links[reply.client], reply.client, weight=federation.size(reply.client))
        record.losses.append(reply.loss)
    trained = time.perf_counter()
    record.bytes_down += broadcast.bytes
    record.digest_down, record.digest_up = broadcast.digest, digest.hexdigest()
    state = server_step(config, server.state, broadcast, mean, record)
    record.seconds = {"train": trained - begin, "server": time.perf_counter() - trained}
    return broadcast.next_server(state), record


def sample(config: Config, eligible: list[int], round: int) -> list[int]:
    """The cohort of a round, in client order."""
    size = cohort_size(config, len(eligible))
    order = torch.randperm(len(eligible), generator=generator(config.seed, "sample", round))
    return sorted(eligible[i] for i in order[:size].tolist())


def decode_update(reply: Reply, config: Config, federation: Federation, broadcast: Broadcast) -> State:
    """A client's model, or an error that says why it cannot be used."""
    if reply.error:
        raise RunError(reply.error)
    format = federation.formats[reply.client]
    seed = derive_seed(config.seed, "up", broadcast.round, reply.client)
    sent = broadcast.sent(downlink(config, format))
    return receive_up(reply.payload, broadcast.server.state.layout, uplink(config, format), sent, seed)


def server_step(config: Config, state: State, broadcast: Broadcast, mean: WeightedMean, record: Record) -> State:
    """UQ: the weighted mean. UQ+: ServerOptimize. DQ: what the server has, plus what came back, less what it sent."""
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
    new = mean.result()
    if config.down.rounding == "dithered" and config.dq.preserve:
        sent = broadcast.mean_sent()
        kept = {
            s.name: state[s.name] + (new[s.name] - sent[s.name]) for s in state.layout if s.kind in ("fp8", "float")
        }
        return State(state.layout, {name: kept.get(name, tensor) for name, tensor in new.items()})
    return new
