"""LoRA: a transformer whose weights are frozen; only its adapters train and travel (pip install transformers peft)."""

from peft import LoraConfig, get_peft_model
from torch import nn

from transformer import main, network


def adapted() -> nn.Module:
    """The network of transformer.py with adapters of rank 4 in its attention; the class scores train as well."""
    chosen = LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"], lora_dropout=0.1)
    return get_peft_model(network(), chosen)


if __name__ == "__main__":
    model = adapted()
    history = main(rounds=20, model=model)
    total, sent = sum(p.numel() for p in model.parameters()), sum(t.numel() for t in history.state.values())
    print(f"accuracy {history.accuracy:.1%} for {history.summary['bytes_total']:,} bytes; {sent:,} of {total:,} travel")
