"""The whole method as a Flower app: the same configs, seeds and bytes as `fedfp8 run`.

Nothing is computed here. The ServerApp is the run folder, records and rounds of `fl.run` with a Grid in place of the
worker pool; the ClientApp hands messages to `fl.client.Client`. Clients are logical: a message names the client it is
for, and node p of P serves the clients k with k mod P = p.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedfp8.errors import LostReference, RunError
from fedfp8.fl.checkpoint import RunFolder
from fedfp8.fl.client import Assignment, Client, Reply
from fedfp8.fl.config import Config, from_dict, to_dict, with_settings
from fedfp8.fl.federation import build
from fedfp8.fl.pool import Pool
from fedfp8.fl.presets import preset
from fedfp8.fl.runs import History, OnRound, execute
from fedfp8.fl.settings import parse_assignment
from fedfp8.fl.wires import wire_for
from fedfp8.flower.blob import record_of
from fedfp8.flower.cache import ClientCache
from fedfp8.flower.method.messages import read_assignment
from fedfp8.flower.method.workers import GridWorkers
from fedfp8.nn import layout_of
from fedfp8.wire import encode

__all__ = ["client_app", "config_of", "config_text", "server_app"]


def config_text(config: Config) -> str:
    """A config as one string, for `run_config`, which holds flat values only."""
    return json.dumps(to_dict(config), separators=(",", ":"))


def config_of(context: Context) -> Config:
    """The config of a run started by `flwr run`: whole in ``fedfp8``, or by ``preset``, ``method`` and ``set``.

    A node may keep its data elsewhere (node config ``data-dir``).
    """
    given = context.run_config
    if "fedfp8" in given:
        return from_dict(json.loads(str(given["fedfp8"])))
    if "preset" not in given or "method" not in given:
        raise RunError(
            "the run config has neither an entry 'fedfp8' nor 'preset' and 'method'; write the app with `fedfp8 flower "
            "app`, or name both in its pyproject.toml"
        )
    settings = dict(parse_assignment(item) for item in str(given.get("set", "")).split())
    return with_settings(preset(str(given["preset"]), str(given["method"])), settings)


# The client


def client_app(config: Config | None = None) -> ClientApp:
    """The ClientApp of `config`; None takes the config from the run (`fedfp8 flower run --engine deploy`)."""
    app = ClientApp()

    @app.query()
    def whoami(message: Message, context: Context) -> Message:
        node = {key: int(context.node_config[key]) for key in ("partition-id", "num-partitions")}
        return Message(RecordDict({"node": ConfigRecord(dict(node))}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        chosen = config or config_of(context)
        folder = str(context.node_config.get("data-dir", "")) or chosen.data.dir
        return answer(message, context, replace(chosen, data=replace(chosen.data, dir=folder)))

    return app


def answer(message: Message, context: Context, config: Config) -> Message:
    """An assignment in, a reply out. What goes wrong on the way is told to the server in words, not as an exception."""
    assignment = read_assignment(message)
    head: dict[str, Any] = {"client": assignment.client, "round": assignment.round}
    content = RecordDict()
    try:
        reply = _train(assignment, ClientCache(context), config)
        content["model"] = record_of(reply.payload)
        head |= {"examples": reply.examples, "loss": reply.loss, "seconds": reply.seconds}
    except LostReference:
        head["lost"] = True
    except Exception as error:  # as in fl.pool: a client's failure is that client's, not the run's
        head["error"] = f"{type(error).__name__}: {error}"
    content["reply"] = ConfigRecord(head)
    return Message(content, reply_to=message)


def _train(assignment: Assignment, cache: ClientCache, config: Config) -> Reply:
    client, name = _client(config), f"client-{assignment.client}"
    format = client.federation.formats[assignment.client]
    layout = wire_for(config, format).layout_down(layout_of(client.network(format)))
    client.held = lambda _: cache.get(name, layout)
    reply = client.train(assignment)
    if kept := assignment.orders.kept:
        cache.put(name, encode(client.message), assignment.round, kept=kept, rounds=config.wire.history)
    return reply


@functools.lru_cache(maxsize=1)
def _client(config: Config) -> Client:
    """Data and networks, kept as long as the process lives (a Ray actor; a deployed ClientApp: one assignment)."""
    return Client(config, build(config), lambda _: [])


# The server


def server_app(
    config: Config | None = None,
    out: Path | None = None,
    *,
    nodes: int = 0,
    timeout: float = 3600.0,
    on_round: OnRound | None = None,
    results: list[History] | None = None,
) -> ServerApp:
    """The ServerApp of `config` with run folder `out`; whatever is None or 0 comes from the run config.

    A folder that holds a run of the same config is continued, so a killed ServerApp resumes by starting it again.
    timeout: seconds to wait for a round's replies. results: the finished History is appended to it.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run_config = context.run_config
        chosen = config or config_of(context)
        where, seconds = nodes or int(run_config["nodes"]), float(run_config.get("timeout", timeout))
        with open_or_create(out or Path(str(run_config["out"])).expanduser(), chosen) as folder:
            trainers = functools.partial(GridWorkers, grid, nodes=where, timeout=seconds)
            history = execute(folder, build(chosen), Pool(0), on_round, trainers=trainers)
        if results is not None:
            results.append(history)

    return app


def open_or_create(path: Path, config: Config) -> RunFolder:
    """A new run folder, or the one that is there if it is of the same config."""
    if not (path / "config.toml").exists():
        return RunFolder.create(path, config)
    folder = RunFolder.open(path)
    if folder.config != config:
        folder.close()
        raise RunError(f"{path} holds a run of another config; choose another --out, or delete it")
    return folder
