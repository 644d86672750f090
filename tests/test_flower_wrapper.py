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
from fedfp8.flower.wrapper.arrays import Wire, arrays_of, state_of_arrays
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import FedAvg

from fedfp8.errors import ConfigError, Fedfp8Error, QuantizationError
from fedfp8.flower import FP8, FP8FedAvg, LocalGrid, fp8_mod
from fedfp8.flower.blob import blob_of, is_blob, record_of
from fedfp8.flower.cache import RECORD as CACHE
from fedfp8.flower.wrapper.orders import RECORD, Orders
from fedfp8.model.state import dequantize_state, quantize_state
from fedfp8.nn import prepare
from fedfp8.wire import encode, header


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
        dice = torch.Generator().manual_seed(context.node_id)
        new = {}
        for name, value in message.content["arrays"].to_torch_state_dict().items():
            noise = move * torch.randn(value.shape, generator=dice)
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


# Arrays


def sample_arrays():
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(9, 11)).astype(np.float32),
        "half": rng.normal(size=(8, 16)).astype(np.float16),
        "double": rng.normal(size=(8, 16)),
        "tiny": rng.normal(size=(2, 2)).astype(np.float32),
        "bias": np.array([1.5, np.nan, -0.0], np.float32),
        "scalar": np.array(3.25, np.float64),
        "count": np.array(7, np.int64),
        "unsigned": np.arange(5, dtype=np.uint32),
        "flags": np.array([True, False]),
        "odd:name": np.arange(3, dtype=np.int16),
        "empty": np.zeros((0, 4), np.float32),
        "fortran": np.asfortranarray(rng.normal(size=(8, 9)).astype(np.float32)),
    }


@pytest.mark.parametrize("rounding", ["none", "nearest", "stochastic", "dithered"])
def test_arrays_survive(rounding):
    arrays = sample_arrays()
    state = state_of_arrays(arrays, Wire(rounding))
    step = 0.3 if rounding == "dithered" else None
    q = quantize_state(state, seed=5, rounding=rounding, step=step)
    back = arrays_of(dequantize_state(q))
    assert list(back) == list(arrays)
    coded = {"w", "half", "double", "fortran"} if rounding != "none" else set()
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape
        if name in coded:
            size = np.sqrt(np.mean(array.astype(float) ** 2))
            bound = 0.15 * size if rounding == "dithered" else np.abs(array).astype(float) / 8 + 1e-2
            assert (np.abs(back[name].astype(float) - array.astype(float)) <= bound * 1.01 + 2e-3).all()
            assert not np.array_equal(back[name], array)
        else:
            assert back[name].tobytes() == array.tobytes()


def test_pattern_chooses_what_is_coded():
    arrays = sample_arrays()
    kinds = {s.name: s.kind for s in state_of_arrays(arrays, Wire("dithered", coded=("b*", "tiny"))).layout}
    assert kinds["bias"] == kinds["tiny"] == "float" and kinds["w:float32"] == "integer"


def test_ranges_come_from_prepared_models_else_from_the_largest_weight():
    arrays = {k: a.numpy() for k, a in initial(prepared=True).items()}
    arrays["3.alpha"] = np.array(0.05, np.float32)
    state = state_of_arrays(arrays, Wire("stochastic"))
    specs = {s.name: s for s in state.layout}
    assert specs["3.weight"].range == "3.alpha:float32" and float(state["3.alpha:float32"]) == np.float32(0.05)
    assert not any(name.endswith(":range") for name in specs)
    del arrays["3.beta"]  # an alpha alone may be anything
    state = state_of_arrays(arrays, Wire("stochastic"))
    assert float(state["3.weight:range"]) == np.abs(arrays["3.weight"]).max()
    arrays = {"w": np.zeros((8, 8), np.float32)}
    assert float(state_of_arrays(arrays, Wire("nearest"))["w:range"]) == 1.0


def test_unusable_arrays_are_named():
    arrays = {k: a.numpy() for k, a in initial(prepared=True).items()}
    with pytest.raises(QuantizationError, match=r"'3\.alpha' is -1\.0"):
        state_of_arrays(arrays | {"3.alpha": np.array(-1.0, np.float32)}, Wire("stochastic"))
    with pytest.raises(QuantizationError, match="'c' is complex128"):
        state_of_arrays({"c": np.zeros(2, complex)}, Wire())
    with pytest.raises(QuantizationError, match="'s'"):
        state_of_arrays({"s": np.array(["a"])}, Wire())
    with pytest.raises(ConfigError, match="rounding"):
        Wire("up")


# Strategies


def test_float_wire_is_the_plain_app_bit_for_bit():
    plain, _, _ = start(FedAvg())
    ours, _, _ = start(FP8FedAvg("fp32"))
    assert list(plain.arrays) == list(ours.arrays)
    for key, array in plain.arrays.items():
        assert array.numpy().tobytes() == ours.arrays[key].numpy().tobytes()
    assert plain.train_metrics_clientapp == ours.train_metrics_clientapp
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
    assert [t["messages"] for t in wrapped.traffic] == [4, 4, 4, 4] and not any(t["resent"] for t in wrapped.traffic)
    assert grid.bytes == {way: sum(t[way] for t in wrapped.traffic) for way in ("down", "up")}


def test_central_model_is_preserved():
    """Clients that do not move change nothing: no noise of the downlink enters the server's model."""
    for wire in ("dq", "fp8"):
        result, _, _ = start(FP8(FedAvg(), wire, seed=3), make_app(move=0.0))
        for key in ("0.weight", "3.weight"):
            start_value = vector(initial(), key)
            error = np.abs(vector(result.arrays, key) - start_value)
            # dq: an unmoved tensor has a step of kappa_up * rms / 1024. fp8: the client's value is on its grid already.
            step = 8 * np.sqrt(np.mean(start_value**2)) / 1024
            assert error.max() <= (3 * step / 2 if wire == "dq" else 1e-6), (wire, key)


def test_updates_are_unbiased():
    """The mean over many draws of a round's result is the plain result, within five standard errors."""
    exact = vector(start(FedAvg(), rounds=1)[0].arrays)
    for wire in ("dq", "fp8"):
        draws = np.stack([vector(start(FP8(FedAvg(), wire, seed=s), rounds=1)[0].arrays) for s in range(24)])
        spread = draws.std(0, ddof=1) / np.sqrt(len(draws))
        score = (draws.mean(0) - exact)[spread > 1e-9] / spread[spread > 1e-9]
        # 3,200 t-distributed scores with 23 degrees of freedom: P(|t| > 7) is 4e-7 each
        assert np.abs(score).max() < 7 and abs(score.mean()) < 5 / np.sqrt(score.size) * 1.1


def test_dice_are_never_used_twice():
    seeds = []

    class Watching(LocalGrid):
        def _deliver(self, message):
            down = {k: header(blob_of(r)).seed for k, r in message.content.array_records.items()}
            reply = super()._deliver(message)
            ups = [header(blob_of(r)).seed for r in reply.content.array_records.values()]
            seeds.append((down["arrays"], ups))
            return reply

    strategy = FP8(FedAvg(), seed=0)
    grid = Watching(make_app(), 3)
    start(strategy, grid=grid)
    start(strategy, grid=grid)  # rounds are counted from 1 again
    ups = [s for _, u in seeds for s in u]
    assert len(ups) == len(set(ups)) == 2 * 3 * 3
    # A model has one draw: round r's evaluation and round r+1's training send the same message.
    assert len({d for d, _ in seeds}) == 2 * 4 and not {d for d, _ in seeds} & set(ups)


def test_same_model_again_is_almost_free():
    strategy = FP8(FedAvg(), seed=0)
    start(strategy)
    down = {(t["round"], t["phase"]): t["down"] for t in strategy.traffic}
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
    assert all(t["up"] == 0 or t["up"] < 4 * 3_400 + 4 * 2_000 for t in strategy.traffic)


def test_wrong_arguments():
    with pytest.raises(ConfigError, match="'dq' or 'fp8'"):
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


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_privacy_mods_inside(kind):
    """Flower's clipping mods insist on one ConfigRecord and one ArrayRecord of arrays: they see exactly that."""
    if kind == "fixed":
        make, mod = strategies.DifferentialPrivacyClientSideFixedClipping, fixedclipping_mod
        inner = make(FedAvg(fraction_evaluate=0.0), 0.0, 0.05, 4)
    else:
        make, mod = strategies.DifferentialPrivacyClientSideAdaptiveClipping, adaptiveclipping_mod
        inner = make(FedAvg(fraction_evaluate=0.0), 0.0, 4, clipped_count_stddev=0.1, initial_clipping_norm=0.05)
    result, _, _ = start(FP8(inner, seed=0), make_app(mods=(fp8_mod, mod), move=1.0), rounds=1)
    assert result.train_metrics_clientapp
    moved = np.abs(vector(result.arrays) - vector(initial())).max()
    assert moved < 0.1  # unclipped clients move by 1


def test_lost_state_is_sent_again_in_the_same_round():
    class Forgetful(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            if len(messages) == 4:
                self.contexts[101].state.array_records.pop(CACHE, None)
            return super().send_and_receive(messages, timeout=timeout)

    strategy, calm = FP8(FedAvg(), seed=2), FP8(FedAvg(), seed=2)
    result, _, _ = start(strategy, grid=Forgetful(make_app(), 4))
    expected, _, _ = start(calm)
    resent = [t["resent"] for t in strategy.traffic]
    assert resent[0] == 0 and sum(resent) >= 3 and max(resent) == 1
    assert vector(result.arrays).tobytes() == vector(expected.arrays).tobytes()
    assert sum(t["down"] for t in strategy.traffic) > sum(t["down"] for t in calm.traffic)


def test_without_cache_nothing_is_kept():
    strategy = FP8(FedAvg(), seed=2, client_cache=False)
    _, grid, _ = start(strategy)
    assert all(CACHE not in context.state for context in grid.contexts.values())
    with_cache = FP8(FedAvg(), seed=2)
    _, grid, _ = start(with_cache)
    assert all(len(context.state[CACHE]) == 1 for context in grid.contexts.values())
    assert sum(t["down"] for t in strategy.traffic) > 1.3 * sum(t["down"] for t in with_cache.traffic)


def test_raw_codes():
    strategy = FP8(FedAvg(fraction_evaluate=0.0), "fp8", seed=2, lossless=False)
    start(strategy, rounds=1)
    coded = 16 * 9 + 64 * 50
    assert 4 * coded < strategy.traffic[0]["up"] < 4 * (coded + 900)


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
    assert "new" in result.arrays and grid.bytes["up"] > 4 * 4 * 3_400  # travelled uncoded, with a warning


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
        reply.content["arrays"] = record_of(payload)
        return reply

    return change


def poisoned(reply):
    """NaN in an array that travels as it is, in a message that is valid otherwise."""
    from fedfp8.wire.container import seal

    payload = blob_of(reply.content["arrays"])
    bias = payload.index(np.float32(1.0).tobytes()) if np.float32(1.0).tobytes() in payload else 40
    damaged = bytearray(payload[:-8])
    damaged[bias : bias + 4] = np.float32(np.nan).tobytes()
    reply.content["arrays"] = record_of(seal(bytes(damaged)))
    return reply


def huge_layout():
    """A message that claims four billion zeros in a few bytes."""
    from fedfp8.model.layout import Layout, TensorSpec
    from fedfp8.model.state import QuantState
    from fedfp8.wire.container import seal, write_header

    layout = Layout((TensorSpec("3.weight", (2**31,), kind="float"),))
    return seal(write_header(QuantState(layout, "dithered", 1), (), True) + np.zeros(1, "<f4").tobytes())


def foreign():
    state = state_of_arrays({"3.weight": np.ones((5, 50), np.float32)}, Wire())
    return encode(quantize_state(state, seed=1, rounding="dithered", step=0.3), with_layout=True)


BAD = {
    "garbage": (replaced(b"garbage" * 50), "not a fedfp8 message"),
    "other model": (replaced(foreign()), "not sent"),
    "huge": (replaced(huge_layout()), "not sent|too many"),
    "nan": (poisoned, "NaN"),
}


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


def test_bytes_by_nodes_without_the_mod_are_errors_not_crashes():
    result, _, _ = start(FP8(FedAvg(), seed=0), make_app(mods=()), rounds=1)
    assert result.arrays is None or not len(result.arrays)


def test_orders_round_trip():
    orders = Orders(Wire("stochastic", coded=("a*",)), 8.0, True, False, 3, {"arrays": 5})
    assert Orders.from_record(orders.to_record()) == orders
    with pytest.raises(Fedfp8Error, match="orders"):
        Orders.from_record(ConfigRecord({"rounding": "dithered"}))
    assert RECORD == "fedfp8" and is_blob(record_of(b"x"))


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
        "-     strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=10)",
        "+     strategy = FP8(FedAvg(fraction_evaluate=0.0, min_available_nodes=10))",
    ]
    assert sum("import" in line for line in changed) == 2


@pytest.mark.parametrize("folder", ["flower-plain", "flower-quickstart"])
def test_example_learns(folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples" / folder)
    for name in [n for n in sys.modules if n.startswith("digits_app")]:
        monkeypatch.delitem(sys.modules, name)
    server, client = (importlib.import_module(f"digits_app.{side}") for side in ("server", "client"))
    config = {"num-rounds": 3, "local-epochs": 1, "lr": 0.05, "out": str(tmp_path / "out.json")}
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
