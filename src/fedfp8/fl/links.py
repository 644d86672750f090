"""The two directions of communication: what is quantized how, with which dice, and coded against what.

Server and client call the same functions, on every engine; a message's dice come from (run seed, direction, round,
client or format), so both engines send the same bytes.
"""

import math
from dataclasses import dataclass

from fedfp8.errors import WireFormatError
from fedfp8.fl.config import Config
from fedfp8.fl.federation import FP32
from fedfp8.fp8 import Format
from fedfp8.model.layout import Layout
from fedfp8.model.state import QuantState, State, dequantize_state, quantize_state
from fedfp8.rng import derive_seed
from fedfp8.wire import decode, encode

__all__ = ["Link", "downlink", "quantize_down", "quantize_up", "receive_down", "receive_up", "send", "uplink"]


@dataclass(frozen=True)
class Link:
    """How one direction codes the models of clients of one format."""

    rounding: str
    format: str  # of the codes; names the grid of "nearest" and "stochastic"

    def layout(self, layout: Layout) -> Layout:
        return layout if self.format == FP32 else layout.with_format(Format.parse(self.format))


def downlink(config: Config, client_format: str) -> Link:
    return _link(config.down.rounding, config.down.format, client_format)


def uplink(config: Config, client_format: str) -> Link:
    return _link(config.up.rounding, config.up.format, client_format)


def _link(rounding: str, format: str, client_format: str) -> Link:
    if client_format == FP32 and rounding in ("nearest", "stochastic"):
        return Link("none", FP32)  # a client without FP8 is sent, and sends, float32
    return Link(rounding, format or client_format)


def quantize_down(config: Config, round: int, state: State, link: Link) -> QuantState:
    """The server's model as it is sent in `round`: one draw for all clients of a format."""
    return quantize_state(
        state.with_layout(link.layout(state.layout)),
        seed=derive_seed(config.seed, "down", round, link.format),
        rounding=link.rounding,
        step=config.dq.kappa_down if link.rounding == "dithered" else None,
    )


def quantize_up(config: Config, round: int, client: int, state: State, received: State, link: Link) -> QuantState:
    """A client's model as it is sent back."""
    dithered = link.rounding == "dithered"
    return quantize_state(
        state.with_layout(link.layout(state.layout)),
        seed=derive_seed(config.seed, "up", round, client),
        rounding=link.rounding,
        step=config.dq.kappa_up if dithered else None,
        step_of="update" if dithered else "weights",
        reference=received if dithered else None,
    )


def send(config: Config, message: QuantState, reference: State | None) -> bytes:
    """Bytes of a quantized model, given a model the receiver holds."""
    return encode(message, reference=reference if config.wire.lossless else None, lossless=config.wire.lossless)


def receive_down(payload: bytes, layout: Layout, link: Link, reference: State | None) -> State:
    return dequantize_state(decode(payload, link.layout(layout), reference=reference))


def receive_up(payload: bytes, layout: Layout, link: Link, sent: State, seed: int) -> State:
    """A client's update, checked: right layout, right dice, finite values."""
    message = decode(payload, link.layout(layout), reference=sent)
    if message.rounding != link.rounding or message.seed != seed:
        raise WireFormatError(
            f"update was rounded {message.rounding!r} with dice {message.seed}; this round and client call for "
            f"{link.rounding!r} with {seed}: the message belongs to another round, client or run"
        )
    state = dequantize_state(message)
    for spec in state.layout:
        if spec.kind != "integer" and spec.size and not all(math.isfinite(end) for end in state[spec.name].aminmax()):
            raise WireFormatError(f"tensor {spec.name!r} of the update holds NaN or Inf; the update is not usable")
    return state
