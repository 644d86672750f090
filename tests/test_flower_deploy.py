"""A real federation on loopback: SuperLink and SuperNodes as processes, TLS, node keys, and what can go wrong.

One deployment serves all tests, in this order: an honest run during which strangers knock at the door, then (slow) a
run with a malicious client whose ServerApp is killed and resumed, then one whose SuperNode is killed in mid-round. An
app with the two lines and the documentation's steps have deployments of their own.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")
from fedfp8.fl import preset, run
from fedfp8.flower.certs import make_certs
from fedfp8.flower.environment import QUIET
from fedfp8.flower.method.launch import write_app
from fedfp8.flower.testing.deployment import MARK, Deployment, _listens, _marked, free_port

pytestmark = pytest.mark.deploy
SAME = ("digest_down", "digest_up", "model", "bytes_down", "bytes_up", "clients", "rejected", "accuracy")


def config(rounds):
    return preset("digits", "dq", clients__count=2, clients__fraction=1.0, local__epochs=1, round__count=rounds)


def history(out):
    path = out / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait(condition, seconds, deployment):
    """Until the condition holds. `seconds` are those of an idle machine: where others are at work they last longer."""
    left = seconds
    while not condition():
        log = (deployment.folder / "superlink.log").read_text()[-3000:]
        assert left > 0, f"waited {seconds} s in vain, at a load of {os.getloadavg()}; the SuperLink's log ends: {log}"
        time.sleep(0.5)
        left -= 0.5 / max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with Deployment(tmp_path_factory.mktemp("deployment"), 2) as running:
        yield running
    left = {mark: pids for mark in running.marks.values() if (pids := _marked(mark))}
    assert not left, f"processes left running: {left}"


def test_three_rounds_same_bytes_and_strangers_refused(deployment, tmp_path):
    out = tmp_path / "run"
    deployment.submit(write_app(tmp_path / "app", config(3), out, nodes=2))
    foreign = make_certs(tmp_path / "foreign", ["127.0.0.1"], 1)  # another CA, and a key that nobody registered
    stranger = deployment.start_supernode("stranger", deployment.certs["ca.crt"], foreign["node-0"], 0)
    no_ca = deployment.start_supernode("no-ca", foreign["ca.crt"], deployment.certs["node-0"], 0)
    wait(lambda: (out / "summary.json").exists(), 240, deployment)
    want, got = run(config(3)).rounds, history(out)
    assert [{k: line[k] for k in SAME} for line in got] == [{k: line[k] for k in SAME} for line in want]
    assert got[-1]["notes"] == [] and json.loads((out / "summary.json").read_text())["finished"]
    nodes = json.loads(deployment.flwr("supernode", "list", "fedfp8", "--format", "json"))["nodes"]
    assert sorted(node["status"] for node in nodes) == ["online", "online"]
    logs = {name: (deployment.folder / f"{name}.log").read_text() for name in ("stranger", "no-ca")}
    assert stranger.poll() not in (None, 0) or "authentic" in logs["stranger"].lower(), logs["stranger"][-2000:]
    assert "certificate" in logs["no-ca"].lower(), logs["no-ca"][-2000:]
    for process in (stranger, no_ca):
        deployment.kill(process)


MALICIOUS = '''
"""An honest node whose client 1 lies: garbage, then NaN, then a payload for another model."""

import numpy as np
from flwr.clientapp import ClientApp
from torch import nn

from fedfp8.flower import client_app
from fedfp8.flower.blob import blob_of, record_of
from fedfp8.nn import state_of
from fedfp8.model.quantized import quantize_state
from fedfp8.wire import encode
from fedfp8.wire.container import seal

inner = client_app()


def lie(round, payload):
    if round == 1:
        return b"garbage" * 1000
    if round == 2:
        state, seed = payload[:6], payload[6:22]  # header as it should be, every number of the body NaN
        return seal(state + seed + payload[22:30] + np.full(len(payload) // 4, np.nan, "<f4").tobytes())
    return encode(quantize_state(state_of(nn.Linear(4, 4)), seed=1, rounding="none"))


def mod(message, context, call_next):
    reply = inner(message, context)
    task = message.content.config_records.get("task")
    if task is not None and task["client"] == 1 and "model" in reply.content.array_records:
        reply.content["model"] = record_of(lie(task["round"], blob_of(reply.content["model"])))
    return reply


app = ClientApp(mods=[mod])
for kind in (app.train, app.query):
    kind()(lambda message, context: message)
'''


def server_apps(deployment):
    """Pids of the ServerApps that run now."""
    found = []
    for pid in deployment.family(deployment.processes[0]):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"flwr-serverapp" in file.read():
                    found.append(pid)
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_malicious_client_and_killed_server_app(deployment, tmp_path):
    out, app = tmp_path / "run", tmp_path / "app"
    write_app(app, config(3), out, nodes=2)
    (app / "fedfp8_app" / "client.py").write_text(MALICIOUS)
    deployment.submit(app)
    wait(lambda: len(history(out)) == 2, 240, deployment)  # the initial model and round 1
    killed = server_apps(deployment)
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    time.sleep(5)
    assert len(history(out)) == 2 and not (out / "summary.json").exists()
    deployment.submit(app)
    wait(lambda: (out / "summary.json").exists(), 300, deployment)
    lines = history(out)
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert [[r["client"] for r in line["rejected"]] for line in lines[1:]] == [[1], [1], [1]]
    reasons = [line["rejected"][0]["reason"] for line in lines[1:]]
    assert "not a fedfp8 message" in reasons[0] and "layout fingerprint" in reasons[2], reasons
    assert len({line["model"] for line in lines}) == 4  # client 0 was heard in every round


@pytest.mark.slow
def test_killed_supernode(deployment, tmp_path):
    out = tmp_path / "run"
    deployment.submit(write_app(tmp_path / "app", config(3), out, nodes=2, timeout=180))
    wait(lambda: len(history(out)) == 2, 240, deployment)
    node = deployment.processes[2]  # SuperLink, node 0, node 1
    deployment.kill(node, signal.SIGKILL)
    node.wait()
    wait(lambda: (out / "summary.json").exists(), 400, deployment)
    lines = history(out)
    assert [line["round"] for line in lines] == [0, 1, 2, 3] and lines[1]["rejected"] == []
    for line in lines[2:]:
        assert [r["client"] for r in line["rejected"]] == [1]
        assert re.match("no reply within 180 s|Flower error", line["rejected"][0]["reason"])
    assert len({line["model"] for line in lines}) == 4


# The documentation's steps, literally

ROOT = Path(__file__).parents[1]


def documented_blocks():
    """The code blocks of "A deployment, step by step" of docs/flower.md, in order."""
    text = (ROOT / "docs/flower.md").read_text()
    section = text.split("## A deployment, step by step")[1].split("\n## ")[0]
    return re.findall(r"^```(?:toml|python)?\n(.*?)^```$", section, re.S | re.M)


@pytest.mark.slow
def test_two_lines_late_node_killed_node_and_a_server_that_resumes(tmp_path):
    """The quickstart with the documented server: a node comes late, is killed, comes back; the ServerApp is killed."""
    app, model = tmp_path / "app", tmp_path / "model.pt"
    shutil.copytree(ROOT / "examples/flower-quickstart", app)
    (app / "digits_app/server.py").write_text(documented_blocks()[6])
    project = (app / "pyproject.toml").read_text().replace('out = ""', f'out = "{model}"')
    deployment = Deployment(tmp_path / "deployment", 2)

    def submit(rounds):
        (app / "pyproject.toml").write_text(project.replace("num-rounds = 15", f"num-rounds = {rounds}"))
        run = deployment.submit(app)
        deployment.start(f"run-{run}", "flwr", "log", run, "fedfp8", "--stream")
        return run

    def log(run):
        """What the ServerApp has said."""
        return (deployment.folder / f"run-{run}.log").read_text()

    def wait_for(run, *phrases):
        """For these phrases in the log, one after the other."""
        pattern = re.compile(".*".join(map(re.escape, phrases)), re.S)
        wait(lambda: pattern.search(log(run)), 600, deployment)

    try:
        deployment.start_superlink()
        for number in (0, 1):
            deployment.register(number)
        deployment.start_node(0)
        run = submit(1000)
        alone, both, one_lost = (f"Received {n}" for n in ("1 results and 0", "2 results and 0", "1 results and 1"))
        wait_for(run, alone)
        late = deployment.start_node(1)
        wait_for(run, alone, both)
        deployment.kill(late, signal.SIGKILL)
        late.wait()
        wait_for(run, alone, both, one_lost)
        deployment.start_node(1)
        wait_for(run, alone, both, one_lost, both)
        (killed,) = server_apps(deployment)
        os.kill(killed, signal.SIGKILL)
        wait(lambda: not server_apps(deployment), 60, deployment)
        saved = torch.load(model)
        assert saved["rounds"] >= 4 and "rejected" not in log(run)
        run = submit(saved["rounds"] + 2)
        wait_for(run, "[ROUND 2/2]", both, "times less")
        wait(lambda: deployment.status(run) == "finished:completed", 60, deployment)
        ended = torch.load(model)
        assert ended["rounds"] == saved["rounds"] + 2 and "rejected" not in log(run)
        assert ended["model"].keys() == saved["model"].keys()
        assert not any(torch.equal(ended["model"][name], saved["model"][name]) for name in ("0.weight", "7.weight"))
    finally:
        deployment.stop()


def test_the_documented_steps(tmp_path):
    """As written, with another name for the server, ports that are free and folders of the test's own.

    ``localhost`` stands for the server's name: the certificate is made for that name alone, as a reader would.
    """
    server, toml, register, node, app, two_lines = documented_blocks()[:6]
    port, home = free_port(), tmp_path / "home"
    (home / ".flwr").mkdir(parents=True)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | QUIET | {"HOME": str(home), "PATH": programs, "FLWR_HOME": str(home / ".flwr")}

    def here(text):
        changes = {
            "fed.example.org:8000": f"localhost:{port}",
            "fed.example.org": "localhost",
            "--host 0.0.0.0 --port 8000": f"--host 127.0.0.1 --port {port}",
            "/path/to/certs": str(tmp_path / "certs"),
            "/srv/runs": str(tmp_path / "runs"),
            " ca.crt": " certs/ca.crt",
            "private-key node-": "private-key certs/node-",
            ' data-dir="/data"': "",
            "examples/": f"{ROOT}/examples/",
            "num-rounds=3": "num-rounds=1",
        }
        for old, new in changes.items():
            text = text.replace(old, new)
        return text

    def shell(text, background=False):
        mark = f"{MARK}={uuid.uuid4().hex}"
        with open(tmp_path / f"{len(processes)}.log", "wb") as log:
            process = subprocess.Popen(
                ["bash", "-ec", here(text)],
                cwd=tmp_path,
                env=env | {MARK: mark.partition("=")[2]},
                stdout=log,
                stderr=log,
            )
        processes.append((process, mark))
        if not background:
            assert process.wait(timeout=400) == 0, (tmp_path / f"{len(processes) - 1}.log").read_text()[-3000:]

    processes = []
    try:
        certs, superlink = server.split("\n", 1)
        shell(certs)
        shell(superlink, background=True)
        (home / ".flwr/config.toml").write_text(here(toml))
        end = time.monotonic() + 60
        while not _listens(port):
            assert time.monotonic() < end, (tmp_path / "1.log").read_text()[-3000:]
            time.sleep(0.5)
        shell(register)
        for number in (0, 1):  # on one machine every SuperNode needs a port of its own
            own = node.replace("node-0", f"node-{number}").replace("partition-id=0", f"partition-id={number}")
            shell(own.replace("flower-supernode", f"flower-supernode --port {free_port()}"), background=True)
        write, run_it = app.strip().split("\n")
        shell(f"{write} --set round.count=1 --set clients.count=2 --set clients.fraction=1.0 --set local.epochs=1")
        shell(run_it)
        assert len(history(tmp_path / "runs/dq")) == 2 and (tmp_path / "runs/dq/summary.json").exists()
        shell(two_lines)
        logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
        assert re.search(r"fedfp8: .* kB instead of .* kB \([\d.]+ times less\)", logs), logs[-3000:]
    finally:
        for process, mark in reversed(processes):
            for pid in {process.pid, *_marked(mark)} if process.poll() is None else _marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
