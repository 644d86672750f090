"""ServerOptimize: the closed form, its promise never to be worse than averaging, and its independence of the cohort."""

import math

import pytest
import torch

from fedfp8.fl.aggregate import WeightedMean
from fedfp8.fl.config import ServerConfig
from fedfp8.fl.server_opt import server_optimize, straight_through_step
from fedfp8.fp8 import E4M3, Format, quantize, squared_error
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.state import State

LAYOUT = Layout(
    (
        TensorSpec("w", (40, 50), kind="fp8", format=E4M3, range="alpha"),
        TensorSpec("b", (50,)),
        TensorSpec("alpha", (), kind="range"),
        TensorSpec("beta", (), kind="range"),
    )
)


def cohort(clients: int, seed: int = 0, spread: float = 0.2) -> list[tuple[State, float]]:
    """Clients that share a model up to noise, quantized with alphas of their own."""
    g = torch.Generator().manual_seed(seed)
    shared = torch.randn(40, 50, generator=g) * 0.1
    found = []
    for k in range(clients):
        w = shared + 0.02 * torch.randn(40, 50, generator=g)
        alpha = w.abs().max() * (1 - spread * torch.rand((), generator=g))
        tensors = {"w": quantize(w, alpha, rounding="stochastic", seed=k), "b": w[0].clone(), "alpha": alpha}
        found.append((State(LAYOUT, tensors | {"beta": torch.tensor(1.0 + k)}), float(3 + k % 5)))
    return found


def mean_of(clients: list[tuple[State, float]]) -> WeightedMean:
    mean = WeightedMean(LAYOUT)
    for state, weight in clients:
        mean.add(state, weight)
    return mean


def textbook_rand(w: torch.Tensor, alpha: float, u: torch.Tensor) -> torch.Tensor:
    """Q_rand with given random bits, differentiable in w by the straight-through rule."""
    bias = 16 - math.log2(alpha) + math.log2(2 - 2**-3) - 1
    clipped = torch.clamp(w, -alpha, alpha)
    s = 2.0 ** (torch.clamp(torch.floor(torch.log2(clipped.abs().detach()) + bias), min=1) - bias - 3)
    ratio = clipped / s
    return s * (ratio + (torch.floor(ratio + u) - ratio).detach())


@pytest.mark.parametrize("choose", ["expected", "draw"])
@pytest.mark.parametrize("rate", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_never_a_larger_expected_error_than_averaging(choose: str, rate: float, seed: int) -> None:
    mean = mean_of(cohort(6, seed))
    plain = mean.result()
    state, gain = server_optimize(mean, ServerConfig(optimize=True, rate=rate, choose=choose), seed)

    def error(s: State) -> float:
        return float(squared_error(s["w"], plain["w"], [float(s["alpha"])], rounding="expected"))

    assert error(state) <= error(plain)
    assert gain.average == pytest.approx(error(plain), rel=1e-6) and gain.alpha == pytest.approx(error(state), rel=1e-6)
    assert gain.average >= gain.weights >= gain.alpha
    report = gain.to_dict()
    assert report["gain_weights_step"] >= 0 and report["gain_alpha_step"] >= 0
    assert torch.equal(state["b"], plain["b"]) and torch.equal(state["beta"], plain["beta"])
    low, high = (f(float(s["alpha"]) for s, _ in cohort(6, seed)) for f in (min, max))
    assert low * (1 - 1e-6) <= float(state["alpha"]) <= high * (1 + 1e-6)


def test_both_halves_can_be_switched_off() -> None:
    mean = mean_of(cohort(6))
    plain = mean.result()
    off, gain = server_optimize(mean, ServerConfig(optimize=True, weights_step=False, alpha_step=False), 0)
    assert all(torch.equal(off[n], plain[n]) for n in plain) and gain.average == gain.alpha
    only_alpha, gain = server_optimize(mean, ServerConfig(optimize=True, weights_step=False), 0)
    assert torch.equal(only_alpha["w"], plain["w"]) and float(only_alpha["alpha"]) != float(plain["alpha"])
    assert gain.weights == gain.average > gain.alpha
    only_weights, _ = server_optimize(mean, ServerConfig(optimize=True, alpha_step=False), 0)
    assert torch.equal(only_weights["alpha"], plain["alpha"])


@pytest.mark.parametrize("format", [E4M3, Format(5, 2), Format(2, 1)])
def test_the_closed_form_is_the_mean_of_many_draws(format: Format) -> None:
    """Draws of ||Q_rand(w) - t||^2 are independent and have this form as their mean: 400 of them stay within 5 standard
    errors, estimated from the draws themselves (a false alarm has a probability below 1e-6)."""
    g = torch.Generator().manual_seed(0)
    w, t = torch.randn(2, 3000, generator=g) * 0.1
    for alpha in (0.1, 0.5):  # clipping a third of all, and nothing
        draws = torch.stack(
            [squared_error(w, t, [alpha], format, rounding="stochastic", seed=s) for s in range(400)]
        ).view(-1)
        exact = float(squared_error(w, t, [alpha], format, rounding="expected"))
        assert abs(float(draws.mean()) - exact) <= 5 * float(draws.std()) / 20 + 1e-6 * exact


def test_the_weight_step_is_autograd_of_the_textbook_formula() -> None:
    g = torch.Generator().manual_seed(3)
    w, target = torch.randn(5000, generator=g) * 0.1, torch.randn(5000, generator=g) * 0.1
    alpha, rate, seed = 0.2, 0.1, 11  # some weights are outside
    ours = straight_through_step(w, target, alpha, E4M3, rate=rate, seed=seed)
    drawn = quantize(w, alpha, rounding="stochastic", seed=seed)
    # Which way each weight was rounded is taken from the draw itself; the gradient is what is tested here.
    x = w.double().requires_grad_()
    u = torch.where(drawn.double() > w.double().clamp(-alpha, alpha), 1 - 1e-9, 1e-9)
    loss = ((textbook_rand(x, alpha, u) - target.double()) ** 2).sum()
    loss.backward()
    expected = w.double() - rate * x.grad
    assert int((w.abs() > alpha).sum()) > 100
    assert torch.allclose(ours.double(), expected, atol=1e-6)
    assert torch.equal(ours[w.abs() > alpha], w[w.abs() > alpha])


def test_fitting_the_mean_is_fitting_the_cohort() -> None:
    """sum_k n_k/m ||Q(w) - q_k||^2 - ||Q(w) - mean||^2 is the same for every w and alpha, so both have one minimum."""
    clients = cohort(5)
    mean = mean_of(clients).result()["w"].double()
    total = sum(n for _, n in clients)
    constants = []
    for i, alpha in enumerate(torch.linspace(0.25, 0.5, 7).tolist()):
        q = quantize(clients[0][0]["w"] * (1 + 0.1 * i), alpha, rounding="stochastic", seed=i).double()
        brute = sum(n / total * float(((q - s["w"].double()) ** 2).sum()) for s, n in clients)
        constants.append(brute - float(((q - mean) ** 2).sum()))
    # The mean was rounded to float32, which moves each of 2,000 errors by 2 * |q - mean| * 2**-25 at most
    assert max(constants) - min(constants) <= 2000 * 2 * 0.5 * 2**-25


def test_alpha_is_the_best_grid_point_for_the_whole_cohort() -> None:
    clients = cohort(5)
    state, _ = server_optimize(mean_of(clients), ServerConfig(optimize=True, weights_step=False), 0)
    low, high = (f(float(s["alpha"]) for s, _ in clients) for f in (min, max))
    w, total = mean_of(clients).result()["w"], sum(n for _, n in clients)

    def brute(alpha: float) -> float:
        return sum(n / total * float(squared_error(w, s["w"], [alpha], rounding="expected")) for s, n in clients)

    points = torch.linspace(low, high, 50, dtype=torch.float64).float().tolist()
    assert float(state["alpha"]) == pytest.approx(min(points, key=brute), rel=1e-6)


def test_identical_clients_leave_nothing_to_search() -> None:
    state, weight = cohort(1)[0]
    result, gain = server_optimize(mean_of([(state, weight)] * 3), ServerConfig(optimize=True), 0)
    assert float(result["alpha"]) == pytest.approx(float(state["alpha"]), rel=1e-6)
    # The mean is on the grid up to float32: |w| 2**-23 off a point, at most |w| / 8 from the next: w**2 2**-26 each
    assert gain.average <= float((state["w"] ** 2).sum()) * 2**-26


# The mean itself


def test_the_mean_is_weighted_and_keeps_the_cohorts_ranges() -> None:
    clients = cohort(4)
    mean = mean_of(clients)
    total = sum(n for _, n in clients)
    wanted = sum(n / total * s["w"].double() for s, n in clients)
    assert torch.allclose(mean.result()["w"].double(), wanted, atol=1e-8)
    alphas = [float(s["alpha"]) for s, _ in clients]
    assert (mean.range_low["alpha"], mean.range_high["alpha"]) == (min(alphas), max(alphas))


def test_a_range_that_is_not_set_is_no_part_of_the_mean() -> None:
    """0 says "not set yet" (a client that trains without FP8): averaging it in would halve the range for all others."""
    (first, n), (second, m) = cohort(2)
    unset = State(LAYOUT, second.tensors | {"beta": torch.tensor(0.0)})
    assert float(mean_of([(first, n), (unset, m)]).result()["beta"]) == float(first["beta"])
    never = State(LAYOUT, first.tensors | {"beta": torch.tensor(0.0)})
    assert float(mean_of([(never, n), (unset, m)]).result()["beta"]) == 0.0
