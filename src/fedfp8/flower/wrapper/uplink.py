"""A client's arrays from the blob it sent: hostile until every check has passed."""

import numpy as np
from flwr.app import ArrayRecord

from fedfp8.errors import WireFormatError
from fedfp8.flower.blob import blob_of
from fedfp8.flower.wrapper.arrays import Wire, arrays_of
from fedfp8.flower.wrapper.downlink import Sent
from fedfp8.model.layout import Layout
from fedfp8.model.state import State, dequantize_state
from fedfp8.wire import decode, header
from fedfp8.wire.container import checked_body

__all__ = ["receive"]


def receive(record: ArrayRecord, sent: Sent, wire: Wire, seed: int) -> tuple[bytes, State, dict[str, np.ndarray]]:
    """(payload, decoded state, arrays) of a reply to `sent`; raises WireFormatError if it is not one."""
    payload = blob_of(record)
    layout = sent.state.layout
    if header(payload).has_layout:
        layout = checked_body(payload, None)[1]
        _check_part_of(layout, sent.state.layout)  # before anything of its sizes is allocated
    message = decode(payload, layout, reference=sent.state)
    if message.rounding != wire.rounding or message.seed != seed:
        raise WireFormatError(
            f"the update was rounded {message.rounding!r} with dice {message.seed}; this message called for "
            f"{wire.rounding!r} with {seed}: it belongs to another round, node or run"
        )
    state = dequantize_state(message)
    arrays = arrays_of(state)
    for name, array in arrays.items():
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            raise WireFormatError(f"array {name!r} of the update holds NaN or Inf; the update is not usable")
    return payload, state, arrays


def _check_part_of(layout: Layout, whole: Layout) -> None:
    known = set(whole)
    for spec in layout:
        if spec not in known:
            raise WireFormatError(
                f"the update has an array {spec.name!r} {spec.shape} that was not sent: another model"
            )
