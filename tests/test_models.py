"""The networks: sizes, shapes, the rearrangements that must change nothing, gradients, and learning in FP8."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from fedfp8.errors import ConfigError
from fedfp8.models import MODELS, build, table
from fedfp8.nn import parameter_groups, prepare


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def example(name: str, batch: int = 2) -> Tensor:
    return torch.randn(batch, *MODELS[name].input_shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "name, classes, options, parameters",
    [
        ("lenet", 10, {}, 797_962),
        ("lenet", 100, {}, 815_332),
        ("resnet18", 10, {}, 11_173_962),
        ("resnet18", 10, {"stem": "imagenet"}, 11_181_642),
        ("resnet18", 100, {}, 11_220_132),
        ("matchboxnet", 30, {}, 77_214),  # the original's "77K", Speech Commands v1
        ("matchboxnet", 35, {}, 77_859),
        ("kwt1", 12, {}, 607_308),  # the original's "607K", 12 classes
        ("kwt1", 35, {}, 608_803),
        ("digits", 10, {}, 38_282),
    ],
)
def test_parameter_counts(name: str, classes: int, options: dict[str, str], parameters: int) -> None:
    with torch.device("meta"):
        assert count(build(name, classes, **options)) == parameters


def test_the_table_counts_what_is_built() -> None:
    rows = {row["model"]: row for row in table()}
    assert list(rows) == list(MODELS)
    with torch.device("meta"):
        assert all(row["parameters"] == count(build(name)) for name, row in rows.items())
    assert rows["matchboxnet"]["paper"] == "350K" and rows["kwt1"]["paper"] == "450K"


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_classes(name: str) -> None:
    for classes in (7, None):
        assert build(name, classes, seed=0)(example(name)).shape == (2, classes or MODELS[name].num_classes)


def test_the_other_stem_takes_the_same_images() -> None:
    assert build("resnet18", stem="imagenet", seed=0)(example("resnet18")).shape == (2, 10)


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_fixes_the_weights_and_leaves_the_global_generator_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    a, b, c = (build(name, 5, seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert any(not torch.equal(a[k], c[k]) for k in a)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: build("vgg"), "unknown model 'vgg'; choose one of digits, lenet"),
        (lambda: build("lenet", stem="cifar"), "model 'lenet' has no option stem; it has in_channels"),
        (lambda: build("resnet18", stem="big"), "stem 'big'; choose 'cifar'"),
        (lambda: build("lenet", 0), "num_classes is 0"),
    ],
)
def test_refusals(call: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_lenet_pools_before_relu_and_nothing_changes() -> None:
    model, x = build("lenet", seed=0), example("lenet", 4)
    y = F.max_pool2d(F.relu(model.conv1(x)), 2)
    y = F.max_pool2d(F.relu(model.conv2(y)), 2)
    y = model.fc3(F.relu(model.fc2(F.relu(model.fc1(y.flatten(1))))))
    assert torch.equal(model(x), y)


def test_kwt_last_block_computes_the_class_token_only_and_nothing_changes() -> None:
    model, x = build("kwt1", seed=0).double(), example("kwt1").double()
    for p in model.parameters():
        p.data.mul_(3)  # away from the nearly linear start
    y = model.embed(x.transpose(1, 2))
    y = torch.cat([model.token.expand(2, -1, -1), y], 1) + model.position
    for block in model.blocks:
        y = block(y, y.shape[1])
    # The same sums over matrices of other shapes: rounding only, in float64 twelve blocks of 1e3 sums of 1e-16 each
    torch.testing.assert_close(model(x), model.head(y[:, 0]), rtol=1e-9, atol=1e-9)


def test_matchboxnet_convolves_sounds_as_images_and_nothing_changes() -> None:
    """The original's one-dimensional convolutions, dilated in the epilogue, with the same weights."""
    model, x = build("matchboxnet", seed=0).double(), example("matchboxnet").double()

    def separable(y: Tensor, layers: nn.Sequential, dilation: int = 1) -> Tensor:
        depthwise, pointwise, norm = layers
        size = depthwise.weight.shape[2]
        kernels, padding = depthwise.weight.squeeze(3), dilation * (size - 1) // 2
        y = F.conv1d(y, kernels, padding=padding, dilation=dilation, groups=len(kernels))
        return norm(F.conv1d(y, pointwise.weight.squeeze(3)))

    y = F.relu(separable(x, model.prologue[0]))
    for block in model.blocks:
        pointwise, norm = block.shortcut
        y = F.relu(separable(y, block.main) + norm(F.conv1d(y, pointwise.weight.squeeze(3))))
    y = F.relu(separable(y, model.epilogue[0], dilation=2))
    pointwise, norm = model.epilogue[2]
    y = model.classifier(F.relu(norm(F.conv1d(y, pointwise.weight.squeeze(3)))).mean(2))
    # The same sums in another order: rounding only, in float64
    torch.testing.assert_close(model(x), y, rtol=1e-9, atol=1e-9)
    assert torch.equal(model(x[:, :, :101]), model(F.pad(x[:, :, :101], (0, 1))))


def first_input_range(model: nn.Module) -> str:
    return next(name for name, _ in model.named_parameters() if name.endswith("beta"))


@pytest.mark.parametrize("fp8", [False, True], ids=["float", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_receives_a_finite_non_zero_gradient(name: str, fp8: bool) -> None:
    model = build(name, 10, seed=0)
    if fp8:
        prepare(model)
    fixed = first_input_range(model) if fp8 else None
    x, y = example(name, 8), torch.arange(8)
    F.cross_entropy(model(x), y).backward()
    if fp8:  # ranges that the first batch set clip nothing; shrink them so that clipping is exercised too
        for p in model.parameters():
            p.grad = None
            if p.dim() == 0:
                p.data.mul_(0.9)
        F.cross_entropy(model(x), y).backward()
    for parameter, p in model.named_parameters():
        if parameter == fixed:
            assert p.grad is None, "the first layer's input range is fixed"
            continue
        assert p.grad is not None, parameter
        assert torch.isfinite(p.grad).all() and p.grad.abs().max() > 0, parameter


@pytest.mark.parametrize("name", MODELS)
def test_prepared_networks_are_deterministic_in_eval(name: str) -> None:
    model = prepare(build(name, 10, seed=0), rounding="stochastic")
    x = example(name)
    model(x)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), model(x))


# Learning: scikit-learn's digits, one recipe for the float network and its FP8 twin


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images, dtype=torch.float32)[order] / 8 - 1, torch.tensor(data.target)[order]


def train(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, steps: int, batch: int) -> Tensor:
    """Which of the last 597 images are right after `steps` on the first 1,200, learning rate up and down again."""
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], total_steps=steps)
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(0, 1200, (batch,), generator=g)
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        rate.step()
    model.eval()
    with torch.no_grad():
        return model(x[1200:]).argmax(1) == y[1200:]


def right_answers(name: str) -> list[Tensor]:
    """Of the float network and of its FP8 twin."""
    images, labels = digits()
    results = []
    for fp8 in (False, True):
        if name == "lenet":
            x, options = F.interpolate(images[:, None], size=(32, 32), mode="bilinear"), {"in_channels": 1}
        elif name == "kwt1":
            x, options = images, {"features": 8, "frames": 8}  # rows of pixels as frames
        else:
            x, options = images[:, None], {}
        model = build(name, 10, seed=0, **options)
        if fp8:
            prepare(model, input_range=1.0)
        if name == "kwt1":
            optimizer = torch.optim.AdamW(parameter_groups(model, lr=3e-3, weight_decay=0.1))
            results.append(train(model, x, labels, optimizer, 70, 64))
        else:
            optimizer = torch.optim.SGD(parameter_groups(model, lr=0.1), momentum=0.8)
            results.append(train(model, x, labels, optimizer, 80, 24))
    return results


@pytest.mark.parametrize("name", ["digits", "lenet", "kwt1"])
def test_fp8_networks_learn_no_worse_than_float(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both learn, which is beyond any doubt at half of the answers right: guesses are at 10 % +- 1.2 %. And of n images
    that only one of the two gets right, an equal FP8 network gets n/2 +- sqrt(n)/2: four deviations are allowed
    (McNemar), so the verdict does not hang on the last bits of a CPU's sums. Three points less would show."""
    monkeypatch.setattr("fedfp8.models.kwt.DEPTH", 4)  # of 12 blocks, which are all alike
    plain, fp8 = right_answers(name)
    only_plain, only_fp8 = int((plain & ~fp8).sum()), int((fp8 & ~plain).sum())
    assert plain.double().mean() > 0.5 and fp8.double().mean() > 0.5
    assert only_plain - only_fp8 <= 4 * (only_plain + only_fp8) ** 0.5, (only_plain, only_fp8)
