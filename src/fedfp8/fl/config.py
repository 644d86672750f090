"""Everything a run can be told, as frozen dataclasses with their checks. No default lives anywhere else.

The comment beside a field is its documentation: `fedfp8 settings` and the config.toml of a run folder show it.

A `Config` comes from a preset (data, model, clients, local training), a method (a named recipe: which rounding where)
and single settings ``section.field = value``, in that order. The same names serve in TOML files, on the command line
(``--set dq.kappa_up=4``) and in Python.
"""

from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

from fedfp8.errors import ConfigError
from fedfp8.fl.settings import assign, choice, not_negative, positive
from fedfp8.fp8 import Format
from fedfp8.model.rounding import ROUNDINGS
from fedfp8.wire.container import REFERENCES

__all__ = ["METHODS", "Config", "cohort_size", "from_dict", "to_dict", "with_method", "with_settings"]


@dataclass(frozen=True)
class DataConfig:
    """Which examples, and how they are spread over the clients."""

    name: str = "digits"  # data set, see `fedfp8 data list`
    dir: str = ""  # folder of data sets; empty: $FEDFP8_DATA or the cache
    partition: str = "dirichlet"  # iid | dirichlet | dirichlet-class | group (by speaker)
    concentration: float = 0.3  # of the Dirichlet distribution; smaller: clients differ more
    features: str = "kwt"  # speech only: kwt | matchboxnet
    limit: int = 0  # use only this many training examples (0: all)
    test_limit: int = 0  # use only this many test examples (0: all)

    def __post_init__(self) -> None:
        positive("data", self, "concentration")
        not_negative("data", self, "limit", "test_limit")


@dataclass(frozen=True)
class ModelConfig:
    """Which network."""

    name: str = "digits"  # see `fedfp8 models`
    stem: str = ""  # resnet18 only: cifar | imagenet; empty: cifar


@dataclass(frozen=True)
class ClientsConfig:
    """K clients of which a fraction C takes part in a round. A partition by group makes one client per group."""

    count: int = 20  # how many there are (K in the paper)
    fraction: float = 0.25  # share of them sampled in a round (C in the paper)
    min_examples: int = 2  # clients with fewer are never sampled
    formats: str = ""  # empty: all in qat.format; "E4M3:3,FP32:1": shares, spread by seed; "0=FP32,7=E5M2": by client

    def __post_init__(self) -> None:
        positive("clients", self, "count", "fraction", "min_examples")
        if self.fraction > 1:
            raise ConfigError(f"clients.fraction is {self.fraction}; it must be at most 1 (all clients)")


@dataclass(frozen=True)
class LocalConfig:
    """LocalUpdate, algorithm 1: what a client does in a round."""

    optimizer: str = "sgd"  # sgd | adamw; its state is new in every round
    lr: float = 0.1  # learning rate
    schedule: str = "constant"  # constant | cosine over rounds
    weight_decay: float = 0.001  # of weights; ranges have none
    momentum: float = 0.0  # sgd only
    batch_size: int = 50  # examples in a minibatch
    epochs: int = 5  # passes over the client's examples; 0 with steps
    steps: int = 0  # > 0: this many minibatches instead of epochs
    clip_norm: float = 0.0  # largest norm of a gradient; 0: no clipping
    prox: float = 0.0  # FedProx: mu/2 * ||w - w_received||^2 added to the loss
    range_lr: float = 0.0  # learning rate of alpha and beta; 0: the weights'
    augment: bool = True  # crops and flips (images), SpecAugment (speech)

    def __post_init__(self) -> None:
        choice("local.optimizer", self.optimizer, "sgd", "adamw")
        choice("local.schedule", self.schedule, "constant", "cosine")
        positive("local", self, "lr", "batch_size")
        not_negative("local", self, "weight_decay", "momentum", "epochs", "steps", "clip_norm", "prox", "range_lr")
        if (self.epochs > 0) == (self.steps > 0):
            raise ConfigError(
                f"local.epochs is {self.epochs} and local.steps is {self.steps}; set exactly one of them above 0"
            )


def _check_format(name: str, value: str) -> None:
    try:
        Format.parse(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


@dataclass(frozen=True)
class QatConfig:
    """FP8 training on the client."""

    rounding: str = "nearest"  # nearest | stochastic | off (plain float training)
    format: str = "E4M3"  # FP8 format of weights and activations, e.g. E4M3, E5M2, E3M4
    ranges: str = "learned"  # learned, as in the paper | largest: max|w|, and max|x| of each batch

    def __post_init__(self) -> None:
        choice("qat.rounding", self.rounding, "nearest", "stochastic", "off")
        choice("qat.ranges", self.ranges, "learned", "largest")
        _check_format("qat.format", self.format)


@dataclass(frozen=True)
class LinkConfig:
    """One direction of communication; checked by `Config`, which knows which one it is."""

    rounding: str = "stochastic"  # none (float32) | nearest | stochastic | dithered
    format: str = ""  # of the FP8 codes; empty: qat.format

    def check(self, name: str) -> None:
        choice(f"{name}.rounding", self.rounding, *ROUNDINGS)
        if not self.format:
            return
        _check_format(f"{name}.format", self.format)
        if not ROUNDINGS[self.rounding].has_ranges:
            raise ConfigError(
                f"{name}.format={self.format!r} and {name}.rounding={self.rounding!r} contradict each other: only "
                "'nearest' and 'stochastic' send FP8 codes"
            )


@dataclass(frozen=True)
class ServerConfig:
    """ServerOptimize, algorithm 2 (UQ+)."""

    optimize: bool = False  # fit the next model to the clients' quantized ones (UQ+); false: their weighted mean
    weights_step: bool = True  # fit the weights by gradient descent
    alpha_step: bool = True  # choose each range among `points`
    steps: int = 5  # of gradient descent
    rate: float = 0.1  # of gradient descent; the paper searches 0.01, 0.1, 1
    points: int = 50  # ranges that are tried
    choose: str = "expected"  # expected: closed form; draw: the paper's one random draw a point

    def __post_init__(self) -> None:
        choice("server.choose", self.choose, "expected", "draw")
        positive("server", self, "steps", "rate", "points")


@dataclass(frozen=True)
class DqConfig:
    """Dithered quantization: a step is kappa times a root mean square, less for small layers and small cohorts."""

    kappa_up: float = 5.0  # the step up, in units of the rms of a client's change; finer with fewer than 5 clients
    kappa_down: float = 0.8  # the step down, in units of the rms of the weights; finer with fewer than 5 clients
    fan_in: float = 228.0  # layers with fewer inputs than this, and small ones, get finer steps; 0: the same for all
    depth: float = 4.75  # deep models come down in finer steps, since the noise of all layers adds up; 0: they do not
    frequencies: bool = True  # kernels travel as frequencies, of which most change little
    strata: int = 16  # places over which a round's clients spread their random bits, at most; 1: the same bits for all
    start: bool = True  # clients build the initial model themselves, and first models are coded given it
    preserve: bool = True  # the server adds changes to what it has, so downlink noise does not pile up

    def __post_init__(self) -> None:
        positive("dq", self, "kappa_up", "kappa_down", "strata")
        not_negative("dq", self, "fan_in", "depth")
        if self.strata > 256:
            raise ConfigError(f"dq.strata is {self.strata}; at most 256")


@dataclass(frozen=True)
class WireConfig:
    """The bytes of a message, whose values it does not change."""

    lossless: bool = True  # code as few bits as possible; off: raw codes, as in the paper
    client_cache: bool = True  # clients keep the models they receive as references for the next
    visits: int = 3  # how many of them, 1 to 3: DQ codes the next given their mix, the others given the last one alone
    history: int = 40  # how many sent models the server remembers for that

    def __post_init__(self) -> None:
        positive("wire", self, "history", "visits")
        if self.visits > REFERENCES:
            raise ConfigError(f"wire.visits is {self.visits}; at most {REFERENCES}")


@dataclass(frozen=True)
class RoundConfig:
    """How many rounds, and what is done in each."""

    count: int = 40  # rounds of the run
    min_clients: int = 0  # fewer valid updates stop the run; 0: a round without any keeps the model
    eval_every: int = 1  # evaluate on the test set every so many rounds, and after the last
    eval_sent: bool = True  # also evaluate the quantized model that is sent next
    keep_payloads: int = 0  # keep the messages of this round in payloads/ of the run folder, to look at; 0: none

    def __post_init__(self) -> None:
        positive("round", self, "count", "eval_every")
        not_negative("round", self, "min_clients", "keep_payloads")


@dataclass(frozen=True)
class Config:
    preset: str = "digits"  # what the settings started from, see `fedfp8 presets`
    name: str = ""  # what tables and plots call the task; empty: the preset
    task: str = ""  # "package.module:function" that makes model, clients and test set; for preset "own"
    method: str = "uq"  # which rounding where: fp32, bq, uq, uq+, dq, qat-nearest, qat-stochastic
    seed: int = 0  # everything random in the run follows from it
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    clients: ClientsConfig = field(default_factory=ClientsConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    qat: QatConfig = field(default_factory=QatConfig)
    up: LinkConfig = field(default_factory=LinkConfig)
    down: LinkConfig = field(default_factory=LinkConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    dq: DqConfig = field(default_factory=DqConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    round: RoundConfig = field(default_factory=RoundConfig)

    def __post_init__(self) -> None:
        self.up.check("up")
        self.down.check("down")
        coded = any(ROUNDINGS[link.rounding].has_ranges for link in (self.up, self.down))
        if self.server.optimize and not ROUNDINGS[self.down.rounding].has_ranges:
            raise ConfigError(
                f"server.optimize=true and down.rounding={self.down.rounding!r} contradict each other: ServerOptimize "
                "fits the FP8 model that is sent down; use down.rounding='stochastic' or server.optimize=false"
            )
        if self.qat.rounding == "off" and coded:
            raise ConfigError(
                f"qat.rounding='off' and FP8 communication (up.rounding={self.up.rounding!r}, down.rounding="
                f"{self.down.rounding!r}) contradict each other: without FP8 training no ranges are learned to code "
                "with; use rounding 'none' or 'dithered' on both links, or qat.rounding='nearest'"
            )
        if self.clients.formats and self.qat.rounding == "off":
            raise ConfigError(
                "clients.formats and qat.rounding='off' contradict each other: nothing would be trained in FP8"
            )

    @property
    def prepared(self) -> bool:
        """Whether models carry ranges at all."""
        return self.qat.rounding != "off"


# A method is a recipe: the settings it fixes, over these. Everything stays reachable through settings.
PLAIN: dict[str, Any] = {"qat.rounding": "nearest", "server.optimize": False}
METHODS: dict[str, dict[str, Any]] = {
    "fp32": {"qat.rounding": "off", "up.rounding": "none", "down.rounding": "none"},
    "bq": {"up.rounding": "nearest", "down.rounding": "nearest"},
    "uq": {"up.rounding": "stochastic", "down.rounding": "stochastic"},
    "uq+": {"up.rounding": "stochastic", "down.rounding": "stochastic", "server.optimize": True},
    "dq": {"up.rounding": "dithered", "down.rounding": "dithered"},
    # Tables 2 of the paper: FP8 training, float communication
    "qat-nearest": {"up.rounding": "none", "down.rounding": "none"},
    "qat-stochastic": {"qat.rounding": "stochastic", "up.rounding": "none", "down.rounding": "none"},
}


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """`config` with ``{"section.field": value}`` applied at once; unknown names are refused with a suggestion."""
    values = to_dict(config)
    for key, value in settings.items():
        if key in ("preset", "method"):
            raise ConfigError(
                f"{key}={value!r} among the settings would change the name of the run and nothing else; "
                f"use --{key}, or preset(name, method) in Python"
            )
        assign(values, key, value)
    return from_dict(values)


def with_method(config: Config, method: str) -> Config:
    if method not in METHODS:
        raise ConfigError(f"method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    return with_settings(replace(config, method=method), PLAIN | METHODS[method])


def cohort_size(config: Config, eligible: int) -> int:
    """How many of the eligible clients are sampled: the share, rounded half up, at least one."""
    return min(max(1, int(config.clients.fraction * eligible + 0.5)), eligible)


def to_dict(config: Config) -> dict[str, Any]:
    return asdict(config)


def from_dict(values: dict[str, Any]) -> Config:
    """A Config from nested dicts; missing fields take their defaults, unknown ones are refused."""
    checked: dict[str, Any] = to_dict(Config())
    for section, content in values.items():
        if isinstance(content, dict):
            for key, value in content.items():
                assign(checked, f"{section}.{key}", value)
        else:
            assign(checked, section, content)
    sections = {f.name: f.default_factory for f in fields(Config) if f.default_factory is not MISSING}
    built = {name: section(**checked[name]) for name, section in sections.items()}
    return Config(**{**checked, **built})
