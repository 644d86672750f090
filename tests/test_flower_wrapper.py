"""FP8 for any app in two lines: arrays in, arrays out, whatever the strategy, the dtypes and the clients' honesty."""

import difflib
import importlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, arrays_size_mod, fixedclipping_mod
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import FedAvg

from fedfp8.errors import ConfigError
from fedfp8.flower import FP8, FP8FedAvg, LocalGrid, fp8_mod, fp8_mod_with
from fedfp8.flower.blob import STYPE, array_of, blob_of, numpy_view, record_of
from fedfp8.flower.wrapper.mod import CACHE, LOST
from fedfp8.link.arrays import state_of_arrays
from fedfp8.link.wire import Orders
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.quantized import QuantState, quantize_state
from fedfp8.nn import prepare
from fedfp8.wire import encode, header
from fedfp8.wire.container import seal, write_header


def model(prepared=False):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(64, 50))
    return prepare(net, input_range=1.0) if prepared else net


def initial(prepared=False):
    return ArrayRecord(model(prepared).state_dict())


def make_app(mods=(fp8_mod,), move=0.01, answer=None):
    """Clients that add noise of their own to every parameter and count batches; all weigh the same."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        rng = torch.Generator().manual_seed(context.node_id)
        new = {}
        for name, value in message.content["arrays"].to_torch_state_dict().items():
            noise = move * torch.randn(value.shape, generator=rng)
            if name.endswith("tracked"):
                new[name] = value + 1
            else:
                fixed = name.endswith(("alpha", "beta", "running_var"))
                new[name] = value if fixed else value + noise.to(value.dtype)
        metrics = MetricRecord({"num-examples": 10, "loss": 1.0})
        reply = RecordDict({"arrays": ArrayRecord(new), "metrics": metrics})
        return Message(answer(reply, context) if answer else reply, reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        total = sum(float(v.sum()) for v in message.content["arrays"].to_torch_state_dict().values())
        return Message(RecordDict({"m": MetricRecord({"num-examples": 10, "total": total})}), reply_to=message)

    return app


def start(strategy, app=None, nodes=4, rounds=3, grid=None, prepared=False):
    grid = grid or LocalGrid(app or make_app(), nodes)
    random.seed(0)  # Flower samples nodes with it; the order of a float sum follows
    seen = []
    result = strategy.start(
        grid, initial(prepared), num_rounds=rounds, evaluate_fn=lambda r, arrays: seen.append(arrays)
    )
    return result, grid, seen


def vector(record, key="3.weight"):
    return record[key].numpy().astype(np.float64)


# Strategies


def test_float_wire_is_the_plain_app_bit_for_bit():
    plain, _, _ = start(FedAvg())
    ours, _, _ = start(FP8FedAvg("fp32"))
    assert list(plain.arrays) == list(ours.arrays)
    for key, array in plain.arrays.items():
        assert array.numpy().tobytes() == ours.arrays[key].numpy().tobytes()
    for round, metrics in plain.train_metrics_clientapp.items():
        assert {k: v for k, v in ours.train_metrics_clientapp[round].items() if "bytes" not in k} == dict(metrics)
    assert plain.evaluate_metrics_clientapp == ours.evaluate_metrics_clientapp


def inner_strategies():
    dp = strategies.DifferentialPrivacyServerSideFixedClipping
    return {
        "FedAvg": FedAvg,
        "FedAvgM": strategies.FedAvgM,
        "FedAdam": strategies.FedAdam,
        "FedYogi": strategies.FedYogi,
        "FedAdagrad": strategies.FedAdagrad,
        "FedProx": lambda: strategies.FedProx(proximal_mu=0.1),
        "FedMedian": strategies.FedMedian,
        "FedTrimmedAvg": strategies.FedTrimmedAvg,
        "Krum": lambda: strategies.Krum(num_malicious_nodes=1),
        "DP server": lambda: dp(FedAvg(), 0.0, 1e6, 4),
    }


@pytest.mark.parametrize("wire", ["dq", "fp8"])
@pytest.mark.parametrize("name", inner_strategies())
def test_any_strategy(name, wire):
    make = inner_strategies()[name]
    plain, _, _ = start(make(), rounds=2)
    wrapped = FP8(make(), wire, seed=1)
    ours, grid, seen = start(wrapped, rounds=2)
    assert list(ours.arrays) == list(plain.arrays) and len(seen) == 3
    for key, array in plain.arrays.items():
        assert (ours.arrays[key].shape, ours.arrays[key].dtype) == (array.shape, array.dtype), key
    counted = "1.num_batches_tracked"
    assert float(ours.arrays[counted].numpy()) == float(plain.arrays[counted].numpy())
    assert set(ours.train_metrics_clientapp) == {1, 2} and set(ours.evaluate_metrics_clientapp) == {1, 2}
    assert [t.messages for t in wrapped.traffic] == [4, 4, 4, 4] and not any(t.resent for t in wrapped.traffic)
    assert grid.bytes == {way: sum(getattr(t, way) for t in wrapped.traffic) for way in ("down", "up")}


def test_central_model_is_preserved():
    """Clients that do not move change nothing: no noise of the downlink enters the server's model."""
    for wire in ("dq", "fp8"):
        result, _, _ = start(FP8(FedAvg(), wire, seed=3), make_app(move=0.0))
        for key in ("0.weight", "3.weight"):
            error = np.abs(vector(result.arrays, key) - vector(initial(), key))
            # dq: no change, no code. fp8: the client's value is on its grid already.
            assert error.max() <= (0 if wire == "dq" else 1e-6), (wire, key)


def test_updates_are_unbiased():
    """The mean over many draws of a round's result is the plain result, within five standard errors."""
    exact = vector(start(FedAvg(), rounds=1)[0].arrays)
    for wire in ("dq", "fp8"):
        draws = np.stack([vector(start(FP8(FedAvg(), wire, seed=s), rounds=1)[0].arrays) for s in range(24)])
        spread = draws.std(0, ddof=1) / np.sqrt(len(draws))
        score = (draws.mean(0) - exact)[spread > 1e-9] / spread[spread > 1e-9]
        # 3,200 t-distributed scores with 23 degrees of freedom: P(|t| > 7) is 4e-7 each
        assert np.abs(score).max() < 7 and abs(score.mean()) < 5 / np.sqrt(score.size) * 1.1


def test_random_bits_are_never_used_twice():
    """What decides the bits of a message is its seed and its place; clients of a round share the seed."""
    downs, ups = [], []

    class Watching(LocalGrid):
        def _deliver(self, message):
            for record in message.content.array_records.values():
                head = header(Orders.split(blob_of(record))[1])
                downs.append((head.seed, head.place))
            reply = super()._deliver(message)
            heads = [header(blob_of(record)) for record in reply.content.array_records.values()]
            ups.extend((head.seed, head.place) for head in heads)
            return reply

    strategy = FP8(FedAvg(), seed=0)
    grid = Watching(make_app(), 3)
    start(strategy, grid=grid)
    start(strategy, grid=grid)  # rounds are counted from 1 again
    assert len(ups) == len(set(ups)) == 2 * 3 * 3 and len({seed for seed, _ in ups}) == 2 * 3
    # A model has one draw a place: round r's evaluation and round r+1's training send the same message.
    assert len(set(downs)) == 2 * 4 * 3 and not {seed for seed, _ in downs} & {seed for seed, _ in ups}


def test_same_model_again_is_almost_free():
    strategy = FP8(FedAvg(), seed=0)
    start(strategy)
    down = {(t.round, t.phase): t.down for t in strategy.traffic}
    assert down[2, "train"] < down[1, "evaluate"] / 3


@pytest.mark.parametrize("method", ["bq", "uq", "uq+"])
@pytest.mark.parametrize("prepared", [False, True])
def test_paper_methods(method, prepared):
    strategy = FP8FedAvg(method, seed=1, fraction_train=1.0, min_available_nodes=4)
    result, _, _ = start(strategy, prepared=prepared)
    assert strategy.strategy.min_available_nodes == 4
    assert list(result.arrays) == list(initial(prepared))
    assert np.abs(vector(result.arrays) - vector(initial(prepared))).max() < 0.1
    assert len(strategy.gains) == (3 if method == "uq+" else 0)
    if method == "uq+":
        assert all(g["gain_weights_step"] >= 0 and g["gain_alpha_step"] >= 0 for g in strategy.gains)
        assert bool(strategy.ranges) != prepared
    assert all(t.up == 0 or t.up < 4 * 3_400 + 4 * 2_000 for t in strategy.traffic)


def test_wrong_arguments():
    with pytest.raises(ConfigError, match="choose one of dq, fp8"):
        FP8(FedAvg(), "zip")
    with pytest.raises(ConfigError, match="kappa_up"):
        FP8(FedAvg(), kappa_up=0)
    with pytest.raises(ConfigError, match="for dq use FP8"):
        FP8FedAvg("dq")


# Clients


def test_mod_passes_messages_of_plain_servers():
    plain, _, _ = start(FedAvg(), make_app(mods=()))
    modded, _, _ = start(FedAvg(), make_app(mods=(fp8_mod,)))
    assert vector(plain.arrays).tobytes() == vector(modded.arrays).tobytes()


class Forgetful(LocalGrid):
    """Node 101 loses what it keeps before every message, or before every second one."""

    every = 2

    def push_messages(self, messages):
        given = list(messages)
        for message in given:
            if message.metadata.dst_node_id == 101:
                self.count = getattr(self, "count", 0) + 1
                if self.count % self.every == 0:
                    self.contexts[101].state.pop(CACHE, None)
        return super().push_messages(given)


def test_lost_state_is_sent_again_in_the_same_round():
    strategy, calm = FP8(FedAvg(), seed=2), FP8(FedAvg(), seed=2)
    result, _, _ = start(strategy, grid=Forgetful(make_app(), 4))
    expected, _, _ = start(calm)
    resent = [t.resent for t in strategy.traffic]
    assert resent[0] == 0 and sum(resent) >= 1 and max(resent) == 1
    assert vector(result.arrays).tobytes() == vector(expected.arrays).tobytes()
    assert sum(t.down for t in strategy.traffic) > sum(t.down for t in calm.traffic)


def test_a_lost_node_is_served_while_others_work():
    """Its second message goes out before the slowest reply has come."""
    pushed, kept = [], []

    class Slow(Forgetful):
        every = 1

        def push_messages(self, messages):
            given = list(messages)
            pushed.extend(m.metadata.dst_node_id for m in given)
            return super().push_messages(given)

        def pull_messages(self, message_ids):
            replies = list(super().pull_messages(message_ids))
            slow = [r for r in replies if r.metadata.src_node_id == 100]
            if slow and pushed.count(100) == 3 and pushed.count(101) == 3 and len(kept) < 20:
                kept.extend(slow)  # node 100 is still at work
                self._replies |= {r.metadata.reply_to_message_id: r for r in slow}
                replies = [r for r in replies if r not in slow]
            return replies

    strategy = FP8(FedAvg(fraction_evaluate=0.0), seed=2)
    result, _, _ = start(strategy, grid=Slow(make_app(), 4), rounds=3)
    assert strategy.traffic[2].resent == 1 and len(kept) == 1
    expected, _, _ = start(FP8(FedAvg(fraction_evaluate=0.0), seed=2), rounds=3)
    assert vector(result.arrays).tobytes() == vector(expected.arrays).tobytes()


def test_without_cache_nothing_is_kept():
    strategy = FP8(FedAvg(), seed=2, client_cache=False)
    _, grid, _ = start(strategy)
    assert all(CACHE not in context.state for context in grid.contexts.values())
    with_cache = FP8(FedAvg(), seed=2)
    _, grid, _ = start(with_cache)
    assert all(len(context.state[CACHE]) == 3 for context in grid.contexts.values())  # of two rounds, and the last
    assert sum(t.down for t in strategy.traffic) > 1.3 * sum(t.down for t in with_cache.traffic)


def test_raw_codes():
    strategy = FP8(FedAvg(fraction_evaluate=0.0), "fp8", seed=2, lossless=False)
    start(strategy, rounds=1)
    coded = 16 * 9 + 64 * 50
    assert 4 * coded < strategy.traffic[0].up < 4 * (coded + 900)


def test_part_of_the_arrays_and_new_ones():
    def head_only(reply, context):
        reply["arrays"] = ArrayRecord({k: v for k, v in reply["arrays"].items() if k.startswith("3.")})
        return reply

    result, grid, _ = start(FP8(FedAvg(fraction_evaluate=0.0), seed=1), make_app(answer=head_only), rounds=1)
    assert list(result.arrays) == ["3.weight", "3.bias"] and grid.bytes["up"] < 4 * 2_000

    def extra(reply, context):
        reply["arrays"]["new"] = Array(np.ones(3, np.float32))
        return reply

    result, grid, _ = start(FP8(FedAvg(fraction_evaluate=0.0), seed=1), make_app(answer=extra), rounds=1)
    assert vector(result.arrays, "new").tolist() == [1, 1, 1]  # travelled beside the blob, uncoded, with a warning
    assert grid.bytes["up"] < 4 * 2_000


def test_other_record_key_in_the_reply():
    def renamed(reply, context):
        return RecordDict({"my-model": reply["arrays"], "metrics": reply["metrics"]})

    result, grid, _ = start(FP8(FedAvg(fraction_evaluate=0.0), seed=1), make_app(answer=renamed), rounds=2)
    assert list(result.arrays) == list(initial()) and grid.bytes["up"] < 8 * 2_000


def attack_with(change):
    def attack(message, context, call_next):
        reply = call_next(message, context)
        return change(reply) if context.node_id == 102 and reply.content.array_records else reply

    return attack


def replaced(payload):
    def change(reply):
        reply.content["arrays"] = record_of(payload, "arrays")
        return reply

    return change


def poisoned(reply):
    """NaN in an array that travels as it is, in a message that is valid otherwise."""
    payload = blob_of(reply.content["arrays"])
    bias = payload.index(np.float32(1.0).tobytes()) if np.float32(1.0).tobytes() in payload else 40
    damaged = bytearray(payload[:-8])
    damaged[bias : bias + 4] = np.float32(np.nan).tobytes()
    reply.content["arrays"] = record_of(seal(bytes(damaged)), "arrays")
    return reply


def huge_layout():
    """A message that claims four billion zeros in a few bytes."""
    layout = Layout((TensorSpec("3.weight", (2**31,), kind="float"),))
    q = QuantState(layout, "dithered", 1)
    return seal(write_header(q, (), True) + np.zeros(1, "<f4").tobytes())


def foreign():
    state = state_of_arrays({"3.weight": np.ones((5, 50), np.float32)}, None)
    return encode(quantize_state(state, seed=1, rounding="dithered", step=0.3), with_layout=True)


def changed(change):
    """A reply whose content another hand has changed."""

    def attack(reply):
        reply.content = change(dict(reply.content.items()))
        return reply

    return attack


def plain(**arrays):
    return ArrayRecord({name: Array(np.asarray(array, np.float32)) for name, array in arrays.items()})


def whole_plain(value):
    arrays = {name: a.numpy() for name, a in initial().items()}
    return ArrayRecord({n: Array(np.full_like(a, value) if a.dtype.kind == "f" else a) for n, a in arrays.items()})


BAD = {
    "garbage": (replaced(b"garbage" * 50), "not a fedfp8 message"),
    "other model": (replaced(foreign()), "not sent"),
    "huge": (replaced(huge_layout()), "not sent|too many"),
    "nan": (poisoned, "NaN"),
    "plain nan": (changed(lambda r: RecordDict(r | {"arrays": whole_plain(np.nan)})), "NaN"),
    "plain, another shape": (changed(lambda r: RecordDict(r | {"arrays": plain(**{"3.weight": [1]})})), "was sent as"),
    "nothing": (changed(lambda r: RecordDict({"metrics": r["metrics"]})), "holds none"),
    "empty": (changed(lambda r: RecordDict(r | {"arrays": ArrayRecord()})), "holds none"),
    "other arrays": (changed(lambda r: RecordDict(r | {"arrays": plain(new=[1])})), "others than those of most"),
    "no metrics": (changed(lambda r: RecordDict({"arrays": r["arrays"]})), "others than those of most"),
    "weight": (changed(lambda r: RecordDict(r | {"metrics": MetricRecord({"num-examples": np.nan})})), "weight"),
    "a list for a number": (
        changed(lambda r: RecordDict(r | {"metrics": MetricRecord({"num-examples": 10, "loss": [1.0, 2.0]})})),
        "others than those of most",
    ),
    "object": (changed(lambda r: RecordDict(r | {"arrays": ArrayRecord({"3.weight": strange()})})), "cannot be read"),
    "lost for ever": (changed(lambda r: RecordDict({LOST: ConfigRecord({"lost": True})})), "same again"),
    "many blobs": (changed(lambda r: RecordDict(r | many(r["arrays"]))), "answered already"),
    "renamed blob": (changed(lambda r: RecordDict(r | {"arrays": record_of(blob_of(r["arrays"]), "x")})), "'x'"),
}


def strange():
    return Array("object", (3,), "numpy.ndarray", b"\x93NUMPY\x01\x00" + b"\x00" * 20)


def many(record):
    return {f"arrays{n}": ArrayRecord(dict(record)) for n in range(300)}


@pytest.mark.parametrize("name", BAD)
def test_bad_client_is_rejected_by_name(name, caplog):
    change, reason = BAD[name]
    errors = []

    class Listening(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            errors.extend(r.error.reason for r in replies if r.has_error())
            return super().aggregate_train(server_round, replies)

    app = make_app(mods=(attack_with(change), fp8_mod))
    result, _, _ = start(FP8(Listening(), seed=0), app, rounds=2)
    assert len(errors) == 2
    assert all(re.search(rf"node 102.*{reason}", text) for text in errors)
    assert np.isfinite(vector(result.arrays)).all() and not np.array_equal(vector(result.arrays), vector(initial()))


@pytest.mark.parametrize("metrics", [{"num-examples": -30, "total": 1.0}, {"num-examples": 10, "total": [1.0, 2.0]}])
def test_a_bad_evaluation_costs_its_sender_only(metrics):
    """Flower would divide by zero, or add a list to a number, and end the run."""

    def attack(message, context, call_next):
        reply = call_next(message, context)
        if context.node_id == 102 and message.metadata.message_type == "evaluate":
            reply.content["m"] = MetricRecord(metrics)
        return reply

    strategy = FP8(FedAvg(), seed=0)
    result, _, _ = start(strategy, make_app(mods=(attack, fp8_mod)), rounds=2)
    assert np.isfinite([m["total"] for m in result.evaluate_metrics_clientapp.values()]).all()
    assert [[one["client"] for one in phase.rejected] for phase in strategy.traffic] == [[], [102], [], [102]]


def test_weights_of_zero_alone_keep_the_model():
    def weightless(reply, context):
        reply["metrics"]["num-examples"] = 0
        return reply

    strategy = FP8(FedAvg(), seed=0)
    result, _, _ = start(strategy, make_app(answer=weightless), rounds=1)  # Flower would divide by zero
    assert not result.arrays and len(strategy.traffic[0].rejected) == 4
    assert "there is no mean" in strategy.traffic[0].rejected[0]["reason"]


def test_a_client_without_the_mod_is_told_what_to_do(caplog):
    errors = []

    class Listening(FedAvg):
        def aggregate_train(self, server_round, replies):
            errors.extend(reply.error.reason for reply in replies if reply.has_error())
            return super().aggregate_train(server_round, replies)

    result, _, _ = start(FP8(Listening(), seed=0), make_app(mods=()), rounds=1)
    assert not result.arrays and len(errors) == 4
    assert all("put fp8_mod first" in text and STYPE in text for text in errors)
    errors.clear()
    inner = strategies.DifferentialPrivacyClientSideFixedClipping(Listening(), 0.0, 0.1, 4)
    start(FP8(inner, seed=0), make_app(mods=(fixedclipping_mod, fp8_mod)), rounds=1)  # the wrong order
    assert not errors  # the privacy wrapper aggregates nothing if a reply is an error
    replies = [one for one in caplog.records if "put fp8_mod first" in one.getMessage()]
    assert len(replies) >= 8


def test_log_lines_are_short(caplog):
    """A small message can hold a name of megabytes: it is not repeated."""
    layout = Layout((TensorSpec("x" * 8_000_000, (4,), kind="float"),))
    bomb = seal(write_header(QuantState(layout, "dithered", 1), (), True) + bytes(16))
    assert len(bomb) < 20_000
    app = make_app(mods=(attack_with(replaced(bomb)), fp8_mod))
    start(FP8(FedAvg(), seed=0), app, rounds=1)
    assert max(len(one.getMessage()) for one in caplog.records) < 1_000


def test_the_client_believes_no_giants():
    """A server's message of some kB may not make a client allocate gigabytes, nor log megabytes."""
    orders = Orders("dithered", None, 1.0, 0.0, 1).to_bytes()
    size = (2**15, 2**15)
    layout = Layout((TensorSpec("w", size, kind="float"),))
    payload = seal(write_header(QuantState(layout, "dithered", 1), (), True) + bytes(1_200_000))
    message = Message(RecordDict({"arrays": record_of(orders + payload)}), 100, "train")
    grid = LocalGrid(make_app(), 1)
    grid.push_messages([message])
    (reply,) = grid.pull_messages([message.metadata.message_id])
    assert "not believed" in reply.error.reason and len(reply.error.reason) < 1_000


# What strategies do


def test_every_node_gets_its_own_model():
    """A generator that makes one model a node, and keeps none of them: nobody may get another node's."""

    class Personal(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            for node in grid.get_node_ids():
                own = ArrayRecord({"w": Array(np.full((16, 16), float(node), np.float32))})
                yield Message(RecordDict({"arrays": own, "config": config}), node, "train")

    seen = {}
    app = ClientApp(mods=[fp8_mod])

    @app.train()
    def train(message, context):
        seen.setdefault(context.node_id, []).append(float(message.content["arrays"]["w"].numpy().mean()))
        return Message(
            RecordDict({"arrays": message.content["arrays"], "m": MetricRecord({"num-examples": 1})}), reply_to=message
        )

    strategy = FP8(Personal(fraction_evaluate=0.0), seed=1)
    strategy.start(LocalGrid(app, 150), ArrayRecord({"w": Array(np.zeros((16, 16), np.float32))}), num_rounds=2)
    # one step of 0.8 / 8 x rms or finer a cell, 256 cells: the mean is within 1 % of it
    assert len(seen) == 150
    assert all(abs(value - node) < 0.01 * node for node, values in seen.items() for value in values)
    assert strategy.traffic[1].resent == 0 and strategy.traffic[1].down < strategy.traffic[0].down


def test_models_in_groups_and_nodes_that_change_groups():
    class Clusters(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            models = [ArrayRecord({"w": Array(np.full((16, 16), v, np.float32))}) for v in (1.0, 5.0)]
            for number, node in enumerate(grid.get_node_ids()):
                group = (number // 4 if server_round % 2 else number % 2) % 2
                yield Message(RecordDict({"arrays": models[group], "config": config}), node, "train")

    app = ClientApp(mods=[fp8_mod])
    seen = []

    @app.train()
    def train(message, context):
        seen.append(round(float(message.content["arrays"]["w"].numpy().mean())))
        return Message(
            RecordDict({"arrays": message.content["arrays"], "m": MetricRecord({"num-examples": 1})}), reply_to=message
        )

    strategy = FP8(Clusters(fraction_evaluate=0.0), seed=1)
    strategy.start(LocalGrid(app, 8), ArrayRecord({"w": Array(np.zeros((16, 16), np.float32))}), num_rounds=3)
    assert seen == [1] * 4 + [5] * 4 + [1, 5] * 4 + [1] * 4 + [5] * 4
    assert not any(line.resent for line in strategy.traffic)


def test_two_messages_to_one_node():
    """A node that serves several clients gets several messages a round; each has a model of its own to refer to."""

    class Twice(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            messages = list(super().configure_train(server_round, arrays, config, grid))
            again = [Message(m.content, m.metadata.dst_node_id, "train") for m in messages]
            return messages + again

    strategy = FP8(Twice(fraction_evaluate=0.0), seed=1)
    result, _, _ = start(strategy)
    assert [line.messages for line in strategy.traffic] == [8, 8, 8] and not any(t.resent for t in strategy.traffic)
    assert np.isfinite(vector(result.arrays)).all()


class Custom(FedAvg):
    """A strategy with an attribute, a method and a loop of its own."""

    flavour = "own"

    def describe(self):
        return f"{self.flavour} strategy"

    def start(self, grid, initial_arrays, num_rounds=3, **more):
        self.started = num_rounds
        result = super().start(grid, initial_arrays, num_rounds, **more)
        result.extra = "kept"
        return result


def test_custom_strategies_keep_their_behaviour():
    strategy = FP8(Custom(), seed=1)
    assert strategy.flavour == "own" and strategy.describe() == "own strategy"
    result, grid, _ = start(strategy, rounds=2)
    assert strategy.started == 2 and result.extra == "kept"
    assert grid.bytes["up"] < 2 * 4 * 2_000
    with pytest.raises(AttributeError, match="nonsense"):
        strategy.nonsense  # noqa: B018


def test_what_an_app_sets_on_its_strategy_the_strategy_sees():
    class Saving(FedAvg):
        folder = None

        def aggregate_train(self, server_round, replies):
            seen.append((self.folder, self.best))
            return super().aggregate_train(server_round, replies)

    seen, inner = [], Saving()
    strategy = FP8(inner, seed=0)
    strategy.folder, strategy.best = "runs", 0.5
    strategy.configure_evaluate = lambda *_, **__: []
    strategy.seed = 3  # ours
    start(strategy, rounds=1)
    assert seen == [("runs", 0.5)] and strategy.best == 0.5 and strategy.seed == 3 and not hasattr(inner, "seed")
    assert [phase.phase for phase in strategy.traffic] == ["train"]


def test_a_question_before_training_belongs_to_the_first_round():
    class Asking(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            if server_round == 1:
                list(grid.send_and_receive([Message(RecordDict(), n, "query") for n in grid.get_node_ids()]))
            return super().configure_train(server_round, arrays, config, grid)

    app = make_app()
    app.query()(lambda message, context: Message(RecordDict(), reply_to=message))
    strategy = FP8(Asking(fraction_evaluate=0.0), seed=0)
    result, _, _ = start(strategy, app, rounds=2)
    assert [phase.phase for phase in strategy.traffic] == ["query", "train", "train"]
    assert list(result.train_metrics_clientapp) == [1, 2]
    up = [metrics["fedfp8-bytes-up"] for metrics in result.train_metrics_clientapp.values()]
    assert up == [strategy.traffic[1].up, strategy.traffic[2].up]


def test_a_run_that_only_evaluates():
    plain, _, _ = start(FedAvg(fraction_train=0.0), rounds=2)
    strategy = FP8(FedAvg(fraction_train=0.0), "fp32")
    ours, _, _ = start(strategy, rounds=2)
    assert ours.evaluate_metrics_clientapp == plain.evaluate_metrics_clientapp and len(plain.evaluate_metrics_clientapp)
    assert [(phase.phase, phase.messages) for phase in strategy.traffic] == [("evaluate", 4)] * 2


def test_statistics_without_a_model():
    """FedAvg sums up metrics of replies that hold no arrays if none were sent."""
    results = []
    for make in (FedAvg, lambda: FP8(FedAvg())):
        app = ClientApp(mods=[fp8_mod])

        @app.train()
        def train(message, context):
            metrics = MetricRecord({"num-examples": 1, "histogram": [1, context.node_id]})
            return Message(RecordDict({"arrays": ArrayRecord(), "m": metrics}), reply_to=message)

        strategy = make()
        strategy.fraction_evaluate = 0.0
        results.append(strategy.start(LocalGrid(app, 3), ArrayRecord(), num_rounds=1).train_metrics_clientapp[1])
    assert results[0]["histogram"] == results[1]["histogram"] == [1, 101]


def test_a_strategy_of_its_own_may_get_other_shapes_back(caplog):
    """Pruned or growing layers, which the strategy itself puts together; Flower's own would fail."""

    class Pruning(FedAvg):
        def aggregate_train(self, server_round, replies):
            got.extend(reply.content["arrays"]["3.weight"].shape for reply in replies if reply.has_content())
            return initial(), MetricRecord()

    def pruned(reply, context):
        reply["arrays"]["3.weight"] = Array(reply["arrays"]["3.weight"].numpy()[: context.node_id - 99])
        return reply

    got = []
    start(FP8(Pruning(fraction_evaluate=0.0), seed=1), make_app(answer=pruned), rounds=1)
    assert sorted(got) == [(1, 64), (2, 64), (3, 64), (4, 64)]
    assert "by these names and shapes, and travel uncoded" in caplog.text
    result, _, _ = start(FP8(FedAvg(fraction_evaluate=0.0), seed=1), make_app(answer=pruned), rounds=1)
    assert not result.arrays and "was sent as (50, 64)" in caplog.text


def test_a_model_of_nan_is_the_apps_own_affair(caplog):
    """A run that went astray ends as it would without us: sent as it is, and said once."""
    broken = ArrayRecord({"w": Array(np.full((16, 16), np.nan, np.float32))})
    strategy, result = rounds_of(broken, rounds=2)
    assert np.isnan(result.arrays["w"].numpy()).all()
    assert [phase.down for phase in strategy.traffic] == [2 * (128 + 4 * 256)] * 2
    assert sum("cannot be coded and travels as it is: tensor 'w' holds NaN" in line for line in caplog.messages) == 1


def test_strategies_in_loops_of_their_own():
    """One who calls the methods one by one, and one who pushes and pulls without waiting for all."""
    strategy, grid = FP8(FedAvg(), seed=1), LocalGrid(make_app(), 4)
    random.seed(0)
    messages = strategy.configure_train(1, initial(), ConfigRecord(), grid)
    arrays, metrics = strategy.aggregate_train(1, grid.send_and_receive(messages))
    expected, _, _ = start(FP8(FedAvg(fraction_evaluate=0.0), seed=1), rounds=1)
    assert vector(arrays).tobytes() == vector(expected.arrays).tobytes() and metrics["loss"] == 1.0

    coded = FP8(FedAvg(), seed=1).on(LocalGrid(make_app(move=0.0), 3))
    replies = []
    for step in range(3):
        record = ArrayRecord({k: Array(np.asarray(a.numpy() * 2**step)) for k, a in initial().items()})
        ids = coded.push_messages([Message(RecordDict({"arrays": record}), 100 + step, "train")])
        replies.append((step, ids))
    for step, ids in reversed(replies):  # the first model is answered after the third was sent
        (reply,) = coded.pull_messages(ids)
        assert np.array_equal(vector(reply.content["arrays"]), vector(initial()) * 2**step)


def test_what_cannot_work_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"None, which has no configure_train.*FP8\(FedAvg"):
        FP8(None)
    with pytest.raises(ConfigError, match="class FedAvg"):
        FP8(FedAvg)
    with pytest.raises(ConfigError, match="one is enough"):
        FP8(FP8(FedAvg()))
    with pytest.raises(ConfigError, match="has no configure_train"):
        FP8("FedAvg")


def test_steps_are_chosen_by_the_strategy(caplog):
    """Where updates are compared or normalized the uplink is finer; the user's word counts more; the log says which."""
    for name, make in (inner_strategies() | {"QFedAvg": lambda: strategies.QFedAvg(0.1)}).items():
        averages = name in ("FedAvg", "FedAvgM", "FedProx")
        assert FP8(make()).wire.kappa_up == (5.0 if averages else 1.0), name
        assert FP8(make()).wire.frequencies is averages, name
        assert FP8(make(), kappa_up=3).wire.kappa_up == 3
    start(FP8(strategies.FedAdam(), seed=1), rounds=1)
    assert any("kappa_up 1 (FedAdam works with" in one.getMessage() for one in caplog.records)


def test_the_state_of_the_app_is_its_own():
    """FedBN's pattern: keep local layers in Context.state, and look whether there are any."""

    def answer(reply, context):
        assert not context.state or list(context.state) == ["local"]
        if not context.state.array_records:
            context.state["local"] = ArrayRecord({"bn": Array(np.array(float(context.node_id)))})
        assert float(context.state["local"]["bn"].numpy()) == context.node_id
        return reply

    strategy = FP8(FedAvg(), seed=1)
    _, grid, _ = start(strategy, make_app(answer=answer), rounds=3)
    assert not any(t.resent for t in strategy.traffic)
    assert all(set(context.state) == {"local", CACHE} for context in grid.contexts.values())
    assert strategy.traffic[4].down < strategy.traffic[0].down


# Replies that are no models


@pytest.mark.parametrize("wire", ["dq", "fp8"])
def test_deltas_and_gradients_are_coded_on_their_own_scale(wire):
    """A client that returns differences of 0.001 under the received names gets them aggregated, not noise of 0.07."""
    size = 0.001

    def deltas(reply, context):
        rng = np.random.default_rng(context.node_id)
        new = {k: size * rng.normal(size=a.shape).astype(a.dtype) for k, a in reply["arrays"].items()}
        reply["arrays"] = ArrayRecord({k: Array(np.asarray(v)) for k, v in new.items()})
        return reply

    strategy = FP8(FedAvg(fraction_evaluate=0.0), wire, seed=1)
    result, grid, _ = start(strategy, make_app(answer=deltas), rounds=1)
    expected, _, _ = start(FedAvg(fraction_evaluate=0.0), make_app(mods=(), answer=deltas), rounds=1)
    error = (vector(result.arrays) - vector(expected.arrays)).std()
    assert error < size, error  # of a mean of four: 0.0005
    assert grid.bytes["up"] < 4 * 7_500  # plain: 15,056


def test_a_second_record_with_the_same_names():
    def more(reply, context):
        grads = {k: Array(np.full_like(a.numpy(), 0.001)) for k, a in reply["arrays"].items()}
        return RecordDict({"grads": ArrayRecord(grads), "arrays": reply["arrays"], "metrics": reply["metrics"]})

    found = []

    class Both(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            found.extend(reply.content for reply in replies)
            for reply in replies:
                reply.content = RecordDict({k: v for k, v in reply.content.items() if k != "grads"})
            return super().aggregate_train(server_round, replies)

    result, _, _ = start(FP8(Both(fraction_evaluate=0.0), seed=1), make_app(answer=more), rounds=1)
    assert np.abs(vector(result.arrays) - vector(initial())).max() < 1
    assert len(found) == 4
    for content in found:
        assert np.array_equal(vector(content["grads"]), np.full((50, 64), np.float32(0.001)))


def test_two_models_in_one_message():
    class Two(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            for message in super().configure_train(server_round, arrays, config, grid):
                second = ArrayRecord({k: Array(np.asarray(-a.numpy())) for k, a in arrays.items()})
                records = {"arrays": arrays, "second": second, "config": config}
                yield Message(RecordDict(records), message.metadata.dst_node_id, "train")

        def aggregate_train(self, server_round, replies):
            found.extend(reply.content for reply in replies)
            return None, None

    found = []
    app = ClientApp(mods=[fp8_mod])

    @app.train()
    def train(message, context):
        records = {k: message.content[k] for k in ("second", "arrays")}
        return Message(RecordDict(records | {"m": MetricRecord({"num-examples": 1})}), reply_to=message)

    strategy = FP8(Two(fraction_evaluate=0.0), seed=1)
    strategy.start(grid := LocalGrid(app, 2), initial(), num_rounds=2)
    assert len(found) == 4 and grid.bytes["up"] < 4 * 2 * 2_000 and not strategy.traffic[1].resent
    for content in found:  # unmoved clients return what the server has
        assert np.array_equal(vector(content["arrays"]), vector(initial()))
        assert np.array_equal(vector(content["second"]), -vector(initial()))


@pytest.mark.parametrize("values", [
    np.arange(12, dtype=np.float32).reshape(3, 4), np.asfortranarray(np.ones((3, 4))), np.float64(2.5),
    np.zeros((0, 4)), np.array([True, False]), np.arange(6, dtype=">i4")[::2], np.ones((2, 3), np.float16),
])  # fmt: skip
def test_arrays_are_those_of_flower(values):
    """Written and read without its copies, to the same bytes."""
    ours, theirs = array_of(values), Array(np.asarray(values))
    assert (ours.data, ours.dtype, ours.shape, ours.stype) == (theirs.data, theirs.dtype, theirs.shape, theirs.stype)
    back = numpy_view("x", theirs)
    assert back.dtype == np.asarray(values).dtype and np.array_equal(back, values) and not back.flags.writeable


# What does not pay


def rounds_of(record, wire="dq", rounds=3, nodes=2):
    app = ClientApp(mods=[fp8_mod])

    @app.train()
    def train(message, context):
        moved = {}
        for name, array in message.content["arrays"].items():
            values = array.numpy()
            noise = np.random.default_rng(context.node_id).normal(size=values.shape)
            moved[name] = Array(np.asarray((values + 0.01 * noise).astype(values.dtype)))
        return Message(
            RecordDict({"arrays": ArrayRecord(moved), "m": MetricRecord({"num-examples": 1})}), reply_to=message
        )

    strategy = FP8(FedAvg(fraction_evaluate=0.0), wire, seed=1)
    result = strategy.start(LocalGrid(app, nodes), record, num_rounds=rounds)
    return strategy, result


WEIRD = {
    "flat": {"w": np.random.default_rng(0).normal(size=100_000).astype(np.float32)},
    "zeros": {"w": np.zeros((10, 784), np.float32), "b": np.zeros(10, np.float32)},
    "short vectors": {f"b{n}": np.ones(50, np.float32) for n in range(5)},
    "tiny": {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float64)},
    "nothing": {},
    "empty": {"w": np.zeros((0, 4), np.float32)},
    "integers": {"n": np.arange(500, dtype=np.int64)},
    "small weight": {"w": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)},
    "half": {"w": np.random.default_rng(0).normal(size=(64, 64)).astype(np.float16)},
    "part empty": {"w": np.zeros((10, 784)), "e": np.zeros(0), "f": np.zeros((0, 5)), "n": np.array(3, np.int8)},
    "wide": {"w": np.zeros((10, 784)), "x": np.ones(2, np.longdouble)},
    "odd names": {n: np.ones((8, 9)) for n in ("", "a:b", "w:range", "x:float32", "重み/\n*[0]", "payload")},
}


@pytest.mark.parametrize("name", WEIRD)
def test_never_more_bytes_than_plain(name, caplog):
    """Whatever the arrays: not one byte more, and no message sent twice; what is not coded is said once."""
    record = ArrayRecord({k: Array(a) for k, a in WEIRD[name].items()})
    strategy, _ = rounds_of(record)
    assert [(t.messages, t.resent) for t in strategy.traffic] == [(2, 0)] * 3
    for line in strategy.traffic:
        assert line.down <= line.plain_down and line.up <= line.plain_up, line
        assert line.up or name == "nothing", line  # all have answered
    said = [one for one in caplog.records if "travels as it is" in one.getMessage()]
    assert len(said) == (1 if name in ("short vectors", "tiny", "nothing", "empty", "integers", "wide") else 0)
    assert any("bytes as without" in one.getMessage() for one in caplog.records) == bool(said)
    assert name != "wide" or any("float128" in one.getMessage() for one in caplog.records)
    if name == "flat":
        assert sum(t.down + t.up for t in strategy.traffic) < 3 * 2 * 2 * 400_000 / 8
    if name == "zeros":
        assert sum(t.down + t.up for t in strategy.traffic) < 3 * 2 * 2 * 31_400 / 5


def test_trees_and_bytes_travel_as_they_are():
    """FedXgbBagging sends bytes that grow from round to round."""
    _, result = rounds_of(ArrayRecord({"0": Array(np.frombuffer(b"tree" * 40, np.uint8))}), rounds=1)
    assert result.arrays["0"].shape == (160,)
    assert FP8(strategies.FedXgbBagging()).wire.kappa_up == 1.0  # they join trees and average nothing
    own = ArrayRecord({"0": Array("", (), "my.type", b"123")})
    coded = FP8(FedAvg(), seed=1).on(LocalGrid(make_app(answer=None), 1))
    message = Message(RecordDict({"arrays": own}), 100, "query")
    coded.push_messages([message])
    assert message.content["arrays"]["0"].data == b"123"


# Start


def test_a_model_that_both_sides_have_is_not_sent():
    make = lambda: model().state_dict()  # noqa: E731
    plain_, shared = FP8(FedAvg(), seed=1), FP8(FedAvg(), seed=1, start=make)
    start(plain_, rounds=1)
    result, _, _ = start(shared, make_app(mods=(fp8_mod_with(start=initial()),)), rounds=1)
    assert not shared.traffic[0].resent and shared.traffic[0].down < plain_.traffic[0].down / 3
    for mod in (fp8_mod, fp8_mod_with(start={k: v + 1 for k, v in make().items()})):  # without it, or another one
        differs = FP8(FedAvg(), seed=1, start=make)
        result_, _, _ = start(differs, make_app(mods=(mod,)), rounds=1)
        assert differs.traffic[0].resent == 4 and differs.traffic[1].resent == 0
        assert vector(result_.arrays).tobytes() == vector(result.arrays).tobytes()
    other = FP8(FedAvg(), seed=1, start={"w": np.ones(3)})
    result_, _, _ = start(other, rounds=1)
    assert not other.traffic[0].resent


# Privacy


def privacy(kind, norm):
    dp = strategies
    once = FedAvg(fraction_evaluate=0.0)
    return {
        "client fixed": lambda: (dp.DifferentialPrivacyClientSideFixedClipping(once, 0.0, norm, 4), fixedclipping_mod),
        "client adaptive": lambda: (
            dp.DifferentialPrivacyClientSideAdaptiveClipping(
                once, 0.0, 4, clipped_count_stddev=0.0, initial_clipping_norm=norm
            ),
            adaptiveclipping_mod,
        ),
        "server fixed": lambda: (dp.DifferentialPrivacyServerSideFixedClipping(once, 0.0, norm, 4), None),
        "server adaptive": lambda: (
            dp.DifferentialPrivacyServerSideAdaptiveClipping(
                once, 0.0, 4, clipped_count_stddev=0.0, initial_clipping_norm=norm
            ),
            None,
        ),
    }[kind]()


@pytest.mark.parametrize("wire", ["dq", "fp8"])
@pytest.mark.parametrize("kind", ["client fixed", "client adaptive", "server fixed", "server adaptive"])
def test_clipping_bounds_what_is_aggregated(kind, wire, monkeypatch):
    """The norm of every update that FedAvg is given is at most C, whatever coding added to it, and whoever clipped."""
    norms, model_norm = [], np.sqrt(sum((a.numpy().astype(float) ** 2).sum() for a in initial().values()))
    aggregate = FedAvg.aggregate_train

    def watched(self, server_round, replies):
        for reply in replies:
            arrays = reply.content["arrays"]
            floats = {k: a.numpy().astype(float) for k, a in initial().items() if a.dtype == "float32"}
            moved = [arrays[k].numpy().astype(float) - a for k, a in floats.items()]
            norms.append(np.sqrt(sum((m**2).sum() for m in moved)))
        return aggregate(self, server_round, replies)

    monkeypatch.setattr(FedAvg, "aggregate_train", watched)
    inner, mod = privacy(kind, 0.1)
    mods = (fp8_mod,) if mod is None else (fp8_mod, mod)
    start(FP8(inner, wire, seed=0), make_app(mods=mods, move=1.0), rounds=1)
    # adding the clipped update to the model rounds each weight to float32: at most 2**-24 of it
    assert len(norms) == 4 and max(norms) <= 0.1 * (1 + 1e-6) + 2**-24 * model_norm and min(norms) > 0.05
    if mod is not None:  # a client that does not clip is clipped, too
        norms.clear()
        cheat = attack_with(lambda reply: reply)
        without = (fp8_mod, _with_norm_bit, cheat) if kind == "client adaptive" else (fp8_mod, cheat)
        start(FP8(inner, wire, seed=0), make_app(mods=without, move=1.0), rounds=1)
        assert len(norms) == 4 and max(norms) <= 0.11


def _with_norm_bit(message, context, call_next):
    reply = call_next(message, context)
    reply.content["metrics"]["norm_bit"] = 1
    return reply


def test_the_wrong_order_of_mods_aggregates_nothing():
    """fp8_mod after a clipping mod cannot work; the bound cannot be broken that way either."""
    for kind in ("client fixed", "client adaptive"):
        inner, mod = privacy(kind, 0.1)
        result, _, _ = start(FP8(inner, seed=0), make_app(mods=(mod, fp8_mod), move=1.0), rounds=1)
        assert not result.arrays


# What the user sees


def test_results_and_log_say_what_was_saved(caplog):
    strategy = FP8(FedAvg(), seed=1)
    result, grid, _ = start(strategy, rounds=2)
    plain_grid = start(FedAvg(), make_app(mods=()), rounds=2)[1]
    sums = {way: sum(m[f"fedfp8-bytes-{way}"] for m in result.train_metrics_clientapp.values()) for way in grid.bytes}
    plain_sums = {way: sum(m[f"plain-bytes-{way}"] for m in result.train_metrics_clientapp.values()) for way in sums}
    assert sums == grid.bytes and plain_sums == plain_grid.bytes
    lines = [one.getMessage() for one in caplog.records]
    assert any(re.fullmatch(r"fedfp8: [\d.]+ kB instead of [\d.]+ kB \([\d.]+ times less\)", line) for line in lines)
    assert sum(line.startswith("fedfp8: round ") for line in lines) == 4


def test_records_are_drawn_by_the_report(tmp_path):
    """Runs beside each other in a folder, plain and coded, become one report."""
    from fedfp8.paper.report import write_report

    for wire in ("dq", "fp32"):
        strategy = FP8(FedAvg(fraction_evaluate=0.0), wire, seed=1, out=tmp_path / "app" / wire)
        app = make_app(mods=(attack_with(replaced(b"garbage")), fp8_mod))
        grid = LocalGrid(app, 4)
        strategy.start(
            grid,
            initial(),
            num_rounds=2,
            evaluate_fn=lambda r, arrays: MetricRecord({"accuracy": 0.5 + r / 10, "loss": 1.0 - r / 10}),
        )
    lines = [json.loads(line) for line in (tmp_path / "app/dq/history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2] and lines[2]["accuracy"] == 0.7 and lines[2]["loss"] == 0.8
    assert lines[1]["clients"] == [100, 101, 102, 103] and [r["client"] for r in lines[1]["rejected"]] == [102]
    assert lines[2]["bytes_total"] == sum(line["bytes_down"] + line["bytes_up"] for line in lines)
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "70.0" in page and "app" in page


def test_a_strategy_that_counts_bytes_counts_plain_ones(caplog):
    """As FlowerTune's does, in the methods that it overrides: it is inside FP8, where models are not coded."""

    class Counting(FedAvg):
        counted = 0

        def configure_train(self, *args):
            messages = list(super().configure_train(*args))
            self.count(messages)
            return messages

        def aggregate_train(self, server_round, replies):
            self.count(replies)
            return super().aggregate_train(server_round, replies)

        def count(self, messages):
            records = [r for m in messages for r in m.content.array_records.values()]
            self.counted += sum(len(array.data) for record in records for array in record.values())

    strategy = FP8(Counting(fraction_evaluate=0.0), seed=1)
    assert strategy.wire.kappa_up == 5.0  # it averages, as the class it derives from
    _, grid, _ = start(strategy, make_app(mods=(arrays_size_mod, fp8_mod)), rounds=2)
    assert strategy.counted == sum(one.plain_down + one.plain_up for one in strategy.traffic)
    assert sum(grid.bytes.values()) == sum(one.down + one.up for one in strategy.traffic) < strategy.counted / 5
    shown = [int(n) for line in caplog.messages for n in re.findall(r"Total array elements .*: (\d+) bytes", line)]
    names = 16 * len("arrays")  # Flower counts the names of arrays as well: here of one blob a message
    assert len(shown) == 16 and sum(shown) == sum(grid.bytes.values()) + names


# The example


def test_example_is_the_plain_app_and_two_lines():
    """The promise of the README: both folders differ in two calls, their imports, and the project's name."""
    examples = Path(__file__).parent.parent / "examples"
    plain, ours = examples / "flower-plain", examples / "flower-quickstart"
    changed = []
    for path in sorted(plain.glob("digits_app/*.py")):
        old, new = (p.read_text().splitlines() for p in (path, ours / path.relative_to(plain)))
        changed += [line for line in difflib.ndiff(old, new) if line.startswith(("+ ", "- "))]
    assert [line for line in changed if "import" not in line] == [
        "- app = ClientApp()",
        "+ app = ClientApp(mods=[fp8_mod])",
        '-     strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=int(context.run_config["nodes"]))',
        '+     strategy = FP8(FedAvg(fraction_evaluate=0.0, min_available_nodes=int(context.run_config["nodes"])))',
    ]
    assert sum("import" in line for line in changed) == 2


@pytest.mark.parametrize("folder", ["flower-plain", "flower-quickstart"])
def test_example_learns(folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples" / folder)
    for name in [n for n in sys.modules if n.startswith("digits_app")]:
        monkeypatch.delitem(sys.modules, name)
    server, client = (importlib.import_module(f"digits_app.{side}") for side in ("server", "client"))
    config = {"nodes": 10, "num-rounds": 3, "local-epochs": 1, "lr": 0.05, "out": str(tmp_path / "out.json")}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        grid = LocalGrid(client.app, 10, config)
        grid.serve(server.app, config)
    accuracy = json.loads((tmp_path / "out.json").read_text())
    assert accuracy["3"] > 0.6 and accuracy["3"] > accuracy["0"] + 0.3
    whole = 3 * 10 * 38_000 * 4
    assert grid.bytes["up"] > whole if folder == "flower-plain" else grid.bytes["up"] < whole / 30
    for name in [n for n in sys.modules if n.startswith("digits_app")]:
        monkeypatch.delitem(sys.modules, name)


def test_the_comparison_of_both_apps_runs():
    script = Path(__file__).parents[1] / "examples/compare_flower.py"
    command = [sys.executable, str(script), "--rounds", "1", "--runs", "1"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line[:12] for line in out] == ["10 clients, ", "plain FedAvg", "with the two"]
    sizes = [float(line.rsplit(" ", 2)[1]) for line in out[1:]]
    assert sizes[1] < sizes[0] / 10
