"""Where workers compute: "auto", "cpu", "cuda", "mps", or several such as "cuda:0,cuda:1"."""

import torch

from fedfp8.errors import ConfigError

__all__ = ["devices_of"]


def devices_of(text: str | torch.device | None) -> list[str]:
    """The devices of a run; worker n takes number n modulo their count. None is the CPU; "auto" the GPUs there are."""
    text = "cpu" if text is None else str(text).replace(" ", "")
    cuda = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    mps = ["mps"] if torch.backends.mps.is_available() else []
    if text == "auto":
        return cuda or mps or ["cpu"]
    found = []
    for name in text.split(","):
        chosen = cuda if name == "cuda" else [name] if name in ("cpu", *cuda, *mps) else []
        if not chosen:
            there = ", ".join(["cpu", *cuda, *mps])
            raise ConfigError(
                f"device {name!r} is not on this machine, which has {there}; give auto, cpu, cuda, mps, or a list "
                "such as cuda:0,cuda:1"
            )
        found += chosen
    return found
