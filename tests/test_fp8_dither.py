"""Subtractive dither: exact integers, an error that is uniform whatever x is, and the limits of float32."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedfp8 import dither, undither
from fedfp8.fp8 import hash_uniform

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
    # Dvoretzky-Kiefer-Wolfowitz; dice are multiples of 2**-23
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
