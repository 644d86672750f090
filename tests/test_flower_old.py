"""Old-style apps (client_fn, NumPyClient, ServerApp(server_fn=...), flwr.server.strategy): the same two lines."""

import json
import random
import time

import numpy as np
import pytest

pytest.importorskip("flwr")
from flwr.client import NumPyClient
from flwr.client.mod import adaptiveclipping_mod, fixedclipping_mod, secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, ServerAppComponents, ServerConfig
from flwr.server import strategy as old
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp

from fedfp8.errors import ConfigError
from fedfp8.flower import FP8, LocalGrid, fp8_mod
from fedfp8.flower.wrapper.mod import CACHE
from fedfp8.flower.wrapper.old import OldFP8

SHAPES = ((64, 48), (48,), (10, 48), (10,))


def weights():
    rng = np.random.default_rng(0)
    return [0.1 * rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def client_app(mods=(fp8_mod,), move=0.01, spoil=lambda node, arrays: arrays):
    class Client(NumPyClient):
        def __init__(self, node):
            self.node = node

        def fit(self, parameters, config):
            assert [p.shape for p in parameters] == list(SHAPES) and "fedfp8" not in str(config)
            rng = np.random.default_rng(self.node)
            moved = [(p + move * rng.normal(size=p.shape)).astype(p.dtype) for p in parameters]
            return spoil(self.node, moved), 10, {"loss": 1.0}

        def evaluate(self, parameters, config):
            return float(sum(p.sum() for p in parameters)), 10, {}

    return ClientApp(client_fn=lambda context: Client(context.node_id).to_client(), mods=list(mods))


def serve(strategy, app=None, rounds=3, grid=None, nodes=4):
    grid = grid or LocalGrid(app or client_app(), nodes)
    random.seed(0)
    components = ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))
    grid.serve(ServerApp(server_fn=lambda context: components))
    return grid


def watched(make, **arguments):
    """A strategy that keeps what it aggregated, as apps do to save models."""

    class Watched(make):
        def aggregate_fit(self, server_round, results, failures):
            found.setdefault("failures", []).extend(failures)
            found.setdefault("updates", []).extend(parameters_to_ndarrays(r.parameters) for _, r in results)
            parameters, metrics = super().aggregate_fit(server_round, results, failures)
            found["model"] = parameters_to_ndarrays(parameters) if parameters else None
            return parameters, metrics

    found = {}
    return Watched(initial_parameters=ndarrays_to_parameters(weights()), **arguments), found


def test_the_same_two_lines(caplog):
    inner, found = watched(old.FedAvg)
    plain_grid = serve(inner, client_app(mods=()))
    plain = found["model"]
    inner, found = watched(old.FedAvg)
    strategy = FP8(inner, seed=1)
    assert isinstance(strategy, OldFP8 | old.Strategy) and strategy.fraction_fit == 1.0
    grid = serve(strategy)
    assert [t.messages for t in strategy.traffic] == [4] * 6 and not any(t.resent for t in strategy.traffic)
    assert grid.bytes == {way: sum(getattr(t, way) for t in strategy.traffic) for way in ("down", "up")}
    assert all(grid.bytes[way] < plain_grid.bytes[way] / 8 for way in grid.bytes)
    for ours, theirs, start in zip(found["model"], plain, weights(), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() < 0.1 and not np.array_equal(ours, start)
    assert all(CACHE in context.state for context in grid.contexts.values())
    lines = [one.getMessage() for one in caplog.records]
    assert any("instead of" in line and "times less" in line for line in lines)
    assert any("fedfp8-bytes-up" in line for line in lines)


def test_float_wire_is_the_plain_app():
    inner, found = watched(old.FedAvg)
    serve(inner, client_app(mods=()))
    assert not found["failures"] and len(found["updates"]) == 12, found["failures"]  # of Flower without us
    plain = found["model"]
    inner, found = watched(old.FedAvg)
    serve(FP8(inner, "fp32"))
    assert not found["failures"] and len(found["updates"]) == 12, found["failures"]
    for ours, theirs in zip(found["model"], plain, strict=True):
        # Flower adds up in the order in which threads end: equal but for the rounding of a sum of four
        assert np.abs(ours - theirs).max() < 1e-6


@pytest.mark.parametrize("name", ["FedAvgM", "FedAdam", "FedYogi", "FedMedian", "FedTrimmedAvg", "Krum", "FedProx"])
def test_any_old_strategy(name):
    make = getattr(old, name)
    extra = {"FedProx": {"proximal_mu": 0.1}, "Krum": {"num_malicious_clients": 1}}.get(name, {})
    inner, found = watched(make, **extra)
    strategy = FP8(inner, seed=1)
    assert strategy.wire.kappa_up == (5.0 if name in ("FedAvgM", "FedProx") else 1.0)
    serve(strategy, rounds=2)
    assert all(np.isfinite(array).all() for array in found["model"]) and not found["failures"]


def test_lost_bad_and_unmodded_clients(caplog):
    class Forgetful(LocalGrid):
        def push_messages(self, messages):
            given = list(messages)
            for message in given:
                if message.metadata.dst_node_id == 101:
                    self.contexts[101].state.pop(CACHE, None)
            return super().push_messages(given)

    def spoil(node, arrays):
        return [a * np.nan for a in arrays] if node == 102 else arrays

    inner, found = watched(old.FedAvg)
    strategy = FP8(inner, seed=1)
    serve(strategy, grid=Forgetful(client_app(spoil=spoil), 4), rounds=2)
    assert sum(t.resent for t in strategy.traffic) >= 1
    assert len(found["failures"]) == 2 and all("NaN" in str(failure) for failure in found["failures"])
    assert all(np.isfinite(array).all() for array in found["model"])
    inner, found = watched(old.FedAvg)
    serve(FP8(inner, seed=1), client_app(mods=()), rounds=1)
    assert len(found["failures"]) == 4 and all("put fp8_mod first" in str(f) for f in found["failures"])


@pytest.mark.parametrize("kind", ["ClientSideFixed", "ClientSideAdaptive", "ServerSideFixed", "ServerSideAdaptive"])
def test_privacy_keeps_its_bound(kind):
    inner, found = watched(old.FedAvg, fraction_evaluate=0.0)
    make = getattr(old, f"DifferentialPrivacy{kind}Clipping")
    if "Fixed" in kind:
        private = make(inner, 0.0, 0.1, 4)
    else:
        private = make(inner, 0.0, 4, initial_clipping_norm=0.1, clipped_count_stddev=0.0)
    mod = {"ClientSideFixed": fixedclipping_mod, "ClientSideAdaptive": adaptiveclipping_mod}.get(kind)
    strategy = FP8(private, seed=1)
    assert strategy.wire.kappa_up == 1.0
    serve(strategy, client_app(mods=(fp8_mod,) if mod is None else (fp8_mod, mod), move=1.0), rounds=1)
    assert len(found["updates"]) == 4
    size = np.sqrt(sum((w.astype(float) ** 2).sum() for w in weights()))
    for update in found["updates"]:
        norm = np.sqrt(sum(((u.astype(float) - w) ** 2).sum() for u, w in zip(update, weights(), strict=True)))
        assert 0.05 < norm <= 0.1 * (1 + 1e-6) + 2**-24 * size


BAD = {
    "fewer": (lambda arrays: (arrays[:2], 10), "others than those of most"),
    "more": (lambda arrays: ([*arrays, arrays[0]], 10), "others than those of most"),
    "no examples at all": (lambda arrays: (arrays, -30), "weight is -30"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("make", [old.FedAvg, old.FedMedian])
def test_one_bad_client_does_not_end_the_run(name, make, caplog):
    """Each of these ended the run in Flower's own averages: zip() of unequal lengths, a division by zero."""
    change, reason = BAD[name]

    class Client(NumPyClient):
        def __init__(self, node):
            self.node = node

        def fit(self, parameters, config):
            return *(change(parameters) if self.node == 101 else (parameters, 10)), {}

        def evaluate(self, parameters, config):
            return 1.0, (-30 if self.node == 101 else 10), {}

    inner, found = watched(make)
    app = ClientApp(client_fn=lambda context: Client(context.node_id).to_client(), mods=[fp8_mod])
    strategy = FP8(inner, seed=1)
    serve(strategy, app, rounds=2)
    assert [len(found["updates"]), len(found["failures"])] == [6, 2]
    assert all("node 101" in str(f) and reason in str(f) for f in found["failures"])
    assert {one["client"] for phase in strategy.traffic for one in phase.rejected} == {101}
    assert len(found["model"]) == len(SHAPES) and caplog.text.count("node 101 is rejected") == 4


def test_a_client_without_examples_counts_nothing_unless_all_are_without():
    def app(examples):
        class Client(NumPyClient):
            def __init__(self, node):
                self.node = node

            def fit(self, parameters, config):
                return parameters, examples(self.node), {}

            def evaluate(self, parameters, config):
                return 1.0, examples(self.node), {}

        return ClientApp(client_fn=lambda context: Client(context.node_id).to_client(), mods=[fp8_mod])

    inner, found = watched(old.FedAvg)
    serve(FP8(inner, seed=1), app(lambda node: 0 if node == 101 else 10), rounds=1)
    assert len(found["updates"]) == 4 and not found["failures"]
    inner, found = watched(old.FedAvg)
    serve(FP8(inner, seed=1), app(lambda node: 0), rounds=1)  # Flower would divide by zero
    assert len(found["failures"]) == 4 and found["model"] is None


def workflow(strategy, grid, on, rounds=2):
    """An app that runs Flower's DefaultWorkflow, which sends by its Grid and not by the clients' proxies."""

    def main(given, context):
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=rounds), strategy=strategy)
        DefaultWorkflow()(on(given), legacy)
        found.append(legacy.history)

    found = []
    app = ServerApp()
    app.main()(main)
    grid.serve(app)
    return found[0]


def test_a_workflow_is_given_the_grid_that_codes(caplog):
    inner, found = watched(old.FedAvg)
    strategy, grid = FP8(inner, seed=1), LocalGrid(client_app(), 4)
    history = workflow(strategy, grid, strategy.on)
    assert [t.messages for t in strategy.traffic] == [4] * 4 and not any(t.resent for t in strategy.traffic)
    assert sum(grid.bytes.values()) == sum(t.down + t.up for t in strategy.traffic)
    assert sum(grid.bytes.values()) < sum(t.plain_down + t.plain_up for t in strategy.traffic) / 4
    assert [size for _, size in history.metrics_distributed_fit["fedfp8-bytes-up"]] == [
        t.up for t in strategy.traffic if t.phase == "train"
    ]
    assert "nothing was saved" not in caplog.text and found["model"] is not None


def test_a_workflow_on_the_plain_grid_says_that_nothing_was_saved(caplog):
    inner, found = watched(old.FedAvg)
    strategy, grid = FP8(inner, seed=1), LocalGrid(client_app(), 4)
    history = workflow(strategy, grid, lambda given: given)
    assert caplog.text.count("workflow(strategy.on(grid), context)") == 2 and "instead of" not in caplog.text
    assert found["model"] is not None and "fedfp8-bytes-up" not in history.metrics_distributed_fit


def secure(strategy, choose, rounds=1):
    run = DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2))
    config, app = ServerConfig(num_rounds=rounds), ServerApp()
    app.main()(lambda grid, c: run(choose(grid), LegacyContext(context=c, config=config, strategy=strategy)))
    LocalGrid(client_app(mods=(fp8_mod, secaggplus_mod)), 4).serve(app)


def test_secure_aggregation_is_refused():
    strategy = FP8(watched(old.FedAvg)[0], seed=1)
    with pytest.raises(ConfigError, match="secure aggregation"):
        secure(strategy, strategy.on)


def test_secure_aggregation_on_the_plain_grid_works_and_says_that_nothing_was_saved(caplog):
    models = []
    for wrap in (lambda inner: inner, FP8):
        inner, found = watched(old.FedAvg, fraction_evaluate=0.0)
        secure(wrap(inner), lambda grid: grid)
        assert not found["failures"] and len(found["updates"]) == 4
        models.append(found["model"])
    for ours, theirs in zip(*models, strict=True):
        assert np.abs(ours - theirs).max() < 1e-3 and ours.any()  # it quantizes at random, and coarsely by weight
    assert caplog.text.count("nothing was saved") == 1 and "secure aggregation cannot be coded" in caplog.text


def test_the_last_line_counts_the_last_evaluation(caplog):
    caplog.set_level("INFO")
    inner, _ = watched(old.FedAvg)
    strategy = FP8(inner, seed=1)
    serve(strategy, rounds=2)
    lines = [one.getMessage() for one in caplog.records if "so far" in one.getMessage()]
    assert lines[-1] == f"fedfp8: so far {strategy.traffic}" and len(set(lines)) == len(lines) == 4


def test_start_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="ServerAppComponents"):
        FP8(old.FedAvg()).start(None, None)


def test_records_are_drawn_by_the_report(tmp_path):
    """`out=` as with new-style strategies; what the server measured goes before what clients reported."""
    from fedfp8.paper.report import write_report

    measured = {0: 0.1, 1: 0.5, 2: 0.7}
    for wire in ("dq", "fp32"):
        inner, _ = watched(
            old.FedAvg,
            evaluate_fn=lambda r, *_: (1.0 - r / 10, {"accuracy": measured[r], "note": "text"}),
            evaluate_metrics_aggregation_fn=lambda _: {"accuracy": 0.99},
        )
        strategy = FP8(inner, wire, seed=1, out=tmp_path / "app" / wire)
        grid = serve(strategy, rounds=2)
    lines = [json.loads(line) for line in (tmp_path / "app/fp32/history.jsonl").read_text().splitlines()]
    assert [line["accuracy"] for line in lines] == [0.1, 0.5, 0.7] and lines[2]["loss"] == 0.8
    assert lines[-1]["bytes_total"] == sum(grid.bytes.values()) and lines[1]["clients"] == [100, 101, 102, 103]
    write_report(tmp_path)
    assert "70.0" in (tmp_path / "report.html").read_text()


def test_records_of_what_clients_reported(tmp_path):
    inner, _ = watched(old.FedAvg, evaluate_metrics_aggregation_fn=lambda _: {"accuracy": 0.25})
    serve(FP8(inner, seed=1, out=tmp_path / "run"), rounds=1)
    line = json.loads((tmp_path / "run/history.jsonl").read_text().splitlines()[1])
    assert line["accuracy"] == 0.25 and np.isfinite(line["loss"])
    assert json.loads((tmp_path / "run/summary.json").read_text())["accuracy"] == 0.25


def test_clients_of_a_local_grid_take_turns():
    """An old-style server asks from several threads; numpy's reading of array headers is not safe there (gh-106905)."""
    inside, most = [0], [0]

    def busy(node, arrays):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return arrays

    serve(FP8(watched(old.FedAvg)[0], seed=1), grid=LocalGrid(client_app(spoil=busy), 4), rounds=1)
    assert most[0] == 1
