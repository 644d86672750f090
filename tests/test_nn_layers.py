"""FP8 layers against the float layer on explicitly quantized operands, and against textbook autograd."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import E3M4, E4M3, E5M2, Format, fake_quantize, quantize, use_kernels
from fedfp8.modules import MatMul
from fedfp8.nn import FP8Layer, operand, prepare, set_rounding
from fedfp8.nn.operand import ACTIVATION_FLOOR
from fedfp8.rng import derive_seed

LAYERS = {
    "linear": (lambda: nn.Linear(12, 7), (5, 12)),
    "linear, no bias, 3-d": (lambda: nn.Linear(12, 7, bias=False), (3, 5, 12)),
    "conv1d": (lambda: nn.Conv1d(6, 8, 5, stride=2, padding=2, dilation=2), (3, 6, 20)),
    "conv1d depthwise": (lambda: nn.Conv1d(6, 6, 11, padding=5, groups=6, bias=False), (3, 6, 20)),
    "conv1d pointwise": (lambda: nn.Conv1d(6, 8, 1, bias=False), (3, 6, 20)),
    "conv2d": (lambda: nn.Conv2d(3, 8, 5), (4, 3, 9, 9)),
    "conv2d stride": (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False), (4, 4, 9, 9)),
    "conv2d groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2, padding=2), (4, 4, 9, 9)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding="same"), (4, 4, 9, 9)),
    "conv2d pointwise": (lambda: nn.Conv2d(4, 8, 1), (4, 4, 9, 9)),
    "conv2d circular": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), (4, 4, 9, 9)),
    "conv2d unbatched": (lambda: nn.Conv2d(4, 8, 3), (4, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 3, padding=1), (2, 2, 4, 5, 6)),
    "conv transpose 1d": (lambda: nn.ConvTranspose1d(6, 4, 4, stride=2, output_padding=1), (3, 6, 9)),
    "conv transpose 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 5, 5)),
    "conv transpose 2d, no bias": (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False), (2, 4, 5, 5)),
    "conv transpose 3d": (lambda: nn.ConvTranspose3d(2, 4, 3, dilation=2), (2, 2, 3, 4, 5)),
}


@pytest.fixture(params=["1", "0"], ids=["kernels", "any device"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with use_kernels(request.param):
        yield


def case(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A float layer and an input, both from `seed`; the caller's generator is left alone."""
    make, shape = LAYERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(), torch.randn(shape)


def textbook(x: Tensor, alpha: Tensor, format: Format) -> Tensor:
    """Kuzmin et al.'s quantizer in autograd operations: only the binade and the rounding are constants."""
    clipped = torch.min(torch.max(x, -alpha), alpha)
    standard = (clipped.detach() * (format.top / alpha.detach())).abs()
    binade = torch.frexp(standard).exponent - 1
    step = torch.pow(2.0, binade.clamp(min=1 - format.bias).double() - format.mantissa_bits)
    s = alpha * step / format.top
    ratio = clipped / s
    return (ratio + (ratio.round() - ratio).detach()) * s


def shrink(layer: nn.Module, factor: float = 0.6) -> None:
    """Ranges small enough that some elements of every operand are clipped."""
    for range_ in layer.ranges().values():
        range_.data.mul_(factor)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("format", [E4M3, E5M2, E3M4, Format(2, 1)], ids=lambda f: f.name)
@pytest.mark.parametrize("name", LAYERS)
def test_output_is_the_float_layer_on_quantized_operands(name: str, format: Format) -> None:
    plain, x = case(name)
    layer = prepare(copy.deepcopy(plain), format)
    layer(x)
    shrink(layer)
    with torch.no_grad():
        plain.weight.copy_(quantize(plain.weight, layer.alpha, format))
        expected = plain(quantize(x, layer.beta, format))
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.eval()(x), expected)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("clip", [1.0, 0.6], ids=["tie at the edge", "clipped"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_textbook_autograd(name: str, clip: float) -> None:
    plain, x = case(name)
    layer = prepare(copy.deepcopy(plain))
    layer(x)
    shrink(layer, clip)
    x.requires_grad_()
    out = layer(x)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(upstream)

    twin = plain.double()
    alpha, beta = (r.detach().double().requires_grad_() for r in (layer.alpha, layer.beta))
    x64 = x.detach().double().requires_grad_()
    weight = twin.weight.detach().requires_grad_()
    q = {"weight": textbook(weight, alpha, E4M3)}
    torch.func.functional_call(twin, q, (textbook(x64, beta, E4M3),)).backward(upstream.double())

    pairs = {"weight": (layer.weight, weight), "x": (x, x64), "alpha": (layer.alpha, alpha), "beta": (layer.beta, beta)}
    if plain.bias is not None:
        pairs["bias"] = (layer.bias, twin.bias)
    for what, (ours, theirs) in pairs.items():
        # float32 sums of at most a few thousand terms of the size of the largest: 1e-5 of it covers them
        scale = theirs.grad.abs().max().item() + upstream.abs().max().item() * 0.1
        assert ours.grad is not None, what
        torch.testing.assert_close(
            ours.grad.double(), theirs.grad, rtol=0, atol=1e-5 * scale, msg=lambda m, w=what: f"{w}: {m}"
        )


@pytest.mark.usefixtures("kernels")
def test_matmul_has_a_range_per_operand_and_textbook_gradients() -> None:
    g = torch.Generator().manual_seed(0)
    left = torch.randn(3, 5, 8, generator=g, requires_grad=True)
    right = (torch.randn(3, 6, 8, generator=g) * 4).requires_grad_()
    layer = prepare(nn.Sequential(MatMul()))[0]
    layer(left, right.transpose(1, 2))
    assert layer.beta_left.item() == left.abs().max().item()
    assert layer.beta_right.item() == right.abs().max().item()
    shrink(layer)
    out = layer(left, right.transpose(1, 2))
    with torch.no_grad():
        expected = quantize(left, layer.beta_left) @ quantize(right.transpose(1, 2), layer.beta_right)
    assert torch.equal(out, expected)

    upstream = torch.randn(out.shape, generator=g)
    out.backward(upstream)
    l64, r64 = (t.detach().double().requires_grad_() for t in (left, right))
    bl, br = (b.detach().double().requires_grad_() for b in layer.ranges().values())
    (textbook(l64, bl, E4M3) @ textbook(r64.transpose(1, 2), br, E4M3)).backward(upstream.double())
    for ours, theirs in ((left, l64), (right, r64), (layer.beta_left, bl), (layer.beta_right, br)):
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=1e-5 * scale)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", LAYERS)
def test_recomputing_in_backward_changes_no_bit(name: str, rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same composition of `fake_quantize` and the operation, with autograd holding the rounded operands."""
    monkeypatch.setattr(operand, "KEEP", 0)
    plain, x = case(name)
    layer = prepare(plain)
    layer(x)
    shrink(layer)
    set_rounding(layer, rounding, seed=9)
    x.requires_grad_()
    upstream = torch.ones_like(layer(x)) / 3
    set_rounding(layer, rounding, seed=9)
    ours = torch.autograd.grad(layer(x), (x, *layer.parameters()), upstream)

    seeds = [derive_seed(9, "qat", "", r, 1) if rounding == "stochastic" else None for r in ("beta", "alpha")]
    q = fake_quantize(x, layer.beta, rounding=rounding, seed=seeds[0])
    w = fake_quantize(layer.weight, layer.alpha, rounding=rounding, seed=seeds[1])
    theirs = torch.autograd.grad(layer._operate(q, w), (x, *layer.parameters()), upstream)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_channels_last_gives_the_same_gradients() -> None:
    plain, x = case("conv2d")
    layer = prepare(plain)
    layer(x)
    twin = copy.deepcopy(layer).to(memory_format=torch.channels_last)
    out, other = layer(x), twin(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(other, out, rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    other.square().sum().backward()
    for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [n for n in LAYERS if "circular" not in n])  # that one saves its padded input
def test_rounded_operands_are_not_held_for_backward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the operation saves is replaced by a recipe; both operands are rounded again in backward."""
    monkeypatch.setattr(operand, "KEEP", 0)
    plain, x = case(name)
    layer = prepare(plain)
    layer(x)
    kept: list[Tensor] = []
    recomputed: list[Tensor] = []
    monkeypatch.setattr(operand, "_Kept", lambda saved: kept.append(saved) or operand._Saved(saved))
    monkeypatch.setattr(operand, "quantize", lambda x, *a, **k: recomputed.append(x) or quantize(x, *a, **k))
    out = layer(x.requires_grad_())
    assert kept == [] and recomputed == []
    out.sum().backward()
    sources = {t.untyped_storage().data_ptr() for t in recomputed}
    assert sources == {t.untyped_storage().data_ptr() for t in (x, layer.weight)}


def test_beta_is_set_by_the_first_training_batch() -> None:
    plain, x = case("linear")
    layer = prepare(copy.deepcopy(plain))
    assert layer.beta.item() == 0.0
    with torch.no_grad():
        plain.weight.copy_(quantize(plain.weight, layer.alpha))
    assert torch.equal(layer.eval()(x), plain(x)), "in eval an unset range lets the input pass"
    assert layer.beta.item() == 0.0
    layer.train()
    assert torch.equal(layer(torch.zeros_like(x)), plain(torch.zeros_like(x)))
    assert layer.beta.item() == 0.0, "a batch of zeros says nothing about the range"
    layer(x)
    assert layer.beta.item() == x.abs().max().item()
    layer(10 * x)
    assert layer.beta.item() == x.abs().max().item(), "only the first batch sets it"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_first_batch_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    model = prepare(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(QuantizationError, match=r"'0\.beta'.*NaN or Inf"):
        model(torch.tensor([[1.0, bad]]))


def test_a_range_that_is_not_finite_is_refused_by_name() -> None:
    model = prepare(nn.Sequential(nn.Linear(2, 2)))
    model[0].alpha.data.fill_(float("nan"))
    with pytest.raises(QuantizationError, match=r"'0\.alpha' is nan"):
        model(torch.ones(1, 2))


def test_an_input_without_gradient_has_a_fixed_range() -> None:
    plain, x = case("conv2d")
    layer = prepare(plain, input_range=2.0)
    assert layer.beta.item() == 2.0
    layer(x).square().sum().backward()
    assert layer.beta.grad is None and layer.alpha.grad is not None and layer.weight.grad is not None
    layer(x.requires_grad_()).square().sum().backward()
    assert layer.beta.grad is not None and layer.beta.grad.item() != 0


def test_a_layer_may_be_used_twice_in_one_graph() -> None:
    layer = prepare(nn.Linear(6, 6))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layer(layer(x)).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())


def test_changing_an_input_before_backward_is_an_error_as_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operand, "KEEP", 0)
    layer = prepare(nn.Linear(6, 6))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    out = layer(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified in place"):
        out.sum().backward()


def test_stochastic_rounding_is_a_function_of_seed_layer_and_call() -> None:
    _, x = case("linear")

    def run(seed: int, calls: int = 2) -> list[Tensor]:
        plain, _ = case("linear")
        second = nn.Linear(7, 7, bias=False)
        nn.init.eye_(second.weight)
        model = prepare(nn.Sequential(plain, second), rounding="stochastic")
        set_rounding(model, "stochastic", seed=seed)
        return [model(x) for _ in range(calls)]

    first, second = run(3)
    assert torch.equal(first, run(3)[0]) and torch.equal(second, run(3)[1])
    assert not torch.equal(first, second), "every call has its own random bits"
    assert not torch.equal(first, run(4)[0]), "every seed too"


def test_stochastic_rounding_is_on_the_grid_and_unbiased() -> None:
    layer = prepare(nn.Linear(1, 200_000, bias=False))
    layer.weight.data.fill_(0.37)
    layer.weight.data[0] = 1.0
    layer.alpha.data.fill_(1.0)
    set_rounding(layer, "stochastic", seed=1)
    layer.beta.data.fill_(1.0)
    out = layer(torch.ones(1, 1))[0, 1:]
    low, high = out.min().item(), out.max().item()
    assert len(out.unique()) == 2 and low < 0.37 < high
    sigma = ((0.37 - low) * (high - 0.37) / out.numel()) ** 0.5
    assert abs(out.double().mean().item() - 0.37) < 5 * sigma


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_eval_is_deterministic_and_rounds_to_nearest(rounding: str) -> None:
    plain, x = case("conv2d")
    layer = prepare(plain)
    layer(x)
    expected = layer(x)
    set_rounding(layer, rounding, seed=5)
    layer.eval()
    assert torch.equal(layer(x), expected) and torch.equal(layer(x), expected)


def test_off_is_the_float_layer() -> None:
    plain, x = case("conv2d groups")
    layer = prepare(copy.deepcopy(plain), rounding="off")
    out = layer(x)
    assert torch.equal(out, plain(x)) and layer.beta.item() == 0.0
    out.sum().backward()
    assert layer.alpha.grad is None
    set_rounding(layer, "nearest")
    assert not torch.equal(layer(x), plain(x))


def test_conv_transpose_takes_an_output_size() -> None:
    plain = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)
    layer = prepare(copy.deepcopy(plain))
    x = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    layer(x)
    with torch.no_grad():
        plain.weight.copy_(quantize(plain.weight, layer.alpha))
        for size in ((7, 7), (8, 7), (8, 8)):
            assert torch.equal(layer(x, size), plain(quantize(x, layer.beta), list(size)))
            assert layer(x, output_size=size).shape[2:] == size
        set_rounding(layer, "off")
        assert layer(x, output_size=(8, 8)).shape[2:] == (8, 8)


def collapse(layer: FP8Layer, make: type[torch.optim.Optimizer], **options: float) -> float:
    """Push alpha down until the optimizer itself has taken it below zero; returns what it wrote."""
    optimizer = make([layer.alpha], **options)
    x = torch.ones(4, layer.in_features)
    for _ in range(1000):
        optimizer.zero_grad()
        layer(x).mean().backward()  # equal positive weights, all clipped: the loss falls with alpha
        optimizer.step()
        if layer.alpha.item() < 0:
            return layer.alpha.item()
    raise AssertionError("alpha never became negative; the test proves nothing")


@pytest.mark.parametrize(
    "make, options", [(torch.optim.SGD, {"lr": 0.1}), (torch.optim.AdamW, {"lr": 0.01}), (torch.optim.SGD, {"lr": 1e4})]
)
def test_ranges_stay_positive_where_a_naive_alpha_goes_negative(make: type, options: dict[str, float]) -> None:
    layer = nn.Linear(8, 8, bias=False)
    nn.init.constant_(layer.weight, 0.5)
    prepare(layer)
    assert collapse(layer, make, **options) < 0
    assert torch.isfinite(layer(torch.ones(4, 8))).all()
    assert layer.alpha.item() == pytest.approx(2**-6 / 8**0.5)


def test_beta_stays_positive_too_and_keeps_meaning_set() -> None:
    layer = prepare(nn.Linear(8, 8))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    layer(x)
    layer.beta.data.fill_(-0.3)
    layer(100 * x)
    assert layer.beta.item() == ACTIVATION_FLOOR, "raised to the floor, not taken from the next batch"


COLLAPSED = {
    "one weight": ["2.alpha"],
    "one input": ["2.beta"],
    "all weights": ["0.alpha", "2.alpha", "4.alpha"],
    "all learned inputs": ["2.beta", "4.beta"],
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("which", COLLAPSED)
def test_collapsed_ranges_come_back_under_sgd(which: str) -> None:
    """A floor of 1e-12 would leave them dead; see the docstring of fedfp8.nn.operand."""
    g = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0))
    prepare(model)
    x = torch.randn(256, 8, generator=g)
    y = x[:, :1] * x[:, 1:2].sign()
    model(x)
    for name in COLLAPSED[which]:
        model.get_parameter(name).data.fill_(-1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(400):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.9 and min(losses) < 0.3
    assert all(model.get_parameter(name).item() > 0.1 for name in COLLAPSED[which])
