"""Every code of every format against the reference, the ties between them, and other implementations."""

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import FormatInfo, RoundMode, round_float
from gfloat.types import Domain

import fp8_reference as reference
from fedfp8 import E4M3, E5M2, Format, from_codes, quantize, to_codes
from tools import FORMATS

ALPHAS = [480.0, 1.0, 3.7, 1e-6, 1e6]
every_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
every_alpha = pytest.mark.parametrize("alpha", ALPHAS)


def bits(format: Format) -> tuple[int, int]:
    return format.exponent_bits, format.mantissa_bits


def float32_alpha(alpha: float) -> float:
    return float(np.float32(alpha))


def neighbours(x: np.ndarray) -> np.ndarray:
    """float32 values with their neighbours on both sides."""
    x = x.astype(np.float32)
    return np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])


def hard_cases(format: Format, alpha: float) -> np.ndarray:
    """Grid values, ties, powers of two, subnormals, zeros and the largest float32s, with neighbours and both signs."""
    grid = reference.magnitudes(*bits(format)) * (alpha / reference.top(*bits(format)))
    tiny, huge = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max
    extremes = np.array([0.0, tiny, 100 * tiny, np.finfo(np.float32).tiny, alpha, 2 * alpha, huge])
    exponents = np.arange(np.floor(np.log2(grid[1])) - 2, np.ceil(np.log2(alpha)) + 2)
    with np.errstate(over="ignore"):
        x = neighbours(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, 2.0**exponents, extremes]))
    x = x[np.isfinite(x)]
    return np.concatenate([x, -x])


def test_seventeen_formats() -> None:
    assert len(FORMATS) == 17 and {E4M3, E5M2, Format(3, 4)} <= set(FORMATS)


@every_format
def test_standard_grid_and_top(format: Format) -> None:
    magnitudes = reference.magnitudes(*bits(format))
    half = len(magnitudes)
    assert np.array_equal(format.grid().numpy()[:half], magnitudes)
    assert np.array_equal(format.grid().numpy()[half:], -magnitudes)
    assert format.top == magnitudes[-1] == reference.top(*bits(format))


@every_format
@every_alpha
def test_all_codes_decode_to_the_grid_and_encode_to_themselves(format: Format, alpha: float) -> None:
    codes = torch.arange(2**format.bits, dtype=torch.uint8)
    values = from_codes(codes, alpha, format)
    exact = reference.decode(codes.numpy(), float32_alpha(alpha), *bits(format))
    assert np.all(np.abs(values.numpy() - exact) <= reference.VALUE_ERROR * np.abs(exact))
    # the documented formula, to the last bit
    scale = np.float32(float32_alpha(alpha) / format.top)
    assert np.array_equal(values.numpy(), format.grid().numpy().astype(np.float32) * scale)
    again = to_codes(values, alpha, format)
    minus_zero = 2 ** (format.bits - 1)
    codes[minus_zero] = 0
    assert torch.equal(again, codes)


@every_format
@every_alpha
def test_nearest_on_hard_cases(format: Format, alpha: float) -> None:
    alpha = float32_alpha(alpha)
    x = hard_cases(format, alpha)
    codes = to_codes(torch.from_numpy(x), alpha, format).numpy()
    t = reference.position(x, alpha, *bits(format))
    expected, unsure = reference.encode(t, *bits(format)), reference.near_tie(t, *bits(format))
    lower, upper, _ = reference.between(t, *bits(format))
    magnitude = codes & (2 ** (format.bits - 1) - 1)
    assert np.array_equal(codes[~unsure], expected[~unsure])
    assert np.all((magnitude[unsure] == lower[unsure]) | (magnitude[unsure] == upper[unsure]))
    assert 0 < unsure.sum() < len(x)  # ties were among the cases, and most cases are decided


@every_format
@every_alpha
def test_nearest_rounds_the_float32_position_exactly(format: Format, alpha: float) -> None:
    """Given y = fl(x * fl(top / alpha)) there is nothing left to doubt, ties included."""
    x = hard_cases(format, alpha)
    with np.errstate(over="ignore"):
        y = x * np.float32(format.top / float32_alpha(alpha))
    expected = reference.encode(y.astype(np.float64), *bits(format))
    assert np.array_equal(to_codes(torch.from_numpy(x), alpha, format).numpy(), expected)


@every_format
def test_exact_ties_go_to_even(format: Format) -> None:
    """alpha = top: positions are exact, so ties are real ties."""
    grid = reference.magnitudes(*bits(format))
    ties = torch.from_numpy((grid[1:] + grid[:-1]) / 2).float()
    lower = torch.arange(len(grid) - 1)
    steps = torch.from_numpy(grid[:-1] / np.diff(grid))
    expected = torch.where(steps % 2 == 1, lower + 1, lower).to(torch.uint8)
    assert torch.equal(to_codes(ties, format.top, format), expected)
    if format.mantissa_bits:
        assert torch.all(expected % 2 == 0)
    below, above = torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(1e9))
    assert torch.equal(to_codes(below, format.top, format), lower.to(torch.uint8))
    assert torch.equal(to_codes(above, format.top, format), (lower + 1).to(torch.uint8))


@every_format
@every_alpha
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_values_of_codes_are_the_quantized_values(format: Format, alpha: float, rounding: str) -> None:
    x = torch.from_numpy(hard_cases(format, alpha))
    values = quantize(x, alpha, format, rounding=rounding, seed=3)
    codes = to_codes(x, alpha, format, rounding=rounding, seed=3)
    assert torch.equal(from_codes(codes, alpha, format).view(torch.int32), values.view(torch.int32))
    assert not torch.any(codes == 2 ** (format.bits - 1)), "the code of -0 is never produced"
    assert int(codes.max()) < 2**format.bits
    largest = from_codes(torch.tensor([2 ** (format.bits - 1) - 1], dtype=torch.uint8), alpha, format)
    assert torch.all(values.abs() <= largest)
    assert abs(float(largest) - float32_alpha(alpha)) <= reference.VALUE_ERROR * alpha


@every_format
@every_alpha
def test_grid_values_are_fixed_points(format: Format, alpha: float) -> None:
    values = from_codes(torch.arange(2**format.bits, dtype=torch.uint8), alpha, format).repeat(300)
    assert torch.equal(quantize(values, alpha, format), values)
    for seed in range(3):  # stochastic too: float32 noise in x * (top / alpha) must not throw a grid value off
        assert torch.equal(quantize(values, alpha, format, rounding="stochastic", seed=seed), values)


@every_format
def test_a_dense_ramp_gives_exactly_the_grid(format: Format) -> None:
    grid = np.unique(format.grid().numpy())
    t = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, np.linspace(-1.2, 1.2, 20001) * format.top])
    alpha = 3.7
    x = torch.from_numpy((t * (alpha / format.top)).astype(np.float32))
    got = np.unique(quantize(x, alpha, format).numpy())
    assert len(got) == 2**format.bits - 1  # all codes but -0
    assert np.array_equal(got, np.unique(from_codes(torch.arange(2**format.bits, dtype=torch.uint8), alpha, format)))
    assert torch.all(quantize(x.sort().values, alpha, format).diff() >= 0)


@every_format
@every_alpha
def test_random_values_against_the_papers_formula(format: Format, alpha: float) -> None:
    """Q_det of the paper in float64; the formula itself leaves the grid by a few ulps, hence the second term."""
    alpha = float32_alpha(alpha)
    x = np.random.default_rng(1).normal(size=20_000).astype(np.float32) * np.float32(alpha / 2)
    paper = reference.paper_quantize(x.astype(np.float64), alpha, *bits(format))
    ours = quantize(torch.from_numpy(x), alpha, format).numpy()
    sure = ~reference.near_tie(reference.position(x, alpha, *bits(format)), *bits(format))
    assert sure.mean() > 0.999
    error = np.abs(ours[sure] - paper[sure])
    assert np.all(error <= (reference.VALUE_ERROR + 64 * np.finfo(np.float64).eps) * np.abs(paper[sure]))


def test_signed_zeros_become_plus_zero() -> None:
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30, -float(np.finfo(np.float32).smallest_subnormal)])
    for rounding in ("nearest", "stochastic"):
        q = quantize(x, 1.0, rounding=rounding, seed=0)
        assert torch.equal(q.view(torch.int32), torch.zeros(5, dtype=torch.int32))
        assert torch.equal(to_codes(x, 1.0, rounding=rounding, seed=0), torch.zeros(5, dtype=torch.uint8))


def test_infinity_is_clipped_and_nan_stays() -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4e38])
    for rounding in ("nearest", "stochastic"):
        q = quantize(x, 2.0, rounding=rounding, seed=0)
        assert q[0] == 2.0 and q[1] == -2.0 and torch.isnan(q[2]) and q[3] == 2.0


def test_against_torch_float8() -> None:
    """E4M3 with alpha = 480 and torch.float8_e4m3fn are one grid up to 448, whose code 127 is NaN there."""
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0)) * 150
    x = torch.cat([x, torch.from_numpy(hard_cases(E4M3, 480.0))])
    x = x[x.abs() < 464]  # from the middle between 448 and 480 on they differ
    theirs = x.to(torch.float8_e4m3fn)
    assert torch.equal(quantize(x, 480.0), theirs.float())
    codes = theirs.view(torch.uint8)
    assert torch.equal(to_codes(x, 480.0), torch.where(codes == 128, 0, codes.to(torch.int32)).to(torch.uint8))


@pytest.mark.parametrize(
    ("format", "dtype", "limit"),
    [
        (E4M3, ml_dtypes.float8_e4m3fn, 464.0),
        (E5M2, ml_dtypes.float8_e5m2, 61440.0),
        (Format(3, 2), ml_dtypes.float6_e3m2fn, 28.0),
        (Format(2, 3), ml_dtypes.float6_e2m3fn, 7.5),
        (Format(2, 1), ml_dtypes.float4_e2m1fn, 6.0),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_against_ml_dtypes(format: Format, dtype: type, limit: float) -> None:
    x = hard_cases(format, format.top)
    x = x[np.abs(x) < limit]
    theirs = x.astype(dtype).astype(np.float32)
    assert np.array_equal(quantize(torch.from_numpy(x), format.top, format).numpy(), theirs)


@pytest.mark.parametrize("format", [f for f in FORMATS if f.mantissa_bits], ids=lambda f: f.name)
def test_against_gfloat(format: Format) -> None:
    """gfloat knows every format whose top exponent is finite; precision-1 formats have another tie rule there."""
    m = format.mantissa_bits
    info = FormatInfo(
        name=format.name, k=format.bits, precision=m + 1, bias=format.bias, is_signed=True,
        domain=Domain.Finite, has_nz=True, num_high_nans=0, has_subnormals=True, is_twos_complement=False,
    )  # fmt: skip
    x = hard_cases(format, format.top)[:: max(1, len(hard_cases(format, format.top)) // 400)]
    theirs = [round_float(info, float(v), RoundMode.TiesToEven, True) for v in x]
    assert np.array_equal(quantize(torch.from_numpy(x), format.top, format).numpy(), np.array(theirs, np.float32))
