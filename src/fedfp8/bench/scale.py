"""The server of a large federation: real messages of the link layer, made-up changes in place of training.

Sixteen rounds pass in which clients are sampled and one of them is served, so that each holds what it would hold and
all kernels are compiled; then rounds are measured. The server's side is real: models are coded for each client given
what it holds, replies are decoded, checked and added to the mean. Clients of one place of a cell would send different
replies of the same length; here they send the same one. Seconds are processor time of the server alone.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fedfp8 import models
from fedfp8.fl.aggregate import WeightedMean
from fedfp8.link import ServerLink
from fedfp8.link.client import write_reply
from fedfp8.link.wire import Orders
from fedfp8.model.state import State, Values
from fedfp8.nn import prepare, state_of
from fedfp8.rng import generator

__all__ = ["CASES", "known_rows", "scale_rows", "server_rows", "simulate"]

Row = dict[str, Any]
BUDGET = 20.0  # ms of one core per client and million weights
HISTORY = 16  # rounds that a server remembers
# Changes in units of the weights' rms, of the server's model in a round and of a client's model in its training: with
# them messages have about the bits per weight of real runs (docs/results.md).
MOVE, TRAINING = 0.1, 0.12
CASES = (  # model, clients, of whom in a round
    ("lenet", 10, 10),
    ("lenet", 100, 10),  # the paper's image cells
    ("lenet", 1_000, 100),
    ("lenet", 10_000, 1_000),
    ("matchboxnet", 2_112, 21),  # the paper's speakers
    ("resnet18", 100, 10),
)
QUICK = (("digits", 10, 4), ("digits", 30, 4))


def server_rows(*, quick: bool = False) -> list[Row]:
    """Processor time of the server per client and million weights, by what it does; most clients hold a model."""
    names = {"dq": "DQ", "fp8": "UQ"}
    return [_server_row(names[wire], _apart("digits" if quick else "lenet", 100, 10, wire)) for wire in names]


def _server_row(name: str, found: Row) -> Row:
    parts = {part: found[part] / found["messages"] / found["weights"] * 1e9 for part in ("code", "decode", "add")}
    total = sum(parts.values())
    rounded = {f"{part}_ms": round(value, 2) for part, value in parts.items()} | {"total_ms": round(total, 2)}
    return (
        {"wire": name, "weights": found["weights"]} | rounded | {"budget": BUDGET, "ok": total <= BUDGET} | _bits(found)
    )


def scale_rows(*, quick: bool = False) -> list[Row]:
    """Memory of the server and seconds of a round beyond training, for federations of several sizes with DQ."""
    rows = []
    for model, clients, cohort in QUICK if quick else CASES:
        found = _apart(model, clients, cohort, "dq")
        seconds = (found["code"] + found["decode"] + found["add"] + found["rest"]) / found["rounds"]
        rows.append(
            {"model": model, "weights": found["weights"], "clients": clients, "cohort": cohort}
            | {"seconds": round(seconds, 4), "ms_per_client": round(1e3 * seconds / cohort, 3)}
            | {"memory_mb": round(found["memory"] / 1e6, 1), "history_mb": round(found["history"] / 1e6, 2)}
            | {"holding": round(found["holding"] / found["messages"], 3)} | _bits(found)
        )  # fmt: skip
    return rows


def _bits(found: Row) -> Row:
    each = found["messages"] * found["weights"] / 8
    return {"bits_down": round(found["bytes_down"] / each, 3), "bits_up": round(found["bytes_up"] / each, 3)}


def _apart(*case: Any) -> Row:
    """`simulate` in a process of its own, so that its memory is its own."""
    code = f"import json; from fedfp8.bench.scale import simulate; print(json.dumps(simulate(*{case!r})))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def simulate(model: str, clients: int, cohort: int, wire: str = "dq", rounds: int = 0) -> Row:
    """Sums over the measured rounds: processor seconds of the server by what it does, bytes, and its peak memory."""
    torch.set_num_threads(1)
    if model != "digits":
        simulate("digits", 4, 4, wire, 1)  # loads the kernels, whose memory is not the federation's
    before, state = _status("VmRSS"), state_of(prepare(models.build(model, 10, seed=0)))
    weights = sum(spec.size for spec in state.layout if spec.kind != "range")
    rounds = rounds or max(1, min(3, round(30e6 / weights / cohort)))  # a few seconds of work
    link = ServerLink(wire, seed=1, start=state if wire == "dq" else None, history=HISTORY, layout_known=True)
    sums = dict.fromkeys(("code", "decode", "add", "rest", "messages", "holding", "bytes_down", "bytes_up"), 0.0)
    for number in range(HISTORY + rounds):
        draw = generator(0, "bench", "scale", number)
        chosen = torch.randperm(clients, generator=draw)[:cohort].tolist()
        state = moved(state, MOVE, draw)
        if number < HISTORY:
            _round(link, state, chosen, 1, dict.fromkeys(sums, 0.0), draw)
        else:
            _round(link, state, chosen, cohort, sums, draw)
    memory = max(_status("VmHWM") - before, 0)
    return sums | {"rounds": rounds, "weights": weights, "memory": memory, "history": link.history.size()}


def _round(
    link: ServerLink, state: State, chosen: list[int], served: int, sums: dict[str, float], draw: torch.Generator
) -> None:
    """All that a server does for the first `served` clients of a round, who cost nothing; the others hold its model."""
    replies: dict[Orders, bytes] = {}
    mark = time.process_time()

    def lap(what: str) -> None:
        nonlocal mark
        now = time.process_time()
        sums[what] += now - mark
        mark = now

    round, mean = link.open(state, chosen), WeightedMean(state.layout)
    lap("rest")
    for client in chosen[:served]:
        sums["holding"] += bool(link.usable(client))
        message = link.message(client)
        lap("code")
        orders = round.orders(client)
        if orders not in replies:
            received = round.sent(client)
            replies[orders] = write_reply(moved(received, TRAINING, draw), received, orders)
        mark = time.process_time()  # what clients do is not counted
        update = round.receive(client, replies[orders])
        lap("decode")
        mean.add(update, weight=1.0)
        lap("add")
        sums["messages"] += 1
        sums["bytes_down"] += len(message)
        sums["bytes_up"] += len(replies[orders])
        if len(replies) > 32:  # stochastic rounding: each client's own
            replies.clear()
    for client in chosen[served:]:
        link.confirm(client)
    mean.result()
    link.close()
    lap("rest")


def moved(state: Values, size: float, draw: torch.Generator) -> State:
    """Every weight tensor changed by noise of `size` times its rms."""
    specs = [spec for spec in state.layout if spec.kind in ("fp8", "float")]
    noise = {s.name: size * state.rms(s.name) * torch.randn(s.shape, generator=draw) for s in specs}
    return State(state.layout, {name: t + noise[name] if name in noise else t for name, t in state.items()})


def known_rows(*, quick: bool = False) -> list[Row]:
    """What it costs a server to know a client: memory, JSON, time; a million of them hold a model."""
    code = (
        f"import json; from fedfp8.bench.scale import known; print(json.dumps(known({2_000 if quick else 1_000_000})))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return [dict(json.loads(done.stdout))]


def known(clients: int) -> Row:
    """All of them hold one of the last models; ids are 64-bit numbers, as Flower's are. No message is coded.

    memory_bytes is of who holds what, traffic_bytes of the lines that `ServerLink.traffic` keeps of every visit.
    """
    ids = (torch.randperm(clients, generator=generator(0, "bench", "ids")) + (1 << 62)).tolist()
    link = ServerLink("dq", seed=1, history=HISTORY)
    model = {"weight": torch.ones(4, 4)}
    share, before = -(-clients // HISTORY), _status("VmRSS")
    for number in range(HISTORY):
        begin = time.process_time()
        part = ids[number * share : (number + 1) * share]
        link.open({"weight": model["weight"] + number}, part)
        for client in part:
            link.confirm(client)
        link.close()
        seconds = time.process_time() - begin
    memory = _status("VmRSS") - before
    assert len(link.held) == clients
    begin = time.process_time()
    text = json.dumps(link.meta())
    saved, before = time.process_time() - begin, _status("VmRSS")
    sizes = {way: {client: 1000 + index for index, client in enumerate(ids)} for way in ("down", "up")}
    traffic = _status("VmRSS") - before
    assert len(sizes["up"]) == clients
    return {
        "clients": clients, "memory_bytes": round(memory / clients, 1), "json_bytes": round(len(text) / clients, 1),
        "traffic_bytes": round(traffic / clients, 1),
        "round_us": round(1e6 * seconds / share, 2), "save_us": round(1e6 * saved / clients, 2),
    }  # fmt: skip


def _status(field: str) -> int:
    """Bytes that /proc/self/status has for this process."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0])
