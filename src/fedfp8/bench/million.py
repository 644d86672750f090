"""What a server needs for a million clients, from the unit costs that `scale` measures; docs/million-clients.md."""

from dataclasses import asdict, dataclass
from typing import Any

from fedfp8.bench.timing import table

__all__ = ["CLIENTS", "Needs", "Unit", "markdown", "needs", "units"]

Row = dict[str, Any]
CLIENTS, VISITS = 1_000_000, 1.0  # clients, and how often a day each takes part in a round
DAY = 86_400
LARGE = 100_000_000  # weights of a model that was not measured
MODELS = {"matchboxnet": "MatchboxNet", "lenet": "LeNet", "resnet18": "ResNet18", "digits": "digits"}


@dataclass(frozen=True)
class Unit:
    """Measured costs of one model. A visit: a client is sent a model, and its reply is decoded and added."""

    name: str
    weights: int
    visit_ms: float  # of one core
    bits_down: float
    bits_up: float
    memory: float  # bytes of the server, beside what it knows of its clients
    disk: float  # bytes of the models that it remembers
    known_memory: float  # bytes a client that holds a model
    known_disk: float

    def scaled(self, weights: int) -> "Unit":
        """The same for another size, by proportion."""
        factor = weights / self.weights
        grown = {"visit_ms": factor * self.visit_ms, "memory": factor * self.memory, "disk": factor * self.disk}
        return Unit(**asdict(self) | grown | {"name": "by proportion", "weights": weights})


@dataclass(frozen=True)
class Needs:
    visits: float  # a second, the mean over a day
    cores: float
    down: float  # bits a second
    up: float
    memory: float  # bytes
    disk: float


def needs(unit: Unit, clients: int = CLIENTS, visits_a_day: float = VISITS) -> Needs:
    """Every client may hold a model, so all are counted as known."""
    visits = clients * visits_a_day / DAY
    return Needs(
        visits=visits,
        cores=visits * unit.visit_ms / 1e3,
        down=visits * unit.weights * unit.bits_down,
        up=visits * unit.weights * unit.bits_up,
        memory=unit.memory + clients * unit.known_memory,
        disk=unit.disk + clients * unit.known_disk,
    )


def units(scale: list[Row], known: list[Row]) -> list[Unit]:
    """Of every measured model, that of its largest federation; by size, then a large model by proportion."""
    largest = {row["model"]: row for row in sorted(scale, key=lambda row: row["clients"])}
    found = [
        Unit(
            MODELS[row["model"]], row["weights"], row["ms_per_client"], row["bits_down"], row["bits_up"],
            1e6 * row["memory_mb"], 1e6 * row["history_mb"], known[0]["memory_bytes"], known[0]["json_bytes"],
        )
        for row in largest.values()
    ]  # fmt: skip
    found.sort(key=lambda unit: unit.weights)
    return [*found, found[-1].scaled(LARGE)]


def markdown(scale: list[Row], known: list[Row]) -> str:
    """The table, and the arithmetic of one of its rows."""
    found = units(scale, known)
    example = next((unit for unit in found if unit.name == "LeNet"), found[0])
    return f"{table([_shown(unit) for unit in found])}\n\n{arithmetic(example)}\n"


def _shown(unit: Unit) -> dict[str, str]:
    need = needs(unit)
    fp32 = needs(Unit(**asdict(unit) | {"bits_down": 32.0, "bits_up": 32.0}))
    return {
        "model": unit.name, "weights": f"{unit.weights:,}", "ms of a core a visit": f"{unit.visit_ms:.3g}",
        "cores": f"{need.cores:.2g}", "network down": _rate(need.down), "up": _rate(need.up),
        "FP32 would be": f"{_rate(fp32.down)} each way", "memory": _bytes(need.memory), "disk": _bytes(need.disk),
    }  # fmt: skip


def arithmetic(unit: Unit, clients: int = CLIENTS, visits_a_day: float = VISITS) -> str:
    """How the row of one model comes about, with its numbers."""
    need = needs(unit, clients, visits_a_day)
    lines = [
        f"visits   = {clients:,} clients x {visits_a_day:g} a day / {DAY:,} s = {need.visits:.3g} a second",
        f"cores    = {need.visits:.3g} / s x {unit.visit_ms:.3g} ms = {need.cores:.2g}",
        f"down     = {need.visits:.3g} / s x {unit.weights:,} weights x {unit.bits_down:.2f} bits = {_rate(need.down)}",
        f"up       = {need.visits:.3g} / s x {unit.weights:,} weights x {unit.bits_up:.2f} bits = {_rate(need.up)}",
        f"memory   = {_bytes(unit.memory)} + {clients:,} x {unit.known_memory:.0f} bytes = {_bytes(need.memory)}",
        f"disk     = {_bytes(unit.disk)} + {clients:,} x {unit.known_disk:.0f} bytes = {_bytes(need.disk)}",
    ]
    return f"{unit.name}, line by line:\n\n" + "\n".join(f"    {line}" for line in lines)


def _rate(bits: float) -> str:
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
