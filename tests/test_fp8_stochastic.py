"""Stochastic rounding: its exact law, unbiasedness with derived bounds, and the quality of the random bits."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import fp8_reference as reference
from fedfp8 import E4M3, E5M2, Format, from_codes, quantize, to_codes
from fedfp8.fp8 import eager, hash_uniform
from fedfp8.fp8.grid import grid_for
from fedfp8.fp8.parallel import random_keys
from tools import FORMATS

RISK = 1e-9  # probability that a statistical test fails by chance, had its seed not been fixed


def places(format: Format, alpha: float, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Positions spread over all cells of the grid, and the float32 x there (positions are those of the float32 x)."""
    grid = reference.magnitudes(format.exponent_bits, format.mantissa_bits)
    rng = np.random.default_rng(seed)
    cell = rng.integers(0, len(grid) - 1, count)
    t = (grid[cell] + rng.random(count) * (grid[cell + 1] - grid[cell])) * rng.choice([-1, 1], count)
    x = (t * (alpha / format.top)).astype(np.float32)
    return reference.position(x, alpha, format.exponent_bits, format.mantissa_bits), x


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_the_law_of_rounding_over_all_random_bits(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """P(up) equals the place in the cell, up to the documented bias, with every number in turn instead of the hash."""
    e, m = format.exponent_bits, format.mantissa_bits
    count, alpha = 2**17, float(np.float32(3.7))
    every_die = (-(2**31) + (2**32 // count) * torch.arange(count) + 2**31 // count).to(torch.int32)
    monkeypatch.setattr(eager, "centred", lambda n, keys, device: every_die[:n])
    t, x = places(format, alpha, 12)
    lower, upper, f = reference.between(t, e, m)
    for i in range(len(x)):
        codes = eager.to_codes(torch.full((count,), float(x[i])), grid_for(alpha, format), random_keys(0)).numpy()
        magnitude = codes & (2 ** (e + m) - 1)
        assert set(np.unique(magnitude)) <= {lower[i], upper[i]}
        # hair + two roundings of the position + one of position plus noise, in steps; 1/count: random bits between ours
        bound = 2.0 ** (m - 20) + 2.0 ** (m - 22) + 2.0 ** (m - 24) + 1 / count
        assert abs((magnitude == upper[i]).mean() - f[i]) <= bound


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_the_largest_die_does_not_move_grid_values(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.arange(2**format.bits, dtype=torch.uint8)
    for bits in (-(2**31), 2**31 - 1):
        monkeypatch.setattr(eager, "centred", lambda n, keys, device, d=bits: torch.full((n,), d, dtype=torch.int32))
        for alpha in (480.0, 1.0, 3.7, 1e-6, 1e6, 0.1, 7.7, 123.456):
            values, grid = from_codes(codes, alpha, format), grid_for(alpha, format)
            assert torch.equal(eager.quantize(values, grid, random_keys(0)), values)
            beyond = torch.tensor([1.0001, -1.0001, 1e30, -1e30]) * alpha
            assert torch.equal(eager.quantize(beyond, grid, random_keys(0)), quantize(beyond, alpha, format))


@pytest.mark.parametrize("format", [E4M3, E5M2, Format(2, 1), Format(3, 0)], ids=lambda f: f.name)
def test_unbiased_per_element(format: Format) -> None:
    """Each element over many seeds: Hoeffding's bound on the share of ups, for all elements at once."""
    count, seeds = 4096, 512
    alpha = float(np.float32(0.37))
    t, x = places(format, alpha, count, seed=1)
    lower, upper, f = reference.between(t, format.exponent_bits, format.mantissa_bits)
    ups = np.zeros(count)
    for seed in range(seeds):
        codes = to_codes(torch.from_numpy(x), alpha, format, rounding="stochastic", seed=seed).numpy()
        magnitude = codes & (2 ** (format.bits - 1) - 1)
        assert np.all((magnitude == lower) | (magnitude == upper))
        ups += magnitude == upper
    assert np.abs(ups / seeds - f).max() <= math.sqrt(math.log(2 * count / RISK) / (2 * seeds))
    # all elements and seeds together: a far sharper bound on a common bias
    assert abs((ups / seeds - f).mean()) <= math.sqrt(math.log(2 / RISK) / (2 * seeds * count)) + 2.0**-14


def test_unbiased_within_a_tensor() -> None:
    """Many equal elements in one tensor: neighbours in memory must not share their luck."""
    n = 1 << 20
    x = torch.full((n,), 0.3 + 0.01)
    q = quantize(x, 1.0, rounding="stochastic", seed=5).double()
    low, high = q.min(), q.max()
    p = float((x[0].double() - low) / (high - low))
    sigma = math.sqrt(p * (1 - p) / n)
    z = stats.norm.isf(RISK / 2)
    assert abs(float((q == high).double().mean()) - p) <= z * sigma + 2.0**-16


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
def test_stochastic_beats_nearest_for_the_average_model(distribution: str) -> None:
    """Figure 3d: when K = 10 devices round the same weights, nearest errs by s**2 / 12, stochastic by s**2 / 6 / K."""
    rng = torch.Generator().manual_seed(7)
    n, devices = 200_000, 10
    w = torch.rand(n, generator=rng) * 2 - 1 if distribution == "uniform" else torch.randn(n, generator=rng)
    alpha = float(w.abs().max())
    mean = sum(quantize(w, alpha, rounding="stochastic", seed=k).double() for k in range(devices)) / devices
    stochastic, nearest = (mean - w).square(), (quantize(w, alpha).double() - w).square()
    ratio = float(stochastic.mean() / nearest.mean())
    # standard error of the ratio from the samples themselves (delta method)
    spread = float((stochastic - ratio * nearest).std() / nearest.mean()) / math.sqrt(n)
    assert (
        abs(ratio - 2 / devices) <= 6 * spread + 0.01
    )  # 0.01: places in a cell are uniform only as far as density is flat
    one = quantize(w, alpha, rounding="stochastic", seed=0).double()
    assert (one - w).square().mean() > nearest.mean()  # for a single device nearest is the better one


def test_seeds_and_prefixes() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    q = quantize(x, 3.0, rounding="stochastic", seed=1)
    assert torch.equal(q, quantize(x, 3.0, rounding="stochastic", seed=1))
    assert not torch.equal(q, quantize(x, 3.0, rounding="stochastic", seed=2))
    assert torch.equal(q[:77], quantize(x[:77], 3.0, rounding="stochastic", seed=1))
    for seed in (-1, 0, 2**63 - 1, 2**64 - 1):
        quantize(x, 3.0, rounding="stochastic", seed=seed)


def chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_random_bits_are_uniform_and_never_repeat_within_a_tensor() -> None:
    n = 1 << 20
    u = hash_uniform(11, n).double().numpy()
    assert u.min() >= 0 and u.max() < 1
    counts = np.bincount((u * 1024).astype(int), minlength=1024)
    assert stats.chi2.sf(chi_square(counts, n / 1024), 1023) > RISK
    assert abs(u.mean() - 0.5) <= stats.norm.isf(RISK / 2) / math.sqrt(12 * n)
    whole = eager.centred(n, random_keys(11), torch.device("cpu"))
    assert len(torch.unique(whole)) == n  # a bijection of the index


def test_random_bits_of_kernels_and_torch_are_one() -> None:
    keys, cpu = random_keys(99), torch.device("cpu")
    u = hash_uniform(99, 5000)
    assert torch.equal(u, eager.uniforms(5000, keys, cpu))
    whole = eager.centred(5000, keys, cpu).double() / 2**32 + 0.5
    assert float((whole - u.double()).min()) >= 0 and float((whole - u.double()).max()) < 2.0**-23


@pytest.mark.parametrize("lag", [1, 2, 3, 8, 16, 64, 1000, 2**12, 2**15, 2**16, 2**17, 2**19])
def test_random_bits_are_independent_along_a_tensor(lag: int) -> None:
    n, bins = 1 << 20, 32
    u = (hash_uniform(5, n).double().numpy() * bins).astype(int)
    pairs = np.bincount(u[lag:] * bins + u[:-lag], minlength=bins * bins)
    assert stats.chi2.sf(chi_square(pairs, (n - lag) / bins**2), bins**2 - 1) > RISK


@pytest.mark.parametrize("other", [1, 2, 3, 256, 2**16, 2**32, 2**62])
def test_random_bits_are_independent_between_seeds(other: int) -> None:
    n, bins = 1 << 19, 32
    u = (hash_uniform(0, n).double().numpy() * bins).astype(int)
    v = (hash_uniform(other, n).double().numpy() * bins).astype(int)
    pairs = np.bincount(u * bins + v, minlength=bins * bins)
    assert stats.chi2.sf(chi_square(pairs, n / bins**2), bins**2 - 1) > RISK


def test_random_bits_of_one_element_over_many_seeds() -> None:
    u = np.array([[float(v) for v in hash_uniform(seed, 2)] for seed in range(4000)])
    for column in u.T:
        assert stats.kstest(column, "uniform").pvalue > RISK
    assert abs(np.corrcoef(u.T)[0, 1]) <= 6 / math.sqrt(len(u))
