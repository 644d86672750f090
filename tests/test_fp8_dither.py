"""Subtractive dither: exact integers, an error that is uniform whatever x is, and the limits of float32."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

import fp8_reference as reference
from fedfp8 import dither, undither
from fedfp8.errors import QuantizationError
from fedfp8.fp8 import eager, hash_uniform
from fedfp8.fp8.parallel import SMALLEST_PIECE, dither_keys

RISK = 1e-9
N = 200_000
ULP = 2.0**-24


def rounding(y: np.ndarray) -> np.ndarray:
    """Steps by which float32 may move y + u: 1/step, the product and the sum round once each."""
    return 1.001 * ULP * (3 * np.abs(y) + 1)


def round_trip_rounding(y: np.ndarray) -> np.ndarray:
    """The same with the sum and the product of `undither`."""
    return rounding(y) + 1.001 * ULP * (2 * np.abs(y) + 3)


def inputs(kind: str, step: float) -> torch.Tensor:
    rng = torch.Generator().manual_seed(3)
    return {
        "zero": torch.zeros(N),
        "one value": torch.full((N,), 0.3217 * step),
        "on the grid": torch.randint(-20, 20, (N,), generator=rng) * step,
        "half way": (torch.randint(-20, 20, (N,), generator=rng) + 0.5) * step,
        "much finer": torch.randn(N, generator=rng) * 0.01 * step,
        "normal": torch.randn(N, generator=rng) * 3 * step,
        "large": torch.randn(N, generator=rng) * 200 * step,
    }[kind]


KINDS = ["zero", "one value", "on the grid", "half way", "much finer", "normal", "large"]


@pytest.mark.parametrize("step", [1.0, 0.1, 3e-5, 2.0**-100, 2.0**100])
@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_the_floor_of_x_over_step_plus_u(kind: str, step: float) -> None:
    x, step = inputs(kind, step), float(np.float32(step))
    y = x.double().numpy() / step
    z = y + hash_uniform(8, N).double().numpy()
    k = dither(x, step, seed=8)
    assert k.dtype == torch.int32
    unsure = np.abs(z - np.round(z)) <= rounding(y)
    assert np.array_equal(k.numpy()[~unsure], np.floor(z[~unsure]))
    assert np.all(np.abs(k.numpy()[unsure] - z[unsure]) <= 1 + rounding(y)[unsure])
    assert unsure.mean() < 0.001


@pytest.mark.parametrize("kind", KINDS)
def test_error_is_uniform_whatever_x_is(kind: str) -> None:
    step = 0.1
    x, exact_step = inputs(kind, step), float(np.float32(step))
    back = undither(dither(x, step, seed=21), step, seed=21)
    y = x.double().numpy() / exact_step
    error = (back.double().numpy() - x.double().numpy()) / exact_step
    slack = round_trip_rounding(y)
    assert np.all(np.abs(error) <= 0.5 + slack)
    # Dvoretzky-Kiefer-Wolfowitz; they are multiples of 2**-23
    distance = stats.kstest(error + 0.5, "uniform").statistic
    assert distance <= math.sqrt(math.log(2 / RISK) / (2 * N)) + slack.max() + 2.0**-23
    z = stats.norm.isf(RISK / 2)
    assert abs(error.mean()) <= z / math.sqrt(12 * N) + slack.max()
    assert abs(error.var() - 1 / 12) <= z * math.sqrt(1 / 180 / N) + slack.max()  # var(e**2) = 1/80 - 1/144 = 1/180
    if x.std() > 0:
        assert abs(np.corrcoef(error, x.numpy())[0, 1]) <= z / math.sqrt(N)


@pytest.mark.parametrize("other", [1, 2, 2**32])
def test_errors_of_different_seeds_are_independent(other: int) -> None:
    x, bins = inputs("normal", 1.0), 16
    cells = []
    for seed in (0, other):
        error = (undither(dither(x, 1.0, seed=seed), 1.0, seed=seed) - x).double().numpy()
        cells.append(np.clip(((error + 0.5) * bins).astype(int), 0, bins - 1))
    pairs = np.bincount(cells[0] * bins + cells[1], minlength=bins**2)
    expected = N / bins**2
    assert stats.chi2.sf(((pairs - expected) ** 2 / expected).sum(), bins**2 - 1) > RISK


def test_the_mean_of_many_devices_improves_like_one_over_k() -> None:
    x, devices = inputs("normal", 1.0), 16
    mean = sum(undither(dither(x, 1.0, seed=s), 1.0, seed=s).double() for s in range(devices)) / devices
    variance = float((mean - x.double()).square().mean())
    # a mean of 16 uniforms is close to normal: var of the sample variance = 2 sigma**4 / N
    sigma2 = 1 / 12 / devices
    assert abs(variance - sigma2) <= stats.norm.isf(RISK / 2) * sigma2 * math.sqrt(2 / N)


def test_precision_near_the_limit() -> None:
    """Up to 2**20 steps the documented bound holds: half a step plus 2**-21 of |x|."""
    x = torch.linspace(-(2.0**20), 2.0**20, 100_001)
    back = undither(dither(x, 1.0, seed=4), 1.0, seed=4)
    error = (back.double() - x.double()).abs()
    assert torch.all(error <= 0.5 + 2.0**-21 * x.double().abs() + 4 * ULP)


def test_too_many_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'w'.*at a step of 1.*2\*\*20"):
        dither(torch.tensor([0.0, 1.1e6]), 1.0, seed=0, name="w")
    with pytest.raises(ValueError, match=r"2\*\*20"):
        dither(torch.tensor([1e300], dtype=torch.float64), 1.0, seed=0)
    with pytest.raises(ValueError, match=r"2\*\*20"):
        dither(torch.tensor([3e38]), 2.0**-100, seed=0)  # x / step overflows float32


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan"), float("inf"), 2.0**-120, 1e-46])
def test_steps_out_of_range_are_refused(step: float) -> None:
    with pytest.raises(ValueError, match="step"):
        dither(torch.ones(3), step, seed=0)
    with pytest.raises(ValueError, match="step of 'w'"):
        undither(torch.ones(3, dtype=torch.int32), step, seed=0, name="w")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_and_inf_are_refused(bad: float, dtype: torch.dtype) -> None:
    x = torch.zeros(1000, dtype=dtype)
    x[777] = bad
    with pytest.raises(ValueError, match=r"'conv\.weight' holds 1 NaN or Inf"):
        dither(x, 0.1, seed=0, name="conv.weight")


# Strata: senders that share a seed, each with its own place in the cell

PLACES = [(0, 1), (0, 16), (1, 2), (2, 3), (15, 16), (5, 7), (255, 256)]


@pytest.mark.parametrize(("place", "strata"), PLACES)
def test_places_are_the_same_in_the_kernel_in_torch_and_in_the_slow_reference(place: int, strata: int) -> None:
    n, step, where = 3000, float(np.float32(0.37)), {"place": place, "strata": strata}
    x = torch.randn(n, generator=torch.Generator().manual_seed(1)) * 3
    u = reference.uniforms(77, n, place, strata)
    assert np.array_equal(hash_uniform(77, n, **where).double().numpy(), u)
    k = dither(x, step, seed=77, **where)
    back = undither(k, step, seed=77, **where)
    keys = dither_keys(77, place, strata)
    assert torch.equal(k, eager.dither(x, float(np.float32(1 / step)), keys))
    assert torch.equal(back, eager.undither(k, step, keys))
    assert np.array_equal(k.numpy(), reference.dither(x.numpy(), step, u))
    assert np.array_equal(back.numpy(), reference.undither(k.numpy(), step, u))


def test_place_0_changes_nothing() -> None:
    x = inputs("normal", 1.0)
    k = dither(x, 1.0, seed=5)
    assert torch.equal(dither(x, 1.0, seed=5, place=0, strata=256), k)
    assert torch.equal(undither(k, 1.0, seed=5, place=0, strata=256), undither(k, 1.0, seed=5))
    assert not torch.equal(dither(x, 1.0, seed=5, place=1, strata=256), k)


def test_places_do_not_depend_on_the_number_of_threads() -> None:
    before, x = torch.get_num_threads(), torch.randn(2 * SMALLEST_PIECE + 999)
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            k = dither(x, 0.5, seed=9, place=3, strata=16)
            found.append((k, undither(k, 0.5, seed=9, place=3, strata=16)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("place", "strata"), PLACES)
def test_every_place_alone_is_uniform_and_unbiased(place: int, strata: int) -> None:
    """So a cohort is served without bias whoever drops out: its mean is a weighted sum of unbiased terms."""
    x = inputs("normal", 1.0)
    k = dither(x, 1.0, seed=33, place=place, strata=strata)
    error = undither(k, 1.0, seed=33, place=place, strata=strata).double().numpy() - x.double().numpy()
    slack = round_trip_rounding(x.double().numpy()).max()
    # Dvoretzky-Kiefer-Wolfowitz, as above
    distance = stats.kstest(error + 0.5, "uniform").statistic
    assert distance <= math.sqrt(math.log(2 / RISK) / (2 * N)) + slack + 2.0**-23
    assert abs(error.mean()) <= stats.norm.isf(RISK / 2) / math.sqrt(12 * N) + slack


def spacing(strata: int) -> float:
    """How far u may be from evenly spaced: cut to 23 bits, and places 2**32 // strata apart."""
    return 2.0**-23 + strata * 2.0**-32


@given(
    values=st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=30),
    step=st.floats(2.0**-6, 2.0**10, width=32),
    strata=st.integers(1, 40) | st.just(256),
    seed=st.integers(0, 2**63 - 1),
)
@example([0.0, 0.5, -0.5, 1.0], 1.0, 2, 0)
def test_the_mean_of_all_places_is_within_a_step_over_twice_their_number(
    values: list[float], step: float, strata: int, seed: int
) -> None:
    """Always, not on average. In cells: sender j errs by 1/2 - f_j, f_j the fraction of g_j = y + u_j + r_j with
    |r_j| <= rounding(y). On a circle the f_j are evenly spaced up to d = spacing + 2 rounding, so the i-th smallest is
    at least i/M - d and the i-th largest at most 1 - i/M + d: their mean is within 1/(2M) + d of 1/2. Then r_j itself
    and the rounding of `undither` are added."""
    x = torch.tensor(values)
    places = range(strata)
    each = [
        undither(dither(x, step, seed=seed, place=p, strata=strata), step, seed=seed, place=p, strata=strata)
        for p in places
    ]
    mean = torch.stack(each).double().mean(0).numpy()
    y = x.double().numpy() / step
    slack = spacing(strata) + 2 * rounding(y) + round_trip_rounding(y)
    assert np.all(np.abs(mean / step - y) <= 1 / (2 * strata) + slack)


def test_variance_with_uneven_weights_is_far_below_that_of_independent_bits() -> None:
    """The error of place i is a sawtooth of the same uniform variable, so two places i and j, d = |i - j| / M apart,
    have covariance B2(d) / 2 = (d**2 - d + 1/6) / 2 cells**2, and a weighted mean the variance

        sum_ij w_i w_j (d**2 - d + 1/6) / 2,

    over random orders of the places 1/(12 M**2) + (M + 1)/(12 M) * sum (w_i - 1/M)**2 on average. Independent bits have
    sum w_i**2 / 12 = 1/(12 M) + sum (w_i - 1/M)**2 / 12: the part that even weights have falls by M, what they are
    uneven by stays."""
    strata = 16
    w = np.linspace(0.5, 1.5, strata)  # shares of data as uneven as three to one
    w = np.random.default_rng(4).permutation(w / w.sum())
    d = np.abs(np.subtract.outer(np.arange(strata), np.arange(strata))) / strata
    exact = float(w @ ((d * d - d + 1 / 6) / 2) @ w)
    even = 1 / strata
    average = 1 / (12 * strata**2) + (strata + 1) / (12 * strata) * ((w - even) ** 2).sum()
    orders = np.random.default_rng(5).permuted(np.tile(w, (4000, 1)), axis=1)
    found = np.einsum("ri,ij,rj->r", orders, (d * d - d + 1 / 6) / 2, orders)
    assert abs(found.mean() - average) <= stats.norm.isf(RISK / 2) * found.std() / math.sqrt(len(found))

    x = inputs("normal", 1.0)
    mean = sum(
        float(w[p])
        * undither(dither(x, 1.0, seed=6, place=p, strata=strata), 1.0, seed=6, place=p, strata=strata).double()
        for p in range(strata)
    )
    error = (mean - x.double()).numpy()
    slack = round_trip_rounding(x.double().numpy()).max()
    # an error within +-1/2: Hoeffding for the mean of N squares in [0, 1/4]; rounding moves a square by at most slack
    assert abs((error**2).mean() - exact) <= 0.25 * math.sqrt(math.log(2 / RISK) / (2 * N)) + slack
    assert np.abs(error).max() <= 0.5 * np.abs(w - even).sum() + even / 2 + slack + spacing(strata)
    independent = float((w**2).sum()) / 12
    assert average < independent / 5 and (error**2).mean() < independent / 3


@pytest.mark.parametrize(("place", "strata"), [(1, 1), (-1, 4), (4, 4), (0, 0), (0, 257), (0, -1)])
def test_places_that_do_not_exist_are_refused(place: int, strata: int) -> None:
    with pytest.raises(QuantizationError, match=rf"place {place} of {strata} strata"):
        dither(torch.ones(3), 1.0, seed=0, place=place, strata=strata)
    with pytest.raises(QuantizationError, match="strata"):
        undither(torch.ones(3, dtype=torch.int32), 1.0, seed=0, place=place, strata=strata)
