"""Prepared models under torch's own tools: compile, export, autocast, DistributedDataParallel, meta, TorchScript."""

import copy
import io
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import E4M3, Format, fake_quantize, quantize
from fedfp8.models import MODELS, build
from fedfp8.nn import FP8Layer, prepare, set_rounding, state_of

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")  # torch.export's own


class Mixed(nn.Module):
    """Convolutions down and up, attention, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv1d(2, 8, 4, stride=2, padding=1), nn.ConvTranspose1d(8, 8, 4, stride=2, padding=1)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.down(x).relu()).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.head(x).relu())


def mixed() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return prepare(Mixed())


def straight() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = {"down": nn.Conv1d(2, 8, 4, stride=2), "relu": nn.ReLU(), "up": nn.ConvTranspose1d(8, 8, 4, stride=2)}
        return prepare(nn.Sequential(OrderedDict(layers, flat=nn.Flatten(), head=nn.Linear(64, 8))))


def batch(seed: int = 0, n: int = 3) -> Tensor:
    return torch.randn(n, 2, 8, generator=torch.Generator().manual_seed(seed))


# the operators


@pytest.mark.parametrize("seed", [None, 5], ids=["nearest", "stochastic"])
def test_the_operators_pass_torchs_own_checks(seed: int | None) -> None:
    g = torch.Generator().manual_seed(0)
    for x in (
        torch.randn(3, 4, generator=g),
        torch.randn(2, 3, 4, 5, generator=g).to(memory_format=torch.channels_last),
        torch.randn(3, 8, generator=g)[:, ::2],
        torch.randn(3, 1, generator=g).expand(3, 4),
    ):
        for value in (0.8, 0.0):
            x, alpha = x.detach().requires_grad_(), torch.tensor(value, requires_grad=True)
            arguments = (x, alpha, 4, 3, seed)
            torch.library.opcheck(torch.ops.fedfp8.fake_quantize.default, arguments)
            with torch.no_grad():
                torch.library.opcheck(torch.ops.fedfp8.fake_quantize_backward.default, (x.detach(), *arguments))
    torch.library.opcheck(torch.ops.fedfp8.settle.default, (alpha, x.detach(), 0.1, True, "beta"))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_operator_is_the_function_bit_for_bit(rounding: str, dtype: torch.dtype) -> None:
    x = (torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)).transpose(0, 2).requires_grad_()
    alpha = torch.tensor(0.9, requires_grad=True)
    compiled = torch.compile(fake_quantize, fullgraph=True, backend="aot_eager")
    results = []
    for function in (fake_quantize, compiled):
        q = function(x, alpha, E4M3, rounding=rounding, seed=7)
        results.append((q, *torch.autograd.grad(q, (x, alpha), torch.ones_like(q) / 3)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    assert torch.equal(compiled(x, 0.9, E4M3, rounding=rounding, seed=7), results[0][0])


# compile


@pytest.mark.parametrize("make, backend", [(mixed, "eager"), (straight, "aot_eager")])
def test_a_compiled_model_trains_to_the_same_bits(make: Callable[[], nn.Module], backend: str) -> None:
    """Ranges set by the first batch, two passes before one backward, a range that an optimizer pushed below zero.

    (aot_eager adds the gradients of a layer that is used twice in another order.)
    """
    plain, model = make(), make()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, model)]
    for i in range(4):
        if i == 2:
            for m in (plain, model):
                m.get_submodule("head").alpha.data.fill_(-1.0)
        for forward, optimizer in zip((plain, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            (forward(batch(i)).square().mean() + forward(batch(i + 9)).square().mean()).backward()
            optimizer.step()
        assert all(
            (p.grad is None) == (q.grad is None) for p, q in zip(plain.parameters(), model.parameters(), strict=True)
        )
        assert state_of(model).fingerprint == state_of(plain).fingerprint, i
    assert model.down.beta.item() > 0 and model.down.beta.grad is None, "the first layer's input range is fixed"
    plain.eval(), model.eval()
    with torch.no_grad():
        assert torch.equal(compiled(batch(5)), plain(batch(5)))


def test_training_compiles_once() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph

    model = mixed()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for i in range(4):
        compiled(batch(i)).sum().backward()
    assert len(graphs) == 1
    set_rounding(model, "off")
    compiled(batch())
    assert len(graphs) == 2, "the rounding is part of the graph"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in ("kwt1", "resnet18") else []) for n in MODELS]
)
def test_every_network_compiles_whole(name: str) -> None:
    model = prepare(build(name, 4, seed=0))
    x = torch.randn(2, *MODELS[name].input_shape, generator=torch.Generator().manual_seed(0))
    model(x)
    expected = copy.deepcopy(model)(x)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)


@pytest.mark.slow
def test_a_step_compiled_with_inductor_is_the_eager_step() -> None:
    """Real code generation: sums in another order, so values next to a threshold may round the other way."""
    plain, model = mixed(), mixed()
    plain(batch()), model(batch())
    compiled = torch.compile(model, fullgraph=True)
    for m in (plain, compiled):
        m(batch()).square().mean().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            assert (p.grad - q.grad).abs().max() <= 0.02 * p.grad.abs().max() + 1e-6


def test_stochastic_training_is_refused_and_eval_is_not() -> None:
    model = mixed()
    model(batch())
    set_rounding(model, "stochastic", seed=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="stochastic rounding in training mode cannot be compiled"):
        compiled(batch())
    torch.compiler.reset()
    model.eval()
    assert torch.equal(compiled(batch()), model(batch()))


def test_errors_in_a_compiled_model_name_the_range() -> None:
    model = mixed()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(QuantizationError, match=r"a training batch seen by 'down\.beta' holds NaN"):
        compiled(batch() * float("nan"))
    compiled(batch())
    model.head.alpha.data.fill_(float("inf"))
    with pytest.raises(QuantizationError, match=r"range 'head\.alpha' is inf"):
        compiled(batch())


# export, meta, TorchScript


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_an_exported_model_computes_the_same_and_can_be_saved(training: bool) -> None:
    model = mixed()
    model(batch())
    model.train(training)
    tokens = torch.export.Dim("n", min=2, max=64)
    exported = torch.export.export(model, (batch(),), dynamic_shapes=({0: tokens},))
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    for program in (exported, exported.run_decompositions(), torch.export.load(buffer)):
        assert torch.equal(program.module()(batch(1, n=5)), model(batch(1, n=5)))
    called = [str(node.target) for node in exported.graph.nodes]
    operands = sum(len(m.ranges()) for m in model.modules() if isinstance(m, FP8Layer))
    # the head runs twice (two more), and self-attention leaves two input ranges unused (two fewer)
    assert called.count("fedfp8.fake_quantize.default") == operands + 2 - 2


def test_shapes_on_the_meta_device() -> None:
    model = mixed().to("meta")
    out = model(batch().to("meta"))
    assert out.is_meta and out.shape == (3, 8, 8)
    out.sum().backward()
    assert model.head.weight.grad is not None and model.head.weight.grad.is_meta


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_clearly() -> None:
    model = nn.Sequential(prepare(nn.Linear(2, 2)), nn.ReLU())
    for make in (lambda: torch.jit.script(model), lambda: torch.jit.trace(model, torch.ones(1, 2))):
        with pytest.raises(QuantizationError, match=r"cannot become TorchScript: use torch\.export.*restore"):
            make()
    scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(QuantizationError, match=r"0 is TorchScript.*give the nn\.Module that it was made from"):
        prepare(scripted)
    assert type(scripted[1]) is nn.Linear and "1.alpha" in prepare(scripted, skip="0").state_dict()


# autocast

AUTOCAST = """
import torch, sys
from torch import nn
from fedfp8.nn import prepare, set_rounding
dtype = getattr(torch, sys.argv[1])
torch.manual_seed(0)
x, y = torch.randn(64, 2, 8), torch.randint(0, 4, (64,))
y = (x[:, 0, :4].argmax(1))
def train(quantized, compiled):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv1d(2, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 4))
    prepare(model, rounding="nearest" if quantized else "off")
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        with torch.autocast("cpu", dtype):
            out = forward(x)
            loss = nn.functional.cross_entropy(out.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert out.dtype == dtype, out.dtype
    assert all(p.dtype == torch.float32 and p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
    return loss.item()
for compiled in (False, True):
    loss = train(True, compiled)
    assert loss < 0.3, loss
print("trained")
"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast_trains(dtype: str) -> None:
    """In a process of its own: products in these types end some CPUs with an illegal instruction."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # without the instructions that some CPUs only announce
    command = [sys.executable, "-c", AUTOCAST, dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode < 0:
        pytest.skip(f"this CPU ends a {dtype} product with signal {-done.returncode}")
    assert done.returncode == 0 and "trained" in done.stdout, done.stderr


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_in_16_bits_is_rounding_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for format in (E4M3, Format(3, 2)):
        assert torch.equal(quantize(x, 1.5, format), quantize(x.float(), 1.5, format).to(dtype))


# DistributedDataParallel

DDP = """
import sys, torch
from torch import nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from fedfp8.nn import prepare, state_of
rank, world, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=world)
torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(8, 6, generator=g), torch.randn(8, 3, generator=g)
x[7] *= 3  # the largest values are on the last process only
def make():
    torch.manual_seed(3 + rank)  # DDP sends rank 0's weights
    return prepare(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
model = make()
wrapped = DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
share = slice(rank * 8 // world, (rank + 1) * 8 // world)
for _ in range(3):
    loss = (wrapped(x[share]) - y[share]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert model[0].beta.item() == x.abs().max().item()
torch.save(dict(state_of(model)), f"{place}/{rank}.pt")
dist.destroy_process_group()
"""


def test_data_parallel_processes_agree_and_do_what_one_does(tmp_path: Path) -> None:
    """Equal ranges everywhere although each process saw other data; and the mean of gradients is the gradient."""
    states = {}
    for world in (1, 2):
        place = tmp_path / str(world)
        place.mkdir()
        started = [
            subprocess.Popen([sys.executable, "-c", DDP, str(rank), str(world), str(place)], stderr=subprocess.PIPE)
            for rank in range(world)
        ]
        for process in started:
            error = process.communicate(timeout=600)[1].decode()
            assert process.returncode == 0, error
        states[world] = [torch.load(place / f"{rank}.pt", weights_only=True) for rank in range(world)]
    (one,), (first, second) = states[1], states[2]
    assert all(torch.equal(first[n], second[n]) for n in first)
    for name, value in one.items():
        # sums in another order; a value next to a threshold may round the other way
        torch.testing.assert_close(first[name], value, rtol=1e-3, atol=1e-3, msg=name)
    assert set(one) == {f"{i}.{n}" for i in (0, 2) for n in ("weight", "bias", "alpha", "beta")}
