"""Model, adapters, data and training: nothing here knows of Flower or of fedfp8.

The language is made up, so that nothing is downloaded: each of 64 words has four successors, of known probabilities.
Its entropy, `floor`, is the loss of a model that has learned all there is to learn.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

WORDS, LENGTH = 64, 32
CHANCES = torch.tensor([0.5, 0.25, 0.15, 0.1])
floor = float(-(CHANCES * CHANCES.log()).sum())
Adapters = dict[str, torch.Tensor]


@functools.cache
def _build(
    checkpoint: str, hidden: int, layers: int, adapter: str, rank: int, dtype: str
) -> tuple[PeftModel, Adapters]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if checkpoint:
            base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        else:
            sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
            base = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes, **heads))
        torch.manual_seed(0)  # a checkpoint may have drawn some numbers, or none
        chosen = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, use_dora=adapter == "dora")
        model = get_peft_model(base, chosen)
    _cast(model, getattr(torch, dtype))
    return model, {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}


def network(settings: Mapping[str, Any]) -> tuple[PeftModel, Adapters]:
    """(the model, its adapters as they start out), equal wherever it is called; built once a process."""
    names = ("checkpoint", "hidden", "layers", "adapter", "rank", "dtype")
    return _build(*(settings[name] for name in names))


def load(model: PeftModel, adapters: Adapters) -> None:
    """Put adapters into the model, which restores their dtype."""
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    set_peft_model_state_dict(model, adapters)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == dtypes


def sentences(seed: int, count: int) -> torch.Tensor:
    """`count` sentences of the language, drawn with `seed`."""
    successors = torch.rand(WORDS, WORDS, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :4]
    draw = torch.Generator().manual_seed(seed)
    words = [torch.randint(WORDS, (count,), generator=draw)]
    for _ in range(LENGTH - 1):
        choice = torch.multinomial(CHANCES, count, replacement=True, generator=draw)
        words.append(successors[words[-1], choice])
    return torch.stack(words, 1)


def train(model: PeftModel, x: torch.Tensor, epochs: int, lr: float, seed: int) -> float:
    """Train the adapters in float32, as peft does by default: the steps are too small for half precision."""
    kept = next(p.dtype for p in model.parameters() if p.requires_grad)
    _cast(model, torch.float32)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    order = torch.Generator().manual_seed(seed)
    model.train()
    loss = torch.zeros(())
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=order).split(16):
            optimizer.zero_grad()
            loss = model(input_ids=x[batch], labels=x[batch]).loss
            loss.backward()
            optimizer.step()
    _cast(model, kept)
    return loss.item()


@torch.no_grad()
def test_loss(model: PeftModel) -> float:
    kept = next(p.dtype for p in model.parameters() if p.requires_grad)
    _cast(model, torch.float32)
    model.eval()
    x = sentences(10**6, 128)
    loss = model(input_ids=x, labels=x).loss.item()
    _cast(model, kept)
    return loss


def _cast(model: PeftModel, dtype: torch.dtype) -> None:
    """The adapters in another dtype; the weights below them are frozen and stay as they are."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None
