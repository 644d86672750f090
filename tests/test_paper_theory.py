"""Figure 3 and the convex experiment against what theory predicts."""

import math

import pytest

from fedfp8.fp8 import E4M3, Format
from fedfp8.paper.figure3 import run_figure3
from fedfp8.paper.theory import Settings, digits_problem, drift_bound, exponent, federate, largest_step

SHORT = Settings(rate=0.05, rounds=600)


@pytest.mark.parametrize("name", ["uniform", "truncated normal"])
def test_figure3_errors(name: str) -> None:
    case = run_figure3(count=100_000)["distributions"][name]
    nearest, stochastic = (case["error"][r]["rms"] for r in ("nearest", "stochastic"))
    # Positions within a cell of width s are uniform up to the slope of the density: variances s^2/12 and s^2/6, so
    # the ratio is 2. Squared errors over 1e5 weights have relative standard error below 0.6 %: 5 sigma is 3 %.
    assert (stochastic / nearest) ** 2 == pytest.approx(2, rel=0.03)
    average = case["error_of_average"]
    assert average["nearest"]["rms"] == pytest.approx(nearest, rel=1e-5)  # the same error ten times
    assert (average["stochastic"]["rms"] / stochastic) ** 2 == pytest.approx(1 / 10, rel=0.03)
    weights = case["weights"]["fp32"]
    width = weights["edges"][1] - weights["edges"][0]
    assert sum(weights["density"]) * width == pytest.approx(1, abs=1e-6)
    assert sum(case["quantized"]["nearest"]["share"]) == pytest.approx(1, abs=1e-5)


def test_largest_step_is_the_grids() -> None:
    assert largest_step(480.0, E4M3) == 32  # 448 and 480
    for m in range(1, 6):
        assert largest_step(1.0, Format(2, m)) == pytest.approx(2.0**-m / (2 - 2.0**-m))


def test_the_minimum_is_one() -> None:
    problem = digits_problem(SHORT)
    assert problem.dimension == 650
    plain = federate(problem, SHORT, None)
    assert all(gap > 0 for gap in plain.gaps)
    assert plain.gaps[-1] < 1e-3 * plain.gaps[0]


def test_floor_falls_like_the_step_and_biased_communication_is_stuck() -> None:
    problem = digits_problem(SHORT)
    unbiased = [federate(problem, SHORT, Format(2, m)) for m in (1, 3, 5)]
    # Theorem 1 bounds the floor by a multiple of S, so it falls at least as S^1. It falls faster where the moves of
    # several clients meet in one round: a weight that each of K = 10 clients moves by a grid step with probability p
    # leaves their mean off the grid by f, and E f(1 - f) / p, the noise against the linear law, is 0.89 for p = 0.01
    # (m = 1) and 0.37 for p = 0.27 (m = 5; computed for moves of random sign). Over a factor 21 in S that adds at most
    # ln(0.89 / 0.37) / ln(21) = 0.29. Over six seeds the exponent was 1.130 with standard deviation 0.031, so three
    # sigma are 0.1 on either side. 4^-m would be an exponent of 2.
    assert 1 - 0.1 <= exponent(unbiased) <= 1 + 0.29 + 0.1
    for trace in unbiased:
        assert trace.drift_max <= trace.bound
        assert trace.bound == drift_bound(SHORT, trace.step, 650, trace.gradient_max)
    biased = federate(problem, SHORT, Format(2, 3), "nearest")
    assert biased.floor > 10 * unbiased[1].floor
    assert math.isclose(biased.step, unbiased[1].step)
