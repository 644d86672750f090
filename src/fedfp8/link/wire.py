"""How models travel: the rounding each way, its steps and its random bits. Server and client read the same rules.

    dq     dithered both ways: any float tensors, a fraction of a bit to a bit or so a weight (our method)
    fp8    the paper's UQ: FP8 codes, stochastic rounding, lossless coding given what the other side holds
    bq     FP8 codes, nearest rounding (biased; for comparison)
    fp32   as they are

The step of a dithered tensor is kappa times a root mean square: of the tensor on the way down, of the change on the way
up. One kappa does not fit all layers. The output of a layer averages the noise of its inputs' weights, so kappa grows
with the root of the number of inputs up to `fan_in` of them; biases, norms and other vectors, which cost next to
nothing, get an eighth. The noise of all layers adds up, so models of more than `depth` of them, those with few inputs
counted in part, come down in finer steps. One kappa does not fit all cohorts either: what matters is the noise of the
mean, so few clients get finer steps.
"""

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedfp8.errors import ConfigError, WireFormatError
from fedfp8.fp8 import E4M3, Format
from fedfp8.fp8.quantizers import MOST_STEPS, STEP_MIN
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.rounding import ROUNDINGS, rounding_of
from fedfp8.model.state import State
from fedfp8.rng import derive_seed
from fedfp8.wire.container import REFERENCES
from fedfp8.wire.steps import sampled_rms

__all__ = ["WIRES", "Orders", "Wire", "share_of_layers", "step_factor", "steps_of", "unlike", "wire_named"]

UNLIKE = 2.0  # a reply this many times farther from the model than it is large is not a model
LOWEST = 1 / 8  # the share of kappa that vectors get
DEEPEST = 1 / 4  # of the square of kappa that many layers leave at least: deeper networks have shortcuts around them
FAN_IN_UP = 25 / 64  # of fan_in: changes of layers with few inputs may be coarser than their weights
SMALL = 16  # a tensor this many times smaller than the largest gets finer steps
KAPPA_UP_CLIENTS, KAPPA_DOWN_CLIENTS = 25 / 6, 5  # cohorts from which on a client's steps are the full ones


@dataclass(frozen=True)
class Wire:
    """How models travel between a server and one client."""

    down: str = "dithered"
    up: str = "dithered"
    format_down: Format | None = None  # of FP8 codes; None: as the layout has it
    format_up: Format | None = None
    kappa_down: float = 0.8
    kappa_up: float = 5.0
    fan_in: float = 228.0  # inputs from which on a layer that is not small gets the whole kappa; 0: all tensors get it
    depth: float = 4.75  # layers up to which steps down are the full ones; more get finer ones; 0: none do
    frequencies: bool = True  # dithered: kernels travel as frequencies, of which most change little
    strata: int = 16  # places a cell is divided into for the clients of a round, at most; 1: the same bits for all
    preserve: bool = True  # dithered: the server adds a client's change to what it has, not to what it sent
    lossless: bool = True
    visits: int = 3  # dithered: a client keeps the models of so many visits; the next is coded given their mix
    name: str = ""  # goes into the seeds, so that two wires of one round have bits of their own

    def __post_init__(self) -> None:
        for direction, rounding in (("down", self.down), ("up", self.up)):
            if rounding not in ROUNDINGS:
                raise ConfigError(f"rounding {direction} is {rounding!r}; choose one of {', '.join(ROUNDINGS)}")
        for name in ("kappa_down", "kappa_up"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value!r}; it must be a number above 0")
        if self.depth < 0:
            raise ConfigError(f"depth is {self.depth}; a number of layers, or 0 for the same steps for any number")
        if not 1 <= self.strata <= 256:
            raise ConfigError(f"strata is {self.strata}; between 1 (the same random bits for all) and 256")
        if not 1 <= self.visits <= REFERENCES:
            raise ConfigError(f"visits is {self.visits}; a message is coded given 1 to {REFERENCES} models")

    @property
    def sends_changes(self) -> bool:
        """Whether clients answer with the change they made rather than with the whole model."""
        return ROUNDINGS[self.up].has_steps

    @property
    def has_places(self) -> bool:
        """Whether what a client receives depends on its place in the cohort."""
        return ROUNDINGS[self.down].has_steps

    @property
    def as_frequencies(self) -> bool:
        """Whether kernels travel as frequencies: where both directions are dithered, since codes know none."""
        return self.frequencies and self.has_places and self.sends_changes

    @property
    def kept(self) -> int:
        """Received models that a client keeps; of FP8 codes there is no mix, and the newest alone serves."""
        return self.visits if ROUNDINGS[self.down].has_steps else 1

    def places(self, cohort: int) -> int:
        """Strata of a round with this many clients: one each, or as many as leave the least error of their mean."""
        if not (self.has_places or self.sends_changes):
            return 1
        return min(range(1, min(cohort, self.strata) + 1), key=lambda m: (mean_variance(cohort, m), -m))

    def layout_down(self, layout: Layout) -> Layout:
        return layout if self.format_down is None else layout.with_format(self.format_down)

    def layout_up(self, layout: Layout) -> Layout:
        return layout if self.format_up is None else layout.with_format(self.format_up)

    def kappa_down_for(self, cohort: int) -> float:
        """Noise of the mean of P places falls with P; a lone client gets what one set of bits for all would need."""
        return self.kappa_down * min(1.0, math.sqrt(cohort / KAPPA_DOWN_CLIENTS))

    def kappa_up_for(self, cohort: int) -> float:
        """A float32, since that is how a client is told."""
        return float(np.float32(self.kappa_up * min(1.0, cohort / KAPPA_UP_CLIENTS)))

    def seed_down(self, root: int, number: int) -> int:
        return derive_seed(root, "down", number, self.name)

    def seed_up(self, root: int, round: int, client: str | int) -> int:
        """Clients that share a cell's places share the bits; stochastic rounding draws for each client anew."""
        return derive_seed(root, "up", round) if self.sends_changes else derive_seed(root, "up", round, client)


WIRES = {
    "dq": Wire(),
    "fp8": Wire("stochastic", "stochastic", E4M3, E4M3, preserve=False, name="E4M3"),
    "bq": Wire("nearest", "nearest", E4M3, E4M3, preserve=False, name="E4M3"),
    "fp32": Wire("none", "none", preserve=False),
}


def wire_named(wire: "str | Wire", **changes: object) -> Wire:
    """A wire by name with some settings changed."""
    if isinstance(wire, str):
        if wire not in WIRES:
            raise ConfigError(f"wire is {wire!r}; choose one of {', '.join(WIRES)}")
        wire = WIRES[wire]
    return replace(wire, **changes)  # type: ignore[arg-type]


# Steps


def mean_variance(cohort: int, strata: int) -> float:
    """Variance of the mean error of equal clients dealt evenly to places, in units of step^2 / 12 (docs/method.md)."""
    more, fewer = cohort % strata, strata - cohort % strata
    low, high = (cohort // strata) / cohort, (cohort // strata + 1) / cohort
    uneven = more * (high - 1 / strata) ** 2 + fewer * (low - 1 / strata) ** 2
    return 1 / strata**2 + (1 + 1 / strata) * uneven


def step_factor(shape: tuple[int, ...], largest: int, fan_in: float, shared: float = 1.0) -> float:
    """The share of kappa for a tensor of this shape, between an eighth and one; `largest`: the most elements of any.

    sqrt(inputs / fan_in), and sqrt(SMALL * elements / largest): what costs next to nothing should not hurt either.
    shared: at most the root of this.
    """
    if not fan_in:
        return math.sqrt(shared)
    inputs = math.prod(shape[1:]) if len(shape) > 1 else 0
    few = min(1.0, SMALL * math.prod(shape) / largest)
    return max(LOWEST, math.sqrt(min(shared, inputs / fan_in) * few))


def steps_of(state: State, rounding: str, kappa: float, fan_in: float, depth: float = 0) -> Mapping[str, float] | None:
    """Absolute steps of the tensors that `rounding` dithers; None for one that has no steps."""
    rule = ROUNDINGS[rounding]
    if not rule.has_steps:
        return None
    coded = [spec for spec in state.layout if spec.kind in rule.kinds and spec.size]
    largest = max((spec.size for spec in coded), default=0)
    shared = share_of_layers([spec.shape for spec in coded], fan_in, depth)
    return {spec.name: _step(state, spec, kappa * step_factor(spec.shape, largest, fan_in, shared)) for spec in coded}


def share_of_layers(shapes: Iterable[tuple[int, ...]], fan_in: float, depth: float) -> float:
    """Of the square of kappa: what many layers leave to each. Those with few inputs make less noise and count less."""
    inputs = [math.prod(shape[1:]) for shape in shapes if len(shape) > 1]
    layers = sum(min(1.0, n / fan_in) if fan_in else 1.0 for n in inputs)
    return max(DEEPEST, depth / layers) if 0 < depth < layers else 1.0


def _step(state: State, spec: TensorSpec, kappa: float) -> float:
    # At most so many steps to the largest value, and none below the smallest there is: an error that harms no model.
    return max(kappa * state.rms(spec.name), state.largest(spec.name) / MOST_STEPS, STEP_MIN)


def unlike(reply: State, change: State) -> bool:
    """Whether a reply is no model but something smaller under its names (a difference, gradients).

    A trained model is near the one it came from; a difference is as far from it as the model is large.
    """
    coded = [spec for spec in reply.layout if spec.kind in ("fp8", "float")]
    strange = [s for s in coded if change.rms(s.name) > UNLIKE * sampled_rms(reply[s.name].view(-1).numpy()) > 0.0]
    return 2 * sum(spec.size for spec in strange) > sum(spec.size for spec in coded)


# What the server tells a client: in front of the model, so that a client needs no settings of its own

MAGIC, VERSION = b"fp8l", 1
HEAD = struct.Struct("<4sBBBBBBffQH")
LOSSLESS, HAS_FORMAT, KEPT, FREQUENCIES = 1, 2, 2, 16  # flags; from bit KEPT on, two say how many models to keep


@dataclass(frozen=True)
class Orders:
    """How the reply to one message is to be made. kappa is that of this cohort."""

    up: str
    format_up: Format | None
    kappa_up: float
    fan_in: float
    seed: int
    place: int = 0  # of this client in a cell, and how many there are
    strata: int = 1
    lossless: bool = True
    frequencies: bool = False  # kernels are wanted as frequencies
    kept: int = 1  # received models to keep, this one included: the next may be coded given them; 0: none
    coded: tuple[str, ...] = ()  # name patterns, where the server has some

    def to_bytes(self) -> bytes:
        flags = LOSSLESS * self.lossless | HAS_FORMAT * (self.format_up is not None) | self.kept << KEPT
        flags |= FREQUENCIES * self.frequencies
        bits = 0 if self.format_up is None else self.format_up.exponent_bits << 4 | self.format_up.mantissa_bits
        patterns = "\n".join(self.coded).encode()
        rounding = ROUNDINGS[self.up].number
        numbers = rounding, bits, self.place, self.strata - 1, self.kappa_up, self.fan_in, self.seed
        return HEAD.pack(MAGIC, VERSION, flags, *numbers, len(patterns)) + patterns

    @classmethod
    def split(cls, message: bytes) -> tuple["Orders", bytes]:
        """(the orders, the payload) of a message of a ServerLink."""
        try:
            magic, version, flags, rounding, bits, place, last, kappa, fan_in, seed, length = HEAD.unpack_from(message)
            end = HEAD.size + length
            patterns = bytes(message[HEAD.size : end]).decode()
            format = Format(bits >> 4, bits & 15) if flags & HAS_FORMAT else None
            sound = math.isfinite(kappa) and kappa > 0 and math.isfinite(fan_in) and fan_in >= 0 and place <= last
            if magic != MAGIC or version != VERSION or flags >= 2 * FREQUENCIES or not sound or len(message) < end:
                raise ValueError(f"it begins with {bytes(message[:5])!r}")
            orders = cls(
                rounding_of(rounding).name, format, kappa, fan_in, seed, place, last + 1, bool(flags & LOSSLESS),
                bool(flags & FREQUENCIES), flags >> KEPT & 3, tuple(patterns.split("\n")) if patterns else (),
            )  # fmt: skip
        except (struct.error, ValueError, KeyError) as error:
            raise WireFormatError(
                f"a message of {len(message)} bytes is not one of a fedfp8.ServerLink ({error}); give "
                "ClientLink.receive the very bytes that broadcast or resend made, and use one fedfp8 on both sides"
            ) from None
        return orders, bytes(message[end:])
