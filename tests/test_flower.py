"""The whole method on a Grid: the bytes of the embedded engine, and clients that lose, fail, lie or are silent."""

import importlib
import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.clientapp import ClientApp

from fedfp8.errors import ConfigError, RunError
from fedfp8.fl import preset, run
from fedfp8.flower import LocalGrid, client_app, server_app
from fedfp8.flower import run as run_on_flower
from fedfp8.flower.blob import STYPE, blob_of, record_of
from fedfp8.flower.cache import RECORD as CACHE
from fedfp8.flower.method.workers import GridWorkers
from fedfp8.link import ServerLink
from fedfp8.model.quantized import quantize_state
from fedfp8.nn import state_of
from fedfp8.wire import encode

SAME = ("digest_down", "digest_up", "model", "bytes_down", "bytes_up", "clients", "rejected", "accuracy", "train_loss")


def small(method="dq", **settings):
    options = {"clients__count": 6, "clients__fraction": 0.5, "local__epochs": 1, "round__count": 4} | settings
    return preset("digits", method, **options)


def serve(config, folder, nodes, app=None):
    histories = []
    grid = LocalGrid(app or client_app(config), nodes)
    grid.serve(server_app(config, folder, nodes=nodes, results=histories))
    return grid, histories[0].rounds


def pick(rounds, keys=SAME):
    return [{key: line.get(key) for key in keys} for line in rounds]


@pytest.mark.parametrize("method", ["dq", "uq+", "fp32"])
@pytest.mark.parametrize("nodes", [6, 2])
def test_same_bytes_as_embedded(tmp_path, method, nodes):
    config = small(method)
    _, rounds = serve(config, tmp_path / "grid", nodes)
    assert pick(rounds) == pick(run(config).rounds)


def test_mixed_formats_same_bytes(tmp_path):
    config = small("uq", clients__formats="E4M3:1,FP32:1", round__count=2)
    _, rounds = serve(config, tmp_path / "grid", 2)
    assert pick(rounds) == pick(run(config).rounds)


def test_folder_is_resumed_by_either_engine(tmp_path):
    config = small(round__count=4)
    whole = run(config).rounds
    folder = tmp_path / "run"
    stop_after(config, folder, 2)
    _, rounds = serve(config, folder, 3)
    # Contexts were new, so every client had lost its reference; values are the same all the same.
    assert pick(rounds, ("digest_down", "digest_up", "model")) == pick(whole, ("digest_down", "digest_up", "model"))
    assert any("lost their reference" in note for line in rounds for note in line["notes"])
    with pytest.raises(RunError, match="another config"):
        serve(replace(config, seed=1), folder, 3)


def stop_after(config, folder, last):
    def stop(line):
        if line["round"] == last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, out=folder, on_round=stop)


def test_lost_state_costs_bytes_only(tmp_path):
    config = small(clients__fraction=1.0, round__count=3)

    class Forgetful(LocalGrid):
        def push_messages(self, messages):
            messages = list(messages)
            if messages and messages[0].metadata.group_id == "3":
                self.contexts[100].state.array_records.pop(CACHE, None)
            return super().push_messages(messages)

    histories = []
    Forgetful(client_app(config), 6).serve(server_app(config, tmp_path / "r", nodes=6, results=histories))
    want, got = run(config).rounds, histories[0].rounds
    assert pick(got, ("digest_up", "model", "rejected")) == pick(want, ("digest_up", "model", "rejected"))
    assert [line["notes"] for line in got[:3]] == [[], [], []]
    assert got[3]["notes"] == ["1 clients had lost their reference and were sent the whole model"]
    assert got[3]["bytes_down"] > want[3]["bytes_down"]


def test_a_node_gets_one_message_at_a_time(tmp_path):
    """On Ray, messages to one node run side by side, each on a copy of its state, and the last copy stays."""
    config = small(clients__fraction=1.0, round__count=3)

    class SideBySide(LocalGrid):
        def push_messages(self, messages):
            states = {node: context.state for node, context in self.contexts.items()}
            for node, context in self.contexts.items():
                context.state = RecordDict({key: ArrayRecord(dict(r)) for key, r in states[node].array_records.items()})
            ids = list(super().push_messages(messages))
            self.left = getattr(self, "left", {}) | {id: self._replies[id].metadata.src_node_id for id in ids}
            self.after = getattr(self, "after", {}) | {id: self.contexts[self.left[id]].state for id in ids}
            for node, state in states.items():
                self.contexts[node].state = state
            return ids

        def pull_messages(self, message_ids):
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                id = reply.metadata.reply_to_message_id
                self.contexts[self.left[id]].state = self.after[id]
            return replies

    histories = []
    SideBySide(client_app(config), 2).serve(server_app(config, tmp_path / "r", nodes=2, results=histories))
    assert pick(histories[0].rounds) == pick(run(config).rounds)
    assert [line["notes"] for line in histories[0].rounds] == [[], [], [], []]


def test_damaged_cache_is_a_lost_one(tmp_path):
    config = small(clients__fraction=1.0, round__count=2)

    class Damaging(LocalGrid):
        def push_messages(self, messages):
            for context in self.contexts.values():
                if CACHE in context.state.array_records:
                    key = next(iter(context.state[CACHE]))
                    context.state[CACHE] = ArrayRecord({key: Array("uint8", (3,), STYPE, b"bad")})
            return super().push_messages(messages)

    histories = []
    Damaging(client_app(config), 6).serve(server_app(config, tmp_path / "r", nodes=6, results=histories))
    assert pick(histories[0].rounds, ("model", "rejected")) == pick(run(config).rounds, ("model", "rejected"))


def test_cache_is_bounded_and_small(tmp_path):
    config = small(clients__count=8, round__count=6, wire__history=2)
    grid, rounds = serve(config, tmp_path / "grid", 2)
    model = 4 * 38_282
    for partition, context in enumerate(grid.contexts.values()):
        entries = context.state[CACHE]
        recent = {k for line in rounds[-2:] for k in line["clients"] if k % 2 == partition}
        kept = {int(key.split("-")[1].split("@")[0]) for key in entries}
        assert recent <= kept <= set(range(8)) and all(int(key.split("@")[1]) > 6 - 2 - 2 for key in entries)
        assert all(len(array.data) < model / 4 for array in entries.values())


def attacker(config, attack):
    """A ClientApp whose client 1 answers by `attack(message, reply) -> reply`."""
    inner = client_app(config)

    def mod(message, context, call_next):
        reply = inner(message, context)
        told = message.content.config_records.get("task")
        return attack(message, reply) if told is not None and told["client"] == 1 else reply

    app = ClientApp(mods=[mod])
    for kind in ("train", "query"):
        getattr(app, kind)()(lambda message, context: message)
    return app


def with_payload(reply, payload):
    reply.content["model"] = record_of(payload)
    return reply


def nan_payload(message, reply):
    payload = bytearray(blob_of(reply.content["model"]))
    return with_payload(reply, bytes(payload[:-20]) + b"\xff\xff\xff\x7f" * 5)


def other_model(message, reply):
    state = state_of(nn.Linear(3, 2))
    return with_payload(reply, encode(quantize_state(state, seed=1, rounding="none")))


def raises(message, reply):
    raise ValueError("boom")


def edit(**values):
    def attack(message, reply):
        reply.content["reply"] = ConfigRecord({**reply.content["reply"], **values})
        return reply

    return attack


def without(key):
    def attack(message, reply):
        del reply.content[key]
        return reply

    return attack


def plain_arrays(message, reply):
    reply.content["model"] = ArrayRecord({"w": Array(np.zeros(3))})
    return reply


ATTACKS = {
    "garbage": (lambda message, reply: with_payload(reply, b"garbage" * 100), "not a fedfp8 message"),
    "empty": (lambda message, reply: with_payload(reply, b""), "needs"),
    "damaged": (nan_payload, "checksum"),
    "other model": (other_model, "layout fingerprint"),
    "own downlink": (lambda message, reply: with_payload(reply, blob_of(message.content["model"])), "reference"),
    "exception": (raises, "boom"),
    "nan loss": (edit(loss=math.nan), "reported loss nan"),
    "text loss": (edit(loss="low"), "reported loss 'low'"),
    "no model": (without("model"), "no ArrayRecord"),
    "no reply": (without("reply"), "reported loss None"),
    "plain arrays": (plain_arrays, "expected one Array"),
    "always lost": (edit(lost=True), "lost its reference"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_bad_client_is_rejected_by_name(tmp_path, name):
    attack, reason = ATTACKS[name]
    config = small(clients__count=3, clients__fraction=1.0, round__count=2)
    _, rounds = serve(config, tmp_path / "grid", 3, attacker(config, attack))
    for line in rounds[1:]:
        assert [r["client"] for r in line["rejected"]] == [1]
        assert re.search(reason, line["rejected"][0]["reason"])
        assert line["model"] != rounds[line["round"] - 1]["model"]  # the others were heard


def test_replayed_update_of_an_earlier_round_is_rejected(tmp_path):
    config = small(clients__count=3, clients__fraction=1.0, round__count=2)
    first = []

    def replay(message, reply):
        first.append(blob_of(reply.content["model"]))
        return with_payload(reply, first[0])

    _, rounds = serve(config, tmp_path / "grid", 3, attacker(config, replay))
    assert rounds[1]["rejected"] == [] and [r["client"] for r in rounds[2]["rejected"]] == [1]


def test_nan_in_a_valid_message_is_rejected(tmp_path):
    """A client that encodes NaN itself, in a float32 message with a right checksum."""
    config = small("fp32", clients__count=2, clients__fraction=1.0, round__count=1)

    def poison(message, reply):
        from fedfp8.wire.container import seal

        payload = bytearray(blob_of(reply.content["model"])[:-8])
        payload[-4:] = b"\x00\x00\xc0\x7f"
        return with_payload(reply, seal(bytes(payload)))

    _, rounds = serve(config, tmp_path / "grid", 2, attacker(config, poison))
    assert "NaN" in rounds[1]["rejected"][0]["reason"] and rounds[1]["rejected"][0]["client"] == 1


def test_silent_node_is_left_out(tmp_path):
    config = small(clients__count=4, clients__fraction=1.0, round__count=2)

    class Dropping(LocalGrid):
        def pull_messages(self, message_ids):
            replies = super().pull_messages(message_ids)
            return [r for r in replies if r.metadata.src_node_id != 101 or r.metadata.message_type == "query"]

    histories = []
    grid = Dropping(client_app(config), 2)
    grid.serve(server_app(config, tmp_path / "r", nodes=2, timeout=1, results=histories))
    for line in histories[0].rounds[1:]:
        assert [(r["client"], r["reason"]) for r in line["rejected"]] == [(k, "no reply within 1 s") for k in (1, 3)]


def test_nodes_are_waited_for_checked_and_welcomed_back(tmp_path):
    config = small(clients__count=3, clients__fraction=1.0)
    grid = LocalGrid(client_app(config), 3)
    link = ServerLink()
    workers = GridWorkers(grid, link, nodes=4, wait=0.3)
    with pytest.raises(RunError, match=r"3 nodes are connected and 0 of 4 partitions"):
        workers._find_nodes()
    workers = GridWorkers(grid, link, nodes=3, wait=5)
    workers._find_nodes()
    assert workers.nodes == {0: 100, 1: 101, 2: 102}
    grid.contexts[200] = grid.contexts[101]  # a second node claims partition 1: ignored while the first is there
    workers._find_nodes()
    assert workers.nodes[1] == 101 and "another node serves" in workers.notes[-1]
    late = grid.contexts.pop(101)
    workers._asked.discard(200)  # it connects anew
    workers._find_nodes()
    assert workers.nodes[1] == 200
    late.node_config["partition-id"] = 7
    grid.contexts[300] = late
    workers._find_nodes()
    assert "ignored" in workers.notes[-1] and 300 not in workers.nodes.values()


def test_one_array_per_message(tmp_path):
    config = small(clients__count=2, clients__fraction=1.0, round__count=1)
    seen = []

    class Watching(LocalGrid):
        def _deliver(self, message):
            reply = super()._deliver(message)
            seen.extend(m for m in (message, reply) if m.metadata.message_type == "train")
            return reply

    Watching(client_app(config), 2).serve(server_app(config, tmp_path / "r", nodes=2))
    assert len(seen) == 4
    for message in seen:
        arrays = [a for record in message.content.array_records.values() for a in record.values()]
        assert len(arrays) == 1 and arrays[0].stype == STYPE


def test_run_grid_engine_and_its_errors(tmp_path):
    config = small(round__count=1)
    run_on_flower(config, tmp_path / "r", engine="grid", nodes=2)
    assert json.loads((tmp_path / "r/summary.json").read_text())["rounds"] == 1
    run_on_flower(config, tmp_path / "r", engine="grid", overwrite=True)
    with pytest.raises(ConfigError, match="choose one of grid, ray, deploy"):
        run_on_flower(config, tmp_path / "x", engine="spark")
    with pytest.raises(ConfigError, match="one node a client"):
        run_on_flower(config, tmp_path / "x", engine="ray", nodes=2)


def test_import_error_names_the_extra():
    code = (
        "import sys; sys.modules['flwr'] = None\n"
        "try:\n    import fedfp8.flower\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "fedfp8[flower]"' in done.stdout
    code = "import sys; sys.modules['flwr'] = None\nfrom fedfp8.cli import main; main()"
    command = [sys.executable, "-c", code, "flower", "certs", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and 'pip install "fedfp8[flower]"' in done.stderr and "Traceback" not in done.stderr


def test_certs(tmp_path):
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    make_certs = importlib.import_module("fedfp8.flower.certs").make_certs
    files = make_certs(tmp_path / "c", ["fed.example.org", "127.0.0.1"], 2)
    ca, server = (x509.load_pem_x509_certificate(files[n].read_bytes()) for n in ("ca.crt", "server.pem"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(n.value) for n in names] == ["fed.example.org", "127.0.0.1", "::1", "localhost"]  # loopback always
    for number in (0, 1):
        private = load_ssh_private_key(files[f"node-{number}"].read_bytes(), None)
        public = load_ssh_public_key(files[f"node-{number}.pub"].read_bytes())
        assert private.public_key().public_numbers() == public.public_numbers()
        assert files[f"node-{number}.pub"].read_text().startswith("ecdsa-sha2-nistp384 ")
    for name in ("ca.key", "server.key", "node-0"):
        assert files[name].stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="already"):
        make_certs(tmp_path / "c", ["127.0.0.1"], 1)
    before = files["ca.crt"].read_bytes()
    assert make_certs(tmp_path / "c", ["127.0.0.1"], 1, overwrite=True)["ca.crt"].read_bytes() != before
    with pytest.raises(ConfigError, match="at least one"):
        make_certs(tmp_path / "d", [], 1)


def test_rounds_written_just_before_the_end_are_reported(tmp_path, monkeypatch):
    """The status is asked before the history is read: what was written until then reaches on_round."""
    from fedfp8.flower.method import launch

    history = tmp_path / "history.jsonl"

    class Deployment:
        folder = tmp_path

        def status(self, run):
            history.write_text('{"round": 0}\n{"round": 1}\n')  # the last lines come while the status is asked
            return "finished:completed"

    monkeypatch.setattr(launch, "STATUS_EVERY", -1.0)
    seen = []
    launch.follow(Deployment(), "1", tmp_path, seen.append)
    assert [line["round"] for line in seen] == [0, 1]
