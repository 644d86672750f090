"""From a run's settings to the link layer: which wire each client has, and the server's link."""

from pathlib import Path

from fedfp8.fl.config import Config
from fedfp8.fl.federation import FP32, Federation
from fedfp8.fp8 import Format
from fedfp8.link import ServerLink, Wire
from fedfp8.model.rounding import ROUNDINGS
from fedfp8.model.state import State

__all__ = ["server_link", "shares_start", "wire_for"]


def wire_for(config: Config, client_format: str) -> Wire:
    """How models travel to and from clients of a format; those without FP8 get, and send, float32 instead of codes."""

    def direction(rounding: str, format: str) -> tuple[str, str]:
        return (
            ("none", FP32)
            if ROUNDINGS[rounding].has_ranges and client_format == FP32
            else (rounding, format or client_format)
        )

    down, down_format = direction(config.down.rounding, config.down.format)
    up, up_format = direction(config.up.rounding, config.up.format)
    dq = config.dq
    return Wire(
        down, up, _format(down_format), _format(up_format), dq.kappa_down, dq.kappa_up, dq.fan_in, dq.depth,
        dq.frequencies, dq.strata, dq.preserve and any(ROUNDINGS[r].has_steps for r in (down, up)),
        config.wire.lossless, config.wire.visits, name=down_format,
    )  # fmt: skip


def _format(name: str) -> Format | None:
    return None if name == FP32 else Format.parse(name)


def shares_start(config: Config) -> bool:
    """Whether models are coded given the initial one, which every client can build from the config."""
    return config.dq.start and ROUNDINGS[config.down.rounding].has_steps and config.wire.lossless


def server_link(config: Config, federation: Federation, initial: State, folder: Path) -> ServerLink:
    """The link of a run; its history lives in `folder`."""
    wires = {format: wire_for(config, format) for format in set(federation.formats)}
    return ServerLink(
        lambda client: wires[federation.formats[int(client)]],
        seed=config.seed,
        start=initial if shares_start(config) else None,
        history=config.wire.history,
        cache=config.wire.client_cache,
        folder=folder,
        layout_known=True,
    )
