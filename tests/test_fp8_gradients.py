"""Gradients of fake_quantize against the closed form and against autograd through the textbook formula."""

import numpy as np
import pytest
import torch

import fp8_reference as reference
from fedfp8 import E4M3, E5M2, Format, dither, fake_quantize, from_codes, quantize, to_codes, undither
from fedfp8.bench.textbook import textbook_quantize
from fedfp8.fp8 import anydevice, use_kernels

ULP = 2.0**-24
roundings = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])


def gradients(
    x: torch.Tensor, alpha: float, g: torch.Tensor, format: Format = E4M3, rounding: str = "nearest"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, a = x.clone().requires_grad_(), torch.tensor(alpha, requires_grad=True)
    q = fake_quantize(x, a, format, rounding=rounding, seed=4)
    q.backward(g)
    assert x.grad is not None and a.grad is not None
    return q.detach(), x.grad, a.grad


def sample(n: int, alpha: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Values inside, outside, on the edge, zeros and subnormals, with upstream gradients."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=rng) * 0.6 * alpha
    x[:8] = torch.tensor([alpha, -alpha, 0.0, -0.0, 1e-4 * alpha, -1e-4 * alpha, 5 * alpha, -5 * alpha])
    return x, torch.randn(n, generator=rng)


@roundings
@pytest.mark.parametrize("format", [E4M3, E5M2, Format(2, 1)], ids=lambda f: f.name)
def test_closed_form_element_by_element(format: Format, rounding: str) -> None:
    alpha = float(np.float32(0.83))
    x, g = sample(300, alpha)
    for i in range(len(x)):
        q, gx, ga = gradients(x[i : i + 1], alpha, g[i : i + 1], format, rounding)
        expected_x, expected_a = reference.gradients(
            x[i].double().numpy(), q.double().numpy(), g[i].double().numpy(), alpha
        )
        assert float(gx) == expected_x  # products with 0, 1/2 and 1 are exact
        # q - x, its product with g, and the result round once each
        assert abs(float(ga) - float(expected_a.item())) <= 4 * ULP * abs(float(expected_a.item()))


@roundings
@pytest.mark.parametrize("n", [5, 1000, 100_003])
def test_closed_form_of_the_sum(n: int, rounding: str) -> None:
    alpha = 1.25
    x, g = sample(max(n, 8), alpha, seed=n)
    x, g = x[:n], g[:n]
    q, gx, ga = gradients(x, alpha, g, rounding=rounding)
    expected_x, terms = reference.gradients(x.double().numpy(), q.double().numpy(), g.double().numpy(), alpha)
    assert np.array_equal(gx.double().numpy(), expected_x)
    # a sum of up to 2**15 float32 terms in any order: n ulps of the sum of magnitudes at worst
    assert abs(float(ga) - terms.sum()) <= (min(n, 2**15) + 4) * ULP * np.abs(terms).sum()


def test_the_edge_counts_half() -> None:
    alpha = 0.7310585786  # alpha starts at max|w|: every tensor has such an element at step 0
    x = torch.tensor([alpha, -alpha])
    for rounding in ("nearest", "stochastic"):
        _, gx, ga = gradients(x, float(x[0]), torch.tensor([1.0, 3.0]), rounding=rounding)
        assert gx.tolist() == [0.5, 1.5] and float(ga) == 0.5 - 1.5


@pytest.mark.parametrize("format", [E4M3, E5M2, Format(3, 4), Format(2, 1)], ids=lambda f: f.name)
@pytest.mark.parametrize("alpha", [1.0, 0.037, 200.0])
def test_autograd_through_the_textbook_formula(format: Format, alpha: float) -> None:
    """The released formula in float64; elements whose neighbour float32 may choose otherwise are left out."""
    alpha = float(np.float32(alpha))
    x, g = sample(20_000, alpha, seed=2)
    t = reference.position(x.numpy(), alpha, format.exponent_bits, format.mantissa_bits)
    sure = torch.from_numpy(~reference.near_tie(t, format.exponent_bits, format.mantissa_bits))
    x, g = x[sure], g[sure]
    assert len(x) > 19_900
    q, gx, ga = gradients(x, alpha, g, format)
    x64, a64 = x.double().requires_grad_(), torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    q64 = textbook_quantize(x64, a64, format)
    q64.backward(g.double())
    error = (q.double() - q64.detach()).abs()
    assert torch.all(error <= (reference.VALUE_ERROR + 1e-12) * q64.detach().abs())
    torch.testing.assert_close(gx.double(), x64.grad, rtol=1e-12, atol=1e-12)
    terms = (g.double() * (q64 - x64) / alpha).detach().abs().sum() + g.abs().sum() * float(
        (x.abs() >= alpha).double().mean()
    )
    bound = (len(x) + 4) * ULP * float(terms) + float((g.double().abs() * error).sum()) / alpha
    assert abs(float(ga) - float(a64.grad)) <= bound + 1e-9 * float(terms)


@roundings
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_follow_float32(dtype: torch.dtype, rounding: str) -> None:
    x, g = sample(2000, 1.0)
    x = x.to(dtype)
    ours = gradients(x, 1.0, g.to(dtype), rounding=rounding)
    in32 = gradients(x.float(), 1.0, g.to(dtype).float(), rounding=rounding)
    assert ours[0].dtype == ours[1].dtype == dtype
    assert torch.equal(ours[0], in32[0].to(dtype)) and torch.equal(ours[1].float(), in32[1])
    # one rounding of q to the dtype (2**-11 for float16), then sums in other orders
    assert abs(float(ours[2] - in32[2])) <= 2.0**-10 * float(g.abs().sum())


@roundings
def test_memory_formats_and_strides(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them by the kernels: operation by operation, a step of LeNet in channels-last took half as long again."""
    monkeypatch.setattr(anydevice, "gradients", lambda *_: pytest.fail("not by a kernel"))
    rng = torch.Generator().manual_seed(1)
    base = torch.randn(4, 6, 5, 7, generator=rng)
    g = torch.randn(4, 6, 5, 7, generator=rng)
    plain = gradients(base, 1.5, g, rounding=rounding)
    variants = {
        "channels last": base.to(memory_format=torch.channels_last),
        "transposed": base.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        "gaps": torch.stack([base, base], dim=-1)[..., 0],
    }
    for name, x in variants.items():
        got = gradients(x, 1.5, g, rounding=rounding)
        assert torch.equal(got[0], plain[0]) and torch.equal(got[1], plain[1]), name
        assert got[1].stride() == torch.empty_like(x).stride(), name
        terms = reference.gradients(base.double().numpy(), plain[0].double().numpy(), g.double().numpy(), 1.5)[1]
        assert abs(float(got[2] - plain[2])) <= 2 * base.numel() * ULP * np.abs(terms).sum(), name


def test_nan_shows_and_infinity_counts_as_outside() -> None:
    for dtype in (torch.float32, torch.float64):
        q, gx, ga = gradients(
            torch.tensor([float("inf"), -float("inf"), 0.1], dtype=dtype), 1.0, torch.ones(3, dtype=dtype)
        )
        assert q[:2].tolist() == [1.0, -1.0] and gx[:2].tolist() == [0.0, 0.0] and abs(float(ga)) < 0.1
        q, _, ga = gradients(torch.tensor([float("nan"), 0.1], dtype=dtype), 1.0, torch.ones(2, dtype=dtype))
        assert torch.isnan(q[0]) and torch.isnan(ga)


def test_what_asks_for_no_gradient_gets_none() -> None:
    x = torch.randn(10, generator=torch.Generator().manual_seed(0))
    assert not fake_quantize(x, 1.0).requires_grad
    with torch.no_grad():
        assert not fake_quantize(x, torch.tensor(1.0, requires_grad=True)).requires_grad
    only_x = x.clone().requires_grad_()
    fake_quantize(only_x, 1.0).sum().backward()
    assert only_x.grad is not None
    alpha = torch.tensor([1.0], requires_grad=True)
    fake_quantize(x, alpha).sum().backward()
    assert alpha.grad is not None and alpha.grad.shape == (1,)
    assert torch.equal(fake_quantize(only_x, 1.0).detach(), quantize(x, 1.0))


@roundings
def test_empty_and_zero_dimensional(rounding: str) -> None:
    _, gx, ga = gradients(torch.zeros(0, 3), 1.0, torch.zeros(0, 3), rounding=rounding)
    assert gx.shape == (0, 3) and float(ga) == 0.0
    _, gx, _ = gradients(torch.tensor(0.3), 1.0, torch.tensor(2.0), rounding=rounding)
    assert gx.shape == () and float(gx) == 2.0


def test_stochastic_gradient_uses_the_random_bits_of_the_forward_pass() -> None:
    """Far into the tensor too. Few elements have a gradient, so the bound is a few ulps and others would show."""
    x, g = sample(300_000, 1.0)
    some = torch.arange(0, 300_000, 9973)
    g = torch.zeros(300_000).index_copy_(0, some, g[some])
    q, _, ga = gradients(x, 1.0, g, rounding="stochastic")
    terms = reference.gradients(x.double().numpy(), q.double().numpy(), g.double().numpy(), 1.0)[1]
    assert abs(float(ga) - terms.sum()) <= (len(some) + 4) * ULP * np.abs(terms).sum()
    with pytest.raises(ValueError, match="needs a seed"):
        fake_quantize(x.requires_grad_(), 1.0, rounding="stochastic")


# without the CPU kernels


@roundings
@pytest.mark.parametrize("format", [E4M3, E5M2, Format(3, 4), Format(2, 1)], ids=lambda f: f.name)
def test_the_any_device_way_gives_the_bits_of_the_kernels(format: Format, rounding: str) -> None:
    for alpha in (0.83, 1.0, 3e-5, 700.0):
        alpha = float(np.float32(alpha))
        x, g = sample(5000, alpha)
        for shaped in (x, x.view(50, 100).T, x.view(5, 10, 10, 10).to(memory_format=torch.channels_last)):
            upstream = g.view(shaped.shape)
            q, gx, ga = gradients(shaped, alpha, upstream, format, rounding)
            with use_kernels("0"):
                q0, gx0, ga0 = gradients(shaped, alpha, upstream, format, rounding)
            assert torch.equal(q.view(torch.int32), q0.view(torch.int32)), "signs of zero too"
            assert torch.equal(gx, gx0) and q.stride() == q0.stride()
            # the kernels add 2**15 float32 terms at a time, the other way float64 ones
            terms = reference.gradients(shaped.double().numpy(), q.double().numpy(), upstream.double().numpy(), alpha)[
                1
            ]
            assert abs(float(ga - ga0)) <= (5000 + 4) * ULP * np.abs(terms).sum()


@roundings
def test_codes_and_dither_are_the_same_without_kernels(rounding: str) -> None:
    x, _ = sample(5000, 1.0)
    codes, k = to_codes(x, 1.0, rounding=rounding, seed=3), dither(x, 0.1, seed=3)
    values = from_codes(codes, 1.0), undither(k, 0.1, seed=3)
    with use_kernels("0"):
        assert torch.equal(to_codes(x, 1.0, rounding=rounding, seed=3), codes)
        assert torch.equal(dither(x, 0.1, seed=3), k)
        assert torch.equal(from_codes(codes, 1.0), values[0]) and torch.equal(undither(k, 0.1, seed=3), values[1])


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="FEDFP8_KERNELS is 'off'; it must be one of 1, 0, compiled"):
        use_kernels("off").__enter__()
    assert torch.equal(quantize(torch.tensor([0.3]), 1.0), fake_quantize(torch.tensor([0.3]), 1.0))


@pytest.mark.slow
@roundings
def test_fused_by_the_compiler_it_still_gives_the_same_bits(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs, here with inductor's C++: one graph for all sizes, ranges and seeds."""
    monkeypatch.setattr(anydevice, "_failed", set())
    for n, alpha, seed in ((1000, 0.83, 4), (5003, 1.0, 5), (70_001, 700.0, 6)):
        alpha = float(np.float32(alpha))
        x, g = sample(n, alpha, seed)
        x.requires_grad_()
        a = torch.tensor(alpha, requires_grad=True)
        results = []
        for value in ("1", "compiled"):
            with use_kernels(value):
                q = fake_quantize(x, a, rounding=rounding, seed=seed)
                results.append((q.detach(), *torch.autograd.grad(q, (x, a), g)))
        (q, gx, ga), (q0, gx0, ga0) = results
        assert torch.equal(q.view(torch.int32), q0.view(torch.int32)) and torch.equal(gx, gx0)
        assert abs(float(ga - ga0)) <= n * ULP * float(g.abs().sum())
    assert not anydevice._failed, "it fell back"


def test_where_the_compiler_fails_the_operations_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: object) -> object:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(anydevice, "_compiled", broken)
    monkeypatch.setattr(anydevice, "_failed", set())
    x, _ = sample(100, 1.0)
    with use_kernels("compiled"):
        with pytest.warns(RuntimeWarning, match=r"does not work for cpu here \(RuntimeError: no C\+\+ compiler\)"):
            assert torch.equal(quantize(x, 1.0), quantize(x.double(), 1.0).float())
        quantize(x, 1.0)  # said once
