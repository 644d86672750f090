"""The fused sums: squared error over many alphas, its expectation, and rms."""

import math

import numpy as np
import pytest
import torch

import fp8_reference as reference
from fedfp8 import E4M3, E5M2, Format, quantize
from fedfp8.fp8 import rms, squared_error
from fedfp8.fp8.kernels import CHUNK
from fedfp8.fp8.measure import largest
from fedfp8.fp8.strides import use_kernels

ULP = 2.0**-24
ALPHAS = [0.5, 1.0, 2.7, 4.0]


def pair(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(n)
    w = torch.randn(n, generator=rng)
    return w, w + 0.01 * torch.randn(n, generator=rng)


def relative_bound(n: int) -> float:
    """Of a sum of non-negative float32 terms d * d: one rounding of d, two of its square, at most CHUNK of the sum."""
    return (min(n, CHUNK) + 4) * ULP


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("n", [1, 1000, 100_003])
@pytest.mark.parametrize("format", [E4M3, E5M2, Format(2, 1)], ids=lambda f: f.name)
def test_is_the_error_of_quantize(format: Format, n: int, rounding: str) -> None:
    w, target = pair(n)
    got = squared_error(w, target, ALPHAS, format, rounding=rounding, seed=5)
    assert got.dtype == torch.float64 and got.shape == (len(ALPHAS),)
    for alpha, error in zip(ALPHAS, got, strict=True):
        q = quantize(w, alpha, format, rounding=rounding, seed=5)
        exact = float((q.double() - target.double()).square().sum())
        assert abs(float(error) - exact) <= relative_bound(n) * exact


@pytest.mark.parametrize("format", [E4M3, E5M2, Format(2, 1)], ids=lambda f: f.name)
def test_expectation_in_closed_form(format: Format) -> None:
    """(clip(w) - t)**2 + s**2 f (1 - f), from the reference's cells."""
    w, target = pair(50_000)
    e, m = format.exponent_bits, format.mantissa_bits
    grid = reference.magnitudes(e, m)
    for alpha, got in zip(ALPHAS, squared_error(w, target, ALPHAS, format, rounding="expected"), strict=True):
        lower, upper, f = reference.between(reference.position(w.numpy(), alpha, e, m), e, m)
        step = (grid[upper] - grid[lower]) * (alpha / format.top)
        clipped = w.double().numpy().clip(-alpha, alpha)
        error = clipped - target.double().numpy()
        exact = (error**2).sum() + (step**2 * f * (1 - f)).sum()
        # besides the sum: clip(w) carries two roundings of its own size, and so does the place in the cell
        own = (2 * np.abs(error) + step) * np.abs(clipped) * 2 * reference.POSITION_ERROR
        assert abs(float(got) - exact) <= relative_bound(50_000) * exact + own.sum()


def test_expectation_is_the_mean_over_the_random_bits() -> None:
    w, target = pair(20_000)
    draws = torch.stack([squared_error(w, target, ALPHAS, rounding="stochastic", seed=s) for s in range(64)])
    expected = squared_error(w, target, ALPHAS, rounding="expected")
    standard_error = draws.std(dim=0) / math.sqrt(len(draws))
    # Student's t with 63 degrees of freedom stays within 6.5 standard errors but for 1e-8
    assert torch.all((draws.mean(dim=0) - expected).abs() <= 6.5 * standard_error + relative_bound(20_000) * expected)


def test_other_dtypes_and_shapes() -> None:
    w, target = pair(999)
    plain = squared_error(w, target, ALPHAS)
    assert torch.equal(
        squared_error(w.view(27, 37), target.view(27, 37), torch.tensor(ALPHAS, dtype=torch.float64)), plain
    )
    for rounding in ("nearest", "stochastic", "expected"):
        ours = squared_error(w, target, ALPHAS, rounding=rounding, seed=1)
        eager = squared_error(w.double(), target.double(), ALPHAS, rounding=rounding, seed=1)
        assert torch.all((ours - eager).abs() <= 2 * relative_bound(999) * ours)
    assert squared_error(torch.zeros(0), torch.zeros(0), [1.0]).tolist() == [0.0]
    with pytest.raises(ValueError, match=r"\(3,\).*\(4,\)"):
        squared_error(torch.zeros(3), torch.zeros(4), [1.0])
    with pytest.raises(ValueError, match="rounding"):
        squared_error(w, target, ALPHAS, rounding="up")


def test_rms() -> None:
    x, _ = pair(100_003)
    exact = math.sqrt(math.fsum(v * v for v in x.double().tolist()) / len(x))
    assert abs(rms(x) - exact) <= 1e-11 * exact  # float64: 2**15 additions of 2**-53 at worst
    assert rms(x.view(1, -1).t()) == rms(x) and rms(torch.zeros(0)) == 0.0


@pytest.mark.parametrize("n", [1, CHUNK, 4 * CHUNK, 9 * CHUNK + 5])
def test_rms_adds_the_squares_of_a_chunk_in_order(n: int) -> None:
    """Bit for bit: steps are made from it, on both sides. cumsum adds from the left, one after the other."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    squares = x.double().numpy() ** 2
    chunks = [float(np.cumsum(squares[start : start + CHUNK])[-1]) for start in range(0, n, CHUNK)]
    assert rms(x) == math.sqrt(math.fsum(chunks) / n)


def test_largest() -> None:
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(3))
    assert largest(x) == float(x.abs().max())
    assert largest(x.view(300, 1000).t()) == largest(-x) == largest(x)
    images = x.view(10, 3, 100, 100).contiguous(memory_format=torch.channels_last)
    assert largest(images) == largest(x) and largest(images[:, :2]) == float(x.view(10, 3, -1)[:, :2].abs().max())
    assert largest(torch._neg_view(x)) == largest(x) and largest(torch.tensor(-3.0)) == 3.0
    with use_kernels("0"):
        assert largest(images) == largest(x) and largest(torch.zeros(0)) == 0.0
        assert math.isnan(largest(torch.tensor([math.inf, math.nan, 1.0])))
    assert largest(torch.zeros(0)) == 0.0 and largest(torch.tensor([-0.0])) == 0.0
    assert largest(torch.tensor([1.0, -math.inf])) == math.inf
    assert math.isnan(largest(torch.tensor([math.inf, math.nan, 1.0])))
