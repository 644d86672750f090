"""Between PyTorch and Flower: adapters only, and bfloat16, which NumPy and so Flower do not know, as float32."""

import torch
from flwr.app import ArrayRecord
from peft import PeftModel, get_peft_model_state_dict

from lora_app.task import Adapters


def to_record(adapters: Adapters) -> ArrayRecord:
    known = {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in adapters.items()}
    return ArrayRecord(known)


def record_of(model: PeftModel) -> ArrayRecord:
    return to_record(get_peft_model_state_dict(model))
