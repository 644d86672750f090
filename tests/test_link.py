"""ServerLink and ClientLink: any tensors, any order, any interruption; nothing that fails changes anything."""

import copy
import hashlib
import json
import math
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from fedfp8 import ClientLink, LostReference, ServerLink, average
from fedfp8.errors import ConfigError, Fedfp8Error, QuantizationError, RunError, WireFormatError
from fedfp8.link.wire import WIRES, Orders, Wire, share_of_layers, step_factor, steps_of
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.state import State
from fedfp8.wire import decode, header

ALL = sorted(WIRES)
COHORT = ["a", 7, "c"]


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "fc.weight": torch.randn(40, 30, generator=g) * 0.1,
        "fc.bias": torch.randn(40, generator=g),
        "norm.running_var": torch.rand(40, generator=g),
        "norm.num_batches_tracked": torch.tensor(3),
    }


def trained(state: dict[str, Any], seed: int, size: float = 0.01) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        n: t + size * torch.randn(t.shape, generator=g).to(t.dtype) if t.is_floating_point() else t + 1
        for n, t in state.items()
    }


def one_round(server: ServerLink, clients: dict, state: dict, round: int = 0) -> tuple[dict, dict]:
    """(what each client received, what the server made of its reply)"""
    received, updates = {}, {}
    for name, payload in server.broadcast(state, clients).items():
        received[name] = clients[name].receive(payload)
        updates[name] = server.receive(name, clients[name].reply(trained(received[name], round)))
    return received, updates


@pytest.mark.parametrize("wire", ALL)
def test_rounds_through_both_links(wire: str) -> None:
    server, clients = ServerLink(wire, seed=1), {name: ClientLink() for name in COHORT}
    state = model()
    for round in range(3):
        received, updates = one_round(server, clients, state, round)
        for name, update in updates.items():
            assert {n: (t.dtype, t.shape) for n, t in update.items()} == {
                n: (t.dtype, t.shape) for n, t in state.items()
            }
            # What is not coded comes back bit for bit
            assert torch.equal(update["fc.bias"], trained(received[name], round)["fc.bias"])
            assert torch.equal(update["norm.num_batches_tracked"], state["norm.num_batches_tracked"] + 1)
        state = average(updates.values())
    assert [line["round"] for line in server.traffic] == [1, 2, 3]
    assert set(server.traffic[-1]["down"]) == set(server.traffic[-1]["up"]) == set(COHORT)


@pytest.mark.parametrize("wire", ALL)
def test_same_seed_same_bytes(wire: str) -> None:
    def run() -> list[bytes]:
        server, clients, state, found = ServerLink(wire, seed=5), {n: ClientLink() for n in COHORT}, model(), []
        for round in range(2):
            payloads = server.broadcast(state, COHORT)
            replies = {n: clients[n].reply(trained(clients[n].receive(p), round)) for n, p in payloads.items()}
            found += [*payloads.values(), *replies.values()]
            state = average([server.receive(n, r) for n, r in replies.items()])
        return found

    assert run() == run()


def test_traffic_is_the_lengths_of_the_very_bytes() -> None:
    server, client, state = ServerLink("dq", seed=1, start=model()), ClientLink(), model()
    message = server.broadcast(state, ["a"])["a"]
    with pytest.raises(LostReference):
        client.receive(message)
    again = server.resend("a")
    reply = client.reply(client.receive(again))
    server.receive("a", reply)
    line = server.traffic[-1]
    assert (line["down"], line["resent"], line["up"]) == ({"a": len(message)}, {"a": len(again)}, {"a": len(reply)})


def test_the_example_of_a_system_of_ones_own() -> None:
    """A server and three client processes over HTTP; one is killed and goes on with the model in its folder."""
    script = Path(__file__).parent.parent / "examples" / "own_system.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=True)
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"round {n}" for n in range(1, 6)]
    down = [int(line.split()[2]) for line in lines]
    assert down[3] < down[0] and down[4] < down[0]  # after the kill, too, models are coded given what clients hold


# The method: error of a cohort's mean


def mean_error(clients: int, seed: int, weights: list[float] | None = None) -> tuple[float, float, float]:
    """(largest error of the weighted mean of what a cohort receives, its rms, the largest step)"""
    state = {"w": torch.randn(64, 300, generator=torch.Generator().manual_seed(seed))}
    server = ServerLink("dq", seed=seed)
    names = list(range(clients))
    round = server.open(state, names)
    sent = [round.sent(name)["w"].double() for name in names]
    step = max(decode(round.payload(0)).steps.values())
    weights = weights or [1.0] * clients
    mean = sum(w * s for w, s in zip(weights, sent, strict=True)) / sum(weights)
    error = mean - state["w"].double()
    return float(error.abs().max()), float(error.square().mean().sqrt()), step


@pytest.mark.parametrize("clients", [2, 5, 10, 16, 24, 32])
def test_the_mean_of_a_full_cohort_is_within_half_a_stratum(clients: int) -> None:
    largest, _, step = mean_error(clients, seed=clients)
    strata = WIRES["dq"].places(clients)
    # Errors of M places are equally spaced by step/M, so their mean lies within step/(2M); undither computes in float32
    # with values up to 5 and u of 23 bits: 4 roundings of 2**-22.
    assert largest <= step / (2 * strata) + 4 * 5 * 2**-22


def test_uneven_cohorts_are_still_far_better_than_independent_bits() -> None:
    """18 clients with weights 1 to 3. With weights that sum to 1, independent bits would give the mean a
    variance of step^2/12 * sum w^2; with places it is step^2/12 * (1/M^2 + (1 + 1/M) * sum (W - 1/M)^2), W the weights
    summed by place (docs/method.md): at most 0.56 of that for any dealing, 0.75 in standard deviation; and 2 % for a
    sample of 19,200."""
    weights = [1.0 + k % 3 for k in range(18)]
    _, rms, step = mean_error(18, seed=3, weights=weights)
    independent = step / math.sqrt(12) * math.sqrt(sum(w * w for w in weights)) / sum(weights)
    assert rms < 0.77 * independent


def test_places_are_dealt_evenly_and_anew_in_every_round() -> None:
    server, dealt = ServerLink("dq", seed=1), set()
    for round in range(6):
        server.open({"w": torch.randn(64, 64) + round}, list(range(41)))
        places = server.round.places
        counts = [list(places.values()).count(p) for p in range(14)]
        assert set(places.values()) == set(range(14)) and max(counts) - min(counts) <= 1
        dealt.add(tuple(places.values()))
    assert len(dealt) == 6


@pytest.mark.parametrize("wire", ["dq", "fp8"])
def test_every_client_is_served_without_bias_whatever_the_others_do(wire: str) -> None:
    """Mean over 400 draws of one client's error in a cohort of three, two of which drop out: with n elements and errors
    of variance at most step^2/4 each, the mean of all lies within 5 sigma = 5 * step / (2 sqrt(400 n)) of 0."""
    state = {"w": torch.randn(40, 40, generator=torch.Generator().manual_seed(0))}
    total, step = torch.zeros(40, 40, dtype=torch.float64), 0.0
    for seed in range(400):
        server = ServerLink(wire, seed=seed)
        server.open(state, ["a", "b", "c"])
        sent = server.round.sent("b")["w"].double()
        total += sent - state["w"]
        step = max(step, 2 * float((sent - state["w"]).abs().max()))
    assert abs(float(total.mean()) / 400) <= 5 * step / (2 * math.sqrt(400 * 1600))


def test_the_server_adds_the_change_to_its_own_model() -> None:
    """A client that changes nothing gives back the server's model exactly, whatever noise the downlink had."""
    server, client, state = ServerLink("dq", seed=1), ClientLink(), model()
    received = client.receive(server.broadcast(state, ["a"])["a"])
    assert not torch.equal(received["fc.weight"], state["fc.weight"])
    update = server.receive("a", client.reply(received))
    assert all(torch.equal(update[name], state[name]) for name in state)


def test_as_many_places_as_leave_the_least_error() -> None:
    places = [WIRES["dq"].places(n) for n in (1, 2, 10, 16, 24, 32, 41)]
    assert places == [1, 2, 10, 16, 12, 16, 14]  # 41 = 14 * 3 - 1
    assert WIRES["fp8"].places(10) == 1 and Wire(strata=1).places(10) == 1


def test_fewer_clients_get_finer_steps() -> None:
    wire = WIRES["dq"]
    assert [round(wire.kappa_up_for(n), 6) for n in (1, 2, 4, 5, 100)] == [1.2, 2.4, 4.8, 5, 5]
    assert wire.kappa_down_for(1) == pytest.approx(0.36, abs=0.01) and wire.kappa_down_for(5) == wire.kappa_down
    assert step_factor((10,), 1, 228) == 1 / 8 and step_factor((64, 1600), 1, 228) == 1
    assert step_factor((64, 57), 1, 228) == 0.5 and step_factor((3,), 1, 0) == 1
    # A 64th of the largest tensor: half of kappa. Nothing falls below an eighth.
    assert step_factor((4, 400), 64 * 1600, 228) == 0.5 and step_factor((4, 57), 64 * 228, 228) == 0.25
    assert step_factor((1, 1600), 2**30, 228) == 1 / 8 and step_factor((1, 1600), 2**30, 0) == 1
    # The noise of all layers adds up, whatever their inputs are; the finer of the two steps counts.
    assert step_factor((64, 1600), 1, 228, 0.25) == 0.5 == step_factor((64, 57), 1, 228, 0.36)
    assert share_of_layers([(8, 256), (8,)] * 20, 228, 5) == 0.25 == share_of_layers([(8, 256)] * 99, 228, 5)
    assert share_of_layers([(8, 57)] * 20, 228, 2.5) == 0.5 and share_of_layers([(8, 57)] * 20, 228, 5) == 1
    assert share_of_layers([(8, 256)] * 99, 228, 0) == 1 and share_of_layers([(8, 1)] * 10, 0, 5) == 0.5
    deep = State(
        Layout((TensorSpec("a", (8, 256)), TensorSpec("b", (8, 256)))), dict.fromkeys("ab", torch.ones(8, 256))
    )
    assert steps_of(deep, "dithered", 0.8, 228, 0.5) == {"a": 0.4, "b": 0.4}
    assert ServerLink("dq").open(model(), ["a"]).orders("a").fan_in == pytest.approx(89, abs=0.1)  # (5/8)^2 of 228


# Start and references


@pytest.mark.parametrize("wire", ["dq", "fp8"])
def test_a_shared_start_makes_first_models_almost_free(wire: str) -> None:
    state = model()
    plain = sum(map(len, ServerLink(wire, seed=1).broadcast(state, COHORT).values()))
    server = ServerLink(wire, seed=1, start=lambda: model())
    payloads = server.broadcast(state, COHORT)
    assert sum(map(len, payloads.values())) < plain - 3 * 300  # at least two bits for each of 1,200 weights
    for name, payload in payloads.items():
        clients = ClientLink(start=state), ClientLink()
        values = clients[0].receive(payload)
        with pytest.raises(LostReference, match="resend"):
            clients[1].receive(payload)
        again = clients[1].receive(server.resend(name))
        assert all(torch.equal(values[n], again[n]) for n in state)
    with pytest.raises(LostReference):
        ClientLink(start=model(seed=9)).receive(payloads["a"])


def test_a_client_without_the_start_is_remembered() -> None:
    state = model()
    server, client = ServerLink("dq", seed=1, start=state), ClientLink()
    with pytest.raises(LostReference):
        client.receive(server.broadcast(state, ["a"])["a"])
    server.receive("a", client.reply(client.receive(server.resend("a"))))
    client.receive(server.broadcast(trained(state, 1), ["a"])["a"])  # given what it received, not given the start


@pytest.mark.parametrize("wire", ALL)
def test_references_save_bytes_and_change_no_value(wire: str) -> None:
    results = []
    for cache in (True, False):
        server, clients, state = ServerLink(wire, seed=1, cache=cache), {n: ClientLink() for n in COHORT}, model()
        for round in range(3):
            _, updates = one_round(server, clients, state, round)
            state = average(updates.values())
        results.append((state, sum(server.traffic[-1]["down"].values())))
    assert all(torch.equal(results[0][0][n], results[1][0][n]) for n in model())
    assert wire == "fp32" or results[0][1] < results[1][1]


def test_a_client_that_lost_its_model_is_sent_it_whole_and_then_left_alone() -> None:
    server, state = ServerLink("dq", seed=1), model()
    client = ClientLink()
    server.receive("a", client.reply(client.receive(server.broadcast(state, ["a"])["a"])))
    for loss in range(2):
        state = trained(state, loss)
        client = ClientLink()  # a new process without a store
        message = server.broadcast(state, ["a"])["a"]
        with pytest.raises(LostReference):
            client.receive(message)
        server.receive("a", client.reply(client.receive(server.resend("a"))))
    ClientLink().receive(server.broadcast(trained(state, 5), ["a"])["a"])  # after two losses: no reference any more
    assert server.traffic[1]["resent"].keys() == {"a"}


def test_the_history_is_bounded_and_clients_of_old_models_are_served() -> None:
    server, state = ServerLink("dq", seed=1, history=3), model()
    old = ClientLink()
    server.receive("old", old.reply(old.receive(server.broadcast(state, ["old"])["old"])))
    for round in range(6):
        state, client = trained(state, round), ClientLink()
        server.receive(round, client.reply(client.receive(server.broadcast(state, [round])[round])))
    server.close()
    assert len(server.history.entries) <= 3 and len(list(server.history.folder.iterdir())) <= 3
    assert "old" not in server.held
    old.receive(server.broadcast(state, ["old"])["old"])


@pytest.mark.parametrize("damage", ["another", "cut", "gone"])
def test_a_damaged_file_of_the_history_costs_a_whole_message(damage: str) -> None:
    server, state, clients = ServerLink("dq", seed=1), model(), {name: ClientLink() for name in "ab"}
    for round, name in enumerate("abb"):
        one_round(server, {name: clients[name]}, trained(state, round))
    first, second = (server.history.path(number) for number in (1, 2))
    whole = {"another": second.read_bytes(), "cut": first.read_bytes()[:-100]}
    first.unlink()
    if damage in whole:
        first.write_bytes(whole[damage])
    messages = server.broadcast(trained(state, 3), "ab")
    assert [references(messages[name]) for name in "ab"] == [0, 2]
    assert clients["a"].receive(messages["a"]).keys() == state.keys()


def test_memory_does_not_grow_with_clients() -> None:
    """What the server keeps for a client is two small numbers, however large the model."""
    sizes = {}
    for clients in (10, 1000):
        server, state = ServerLink("dq", seed=1), {"w": torch.randn(100, 100)}
        round = server.open(state, range(clients))
        round.confirmed.update(range(clients))
        server.close()
        sizes[clients] = len(json.dumps(server.meta())), server.history.size()
    assert sizes[10][1] == sizes[1000][1]
    assert sizes[1000][0] - sizes[10][0] < 990 * 20


def test_the_same_model_again_costs_nothing_for_who_holds_it() -> None:
    """As in evaluation followed by the next round."""
    server, client, state = ServerLink("dq", seed=1), ClientLink(), {"w": torch.randn(100, 100)}
    first = server.broadcast(state, ["a", "b"])["a"]
    values = client.receive(first)
    server.confirm("a")
    again = server.broadcast(state, ["a", "c"])["a"]
    assert len(again) < 150 < len(first)
    assert torch.equal(client.receive(again)["w"], values["w"])


# Tensors of every kind

KINDS = {
    "float32": torch.randn(20, 20), "float64": torch.randn(20, 20, dtype=torch.float64),
    "float16": torch.randn(20, 20).half(), "bfloat16": torch.randn(20, 20).bfloat16(),
    "int64": torch.arange(5), "bool": torch.tensor([True, False]), "uint8": torch.arange(200, dtype=torch.uint8),
    "scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4), "zeros": torch.zeros(30, 30), "long": torch.randn(5000),
    "strided": torch.randn(30, 20).t(), "channels_last": torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),
    "complex64": torch.randn(3, dtype=torch.complex64),
}  # fmt: skip


@pytest.mark.parametrize("wire", ALL)
@pytest.mark.parametrize("arrays", ["torch", "numpy"])
def test_tensors_of_every_kind(wire: str, arrays: str) -> None:
    state: dict[str, Any] = dict(KINDS)
    if arrays == "numpy":
        state = {n: t.numpy() for n, t in KINDS.items() if n != "bfloat16"}
        state["backwards"] = np.arange(400.0).reshape(20, 20)[::-1, ::2]
        state["big endian"] = np.arange(100, dtype=">f4").reshape(10, 10)
    server, client = ServerLink(wire, seed=1), ClientLink(arrays=arrays)
    for _ in range(2):
        received = client.receive(server.broadcast(state, ["a"])["a"])
        update = server.receive("a", client.reply(received))
        for name, array in state.items():
            for found in (received[name], update[name]):
                assert tuple(found.shape) == tuple(array.shape) and type(found) is type(array)
                assert found.dtype == array.dtype or str(array.dtype).startswith(">")
            if name in ("int64", "bool", "uint8", "scalar", "empty", "zeros", "complex64"):
                assert (np.asarray(received[name]) == np.asarray(array)).all()


def test_ml_dtypes_bfloat16_arrays() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    state = {"w": np.random.default_rng(0).normal(size=(20, 20)).astype(ml_dtypes.bfloat16)}
    server, client = ServerLink("dq", seed=1), ClientLink(arrays="numpy")
    update = server.receive("a", client.reply(client.receive(server.broadcast(state, ["a"])["a"])))
    assert update["w"].dtype == ml_dtypes.bfloat16


def test_tied_tensors_and_parameters() -> None:
    tied = torch.nn.Parameter(torch.randn(30, 30))
    server, client = ServerLink("dq", seed=1), ClientLink()
    update = server.receive("a", client.reply(client.receive(server.broadcast({"x": tied, "y": tied}, ["a"])["a"])))
    assert torch.equal(update["x"], tied.data) and torch.equal(update["y"], tied.data)


def test_a_reply_may_leave_tensors_out() -> None:
    server, client, state = ServerLink("dq", seed=1), ClientLink(), model() | {"head": torch.randn(30, 30)}
    received = client.receive(server.broadcast(state, ["a"])["a"])
    update = server.receive("a", client.reply({"head": received["head"], "fc.bias": received["fc.bias"]}))
    assert set(update) == {"head", "fc.bias"} and torch.equal(update["head"], state["head"])


@pytest.mark.parametrize("scale", [1e-4, 1e-3])
def test_a_reply_that_is_no_model_keeps_its_own_scale(scale: float) -> None:
    """Differences or gradients under the model's names: noise of the size of their own step, not of the model's."""
    server, client, state = ServerLink("dq", seed=1), ClientLink(), {"w": torch.randn(60, 60)}
    client.receive(server.broadcast(state, ["a"])["a"])
    difference = {"w": scale * torch.randn(60, 60)}
    update = server.receive("a", client.reply(difference))
    # kappa of a lone client is 1.2, times sqrt(60/228): noise of step/sqrt(12) = 0.18 of the rms
    assert float((update["w"] - difference["w"]).std()) < 0.3 * scale


# What is refused


def opened(wire: str = "dq") -> tuple[ServerLink, ClientLink, dict]:
    server, client, state = ServerLink(wire, seed=1), ClientLink(), model()
    client.receive(server.broadcast(state, ["a", "b"])["a"])
    return server, client, state


def test_a_model_may_not_change_its_tensors() -> None:
    server, _, state = opened()
    with pytest.raises(QuantizationError, match=r"'fc.weight' was float32 \(40, 30\) .* is float32 \(30, 40\) now"):
        server.broadcast(state | {"fc.weight": torch.zeros(30, 40)}, ["a"])
    with pytest.raises(QuantizationError, match="'more' was missing"):
        server.broadcast(state | {"more": torch.zeros(3)}, ["a"])
    server.receive("a", server_reply(server, "a"))  # the round is still open


def server_reply(server: ServerLink, name: str) -> bytes:
    client = ClientLink()
    return client.reply(client.receive(server.resend(name)))


@pytest.mark.parametrize(
    "reply, message",
    [
        (b"", "client 'a'"), (b"nonsense", "not a fedfp8 message"),
        (lambda good: good[:-1], "checksum"), (lambda good: good[:20] + b"x" + good[21:], "client 'a'"),
    ],
)  # fmt: skip
def test_bad_replies_name_the_client_and_change_nothing(reply: Any, message: str) -> None:
    server, client, state = opened()
    good = client.reply(state)
    before = server.meta()
    with pytest.raises(WireFormatError, match=message):
        server.receive("a", reply(good) if callable(reply) else reply)
    assert server.meta() == before
    server.receive("a", good)


def test_replies_of_another_client_round_or_model() -> None:
    server, client, state = opened()
    reply = client.reply(state)
    with pytest.raises(WireFormatError, match=r"client 'b'.*another round, client or run"):
        server.receive("b", reply)
    with pytest.raises(WireFormatError, match="client 'z'"):
        server.receive("z", reply)
    server.broadcast(trained(state, 1), ["a"])
    with pytest.raises(WireFormatError, match="another round"):
        server.receive("a", reply)
    other, stranger = ServerLink("dq", seed=1), ClientLink()
    values = stranger.receive(other.broadcast({"fc.weight": torch.randn(9, 9)}, ["a"])["a"])
    with pytest.raises(WireFormatError, match="client 'a'"):
        server.receive("a", stranger.reply(values))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("wire", ALL)
def test_nan_and_inf_are_refused_by_name(bad: float, wire: str) -> None:
    server, client, state = opened(wire)
    for name in ("fc.weight", "fc.bias"):
        spoiled = {n: t.clone() for n, t in state.items()}
        spoiled[name].view(-1)[3] = bad
        with pytest.raises(Fedfp8Error, match=name):
            server.receive("a", client.reply(spoiled))
    with pytest.raises(Fedfp8Error, match=r"fc\.weight"):
        ServerLink(wire).broadcast(state | {"fc.weight": torch.full((40, 30), bad)}, ["a"])


def test_a_client_names_what_does_not_fit() -> None:
    server, client, state = opened()
    for change, message in [
        ({"other": torch.zeros(3)}, "'other' was not received"),
        ({"fc.weight": torch.zeros(30, 40)}, r"'fc.weight' is \(30, 40\)"),
        ({"norm.num_batches_tracked": torch.tensor(0.5)}, "cannot hold its values"),
        ({"fc.weight": np.array([["x"]])}, "fc.weight"),
    ]:
        with pytest.raises(QuantizationError, match=message):
            client.reply(state | change)
    server.receive("a", client.reply({n: t.double() for n, t in state.items() if t.is_floating_point()}))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: ServerLink("dp"), ConfigError, "choose one of"),
        (lambda: ServerLink("dq", kappa_up=-1), ConfigError, "kappa_up is -1"),
        (lambda: ServerLink("dq", strata=0), ConfigError, "strata"),
        (lambda: ServerLink().broadcast(model(), []), RunError, "needs clients"),
        (lambda: ServerLink().broadcast(model(), [1.5]), RunError, "strings or ints"),
        (lambda: ServerLink().receive("a", b""), RunError, "call broadcast first"),
        (lambda: ServerLink().resend("a"), RunError, "call broadcast first"),
        (lambda: ClientLink().reply(model()), RunError, "call receive first"),
        (lambda: ClientLink(arrays="jax"), RunError, "torch"),
        (lambda: ClientLink().receive(b"junk"), WireFormatError, "ServerLink"),
        (lambda: ServerLink(start={"x": torch.zeros(9, 9)}).broadcast(model(), ["a"]), QuantizationError, "start"),
        (lambda: average([]), QuantizationError, "at least one"),
        (lambda: average([model()], [-1.0]), QuantizationError, "weight 0"),
    ],
)
def test_wrong_calls(call: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80))
def test_hostile_messages_and_orders(data: bytes) -> None:
    client = ClientLink()
    for message in (data, Orders("dithered", None, 1.0, 0.0, 1).to_bytes() + data):
        with pytest.raises((WireFormatError, LostReference)):
            client.receive(message)


def test_orders_come_back_as_they_were() -> None:
    orders = ServerLink("fp8", seed=3, coded=["*.weight", "x"], kappa_up=0.7, fan_in=0.1)
    orders.open(model(), ["a"])
    given = orders.round.orders("a")
    assert Orders.split(given.to_bytes() + b"rest") == (given, b"rest")


# Interruptions, threads


@pytest.mark.parametrize("wire", ALL)
@pytest.mark.parametrize("middle", [False, True])
def test_saved_and_restored_links_go_on_to_the_same_bytes(wire: str, middle: bool, tmp_path: Path) -> None:
    def run(interrupted: bool) -> list[bytes]:
        server, clients, state, found = ServerLink(wire, seed=5), {n: ClientLink() for n in COHORT}, model(), []
        for round in range(3):
            payloads = server.broadcast(state, COHORT)
            replies = {n: clients[n].reply(trained(clients[n].receive(p), round)) for n, p in payloads.items()}
            updates = []
            for number, (name, reply) in enumerate(replies.items()):
                updates.append(server.receive(name, reply))
                if interrupted and round == 1 and (number == 0) == middle:
                    saved = load(save(server.state_dict()))
                    server = ServerLink(wire, seed=0)
                    server.load_state_dict(saved)
                    for n in COHORT:
                        kept = load(save(clients[n].state_dict()))
                        clients[n] = ClientLink()
                        clients[n].load_state_dict(kept)
            found += [*payloads.values(), *replies.values()]
            state = average(updates)
        return found

    assert run(False) == run(True)


def test_a_store_outlives_the_process(tmp_path: Path) -> None:
    server, state = ServerLink("dq", seed=1), model()
    client = ClientLink(store=tmp_path)
    server.receive("a", client.reply(client.receive(server.broadcast(state, ["a"])["a"])))
    message = server.broadcast(trained(state, 1), ["a"])["a"]
    assert header(Orders.split(message)[1]).reference_fingerprint is not None
    (tmp_path / "received.bin").write_bytes(b"damaged")
    with pytest.raises(LostReference):
        ClientLink(store=tmp_path).receive(message)


# Visits: what a client received on its last ones


def visiting(client: ClientLink, rounds: int, **settings: Any) -> tuple[ServerLink, list[bytes], list[dict]]:
    """A silo that comes every round, of a model that hardly moves: messages down, and what was made of them."""
    server, state, messages, received = ServerLink("dq", seed=1, **settings), model(), [], []
    for number in range(rounds):
        messages.append(server.broadcast(trained(state, number, 1e-4), ["a"])["a"])
        received.append(client.receive(messages[-1]))
        server.receive("a", client.reply(received[-1]))
    return server, messages, received


def references(message: bytes) -> int:
    return len(header(Orders.split(message)[1]).reference_fingerprints)


@pytest.mark.parametrize("kind", ["memory", "store", "packed"])
def test_the_next_model_is_coded_given_the_last_visits(kind: str, tmp_path: Path) -> None:
    made = {"memory": ClientLink, "store": lambda: ClientLink(store=tmp_path), "packed": lambda: ClientLink(packed=())}
    client = made[kind]()
    server, messages, _ = visiting(client, 5)
    assert [references(message) for message in messages] == [0, 1, 2, 3, 3]
    assert len(client.visits) == 3 == len(server.held["a"])
    with pytest.raises(LostReference):  # the fourth last is gone
        client.receive(messages[1])
    made |= {"memory": lambda: client, "packed": lambda: ClientLink(packed=client.packed)}
    again = made[kind]()  # in another process, where it does not live from one to the next
    server.close()
    update = again.receive(server.broadcast(trained(model(), 5, 1e-4), ["a"])["a"])
    server.receive("a", again.reply(update))


def test_visits_save_bytes_and_change_no_value() -> None:
    made = {visits: visiting(ClientLink(), 6, visits=visits) for visits in (1, 2, 3)}
    for _, _, received in made.values():
        assert all(torch.equal(a[n], b[n]) for a, b in zip(received, made[1][2], strict=True) for n in a)
    one, two, three = (sum(map(len, messages[3:])) for _, messages, _ in made.values())
    assert three < two < one
    with pytest.raises(ConfigError, match="visits is 4; a message is coded given 1 to 3"):
        ServerLink("dq", visits=4)


def test_a_model_that_is_sent_twice_is_one_visit() -> None:
    server, client, state = ServerLink("dq", seed=1), ClientLink(packed=()), model()
    for number in range(4):
        for _ in ("evaluate", "train"):
            message = server.broadcast(trained(state, number), ["a"])["a"]
            server.receive("a", client.reply(client.receive(message)))
        assert references(message) == 1 and len(message) < 4 * 80 + 100  # what travels as it is, little else
        assert len(client.visits) == len(client.packed or ()) == len(server.held["a"]) == min(number + 1, 3)


def test_a_client_that_lost_one_of_its_visits_is_sent_the_whole_model(tmp_path: Path) -> None:
    server, _, _ = visiting(ClientLink(store=tmp_path), 3)
    (tmp_path / "received-1.bin").unlink()
    client, state = ClientLink(store=tmp_path), trained(model(), 3, 1e-4)
    with pytest.raises(LostReference):
        client.receive(server.broadcast(state, ["a"])["a"])
    server.receive("a", client.reply(client.receive(server.resend("a"))))
    assert references(server.broadcast(trained(state, 4, 1e-4), ["a"])["a"]) == 1


def test_fp8_codes_have_no_mix_and_keep_one_visit() -> None:
    server, client, state = ServerLink("fp8", seed=1), ClientLink(packed=()), model()
    for number in range(3):
        message = server.broadcast(trained(state, number, 1e-3), ["a"])["a"]
        server.receive("a", client.reply(client.receive(message)))
    assert references(message) == len(client.visits) == len(server.held["a"]) == 1


def test_replies_in_parallel_and_in_any_order() -> None:
    names = list(range(12))
    server, clients, state = ServerLink("dq", seed=1), {n: ClientLink() for n in names}, model()
    payloads = server.broadcast(state, names)
    replies = {n: clients[n].reply(trained(clients[n].receive(p), n)) for n, p in payloads.items()}
    alone = copy.deepcopy({n: server.receive(n, r) for n, r in replies.items()})
    barrier = threading.Barrier(6)

    def receive(n: int) -> tuple[int, dict]:
        if n < 6:
            barrier.wait(10)
        return n, server.receive(n, replies[n])

    shuffled = names[:6] + random.Random(0).sample(names[6:], 6)
    with ThreadPoolExecutor(6) as pool:
        for n, update in pool.map(receive, shuffled):
            assert all(torch.equal(update[name], alone[n][name]) for name in state)


def test_average_is_weighted_and_keeps_kinds() -> None:
    states = [
        {"w": torch.full((2, 2), v).bfloat16(), "n": torch.tensor(int(v)), "a": np.full(3, v)} for v in (1.0, 4.0)
    ]
    mean = average(states, [2, 1])
    assert mean["w"].dtype == torch.bfloat16 and float(mean["w"][0, 0]) == 2.0
    assert int(mean["n"]) == 1 and isinstance(mean["a"], np.ndarray) and mean["a"][0] == 2.0
    assert average([{"w": torch.ones(1)}, {}])["w"] == 1


def test_a_wire_of_ones_own() -> None:
    server = ServerLink(Wire("dithered", "none"), seed=1)
    client, state = ClientLink(), model()
    update = server.receive("a", client.reply(client.receive(server.broadcast(state, ["a"])["a"])))
    assert torch.allclose(update["fc.weight"], state["fc.weight"], atol=1e-6)


@pytest.mark.parametrize("arrays", ["torch", "numpy"])
def test_what_was_received_may_be_trained_in_place(arrays: str) -> None:
    server, client, state = ServerLink("dq", seed=1, kappa_up=0.1), ClientLink(arrays=arrays), model()
    received = client.receive(server.broadcast(state, ["a"])["a"])
    received["fc.weight"] += 0.5
    update = server.receive("a", client.reply(received))
    change = update["fc.weight"] - state["fc.weight"]
    assert float((change - 0.5).abs().max()) < 0.026  # half a step, at most 0.1 * 0.5 / 2
    client.receive(server.broadcast(update, ["a"])["a"])  # and its memory is still what the server thinks it is


@pytest.mark.parametrize("wire", ["dq", "fp8"])
@pytest.mark.parametrize("damage", ["checksum", "head", "values", "short", "another version"])
def test_a_damaged_memory_counts_as_lost(wire: str, damage: str) -> None:
    server, client, state = ServerLink(wire, seed=1), ClientLink(packed=()), model()
    server.receive("a", client.reply(client.receive(server.broadcast(state, ["a"])["a"])))
    message = server.broadcast(trained(state, 1), ["a"])["a"]
    assert client.packed is not None and header(Orders.split(message)[1]).reference_fingerprints
    held = bytearray(client.packed[0])
    if damage == "short":
        del held[-1]
    elif damage == "another version":
        head = b"\2\0\0\0{}"
        held = bytearray(hashlib.blake2b(head, digest_size=8).digest() + head)
    else:
        held[{"checksum": 0, "head": 40, "values": -1}[damage]] ^= 1
    with pytest.raises(LostReference):
        ClientLink(packed=[bytes(held)]).receive(message)
    assert ClientLink(packed=client.packed).receive(message).keys() == state.keys()


@pytest.mark.parametrize("wire", ["dq", "fp8"])
def test_empty_tensors_in_a_clients_memory(wire: str) -> None:
    empty = {"e": torch.zeros(0), "f": torch.zeros(0, 5).double(), "n": torch.zeros(3, 0, dtype=torch.int16)}
    server, packed, state = ServerLink(wire, seed=1), [], model() | empty
    for _ in range(3):
        client = ClientLink(packed=packed)
        received = client.receive(server.broadcast(state, ["a"])["a"])
        assert {name: (received[name].shape, received[name].dtype) for name in empty} == {
            name: (tensor.shape, tensor.dtype) for name, tensor in empty.items()
        }
        state, packed = server.receive("a", client.reply(received)), client.packed


def test_clients_that_join_get_the_steps_of_the_whole_cohort() -> None:
    state = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}
    known, joined = ServerLink(seed=1), ServerLink(seed=1)
    known.open(state, ["a", "b", "c"])
    joined.open(state, ["a"], expected=3)
    for client in ("b", "c", "b"):
        joined.join(client)
    assert known.round is not None and joined.round is not None
    assert sorted(joined.round.places.values()) == sorted(known.round.places.values()) == [0, 1, 2]
    assert joined.round.entry == known.round.entry
    for client in ("a", "b", "c"):
        link = ClientLink()
        received = link.receive(joined.message(client))
        assert joined.round.orders(client).kappa_up == known.round.orders(client).kappa_up
        update = joined.receive(client, link.reply({"w": received["w"] + 0.01}))
        assert (update["w"] - state["w"]).mean().item() == pytest.approx(
            0.01, abs=6e-4
        )  # 8 sigma: step 0.016, 4096 weights
