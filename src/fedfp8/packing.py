"""`pack` and `unpack`: a model as bytes and back, the packages nn, model and wire in one call each."""

from collections.abc import Mapping, Sequence

from torch import nn

from fedfp8.model.quantized import dequantize_state, quantize_state
from fedfp8.model.state import State
from fedfp8.nn import layout_of, load_state, state_of
from fedfp8.wire import decode, encode

__all__ = ["pack", "unpack"]


def pack(
    model: nn.Module,
    *,
    seed: int,
    rounding: str = "stochastic",
    step: float | Mapping[str, float] | None = None,
    step_of: str = "weights",
    lossless: bool = True,
    reference: State | Sequence[State] | None = None,
    with_layout: bool = False,
) -> bytes:
    """Quantize `model` and encode it. The model is not changed.

    rounding: "stochastic" or "nearest" (FP8 codes), "dithered" (uniform grid; needs `step`), "none" (float32).
    step: a multiple of each tensor's rms, or of the rms of its change with ``step_of="update"`` (needs `reference`), or
    a dict of absolute steps. reference: what `unpack` returned for a model the receiver still has, or a list of up to 3
    (changes are measured against the first); fewer bytes, same values. lossless=False: no entropy coding, one byte a
    weight as in the paper. Use a new seed for every message.
    """
    state, given = state_of(model), _several(reference)
    first = given[0] if given else None
    q = quantize_state(state, seed=seed, rounding=rounding, step=step, step_of=step_of, reference=first)
    return encode(q, references=given, lossless=lossless, with_layout=with_layout)


def unpack(payload: bytes, model: nn.Module, *, reference: State | Sequence[State] | None = None) -> State:
    """Load `payload` into `model` and return the decoded state, usable as a reference.

    reference: the state, or states, that the sender may have used. The model changes only after the whole payload has
    been decoded and checked; a WireFormatError leaves it untouched.
    """
    state = dequantize_state(decode(payload, layout_of(model), references=_several(reference)))
    load_state(model, state)
    return state


def _several(reference: State | Sequence[State] | None) -> Sequence[State]:
    return () if reference is None else (reference,) if isinstance(reference, State) else reference
