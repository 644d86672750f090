"""The model of a run, rounded to FP8 or not, as a file that the user's own class loads."""

import json
from pathlib import Path

from safetensors.torch import save_file

from fedfp8.errors import RunError
from fedfp8.fl.checkpoint import RunFolder
from fedfp8.link.store import read_state
from fedfp8.model.quantized import dequantize_state, quantize_state
from fedfp8.model.state import State

__all__ = ["export_model", "rounded_state"]


def rounded_state(state: State) -> State:
    """`state` with its weights as the FP8 values that the forward pass uses."""
    if not any(spec.kind == "fp8" for spec in state.layout):
        raise RunError("the run did not train in FP8, so it has no ranges to round its weights with")
    return dequantize_state(quantize_state(state, rounding="nearest"))


def export_model(run: Path, out: Path, *, rounded: bool = False) -> int:
    """Write the server's model of the run folder `run` to `out`, without the ranges; returns how many tensors.

    rounded: the weights as FP8 values, which are floats, too.
    Weights that a model uses under several names are there under the first, and frozen ones are not there at all:
    ``safetensors.torch.load_model(model, out, strict=False)`` knows what to do.
    """
    folder = RunFolder(run)
    config, state_file = folder.config, folder.checkpoint / "state.json"
    if not state_file.exists():
        raise RunError(f"{run} has no checkpoint yet; wait for its first round")
    saved = json.loads(state_file.read_text())
    state = read_state(folder.checkpoint / str(saved["model"]))
    state = rounded_state(state) if rounded else state
    ranges = {spec.name for spec in state.layout if spec.kind == "range"}
    tensors = {name: tensor for name, tensor in state.items() if name not in ranges}
    about = {"model": config.model.name, "method": config.method, "round": str(saved["round"])}
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out, metadata=about | {"format": "pt"})
    return len(tensors)
