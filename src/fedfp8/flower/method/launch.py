"""Run the whole method on a Flower engine of this machine, or hand it to a SuperLink that is already there.

grid     every node a Context in this process: no Ray, no network
ray      Flower's simulation: nodes in Ray actors
deploy   a SuperLink and SuperNodes as processes, with TLS and node authentication
"""

import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w

from fedfp8.errors import ConfigError, RunError
from fedfp8.fl.checkpoint import RunFolder
from fedfp8.fl.config import Config
from fedfp8.fl.federation import build
from fedfp8.fl.runs import OnRound
from fedfp8.fl.task import complete
from fedfp8.flower.environment import keep_quiet
from fedfp8.flower.method.app import client_app, config_text, server_app
from fedfp8.flower.testing.deployment import Deployment
from fedfp8.flower.testing.localgrid import LocalGrid
from fedfp8.machine import cores

__all__ = ["ENGINES", "run", "write_app"]

ENGINES = ("grid", "ray", "deploy")
STATUS_EVERY = 10.0  # seconds; asking costs a process
APP = {
    "__init__.py": "",
    "server.py": "from fedfp8.flower import server_app\n\napp = server_app()\n",
    "client.py": "from fedfp8.flower import client_app\n\napp = client_app()\n",
}


def run(
    config: Config,
    out: str | os.PathLike[str],
    *,
    engine: str = "ray",
    nodes: int = 0,
    timeout: float = 3600.0,
    overwrite: bool = False,
    on_round: OnRound | None = None,
) -> None:
    """Run `config` into the run folder `out`, or continue the run that is there: the bytes are those of `fedfp8 run`.

    nodes: how many; default one a client (grid, ray) or two (deploy). timeout: seconds to wait for a round's replies.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine {engine!r}; choose one of {', '.join(ENGINES)}")
    keep_quiet()
    config = complete(config)
    folder = Path(out)
    if overwrite and (folder / "config.toml").exists():
        RunFolder.create(folder, config, overwrite=True).close()
    if engine == "deploy":
        _deploy(config, folder, nodes or 2, timeout, on_round)
        return
    clients = len(build(config).clients)
    if engine == "ray" and nodes not in (0, clients):
        raise ConfigError(f"--nodes {nodes} with engine ray, which runs one node a client ({clients}); leave it out")
    server = server_app(config, folder, nodes=nodes or clients, timeout=timeout, on_round=on_round)
    if engine == "grid":
        LocalGrid(client_app(config), nodes or clients).serve(server)
    else:
        _simulate(config, server, clients)


def _simulate(config: Config, server: Any, nodes: int) -> None:
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)  # else: a deprecation notice, and a line for every message
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": cores()}}
    run_simulation(server, client_app(config), num_supernodes=nodes, backend_config=resources)


def _deploy(config: Config, out: Path, nodes: int, timeout: float, on_round: OnRound | None) -> None:
    with tempfile.TemporaryDirectory(prefix="fedfp8-flower-") as temporary:
        app = write_app(Path(temporary) / "app", config, out, nodes=nodes, timeout=timeout)
        with Deployment(Path(temporary), nodes) as deployment:
            follow(deployment, deployment.submit(app), out, on_round)


def write_app(folder: Path, config: Config, out: Path, *, nodes: int, timeout: float = 3600.0) -> Path:
    """A Flower app for `flwr run FOLDER`: a pyproject.toml that holds the config, and two lines of code a side.

    `out` is a folder of the machine where the ServerApp runs. Nodes need fedfp8 installed, and for data sets that do
    not ship with it ``data-dir`` in their node config.
    """
    package = folder / "fedfp8_app"
    package.mkdir(parents=True, exist_ok=True)
    for name, text in APP.items():
        (package / name).write_text(text)
    components = {"serverapp": "fedfp8_app.server:app", "clientapp": "fedfp8_app.client:app"}
    settings = {"fedfp8": config_text(config), "out": str(out.resolve()), "nodes": nodes, "timeout": timeout}
    project = {
        "project": {"name": "fedfp8-app", "version": "1.0.0", "description": "fedfp8", "dependencies": []},
        "tool": {"flwr": {"app": {"publisher": "fedfp8", "components": components, "config": settings}}},
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project))
    return folder


def follow(deployment: Deployment, run: str, out: Path, on_round: OnRound | None = None) -> None:
    """Wait for a run that writes to `out`, reporting its rounds as they are recorded."""
    history, shown, asked, status = out / "history.jsonl", 0, time.monotonic(), ""
    while True:
        if time.monotonic() > asked + STATUS_EVERY:  # before reading: what was written until then is then read
            asked, status = time.monotonic(), deployment.status(run)
        lines = history.read_text().splitlines(keepends=True) if history.exists() else []
        for line in (line for line in lines[shown:] if line.endswith("\n")):
            shown += 1
            if on_round is not None:
                on_round(json.loads(line))
        if status == "finished:completed":
            return
        if status.startswith("finished"):
            raise RunError(f"the run ended as {status}; its log: {deployment.folder / 'superlink.log'}")
        time.sleep(0.5)
