"""Products through `torch._scaled_mm` against emulated ones: the same but for the one code that hardware lacks."""

import copy
import subprocess

import pytest
import torch
from torch import Tensor, nn

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import E5M2, quantize
from fedfp8.nn import native, prepare, report, restore, set_rounding

if problem := native._problem("cpu", None):
    pytest.skip(f"no FP8 products on this CPU: {problem}", allow_module_level=True)

LAYERS = {
    "linear": (lambda: nn.Linear(32, 16), (5, 32)),
    "odd sizes, no bias": (lambda: nn.Linear(37, 7, bias=False), (3, 37)),
    "more dimensions": (lambda: nn.Linear(9, 5), (2, 3, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(6, 10, 1), (2, 6, 5, 4)),
    "conv2d unbatched": (lambda: nn.Conv2d(6, 10, 1), (6, 5, 4)),
    "conv1d": (lambda: nn.Conv1d(6, 10, 1, bias=False), (2, 6, 5)),
    "conv3d": (lambda: nn.Conv3d(6, 10, 1), (2, 6, 3, 2, 2)),
}


def case(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """The same layer native and emulated, its ranges set, and an input."""
    make, shape = LAYERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain, x = make(), torch.randn(shape)
    fp8, emulated = prepare(copy.deepcopy(plain), compute="native"), prepare(plain)
    assert fp8.native and not emulated.native
    emulated(x), fp8(x)
    return fp8, emulated, x


@pytest.mark.parametrize("name", LAYERS)
def test_forward_is_emulation_without_the_top_code(name: str) -> None:
    fp8, emulated, x = case(name)
    with torch.no_grad():
        weight, top = quantize(emulated.weight, emulated.alpha), emulated.alpha * 448 / 480
        assert weight.abs().max() > top, "alpha is max|w|, so the missing code is used"
        clipped = quantize(x, emulated.beta).clamp(-emulated.beta * 448 / 480, emulated.beta * 448 / 480)
        expected = emulated._operate(clipped, weight.clamp(-top, top))
        # at most 37 products, added in another order
        torch.testing.assert_close(fp8(x), expected, rtol=1e-5, atol=1e-5)
        assert not torch.equal(fp8(x), emulated(x))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_emulation(name: str) -> None:
    """Ranges beyond the largest values, so that the missing code is not used."""
    fp8, emulated, x = case(name)
    results = []
    for layer in (fp8, emulated):
        layer.alpha.data.mul_(1.1)
        layer.beta.data.mul_(1.1)
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        out.backward(upstream)
        results.append([out.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()) + 1e-6)


def test_clipped_elements_get_no_gradient_and_move_the_range() -> None:
    fp8, _, x = case("linear")
    fp8.beta.data.fill_(0.5)
    x.requires_grad_()
    fp8(x).sum().backward()
    assert torch.equal(x.grad == 0, x.abs() > 0.5) and fp8.beta.grad.abs() > 0


def test_an_input_without_gradient_has_a_fixed_range() -> None:
    fp8, _, x = case("linear")
    fp8(x).sum().backward()
    assert fp8.beta.grad is None and fp8.weight.grad is not None and fp8.alpha.grad is not None


def test_only_products_run_there_and_the_report_says_so() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 1, 2))
    prepare(model, compute="native")
    assert [m.native for m in model] == [False, True, False, False]
    assert report(model) == "E4M3: 4 layers swapped (232 weights), 1 of them on FP8 hardware, 0 in float"
    assert "native" in repr(model[1]) and "native" not in repr(model[0])
    assert not hasattr(restore(model)[1], "native")


def test_a_small_network_trains() -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    accuracy = {}
    for compute in ("native", "emulated"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = prepare(nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)), compute=compute)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[:1200]), y[:1200]).backward()
            optimizer.step()
        accuracy[compute] = (model.eval()(x[1200:]).argmax(1) == y[1200:]).float().mean().item()
    assert accuracy["native"] > 0.88 and abs(accuracy["native"] - accuracy["emulated"]) < 0.04, accuracy


@pytest.mark.parametrize(
    "options, message",
    [
        ({"format": E5M2, "compute": "native"}, "knows E4M3 only, not E5M2"),
        ({"rounding": "stochastic", "compute": "native"}, "rounds to nearest only"),
        ({"compute": "fast"}, "compute is 'fast'; choose 'emulated' or 'native'"),
    ],
)
def test_refusals_change_nothing(options: dict[str, object], message: str) -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(QuantizationError, match=message):
        prepare(layer, **options)
    assert type(layer) is nn.Linear


def test_stochastic_rounding_and_compiling_are_refused_later_too() -> None:
    layer = prepare(nn.Linear(4, 4), compute="native")
    with pytest.raises(QuantizationError, match="rounds to nearest only"):
        set_rounding(layer, "stochastic")
    layer(torch.ones(2, 4))
    with pytest.raises(Exception, match="cannot be compiled or exported yet"):
        torch.compile(layer, fullgraph=True, backend="eager")(torch.ones(2, 4))


@pytest.mark.parametrize(
    "device, outcome, message",
    [
        ("cpu", subprocess.CompletedProcess([], -4, "", ""), "no FP8 products on cpu: a trial was ended by signal 4"),
        (
            "cpu",
            subprocess.CompletedProcess([], 1, "", "x\nRuntimeError: no"),
            "RuntimeError: no. Use compute='emulated'",
        ),
        ("meta", None, "known to work on cuda and cpu only"),
    ],
)
def test_a_device_without_fp8_products_is_refused(
    device: str, outcome: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_problem", native._problem.__wrapped__)
    monkeypatch.setattr(native.subprocess, "run", lambda *a, **k: outcome)
    with pytest.raises(QuantizationError, match=message):
        native.check(torch.device(device))
