"""`prepare` on whole models: what is swapped, what is refused, and what must go on working afterwards."""

import copy
import io
import logging
import pickle

import pytest
import safetensors.torch
import torch
from torch import nn

import fedfp8
from fedfp8.errors import QuantizationError
from fedfp8.fp8 import E5M2
from fedfp8.models import build
from fedfp8.modules import MatMul
from fedfp8.nn import FP8Layer, QuantLinear, float_state_dict, parameter_groups, prepare, report, set_rounding, state_of


class Tied(nn.Module):
    """A decoder that shares its weight with the encoder's last layer, and one module used under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.second(self.first(x)).relu())


class OwnLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class OwnAttention(nn.MultiheadAttention):
    pass


class OwnEncoderLayer(nn.TransformerEncoderLayer):
    pass


def with_alpha() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.alpha = 0.5
    return layer


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10), nn.ReLU(), nn.Linear(10, 3))


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def swapped(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, FP8Layer)]


def test_in_place_with_the_same_parameters_under_the_same_names() -> None:
    model = small()
    before = dict(model.named_parameters())
    returned = fedfp8.prepare(model)
    assert returned is model and swapped(model) == ["0", "3", "5"]
    after = dict(model.named_parameters())
    assert all(after[name] is p for name, p in before.items())
    ranges = set(after) - set(before)
    assert ranges == {f"{n}.{r}" for n in ("0", "3", "5") for r in ("alpha", "beta")}
    assert all(after[r].shape == () and after[r].dtype == torch.float32 for r in ranges)
    for name in ("0", "3", "5"):
        assert after[f"{name}.alpha"].item() == before[f"{name}.weight"].abs().max().item()
        assert after[f"{name}.beta"].item() == 0.0
    assert isinstance(model[3], nn.Linear) and "format=E4M3" in repr(model)


def test_a_weight_of_zeros_gets_a_positive_range_and_can_learn() -> None:
    layer = nn.Linear(16, 4)
    nn.init.zeros_(layer.weight)
    prepare(layer)
    assert layer.alpha.item() == 0.25
    layer(torch.ones(2, 16)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((4, 16), 2.0))


def test_says_what_it_swapped_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fedfp8"):
        model = prepare(nn.Sequential(nn.Linear(4, 4), OwnLinear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 2)), skip="3")
    text = "E4M3: 1 layers swapped (16 weights), 3 in float: 1 (OwnLinear), 2 (LSTM), 3 (Linear)"
    assert report(model) == text and text in caplog.text


@pytest.mark.parametrize(
    "skip, left",
    [
        ("5", ["5"]),
        (["0", "[35]"][1], ["3", "5"]),
        (nn.Conv2d, ["0"]),
        ([nn.Conv2d, "3"], ["0", "3"]),
        (lambda name, module: getattr(module, "out_features", 0) == 3, ["5"]),
    ],
    ids=["name", "pattern", "type", "several", "predicate"],
)
def test_skip(skip: object, left: list[str]) -> None:
    model = prepare(small(), skip=skip)
    assert swapped(model) == [n for n in ("0", "3", "5") if n not in left]


def test_skipping_a_module_skips_what_it_contains() -> None:
    model = prepare(nn.Sequential(small(), nn.Linear(3, 3)), skip="0")
    assert swapped(model) == ["1"]


def test_format_and_rounding_reach_every_layer() -> None:
    model = prepare(small(), E5M2, rounding="stochastic")
    assert {(m.format, m.rounding) for m in model.modules() if isinstance(m, FP8Layer)} == {(E5M2, "stochastic")}
    assert prepare(small(), "E5M2")[0].format == E5M2


def test_what_stays_in_float_is_named() -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(4, 4),
            "rnn": nn.GRU(4, 4),
            "cell": nn.LSTMCell(4, 4),
            "attention": nn.MultiheadAttention(4, 1),
            "head": nn.Linear(4, 2),
        }
    )
    prepare(model, skip="attention")
    assert report(model).endswith(
        "4 in float: embed (Embedding), rnn (GRU), cell (LSTMCell), attention (MultiheadAttention)"
    )


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: prepare(prepare(small())), "already prepared"),
        (lambda: prepare(small(), skip="fc"), "skip pattern 'fc' matches no module; the model has: 0, 1"),
        (lambda: prepare(small(), skip=[3]), "skip holds 3"),
        (lambda: prepare(nn.Sequential(nn.ReLU())), "nothing to prepare"),
        (lambda: prepare(nn.Sequential(OwnLinear(2, 2))), "subclasses are not swapped"),
        (lambda: prepare(small(), rounding="up"), "rounding 'up'; choose one of nearest, stochastic, off"),
        (lambda: prepare(small(), input_range=-1.0), "input_range is -1.0"),
        (lambda: prepare(small().double()), "float64"),
        (
            lambda: prepare(nn.Sequential(nn.Linear(2, 2), OwnAttention(4, 1))),
            "1 is a OwnAttention, a subclass of nn.Mult",
        ),
        (lambda: prepare(OwnEncoderLayer(4, 1)), "a subclass of nn.TransformerEncoderLayer.*half quantized"),
        (lambda: prepare(small(), "FP8"), "format 'FP8' is not of the form 'E4M3'"),
        (lambda: prepare(small(), "E9M9"), r"Format\(9, 9\)"),
        (lambda: prepare(small(), 8), "format is 8; give a Format or its name"),
        (lambda: prepare(nn.Sequential(with_alpha())), "0 has an attribute 'alpha', a name that its FP8 twin uses"),
        (lambda: set_rounding(small(), "off"), "not prepared"),
        (lambda: set_rounding(prepare(small()), "up"), "rounding 'up'"),
    ],
)
def test_refusals_say_what_to_do(call: object, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        call()


@pytest.mark.parametrize(
    "bad, options",
    [
        (OwnAttention(4, 1), {}),
        (prepare(nn.Linear(2, 2)), {}),
        (nn.Linear(2, 2).double(), {}),
        (with_alpha(), {}),
        (nn.ReLU(), {"format": "E9M9"}),
        (nn.ReLU(), {"format": "FP8"}),
        (nn.ReLU(), {"format": 8}),
        (nn.ReLU(), {"skip": "none"}),
    ],
)
def test_a_refused_model_is_left_as_it_was(bad: nn.Module, options: dict[str, object]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(1, 1, 1), nn.TransformerEncoderLayer(4, 1), bad)
    before = [(type(m), set(vars(m)), set(m._parameters)) for m in model.modules()]
    with pytest.raises(QuantizationError):
        prepare(model, **options)
    assert [(type(m), set(vars(m)), set(m._parameters)) for m in model.modules()] == before


def test_a_weight_with_nan_is_refused_by_name() -> None:
    model = small()
    model[3].weight.data[0, 0] = float("nan")
    with pytest.raises(QuantizationError, match="layer '3' holds NaN"):
        prepare(model)


def test_attention_can_be_left_in_float() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 1))
    assert swapped(prepare(model, skip=nn.MultiheadAttention)) == ["0"]


def test_tied_weights_stay_tied_and_share_their_range() -> None:
    model = prepare(Tied())
    assert model.first.weight is model.second.weight and model.first.alpha is model.second.alpha
    assert model.first.beta is not model.second.beta and model.again is model.first
    model(torch.randn(3, 6, generator=torch.Generator().manual_seed(0))).sum().backward()
    assert len(list(model.parameters())) == 6  # weight, 2 biases, alpha, 2 betas


@pytest.mark.parametrize("name", ["digits", "matchboxnet", "kwt1"])
def test_deepcopy_and_pickle_give_independent_equal_twins(name: str) -> None:
    model = prepare(build(name, 4, seed=0))
    x = torch.randn(2, *fedfp8.models.MODELS[name].input_shape, generator=torch.Generator().manual_seed(1))
    model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))
        next(twin.parameters()).data.add_(1)
        assert not torch.equal(twin(x), model(x))


def test_state_dict_round_trips_through_torch_and_safetensors(tmp_path: object) -> None:
    model = prepare(small(), input_range=3.0)
    model(batch())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "m.safetensors")
    for state in (torch.load(buffer, weights_only=True), safetensors.torch.load_file(tmp_path / "m.safetensors")):
        twin = prepare(small())
        twin.load_state_dict(state)
        assert torch.equal(twin.eval()(batch(1)), model.eval()(batch(1)))


def test_float_checkpoints_load_into_prepared_models_and_back() -> None:
    plain = small()
    with torch.no_grad():
        plain[3].weight.mul_(7)
    model = prepare(small(), input_range=3.0)
    model.load_state_dict(plain.state_dict())  # strict
    assert model[3].alpha.item() == plain[3].weight.abs().max().item(), "alpha follows the loaded weight"
    assert model[0].beta.item() == 3.0
    back = small()
    back.load_state_dict(float_state_dict(model))  # strict
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), plain.parameters(), strict=True))


def test_a_checkpoint_without_a_weight_is_still_an_error() -> None:
    state = small().state_dict()
    del state["3.weight"]
    with pytest.raises(RuntimeError, match=r'"3\.weight", "3\.alpha"'):
        prepare(small()).load_state_dict(state)


def test_to_moves_ranges_along() -> None:
    model = prepare(small()).to("meta")
    assert all(p.is_meta for p in model.parameters())
    half = prepare(nn.Linear(3, 3)).to(torch.float64)
    assert half.alpha.dtype == torch.float64 and half(torch.ones(1, 3, dtype=torch.float64)).dtype == torch.float64


def test_parameter_groups_keep_decay_off_the_ranges() -> None:
    model = prepare(small())
    weights, ranges = parameter_groups(model, lr=0.1, weight_decay=0.5, range_lr=0.01)
    assert (weights["lr"], weights["weight_decay"]) == (0.1, 0.5)
    assert (ranges["lr"], ranges["weight_decay"]) == (0.01, 0.0)
    assert len(weights["params"]) == 6 and len(ranges["params"]) == 6
    assert parameter_groups(model, lr=0.1)[1]["lr"] == 0.1
    assert len(parameter_groups(small(), lr=0.1)) == 1
    assert len(parameter_groups(prepare(Tied()), lr=0.1)[1]["params"]) == 3, "a shared range is listed once"

    model(batch())
    before = [r.item() for r in ranges["params"]]
    optimizer = torch.optim.SGD([weights, ranges])
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert [r.item() for r in ranges["params"]] == before


def test_matmul_modules_are_found() -> None:
    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = MatMul()
            self.head = nn.Linear(3, 2)

    model = prepare(Score(), input_range=4.0)
    names = [n for n, _ in model.named_parameters()]
    assert names == ["product.beta_left", "product.beta_right", "head.weight", "head.bias", "head.alpha", "head.beta"]
    assert model.head.beta.item() == 4.0, "the first layer with a weight"
    assert type(model.head) is QuantLinear


def test_checkpointing_activations_gives_the_same_gradients() -> None:
    model = prepare(small())
    model(batch())

    def gradients(forward: object) -> list[torch.Tensor]:
        model.zero_grad()
        forward(batch(2)).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients(model)
    again = gradients(lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False))
    assert len(plain) == len(again) and all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_ranges_that_follow_their_weights_clip_nothing(compiled: bool) -> None:
    """Adam moves a learned range by its whole rate in every step, whatever the gradient's size, and a range that falls
    takes its weights with it; the largest magnitude is not learned and covers them at any time."""
    torch.manual_seed(0)
    model = prepare(small(), ranges="largest")
    learned = prepare(small())
    for other in (model, learned):
        forward = torch.compile(other, fullgraph=True, backend="eager") if compiled else other
        optimizer = torch.optim.AdamW(parameter_groups(other, lr=0.01))
        for _ in range(20):
            optimizer.zero_grad()
            forward(batch()).square().mean().backward()
            optimizer.step()
    for layer in (m for m in model.modules() if isinstance(m, FP8Layer)):
        for name, weight in layer.weights().items():
            assert getattr(layer, name).grad is None
            assert getattr(layer, name).item() != weight.abs().max().item(), "the last step has moved the weights"
    state = state_of(model)
    for spec in state.layout:
        if spec.kind == "fp8":
            assert spec.range is not None and float(state[spec.range]) == state.largest(spec.name), spec.name
    moved = state_of(learned)
    assert any(moved.largest(s.name) > float(moved[s.range]) for s in moved.layout if s.kind == "fp8" and s.range)

    with pytest.raises(QuantizationError, match="ranges is 'max'; choose one of learned, largest"):
        prepare(small(), ranges="max")


@pytest.mark.parametrize("compiled", [False, True])
def test_ranges_that_follow_their_batches_clip_nothing(compiled: bool) -> None:
    """Activations grow tenfold while a transformer learns, and Adam moves a range by its rate in every step: KWT-1's
    keys were cut by a third. The first layer's input, which needs no gradient, keeps its range."""
    torch.manual_seed(0)
    model = prepare(small(), ranges="largest", input_range=4.0)
    first, *others = layers = [m for m in model.modules() if isinstance(m, FP8Layer)]
    largest: dict[FP8Layer, float] = {}
    for layer in layers:
        layer.register_forward_pre_hook(lambda m, x: largest.update({m: x[0].abs().max().item()}))
    forward = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    for scale in (1.0, 30.0, 0.1):
        forward(scale * batch()).square().sum().backward()
        model(scale * batch())  # the same batch once more, for the hooks: the same ranges
        assert [m.beta.item() for m in others] == [largest[m] for m in others]
        assert [m.beta.grad for m in layers] == [None] * 3 and first.beta.item() == 4
    with torch.no_grad():
        for p in (p for name, p in model.named_parameters() if name.endswith("bias")):
            p.zero_()
    kept = [m.beta.item() for m in layers]
    forward(torch.zeros_like(batch()))
    model.eval()(100 * batch())
    assert [m.beta.item() for m in layers] == kept, "zeros say nothing, and evaluation changes nothing"
    model.train()
    if not compiled:
        with torch.no_grad():
            first.weight.fill_(float("nan"))
        with pytest.raises(QuantizationError, match="NaN or Inf"):
            model(batch())
