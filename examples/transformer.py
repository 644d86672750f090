"""A Hugging Face transformer, built from a small config, with dict batches (pip install transformers)."""

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import fedfp8

Batch = dict[str, torch.Tensor]
LENGTH, WORDS = 12, 50


def sentences(client: int, count: int) -> Batch:
    """Sentences of word numbers, of several lengths; the class is whether word 1 comes before word 2."""
    random = torch.Generator().manual_seed(client)
    words = torch.randint(5 + client % 5, WORDS, (count, LENGTH), generator=random)
    order = torch.rand(count, LENGTH - 4, generator=random).argsort(1)[:, :2]
    words.scatter_(1, order, torch.tensor([1, 2]).expand(count, 2))
    lengths = torch.randint(LENGTH - 4, LENGTH + 1, (count, 1), generator=random)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": words * mask, "attention_mask": mask, "labels": (order[:, 0] < order[:, 1]).long()}


def network() -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **small))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def accuracy(model: nn.Module, batch: Batch) -> tuple[float, float]:
    right = model(**batch).logits.argmax(-1) == batch["labels"]
    return right.float().mean().item(), len(right)


def main(rounds: int = 20, model: nn.Module | None = None) -> fedfp8.History:
    local = {"local__optimizer": "adamw", "local__lr": 0.003, "local__epochs": 2, "local__batch_size": 20}
    config = fedfp8.preset("own", "dq", round__count=rounds, clients__fraction=0.5, **local)
    clients, test = [sentences(k, 200) for k in range(8)], sentences(99, 400)
    return fedfp8.run(config, model=model or network(), clients=clients, test=test, loss=loss, metric=accuracy)


if __name__ == "__main__":
    history = main()
    print(f"accuracy {history.accuracy:.1%} for {history.summary['bytes_total']:,} bytes")
