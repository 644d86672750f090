"""examples/flower-lora: adapters of a causal language model, plain and coded, in all dtypes, on tiny sizes."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("flwr", "transformers", "peft"):
    pytest.importorskip(package, reason='the example needs `pip install "fedfp8[flower]" transformers peft`')
FOLDER = Path(__file__).parents[1] / "examples" / "flower-lora"
TINY = {"hidden": 128, "layers": 1, "rank": 8, "sentences": 48, "num-rounds": 2, "lr": 0.03}
pytestmark = pytest.mark.filterwarnings("default")  # those of peft and transformers are theirs


@pytest.fixture(scope="module")
def app():
    """(compare.py, task.py) of the example."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield tuple(importlib.import_module(name) for name in ("compare", "lora_app.task"))
    finally:
        sys.path[:] = [path for path in sys.path if path != str(FOLDER)]
        for name in [n for n in sys.modules if n.partition(".")[0] in ("compare", "lora_app")]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("adapter", "dtype", "clients"),
    [("lora", "float32", 10), ("lora", "bfloat16", 2), ("lora", "float16", 2), ("dora", "float32", 2)],
)
def test_few_bytes_and_the_loss_of_the_plain_app(app, adapter: str, dtype: str, clients: int) -> None:
    compare, _ = app
    chosen = TINY | {"adapter": adapter, "dtype": dtype, "clients": clients}
    plain_bytes, plain = compare.run(**chosen, wire="plain")
    our_bytes, ours = compare.run(**chosen)
    assert ours[0] == plain[0] and plain[-1] < plain[0] - 0.1
    assert abs(ours[-1] - plain[-1]) < 0.2 * (plain[0] - plain[-1])
    fewer = 3 if dtype == "float16" else 6  # float16 arrays are half as large to begin with
    assert all(our_bytes[way] < plain_bytes[way] / fewer for way in plain_bytes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_only_adapters_travel_and_their_dtype_is_restored(app, dtype: str) -> None:
    _, task = app
    border = importlib.import_module("lora_app.border")
    model, start = task.network(settings(dtype=dtype))
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    record = border.to_record(start)
    assert record.keys() == start.keys() and all("lora_" in name for name in record)
    assert {array.dtype for array in record.values()} == {"float16" if dtype == "float16" else "float32"}
    assert {tensor.dtype for tensor in start.values()} == {getattr(torch, dtype)}
    task.train(model, task.sentences(0, 16), 1, 0.01, 0)
    moved = {name: tensor.clone() for name, tensor in task.get_peft_model_state_dict(model).items()}
    assert not all(torch.equal(moved[name], start[name]) for name in start)
    task.load(model, border.record_of(model).to_torch_state_dict())
    for name, tensor in task.get_peft_model_state_dict(model).items():
        assert tensor.dtype == getattr(torch, dtype) and torch.equal(tensor, moved[name]), name
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if not p.requires_grad)


def test_the_start_is_not_sent(app) -> None:
    """Every client can make it: the first message down is coded given it, and almost empty."""
    compare, task = app
    one = TINY | {"num-rounds": 1}
    sent, _ = compare.run(**one)
    weights = sum(tensor.numel() for tensor in task.network(settings())[1].values())
    assert 8 * sent["down"] / 2 < 4 * weights + 8 * 200 * 4  # vs. 32 bits; 200 bytes a tensor for headers
    assert sent["down"] < sent["up"]


def test_a_checkpoint(app, tmp_path: Path) -> None:
    """By the name of a folder, as one of the hub would be."""
    compare, task = app
    base = task.LlamaForCausalLM(
        task.LlamaConfig(
            vocab_size=task.WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
        )
    )
    base.save_pretrained(tmp_path)
    _, losses = compare.run(**TINY, checkpoint=str(tmp_path))
    assert losses[-1] < losses[0]
    model, _ = task.network(settings(checkpoint=str(tmp_path)))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.get_base_model().state_dict()[name], base.state_dict()[name])


def settings(**changes: Any) -> dict[str, Any]:
    return {"checkpoint": "", "adapter": "lora", "dtype": "float32"} | TINY | changes
