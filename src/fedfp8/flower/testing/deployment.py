"""A whole federation on this machine: a SuperLink and SuperNodes as processes of their own, with TLS and node keys.

What `fedfp8 flower run --engine deploy` starts, and what the deployment tests break on purpose. The same commands, one
machine each, are a real deployment (docs/flower.md). Ports are free ones, every process is remembered by its pid, and
`stop` leaves nothing running.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import tomli_w

from fedfp8.errors import RunError
from fedfp8.flower.certs import make_certs
from fedfp8.flower.environment import QUIET

__all__ = ["Deployment", "free_port"]

HOST = "127.0.0.1"
SUPERLINK = "fedfp8"  # its name in Flower's config.toml
POLL = 0.5
MARK = "FEDFP8_FAMILY"


class Deployment:
    """Use as a context manager; `folder` gets certificates, logs, Flower's home and the SuperLink's database."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.count = folder.resolve(), nodes
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.certs = make_certs(self.folder / "certs", [HOST, "localhost"], nodes, overwrite=True)
        self.home = self.folder / "flwr"
        self.home.mkdir(exist_ok=True)
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self.env = os.environ | QUIET | {"FLWR_HOME": str(self.home), "PATH": programs}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.marks: dict[int, str] = {}  # pid -> what its family carries in its environment
        address = {"address": f"{HOST}:{self.port}", "root-certificates": str(self.certs["ca.crt"])}
        config = {"superlink": {"default": SUPERLINK, SUPERLINK: address}}
        (self.home / "config.toml").write_text(tomli_w.dumps(config))

    def __enter__(self) -> "Deployment":
        try:
            self.start_superlink()
            for number in range(self.count):
                self.register(number)
                self.start_node(number)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_superlink(self) -> subprocess.Popen[bytes]:
        process = self.start(
            "superlink", "flower-superlink", "--host", HOST, "--port", str(self.port),
            "--ssl-ca-certfile", str(self.certs["ca.crt"]), "--ssl-certfile", str(self.certs["server.pem"]),
            "--ssl-keyfile", str(self.certs["server.key"]), "--enable-supernode-auth",
            "--disable-runtime-dependency-installation", "--database", str(self.folder / "superlink.db"),
        )  # fmt: skip
        end = time.monotonic() + 60
        while not _listens(self.port):
            if process.poll() is not None or time.monotonic() > end:
                raise RunError(f"the SuperLink did not start; its log: {self.folder / 'superlink.log'}")
            time.sleep(POLL)
        return process

    def register(self, number: int) -> None:
        """Tell the SuperLink a node's public key. Nodes whose keys it does not know are turned away."""
        self.flwr("supernode", "register", str(self.certs[f"node-{number}.pub"]), SUPERLINK)

    def start_node(self, number: int, **node_config: Any) -> subprocess.Popen[bytes]:
        key = self.certs[f"node-{number}"]
        return self.start_supernode(f"node-{number}", self.certs["ca.crt"], key, number, **node_config)

    def start_supernode(
        self, name: str, ca: Path, key: Path, partition: int, **node_config: Any
    ) -> subprocess.Popen[bytes]:
        values = {"partition-id": partition, "num-partitions": self.count} | node_config
        return self.start(
            name, "flower-supernode", "--superlink", f"{HOST}:{self.port}", "--host", HOST, "--port", str(free_port()),
            "--root-certificates", str(ca), "--auth-supernode-private-key", str(key),
            "--node-config", " ".join(f"{k}={json.dumps(v)}" for k, v in values.items()),
        )  # fmt: skip

    def start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A process whose family can be found again, by a mark in the environment: Flower detaches what it starts."""
        mark = f"{MARK}={uuid.uuid4().hex}"
        env = self.env | {MARK: mark.partition("=")[2]}
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen([_program(program), *arguments], env=env, stdout=log, stderr=log)
        self.processes.append(process)
        self.marks[process.pid] = mark
        return process

    def family(self, process: subprocess.Popen[bytes]) -> list[int]:
        """The processes alive that `process` has started, and theirs, wherever they hang by now."""
        return [pid for pid in _marked(self.marks[process.pid]) if pid != process.pid]

    def flwr(self, *arguments: str, timeout: float = 120.0) -> str:
        """Run Flower's command line against this SuperLink; returns what it printed."""
        command = [_program("flwr"), *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode:
            raise RunError(f"`flwr {' '.join(arguments[:2])}` failed: {(done.stderr or done.stdout).strip()[-800:]}")
        return done.stdout

    def submit(self, app: Path) -> str:
        """Start the app in folder `app`; returns the run's id at once."""
        answer = json.loads(self.flwr("run", str(app), SUPERLINK, "--format", "json"))
        if not answer.get("success"):
            raise RunError(f"flwr run failed: {answer}")
        return str(answer["run-id"])

    def status(self, run: str) -> str:
        """Flower's word for the state of a run, such as "running" or "finished:completed"."""
        answer = json.loads(self.flwr("list", SUPERLINK, "--run-id", run, "--format", "json"))
        return str(answer["runs"][0]["status"])

    def kill(self, process: subprocess.Popen[bytes], signum: int = signal.SIGKILL) -> None:
        """End a process we started and its family."""
        for pid in [*([process.pid] if process.poll() is None else []), *self.family(process)]:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                pass

    def stop(self) -> None:
        """End all processes: first politely, then not."""
        for process in reversed(self.processes):
            self.kill(process, signal.SIGTERM)
        end = time.monotonic() + 10
        for process in self.processes:
            while (process.poll() is None or self.family(process)) and time.monotonic() < end:
                time.sleep(0.1)
            self.kill(process)
            process.wait()


def free_port() -> int:
    """A port that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _marked(mark: str) -> list[int]:
    """Processes that carry `mark` in their environment and are no zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it ended while we looked, or is not ours
            continue
    return found


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


def _program(name: str) -> str:
    """Flower's programs are beside the Python that runs us."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise RunError(f'{name} is not installed beside {sys.executable}; pip install "fedfp8[flower]"')
    return str(path)
