"""The model of a run as a file that the user's own class loads."""

import json
from pathlib import Path

from safetensors.torch import save_file

from fedfp8.errors import RunError
from fedfp8.fl.checkpoint import RunFolder
from fedfp8.link.store import read_state

__all__ = ["export_model"]


def export_model(run: Path, out: Path) -> int:
    """Write the server's model of the run folder `run` to `out`, without the ranges; returns how many tensors.

    Weights that a model uses under several names are there under the first, and frozen ones are not there at all:
    ``safetensors.torch.load_model(model, out, strict=False)`` knows what to do.
    """
    folder = RunFolder(run)
    config, state_file = folder.config, folder.checkpoint / "state.json"
    if not state_file.exists():
        raise RunError(f"{run} has no checkpoint yet; wait for its first round")
    saved = json.loads(state_file.read_text())
    state = read_state(folder.checkpoint / str(saved["model"]))
    ranges = {spec.name for spec in state.layout if spec.kind == "range"}
    tensors = {name: tensor for name, tensor in state.items() if name not in ranges}
    about = {"model": config.model.name, "method": config.method, "round": str(saved["round"])}
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out, metadata=about | {"format": "pt"})
    return len(tensors)
