"""`restore`: the plain model again, with what it has learnt."""

import copy

import pytest
import torch
from torch import nn

import fedfp8
from fedfp8.errors import QuantizationError
from fedfp8.fp8 import quantize
from fedfp8.models import MODELS, build
from fedfp8.nn import prepare, report, restore, set_rounding


class Everything(nn.Module):
    """One of each kind of layer, tied weights, and some that stay in float."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.conv = nn.Sequential(nn.Conv1d(6, 6, 3), nn.ConvTranspose1d(6, 6, 3))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.product = fedfp8.modules.MatMul()
        self.head = nn.Linear(6, 5)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        x = self.rnn(self.attention(x, x, x)[0])[0]
        return self.head(self.product(x.softmax(-1), torch.eye(6)))


def trained(model: nn.Module, batch: torch.Tensor) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
    return model


def everything() -> tuple[nn.Module, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Everything(), torch.randint(0, 5, (3, 7))


def shape_of(model: nn.Module) -> list[object]:
    return [(n, type(m), set(vars(m)), list(m._parameters), list(m._modules)) for n, m in model.named_modules()]


def test_in_place_with_the_original_classes_keys_and_attributes() -> None:
    plain, batch = everything()
    model = trained(prepare(copy.deepcopy(plain)), batch)
    weights = {n: (p, p.detach().clone()) for n, p in model.named_parameters() if n in plain.state_dict()}
    assert fedfp8.restore(model) is model
    assert shape_of(model) == shape_of(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, p in model.named_parameters():
        kept, value = weights[name]
        assert p is kept and torch.equal(p, value), "the trained weights, the same objects"
    assert model.head.weight is model.embed.weight
    plain.load_state_dict(model.state_dict())  # strict
    assert torch.equal(plain.eval()(batch), model.eval()(batch))


def test_rounded_weights_are_those_the_forward_pass_has_used() -> None:
    plain, batch = everything()
    model = trained(prepare(plain), batch)
    expected = {"head": quantize(model.head.weight, model.head.alpha), "bias": model.head.bias.detach().clone()}
    expected |= {"in": quantize(model.attention.in_proj_weight, model.attention.alpha)}
    recurrent = model.rnn.weight_hh_l0.detach().clone()
    model.conv[0].alpha.data.fill_(-1.0)  # as an optimizer may leave it: rounded with its floor
    restore(model, rounded=True)
    assert torch.equal(model.head.weight, expected["head"]) and torch.equal(model.embed.weight, expected["head"])
    assert torch.equal(model.head.bias, expected["bias"]) and torch.equal(
        model.attention.in_proj_weight, expected["in"]
    )
    assert torch.equal(model.rnn.weight_hh_l0, recurrent)
    assert model.conv[0].weight.abs().max() <= 2**-6


@pytest.mark.parametrize("name", MODELS)
def test_every_network_comes_back(name: str) -> None:
    model = build(name, 4, seed=0)
    before, keys = shape_of(model), list(model.state_dict())
    restore(prepare(model))
    assert shape_of(model) == before and list(model.state_dict()) == keys


def test_rounding_stays_close_and_prepare_can_follow() -> None:
    model = prepare(build("digits", seed=0))
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model(x)
    twin = restore(copy.deepcopy(model), rounded=True)
    set_rounding(model, "off")
    assert 0 < (twin(x) - model(x)).abs().max() < 0.1
    assert report(prepare(twin)) == report(model)


def test_a_plain_model_is_returned_as_it_is() -> None:
    model = build("digits", seed=0)
    assert restore(model) is model
    with pytest.raises(QuantizationError, match="not prepared"):
        restore(model, rounded=True)
