"""FP8 attention against ``nn.MultiheadAttention``: the same masks, biases and layouts, and rounded operands."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import quantize
from fedfp8.nn import layout_of, prepare, restore, set_rounding
from fedfp8.nn.operand import Operand

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
    "other widths": {"kdim": 6, "vdim": 10},
}


def attention(**options: Any) -> nn.MultiheadAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(8, 2, **options)
        for bias in (layer.in_proj_bias, layer.out_proj.bias):
            if bias is not None:
                nn.init.normal_(bias)
    return layer


def inputs(layer: nn.MultiheadAttention, batched: bool, cross: bool) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)

    def make(tokens: int, width: int) -> Tensor:
        x = torch.randn(tokens, 3, width, generator=g)
        return (x.transpose(0, 1) if layer.batch_first else x) if batched else x[:, 0]

    query = make(5, 8)
    return (query, make(7, layer.kdim), make(7, layer.vdim)) if cross else (query, query, query)


def masks(batched: bool, cross: bool) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(2)
    n, tokens = (3 if batched else 1), (7 if cross else 5)
    hidden = torch.zeros((n, tokens) if batched else (tokens,), dtype=torch.bool)
    hidden[..., -2:] = True
    causal = torch.triu(torch.ones(5, tokens, dtype=torch.bool), 1)
    return [
        {},
        {"attn_mask": causal},
        {"attn_mask": torch.randn(5, tokens, generator=g)},
        {"attn_mask": torch.randn(2 * n, 5, tokens, generator=g)},
        {"key_padding_mask": hidden},
        {"attn_mask": causal, "key_padding_mask": hidden},
    ]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_computes_what_torch_computes(kind: str, batch_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rounding taken out of the operands only the order of float32 sums is left to differ."""
    plain = attention(**KINDS[kind], batch_first=batch_first)
    layer = prepare(copy.deepcopy(plain))
    monkeypatch.setattr(Operand, "fake", lambda self: self.source)
    for batched, cross in itertools.product((True, False), (True, False)):
        if kind == "other widths" and not cross:
            continue
        qkv = inputs(plain, batched, cross)
        for mask, shown in itertools.product(
            masks(batched, cross), ({"need_weights": False}, {}, {"average_attn_weights": False})
        ):
            out, weights = layer(*qkv, **mask, **shown)
            expected, expected_weights = plain(*qkv, **mask, **shown)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
            assert (weights is None) == (expected_weights is None)
            if weights is not None:
                torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "other widths"])
def test_every_product_has_rounded_operands(kind: str) -> None:
    """The whole of attention written out on explicitly rounded tensors."""
    layer = prepare(attention(**KINDS[kind], batch_first=True))
    cross = kind == "other widths"
    query, key, value = inputs(layer, batched=True, cross=cross)
    layer(query, key, value)  # sets the ranges
    r = layer.ranges()
    assert r["beta_weights"].item() == 1.0
    assert (r["beta_key"].item() == r["beta_value"].item() == 0.0) is not cross, "self-attention has one input"
    weights = {name: quantize(w, r[name]) for name, w in layer.weights().items()}
    three = list(weights.values()) if cross else weights["alpha"].chunk(3)
    names = ("beta_query", "beta_key", "beta_value") if cross else ("beta_query",) * 3
    q, k, v = (
        (quantize(x, r[name]) @ w.T + b).unflatten(-1, (2, 4)).transpose(1, 2)
        for x, name, w, b in zip((query, key, value), names, three, layer.in_proj_bias.chunk(3), strict=True)
    )
    scores = quantize(q, r["beta_q"]) @ quantize(k, r["beta_k"]).transpose(-1, -2) / 2
    mixed = quantize(scores.softmax(-1), r["beta_weights"]) @ quantize(v, r["beta_v"])
    expected = layer.out_proj(mixed.transpose(1, 2).flatten(-2))
    # q, k, v may differ by an ulp (one linear or three); a value next to a threshold then moves by a whole step
    difference = (layer(query, key, value)[0] - expected).abs()
    assert difference.median() < 1e-6 and difference.max() < 0.1 * expected.abs().max()


def test_all_weights_and_used_ranges_learn() -> None:
    layer = prepare(attention(batch_first=True))
    x = inputs(layer, True, False)[0].requires_grad_()
    layer(x, x, x)[0].square().sum().backward()
    without = {name for name, p in layer.named_parameters() if p.grad is None or not p.grad.any()}
    assert without == {"beta_key", "beta_value"}, "self-attention has one input"
    kinds = {s.name: (s.kind, s.range) for s in layout_of(layer)}
    assert kinds["in_proj_weight"] == ("fp8", "alpha") and kinds["out_proj.weight"] == ("fp8", "out_proj.alpha")


def test_dropout_widens_the_range_of_the_weights() -> None:
    assert prepare(attention(dropout=0.2)).beta_weights.item() == pytest.approx(1.25)


def test_off_is_the_float_module_on_its_fast_path_too() -> None:
    plain = attention(batch_first=True)
    layer = prepare(copy.deepcopy(plain), rounding="off")
    x = inputs(plain, True, False)[0]
    for training in (True, False):
        with torch.no_grad():
            assert torch.equal(layer.train(training)(x, x, x)[0], plain.train(training)(x, x, x)[0])


def test_is_causal_needs_its_mask() -> None:
    layer = prepare(attention())
    x = inputs(layer, True, False)[0]
    with pytest.raises(RuntimeError, match="give the mask too"):
        layer(x, x, x, is_causal=True)
    causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    assert torch.equal(layer(x, x, x, attn_mask=causal, is_causal=True)[0], layer(x, x, x, attn_mask=causal)[0])


@pytest.fixture
def encoder() -> nn.TransformerEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)


@pytest.mark.filterwarnings("ignore:.*nested tensors")  # of the float encoder's fast path
@pytest.mark.parametrize("skip", [(), nn.MultiheadAttention], ids=["all", "attention in float"])
def test_encoders_round_in_eval_mode_without_gradients(encoder: nn.TransformerEncoder, skip: Any) -> None:
    """There torch would hand the float weights to a fused kernel, and padded batches to nested tensors."""
    model = prepare(copy.deepcopy(encoder), skip=skip)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    hidden = torch.zeros(3, 5, dtype=torch.bool)
    hidden[0, 3:] = True
    model(x)
    model.eval()
    for mask in (None, hidden):
        seen = model(x, src_key_padding_mask=mask)
        with torch.no_grad():
            fast = model(x, src_key_padding_mask=mask)
            plain = encoder.eval()(x, src_key_padding_mask=mask)
        visible = torch.ones(3, 5, dtype=torch.bool) if mask is None else ~mask
        # in float attention torch has a fast path of its own: other sums, so a threshold may be crossed
        assert torch.equal(seen, fast) if skip == () else torch.allclose(seen[visible], fast[visible], atol=0.05)
        assert 1e-3 < (fast - plain)[visible].abs().max() < 0.5
    set_rounding(model, "off")
    torch.testing.assert_close(model(x), encoder(x), rtol=1e-5, atol=1e-5)


def test_restoring_an_encoder_gives_back_its_fast_path(encoder: nn.TransformerEncoder) -> None:
    model = restore(prepare(copy.deepcopy(encoder)))
    assert [(type(m), set(vars(m))) for m in model.modules()] == [(type(m), set(vars(m))) for m in encoder.modules()]
    assert model.layers[0].activation_relu_or_gelu == 1 and model.use_nested_tensor
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model.eval()(x), encoder.eval()(x))


def test_a_whole_transformer_trains() -> None:
    g = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = prepare(nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True))
    source, target = torch.randn(16, 5, 8, generator=g), torch.randn(16, 4, 8, generator=g)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        loss = (model(source, target) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_weights_of_another_dtype_are_refused_by_name() -> None:
    with pytest.raises(QuantizationError, match=r"in_proj_weight is torch\.float64"):
        prepare(attention().double())
