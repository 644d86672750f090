"""The four FLARE filters, between a server and clients that are FLARE contexts without a network."""

import copy
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare", reason='NVIDIA FLARE is not installed: pip install "fedfp8[nvflare]"')

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply

from fedfp8.errors import ConfigError, RunError
from fedfp8.nvflare import ReceiveModel, ReceiveUpdate, SendModel, SendUpdate, add_to, filters

MESSAGE = filters.MESSAGE


class Engine:
    """What the filters use of an engine: clients, a run folder, auxiliary messages."""

    def __init__(self, folder: Path, clients: int = 2) -> None:
        self.folder, self.number, self.handlers = folder, clients, {}
        self.server: Any = None  # of a client: how its requests reach the server

    def get_clients(self) -> list[str]:
        return [f"site-{i + 1}" for i in range(self.number)]

    def get_workspace(self) -> Any:
        return SimpleNamespace(get_run_dir=lambda job: str(self.folder / job))

    def fire_event(self, event: str, fl_ctx: FLContext) -> None:
        pass

    def register_aux_message_handler(self, topic: str, message_handle_func: Any) -> None:
        if topic in self.handlers:
            raise ValueError("handler already registered")
        self.handlers[topic] = message_handle_func

    def send_aux_request(
        self, targets: Any, topic: str, request: Shareable, timeout: float, fl_ctx: FLContext
    ) -> dict[str, Shareable]:
        return {"server": self.server(topic, request, fl_ctx.get_identity_name())}


def context(engine: Engine, job: str, name: str, peer: str) -> FLContext:
    ctx, peer_ctx = FLContext(), FLContext()
    peer_ctx.set_prop(ReservedKey.IDENTITY_NAME, peer, private=False, sticky=False)
    for key, value in {
        ReservedKey.ENGINE: engine,
        ReservedKey.RUN_NUM: job,
        ReservedKey.IDENTITY_NAME: name,
        ReservedKey.PEER_CTX: peer_ctx,
    }.items():
        ctx.set_prop(key, value, private=True, sticky=False)
    return ctx


class Federation:
    """A server and clients; `task` and `result` go through the filters as FLARE would take them."""

    def __init__(self, folder: Path, job: str = "job", clients: int = 2, **settings: Any) -> None:
        self.folder, self.job = folder, job
        self.engine = Engine(folder / "server", clients)
        self.send, self.back = SendModel(settings={"seed": 1} | settings), ReceiveUpdate()
        self.sites: dict[str, tuple[Engine, ReceiveModel, SendUpdate]] = {}
        (folder / "server" / job).mkdir(parents=True, exist_ok=True)

    def at_server(self, site: str) -> FLContext:
        return context(self.engine, self.job, "server", site)

    def at(self, site: str) -> FLContext:
        return context(self.site(site)[0], self.job, site, "server")

    def site(self, name: str) -> tuple[Engine, ReceiveModel, SendUpdate]:
        if name not in self.sites:
            engine = Engine(self.folder / name)
            engine.server = lambda topic, request, who: self.engine.handlers[topic](topic, request, self.at_server(who))
            self.sites[name] = engine, ReceiveModel(), SendUpdate()
        return self.sites[name]

    def restart(self, name: str) -> None:
        del self.sites[name]  # another process: nothing in memory

    def message(self, site: str, model: dict[str, Any], round: int = 0) -> Shareable:
        task = DXO(DataKind.WEIGHTS, model, {"a": 1}).to_shareable()
        task.set_header("current_round", round)
        task.set_header(ReservedHeaderKey.MSG_ROOT_ID, f"task {round}")
        return self.send.process(task, self.at_server(site))

    def receive(self, site: str, message: Shareable) -> dict[str, Any]:
        dxo = from_shareable(self.site(site)[1].process(copy.deepcopy(message), self.at(site)))
        assert dxo.get_meta_prop("a") == 1 and MESSAGE not in dxo.meta
        return dxo.data

    def reply(self, site: str, data: dict[str, Any], kind: str = DataKind.WEIGHTS) -> Shareable:
        result = DXO(kind, data, {"NUM_STEPS_CURRENT_ROUND": 7}).to_shareable()
        return self.site(site)[2].process(result, self.at(site))

    def update(self, site: str, reply: Shareable) -> DXO:
        return from_shareable(self.back.process(copy.deepcopy(reply), self.at_server(site)))

    @property
    def link(self) -> Any:
        return filters._of_job(self.at_server("site-1"), "server").link

    @property
    def rows(self) -> Any:
        return filters._of_job(self.at_server("site-1"), "server").rows


@pytest.fixture
def fed(tmp_path: Path) -> Federation:
    return Federation(tmp_path)


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO):
        yield caplog


def model(seed: int = 0, kind: str = "numpy", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    tensors = {
        "w": torch.randn(64, 48, generator=g).to(dtype),
        "b": torch.randn(48, generator=g).to(dtype),
        "steps": torch.tensor(3),
    }
    return tensors if kind == "torch" else {name: t.numpy() for name, t in tensors.items()}


def moved(received: dict[str, Any], by: float = 0.01) -> dict[str, Any]:
    return {name: array + (1 if name == "steps" else by) for name, array in received.items()}


def size(shareable: Shareable) -> int:
    return len(from_shareable(shareable).data[MESSAGE])


@pytest.mark.parametrize("wire", ["dq", "fp8", "fp32"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_round_brings_models_of_the_same_kind_there_and_back(tmp_path: Path, kind: str, wire: str) -> None:
    fed, start = Federation(tmp_path), model(kind=kind)
    fed.send.wire = wire
    before = copy.deepcopy(start)
    for site in ("site-1", "site-2"):
        message = fed.message(site, start)
        data = from_shareable(message).data
        assert list(data) == [MESSAGE] and isinstance(data[MESSAGE], type(start["w"]))
        received = fed.receive(site, message)
        assert list(received) == list(start)
        for name, array in received.items():
            assert type(array) is type(start[name]) and array.dtype == start[name].dtype
        reply = fed.reply(site, moved(received))
        assert from_shareable(reply).get_meta_prop("NUM_STEPS_CURRENT_ROUND") == 7
        update = fed.update(site, reply)
        assert update.data_kind == DataKind.WEIGHTS and update.get_meta_prop("NUM_STEPS_CURRENT_ROUND") == 7
        assert update.data["steps"] == 4
        assert np.array_equal(update.data["b"], start["b"] + 0.01)  # travels as it is
        change = torch.as_tensor(update.data["w"] - start["w"])
        # dq: half a step, kappa_up 2.4 (two clients) * sqrt(48/89) = 1.76 times 0.01; fp8: max|w|/8 at most, each way
        bound = {"dq": 0.89 * 0.01, "fp8": float(abs(start["w"]).max()) / 4, "fp32": 1e-6}[wire]
        assert float((change - 0.01).abs().max()) <= bound
    assert all(np.array_equal(start[name], before[name]) for name in start)  # the server shares one dict among clients


@pytest.mark.parametrize("wire", ["dq", "fp8", "fp32"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_difference_comes_out_as_the_change_the_client_made(tmp_path: Path, kind: str, wire: str) -> None:
    fed, start = Federation(tmp_path), model(kind=kind)
    fed.send.wire = wire
    received = fed.receive("site-1", fed.message("site-1", start))
    diff = {name: array * 0 + (1 if name == "steps" else 0.01) for name, array in received.items()}
    update = fed.update("site-1", fed.reply("site-1", diff, DataKind.WEIGHT_DIFF))
    assert update.data_kind == DataKind.WEIGHT_DIFF and update.data["steps"] == 1
    bound = {"dq": 0.93 * 0.01, "fp8": float(abs(start["w"]).max()) / 8, "fp32": 1e-6}[wire]
    assert float(abs(update.data["w"] - 0.01).max()) <= bound
    # the mean of 3072 errors below half a step each: 6 sigma
    assert abs(float(update.data["w"].mean()) - 0.01) < 6 * bound / np.sqrt(3072)
    assert float(abs(update.data["b"] - 0.01).max()) < 1e-6


def test_bfloat16_tensors_stay_what_they_are(fed: Federation) -> None:
    start = model(kind="torch", dtype=torch.bfloat16)
    received = fed.receive("site-1", fed.message("site-1", start))
    assert received["w"].dtype == received["b"].dtype == torch.bfloat16
    update = fed.update("site-1", fed.reply("site-1", moved(received)))
    assert update.data["w"].dtype == torch.bfloat16 and torch.equal(update.data["b"], start["b"] + 0.01)


def test_later_rounds_are_coded_given_what_the_client_holds_also_in_a_new_process(fed: Federation) -> None:
    start = model()
    fed.update("site-1", fed.reply("site-1", moved(fed.receive("site-1", fed.message("site-1", start)))))
    fed.restart("site-1")
    second = fed.message("site-1", moved(start, 0.001), round=1)
    fresh = fed.message("site-2", moved(start, 0.001), round=1)
    assert size(second) < 0.8 * size(fresh)
    fed.receive("site-1", second)
    assert fed.rows[-1]["resent"] == {}


def test_counters_that_an_average_made_floats_are_counters_again(fed: Federation) -> None:
    for round in range(3):
        received = fed.receive("site-1", fed.message("site-1", given := model() | {"steps": 3}, round=round))
        if round:
            given["steps"] = np.float64(3.0000001)
        assert received["steps"].dtype == np.int64 and received["steps"] == 3
        assert fed.update("site-1", fed.reply("site-1", moved(received))).data["steps"] == 4
    fed.message("site-1", model() | {"steps": np.float64(3.9999999)}, round=3)
    assert fed.link.opened == 4  # one link all along


def test_a_task_sent_again_is_the_same_message(fed: Federation) -> None:
    start = model()
    first, again = fed.message("site-1", start), fed.message("site-1", start)
    assert np.array_equal(from_shareable(first).data[MESSAGE], from_shareable(again).data[MESSAGE])
    fed.message("site-2", start)
    assert fed.link.opened == 1
    reply = fed.reply("site-1", moved(fed.receive("site-1", first)))
    one, two = fed.update("site-1", reply), fed.update("site-1", reply)
    assert np.array_equal(one.data["w"], two.data["w"])


def test_a_relay_gives_the_next_client_the_model_of_the_last(fed: Federation) -> None:
    """One task, one round, another model for each client."""
    fed.send.clients = 1
    fed.receive("site-1", fed.message("site-1", model()))
    received = fed.receive("site-2", fed.message("site-2", other := model(1)))
    assert np.corrcoef(received["w"].ravel(), other["w"].ravel())[0, 1] > 0.9


def test_a_lost_reference_is_healed_within_the_task(fed: Federation, logged: pytest.LogCaptureFixture) -> None:
    start = model()
    fed.update("site-1", fed.reply("site-1", moved(fed.receive("site-1", fed.message("site-1", start)))))
    next(fed.folder.rglob("received.bin")).unlink()
    fed.restart("site-1")
    received = fed.receive("site-1", fed.message("site-1", moved(start), round=1))
    assert "asking for it whole" in logged.text
    assert fed.rows[-1]["resent"].keys() == {"site-1"}
    update = fed.update("site-1", fed.reply("site-1", moved(received)))
    assert np.array_equal(update.data["b"], start["b"] + 0.01 + 0.01)


def test_a_client_that_is_killed_in_its_task_heals_too(fed: Federation) -> None:
    """It holds the new model besides the one that the server counts on, and the task is sent again. (FLARE's simulator
    ends the run when a client's process dies, so that this cannot be seen there.)"""
    start = model()
    fed.update("site-1", fed.reply("site-1", moved(fed.receive("site-1", fed.message("site-1", start)))))
    second = moved(start)
    from_shareable(fed.message("site-1", second, round=1)).data[MESSAGE].tofile(fed.folder / "message")
    done = subprocess.run([sys.executable, "-c", RECEIVE_AND_DIE, __file__, fed.folder], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    fed.restart("site-1")
    received = fed.receive("site-1", fed.message("site-1", second, round=1))
    assert not fed.rows[-1]["resent"]
    assert fed.update("site-1", fed.reply("site-1", moved(received))).data["steps"] == 5


RECEIVE_AND_DIE = """
import os, signal, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from test_nvflare import *
message = {MESSAGE: np.fromfile(Path(sys.argv[2]) / "message", np.uint8)}
task = DXO(DataKind.WEIGHTS, message, {"a": 1, MESSAGE: "numpy"}).to_shareable()
Federation(Path(sys.argv[2])).receive("site-1", task)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_that_cannot_send_the_whole_model_is_an_error_that_says_so(fed: Federation) -> None:
    start = model()
    fed.update("site-1", fed.reply("site-1", moved(fed.receive("site-1", fed.message("site-1", start)))))
    next(fed.folder.rglob("received.bin")).unlink()
    fed.restart("site-1")
    message = fed.message("site-1", moved(start), round=1)
    fed.site("site-1")[0].server = lambda *_: make_reply(ReturnCode.COMMUNICATION_ERROR)
    with pytest.raises(RunError, match="did not send the whole model in 3 attempts"):
        fed.receive("site-1", message)
    handler = fed.engine.handlers[filters.TOPIC]
    for stranger in (fed.at_server("site-9"), context(fed.engine, "another job", "server", "site-1")):
        assert handler(filters.TOPIC, Shareable(), stranger).get_return_code() == ReturnCode.BAD_REQUEST_DATA


def hostile(fed: Federation, reply: Shareable) -> dict[str, Shareable]:
    """Results that a client could send instead of `reply`."""
    good = from_shareable(reply).data[MESSAGE]
    damaged = good.copy()
    damaged[len(damaged) // 2] ^= 255
    nan = model() | {"b": np.full(48, np.nan, np.float32)}
    contents = {
        "damaged": {MESSAGE: damaged},
        "cut": {MESSAGE: good[:-9]},
        "empty": {MESSAGE: good[:0]},
        "not bytes": {MESSAGE: good.astype(np.float32)},
        "a string": {MESSAGE: "x"},
        "more than a message": {MESSAGE: good, "w": nan["w"]},
        "plain, not finite": nan,
        "plain": model(),
    }
    found = {name: DXO(DataKind.WEIGHTS, data).to_shareable() for name, data in contents.items()}
    for kind in ("STATISTICS", DataKind.COLLECTION, 7, None):
        other = DXO(DataKind.WEIGHTS, nan).to_shareable()
        other["DXO"]["kind"] = kind
        found[f"kind {kind}"] = other
    found["refused by its own filter"] = fed.reply("site-1", nan)
    found["other tensors"] = fed.reply("site-1", {"x": nan["w"]})
    return found


def test_bad_results_cost_the_sender_its_update_and_name_it(fed: Federation, logged: pytest.LogCaptureFixture) -> None:
    start = model()
    received = {site: fed.receive(site, fed.message(site, start)) for site in ("site-1", "site-2")}
    reply = fed.reply("site-1", moved(received["site-1"]))
    fed.update("site-2", fed.reply("site-2", moved(received["site-2"])))
    for name, bad in hostile(fed, reply).items():
        logged.clear()
        assert not fed.update("site-1", bad).data, name
        assert "an update is left out" in logged.text and "'site-1'" in logged.text, name
    other = fed.reply("site-2", moved(received["site-2"]))
    logged.clear()
    assert not fed.update("site-1", other).data  # another client's message
    assert "'site-1'" in logged.text
    assert fed.update("site-1", reply).data  # nothing was changed by what failed


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_a_round_without_any_good_result_keeps_the_model(fed: Federation, kind: str) -> None:
    """FLARE's FedAvg would go on with an empty model."""
    start = model()
    for site in ("site-1", "site-2"):
        fed.receive(site, fed.message(site, start))
    bad = DXO(kind, {MESSAGE: np.zeros(9, np.uint8)}).to_shareable()
    assert fed.update("site-1", bad).data == {}
    kept = fed.update("site-2", bad).data
    expected = start if kind == DataKind.WEIGHTS else {name: array * 0 for name, array in start.items()}
    assert all(np.array_equal(kept[name], expected[name]) for name in expected)


def test_models_and_differences_are_never_mixed_in_one_average(fed: Federation) -> None:
    start = model()
    received = {site: fed.receive(site, fed.message(site, start)) for site in ("site-1", "site-2")}
    fed.update("site-1", fed.reply("site-1", moved(received["site-1"])))
    diff = {name: array * 0 for name, array in received["site-2"].items()}
    update = fed.update("site-2", fed.reply("site-2", diff, DataKind.WEIGHT_DIFF))
    assert update.data_kind == DataKind.WEIGHTS and np.allclose(update.data["w"], start["w"], atol=1e-6)


def test_a_late_result_is_left_out(fed: Federation, logged: pytest.LogCaptureFixture) -> None:
    late = fed.reply("site-1", moved(fed.receive("site-1", fed.message("site-1", model()))))
    fed.message("site-2", second := model(1), round=1)
    assert not fed.update("site-1", late).data  # it has not even asked for its next task
    fed.message("site-1", second, round=1)
    assert not fed.update("site-1", late).data
    assert logged.text.count("client 'site-1'") == 2 and "another round" in logged.text


def test_other_content_passes_untouched(fed: Federation) -> None:
    empty = DXO(DataKind.WEIGHTS, {}).to_shareable()  # FedAvg without an initial model
    assert from_shareable(fed.send.process(empty, fed.at_server("site-1"))).data == {}
    plain = DXO(DataKind.WEIGHTS, model()).to_shareable()
    assert fed.site("site-1")[1].process(plain, fed.at("site-1")) == plain
    assert from_shareable(fed.site("site-1")[2].process(plain, fed.at("site-1"))).data.keys() == model().keys()
    assert fed.update("site-1", plain).data.keys() == model().keys()  # nothing coded was sent: plain is welcome
    fed.message("site-1", model())
    metrics = DXO(DataKind.METRICS, {"accuracy": 0.5}).to_shareable()
    assert fed.update("site-1", metrics).data == {"accuracy": 0.5}
    error = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    assert fed.back.process(error, fed.at_server("site-1")).get_return_code() == ReturnCode.EXECUTION_EXCEPTION


def test_a_model_that_cannot_be_coded_is_sent_as_it_is(fed: Federation, logged: pytest.LogCaptureFixture) -> None:
    broken = model() | {"w": np.full((64, 48), np.nan, np.float32)}
    sent = fed.message("site-1", broken)
    assert from_shareable(sent).data.keys() == broken.keys() and "uncoded" in logged.text
    plain = fed.receive("site-1", sent)
    assert fed.update("site-1", fed.reply("site-1", plain)).data.keys() == broken.keys()


def test_other_tensors_than_before_begin_a_new_link(fed: Federation) -> None:
    start = model()
    fed.update("site-1", fed.reply("site-1", moved(fed.receive("site-1", fed.message("site-1", start)))))
    received = fed.receive("site-1", fed.message("site-1", {"w": start["w"]}, round=1))
    assert list(received) == ["w"]
    assert fed.update("site-1", fed.reply("site-1", received)).data["w"].shape == (64, 48)


def test_jobs_keep_apart(tmp_path: Path) -> None:
    one, two = Federation(tmp_path / "1", "one"), Federation(tmp_path / "2", "two", seed=2)
    two.engine = one.engine  # one process
    (tmp_path / "1" / "server" / "two").mkdir()
    first, second = model(1), model(2)
    replies = {fed.job: fed.reply("site-1", moved(fed.receive("site-1", fed.message("site-1", m))))
               for fed, m in ((one, first), (two, second))}  # fmt: skip
    assert np.array_equal(one.update("site-1", replies["one"]).data["b"], first["b"] + 0.01)
    assert np.array_equal(two.update("site-1", replies["two"]).data["b"], second["b"] + 0.01)
    assert not two.update("site-1", replies["one"]).data


def test_the_end_of_a_run_reports_its_bytes(fed: Federation, logged: pytest.LogCaptureFixture) -> None:
    message = fed.message("site-1", model())
    reply = fed.reply("site-1", moved(fed.receive("site-1", message)))
    fed.update("site-1", reply)
    fed.send.handle_event(EventType.END_RUN, fed.at_server("site-1"))
    rows = json.loads((fed.folder / "server" / "job" / "fedfp8-traffic.json").read_text())
    plain = 64 * 48 * 4 + 48 * 4 + 8
    down, up = {"site-1": size(message)}, {"site-1": size(reply)}
    assert rows == [{"round": 1, "plain": plain, "down": down, "up": up, "resent": {}, "beside": {}}]
    assert "times less" in logged.text
    assert filters._of_job(fed.at_server("site-1"), "server") is None


def test_a_job_whose_models_pass_no_filter_is_told(fed: Federation, logged: pytest.LogCaptureFixture) -> None:
    fed.send.handle_event(EventType.END_RUN, fed.at_server("site-1"))
    assert "no model of this job passed the filters" in logged.text and "tasks=" in logged.text


def test_arrays_beside_the_model_are_counted(fed: Federation, logged: pytest.LogCaptureFixture) -> None:
    """Scaffold sends its control terms, as large as the model, in the meta of the DXO."""
    terms = {"scaffold_c": {"w": np.zeros((64, 48), np.float32)}, "steps": 3}
    task = DXO(DataKind.WEIGHTS, model(), {"a": 1} | terms).to_shareable()
    message = fed.send.process(task, fed.at_server("site-1"))
    reply = fed.reply("site-1", moved(fed.receive("site-1", message)))
    from_shareable(reply).meta.update(terms)
    update = fed.update("site-1", reply)
    assert np.array_equal(update.meta["scaffold_c"]["w"], terms["scaffold_c"]["w"])
    assert fed.rows[0]["beside"] == {"site-1": 2 * 64 * 48 * 4}
    fed.send.handle_event(EventType.END_RUN, fed.at_server("site-1"))
    assert re.search(r"\(1\.8 times less\) in 1 rounds; 24.6 kB of it are arrays beside the model", logged.text)


def test_never_more_bytes_than_plain(fed: Federation, logged: pytest.LogCaptureFixture) -> None:
    """FLARE's hello-numpy: nine numbers."""
    tiny = {"numpy_key": np.arange(9, dtype=np.float32).reshape(3, 3)}
    sent = fed.message("site-1", tiny)
    assert list(from_shareable(sent).data) == ["numpy_key"] and "not smaller when coded" in logged.text
    reply = fed.reply("site-1", {"gradient": fed.receive("site-1", sent)["numpy_key"]})  # nobody minds other names
    assert list(fed.update("site-1", reply).data) == ["gradient"]
    fed.send.handle_event(EventType.END_RUN, fed.at_server("site-1"))
    assert "fedfp8: 36 B in 1 rounds" in logged.text


def recipe(*controllers: Any, filters: tuple[Any, ...] = ()) -> Any:
    """As much of a FLARE recipe as `add_to` looks at."""
    flows = [SimpleNamespace(controller=one) for one in controllers]
    config = SimpleNamespace(workflows=flows, task_data_filters=[], task_result_filters=[({"train"}, list(filters))])
    return SimpleNamespace(_job=SimpleNamespace(_deploy_map={"server": SimpleNamespace(app_config=config)}))


@pytest.mark.parametrize(
    ("module", "reason"),
    [("app_common.ccwf.x", "send models to each other"), ("app_opt.he.x", "encrypted"),
     ("app_opt.pt.quantization.x", "take out one")],
)  # fmt: skip
def test_what_cannot_work_is_refused_at_once(module: str, reason: str) -> None:
    part = type("Mine", (type("Theirs", (), {"__module__": f"nvflare.{module}"}),), {})()
    for one in (recipe(part), recipe(filters=(part,))):
        with pytest.raises(ConfigError, match=f"Mine.*{reason}"):
            add_to(one)


def test_flares_own_swarm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvflare.app_opt.pt.recipes.swarm import SwarmLearningRecipe

    (tmp_path / "client.py").write_text("")
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Linear(2, 2)
    swarm = SwarmLearningRecipe(name="s", model=net, num_rounds=1, train_script="client.py", min_clients=2)
    with pytest.raises(ConfigError, match=r"SwarmLearningRecipe.*send models to each other"):
        add_to(swarm)


def test_bad_settings_are_reported_where_they_are_given() -> None:
    with pytest.raises(ConfigError, match="wire is 'fp7'"):
        SendModel("fp7")
