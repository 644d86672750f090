"""The client's half of a round: optimizers, FedProx, clipping, formats; and nothing kept between tasks."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import fedfp8
from fedfp8.fl.client import Client
from fedfp8.fl.config import Config, LocalConfig
from fedfp8.fl.federation import Federation, from_tensors
from fedfp8.fl.local import learning_rate, local_update, minibatches
from fedfp8.fl.simulate import run_round, sample
from fedfp8.fp8 import Format, quantize
from fedfp8.nn import state_of
from fedfp8.wire import header
from fl_tools import Inline, first_assignment, own_data, own_tiny, rounds_with, start, tiny


def federation_of(config: Config, model: nn.Module | None = None) -> Federation:
    torch_model = model or nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for i, p in enumerate(torch_model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.3)
    return from_tensors(config, torch_model, own_data(), own_data(1, seed=9)[0])


def trained(local: LocalConfig, rate: float | None = None, method: str = "fp32") -> tuple[torch.Tensor, torch.Tensor]:
    """(weights before, weights after) a local update of client 0."""
    config = tiny(method)
    federation = federation_of(config)
    model = federation.network(config)
    flat = lambda: torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])  # noqa: E731
    before = flat()
    local_update(model, federation, 0, local, rate or local.lr, torch.Generator().manual_seed(3))
    return before, flat()


def moved(local: LocalConfig, **options) -> float:
    before, after = trained(local, **options)
    return float((after - before).norm())


PLAIN = LocalConfig(weight_decay=0.0, epochs=10, batch_size=4)


def test_fedprox_pulls_towards_what_was_received() -> None:
    distances = [moved(replace(PLAIN, prox=mu)) for mu in (0.0, 0.1, 1.0, 5.0)]
    assert all(far > near for far, near in pairwise(distances))


def test_fedprox_is_the_gradient_of_its_term() -> None:
    """Two full-batch steps by hand: the term vanishes in the first and is mu * (w1 - w0) in the second."""
    local, mu, lr = LocalConfig(weight_decay=0.0, epochs=2, batch_size=100), 0.7, 0.1
    w0, plain = trained(local)
    _, proximal = trained(replace(local, prox=mu))
    _, one_step = trained(replace(local, epochs=1))
    # Both sides are made of fewer than eight roundings of numbers below 1, each off by at most 2**-25
    torch.testing.assert_close(proximal, plain - lr * mu * (one_step - w0), rtol=0, atol=8 * 2**-25)


def test_clip_norm_bounds_every_step() -> None:
    local = replace(PLAIN, epochs=0, steps=5)
    free = moved(local)
    before, after = trained(replace(local, clip_norm=0.01))
    # Five steps of at most lr * 0.01, and five roundings of each weight (below 1: 2**-25)
    most = 5 * local.lr * 0.01 + 5 * 2**-25 * before.numel() ** 0.5
    assert float((after - before).double().norm()) <= most < free
    assert moved(replace(local, clip_norm=1e6)) == free


def test_weight_decay_leaves_ranges_alone() -> None:
    """With no data to learn from (all inputs 0, uniform labels) only decay moves anything."""
    config = tiny("uq", local__weight_decay=0.5)
    federation = federation_of(config)
    federation.clients[0].data[0].zero_()
    model = federation.network(config)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    local = LocalConfig(weight_decay=0.5, epochs=0, steps=1, batch_size=12)
    local_update(model, federation, 0, local, 0.1, torch.Generator().manual_seed(0))
    after = dict(model.named_parameters())
    # Three roundings here and one there, of numbers below 2
    torch.testing.assert_close(after["0.weight"], before["0.weight"] * (1 - 0.1 * 0.5), rtol=0, atol=4 * 2**-24)
    assert torch.equal(after["0.alpha"], before["0.alpha"])


def test_optimizers_differ_and_start_afresh_in_every_round(tmp_path: Path) -> None:
    assert moved(replace(PLAIN, optimizer="adamw", lr=0.01)) != moved(replace(PLAIN, lr=0.01))
    # AdamW's first step is lr * g / (|g| + 1e-8): the learning rate, whatever the gradient, or 0 (a closed ReLU).
    # The gradients here are above 1e-6, which is 1 % less at most; a weight below 2 rounds by 2**-24.
    before, after = trained(replace(PLAIN, optimizer="adamw", lr=0.01, epochs=0, steps=1))
    steps = (after - before).abs()
    moving = steps[steps > 0]
    assert len(moving) and float(moving.min()) > 0.0099 and float(moving.max()) <= 0.01 + 2**-24 + 1e-9
    config = tiny("dq", local__optimizer="adamw", local__lr=0.01, local__momentum=0.0)
    federation, server, link = start(config, tmp_path, federation_of(config))
    client = Client(config, federation, lambda _: None)
    task = first_assignment(server, link, 0)
    first, second = client.train(task), client.train(task)
    assert first.payload == second.payload


@pytest.mark.parametrize("settings", [{}, {"qat__rounding": "stochastic"}, {"local__momentum": 0.9}])
def test_a_client_leaves_nothing_behind_for_the_next(settings: dict, tmp_path: Path) -> None:
    """Client 1 sends the same bytes whether or not client 0 (or a failing task) trained before it in this process."""
    config = tiny("uq", **settings)
    federation, server, link = start(config, tmp_path, federation_of(config))
    task = first_assignment(server, link, 1, (0, 1, 2))
    alone = Client(config, federation, lambda _: None).train(task)
    busy = Client(config, federation, lambda _: None)
    busy.train(replace(task, client=0))
    federation.clients[2].data[0][federation.clients[2].rows] = float("nan")
    with pytest.raises(fedfp8.errors.DataError, match="NaN"):
        busy.train(replace(task, client=2))
    assert busy.train(task).payload == alone.payload


def test_equal_payloads_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many decodings as there are changes from one payload to the next."""
    from fedfp8.fl import client

    decoded: list[bytes] = []
    original = client.read_message
    monkeypatch.setattr(client, "read_message", lambda p, *rest: decoded.append(p) or original(p, *rest))
    config = tiny("uq", 4, clients__fraction=0.5)
    federation, server, link = start(config, tmp_path)
    workers = Inline(config, federation, tmp_path)
    rounds_with(workers, config, federation, server, link, 4)
    runs = [p for p, before in zip(workers.down, [b"", *workers.down[:-1]], strict=True) if p != before]
    assert decoded == runs and len(set(runs)) > 4 and len(runs) < len(workers.down)


def test_cosine_decay_over_rounds() -> None:
    config = tiny("uq", 10, local__schedule="cosine", local__lr=0.2)
    rates = [learning_rate(config, r) for r in range(1, 11)]
    assert rates[0] == pytest.approx(0.2) and rates == sorted(rates, reverse=True) and rates[-1] > 0
    assert rates[5] == pytest.approx(0.2 * 0.5 * (1 + math.cos(math.pi * 5 / 10)))
    assert {learning_rate(tiny("uq", 10), r) for r in range(1, 11)} == {0.1}


def test_range_learning_rate() -> None:
    """A range rate of (almost) nothing keeps the ranges where they are: steps below 1e-9 times a gradient of the order
    of 1 are under half a unit in the last place of an alpha above 1/8 (2**-28)."""

    def alpha(range_lr: float, rate: float = 0.1) -> float:
        config = tiny("uq")
        federation = federation_of(config)
        model = federation.network(config)
        local = replace(PLAIN, range_lr=range_lr)
        before = model[0].alpha.item()
        local_update(model, federation, 0, local, rate, torch.Generator().manual_seed(3))
        return abs(model[0].alpha.item() - before)

    assert alpha(0.0) == alpha(0.1) > 0 and alpha(1e-9) == 0


@pytest.mark.parametrize("ranges", ["learned", "largest"])
def test_ranges_that_are_the_largest_weight_clip_nothing_under_adamw(ranges: str) -> None:
    config = tiny("uq", qat__ranges=ranges)
    federation = federation_of(config)
    model = federation.network(config)
    local = replace(PLAIN, optimizer="adamw", lr=0.02, epochs=20)
    local_update(model, federation, 0, local, 0.02, torch.Generator().manual_seed(3))
    state = state_of(model)
    covered = [float(state[s.range]) == state.largest(s.name) for s in state.layout if s.kind == "fp8" and s.range]
    assert covered == [ranges == "largest"] * 2


@pytest.mark.parametrize("ranges", ["learned", "largest"])
def test_a_run_says_once_that_learned_ranges_have_fallen(ranges: str) -> None:
    """Labels that the first model finds least likely push every weight, and so the range, towards zero; AdamW's steps
    are as long as its rate, so that a range of at most 1/sqrt(5) is below a quarter of itself within a few of 0.05."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    with torch.no_grad():
        clients = [(x, model(x).argmin(1)) for x, _ in own_data()]
    settings = {"local__optimizer": "adamw", "local__lr": 1e-4, "local__range_lr": 0.05, "local__steps": 5}
    config = own_tiny("uq", 4, qat__ranges=ranges, **settings)
    history = fedfp8.run(config, model=model, clients=clients, test=clients[0], workers=0)
    notes = [note for line in history.rounds for note in line["notes"]]
    assert len(notes) == (ranges == "learned")
    assert all("fallen below a quarter" in note and ": 1, the lowest alpha (" in note for note in notes)


def test_epochs_and_steps() -> None:
    part = torch.arange(100, 110)

    def batches(**local: int) -> list[list[int]]:
        config = LocalConfig(batch_size=4, **local)
        return [b.tolist() for b in minibatches(part, config, torch.Generator().manual_seed(0))]

    epochs = batches(epochs=3)
    assert [len(b) for b in epochs] == [4, 4, 2] * 3
    for i in range(3):
        assert sorted(x for batch in epochs[3 * i : 3 * i + 3] for x in batch) == part.tolist()
    assert epochs[:3] != epochs[3:6]
    for steps in (1, 3, 5, 7):
        assert batches(epochs=0, steps=steps) == epochs[:steps]


def test_sampling() -> None:
    config = tiny("uq", clients__fraction=0.3)
    cohorts = [sample(config, list(range(0, 40, 2)), r) for r in range(200)]
    assert all(len(set(c)) == 6 and c == sorted(c) and all(k % 2 == 0 for k in c) for c in cohorts)
    counts = torch.bincount(torch.tensor(cohorts).view(-1), minlength=40)[::2]
    # Each client is in a cohort with probability 0.3: 60 of 200 rounds, deviation 6.5; five of them for 20 clients
    assert float((counts - 60).abs().max()) < 5 * 6.5
    # 200 of 38,760 possible cohorts: 0.5 are expected to come twice; ten and more would come once in 1e10 seeds
    assert sample(config, [7], 1) == [7] and len({tuple(c) for c in cohorts}) > 190


# Formats


def test_mixed_formats_in_one_run(tmp_path: Path) -> None:
    config = tiny("uq", clients__fraction=1.0, clients__formats="0=FP32,1=E5M2,2=E3M4", wire__lossless=False)
    federation, server, link = start(config, tmp_path)
    workers = Inline(config, federation, tmp_path)
    after, record = run_round(server, config, federation, workers, link)
    assert record.rejected == []
    weights = sum(s.size for s in server.state.layout if s.kind == "fp8")
    rest = sum(4 * s.size for s in server.state.layout if s.kind != "fp8")
    for sizes in ([len(p) for p in workers.down], [len(p) for p in workers.up]):
        assert sizes[0] == 4 * weights + rest + 30  # header and checksum
        most = 30 + 4 * len(server.state.layout)  # and modes and lengths
        assert all(0 < size - weights - rest <= most for size in sizes[1:])
    layouts = [header(p).layout_fingerprint for p in workers.up]
    assert len(set(layouts[1:])) == 3 and layouts[3] == layouts[4] == layouts[5]
    betas = [n for n in after.state if n.endswith("beta")]
    only_fp8 = tiny("uq", clients__fraction=1.0, clients__formats="1=E5M2,2=E3M4")
    fp8_federation, fp8_server, fp8_link = start(only_fp8, tmp_path / "b")
    reference, _ = run_round(
        fp8_server, only_fp8, fp8_federation, Inline(only_fp8, fp8_federation, tmp_path / "b"), fp8_link
    )
    # The FP32 client has seen no ranges. Its zeros would pull them down by its share of the examples, a sixth; leaving
    # out what it would have seen as an FP8 client must move them by less than half of that
    share = federation.size(0) / sum(map(federation.size, range(6)))
    for name in betas:
        assert float(after.state[name]) == pytest.approx(float(reference.state[name]), rel=share / 2)


def test_fp32_clients_train_in_float(tmp_path: Path) -> None:
    """Their update is the one that plain FedAvg would make from the same start: no rounding, no ranges moved."""
    config = tiny("uq", clients__fraction=1.0, clients__formats="FP32")
    federation, server, link = start(config, tmp_path, federation_of(config))
    after, _ = run_round(server, config, federation, Inline(config, federation, tmp_path), link)
    plain = tiny("fp32", clients__fraction=1.0)
    other, plain_server, plain_link = start(plain, tmp_path / "b", federation_of(plain))
    wanted, _ = run_round(plain_server, plain, other, Inline(plain, other, tmp_path / "b"), plain_link)
    assert all(torch.equal(after.state[n], wanted.state[n]) for n in wanted.state)
    alphas = [n for n in server.state if n.endswith("alpha")]
    assert all(torch.equal(after.state[n], server.state[n]) for n in alphas)


def test_a_format_for_each_direction(tmp_path: Path) -> None:
    config = tiny("uq", up__format="E5M2", down__format="E3M4")
    federation, server, link = start(config, tmp_path)
    workers = Inline(config, federation, tmp_path)
    _, record = run_round(server, config, federation, workers, link)
    assert record.rejected == []
    client = record.clients[0]
    again = start(config, tmp_path / "again", federation)[2].open(server.state, record.clients)
    sent, update = again.sent(client), again.receive(client, workers.up[0])
    for spec in update.layout:
        if spec.kind == "fp8":
            for state, format in ((sent, Format(3, 4)), (update, Format(5, 2))):
                values, alpha = state[spec.name], state[spec.range]
                assert torch.equal(quantize(values, alpha, format), values)
                assert not torch.equal(quantize(values, alpha, Format(4, 3)), values)


def test_mixed_directions() -> None:
    """Every field of a method stays reachable: dithered up and FP8 down, float up and nearest down."""
    for up, down in (("dithered", "stochastic"), ("none", "nearest"), ("nearest", "dithered")):
        history = fedfp8.run(tiny("uq", 1, up__rounding=up, down__rounding=down))
        assert history.rounds[-1]["rejected"] == [] and history.rounds[-1]["notes"] == []


def test_dq_keeps_the_central_model(tmp_path: Path) -> None:
    """With next to no learning, `preserve` leaves the server's model where it is: no change is sent as nothing.
    Without it every round adds the mean downlink noise of its three clients, equally spaced errors if they count alike:
    at least (kappa 0.6 * 0.2)/(3 sqrt(12)) = 1 % of the weights' norm of 4 a round."""

    def drift(**settings: object) -> float:
        config = tiny("dq", 4, local__lr=1e-8, local__weight_decay=0.0, wire__client_cache=False, **settings)
        history = fedfp8.run(config)
        start_ = fedfp8.fl.federation.build(config).model.state_dict()
        return float(sum((history.state[n] - t).norm() ** 2 for n, t in start_.items())) ** 0.5

    kept, lost = drift(), drift(dq__preserve=False)
    assert kept < 0.001 and lost > 0.04, (kept, lost)
