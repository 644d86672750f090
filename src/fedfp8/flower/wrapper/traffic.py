"""What models cost, and what they would have cost: a line for every phase of every round."""

from dataclasses import dataclass, field
from typing import Any

from fedfp8.text import size_text

__all__ = ["Phase", "Traffic"]


@dataclass
class Phase:
    """Bytes of all Arrays of all messages, each way; plain: of the same models without fedfp8."""

    round: int
    phase: str
    messages: int = 0
    resent: int = 0
    down: int = 0
    up: int = 0
    plain_down: int = 0
    plain_up: int = 0
    clients: list[int] = field(default_factory=list)  # nodes, as Flower numbers them
    rejected: list[dict[str, Any]] = field(default_factory=list)  # client and reason

    def __str__(self) -> str:
        sizes = f"{size_text(self.down)} down, {size_text(self.up)} up"
        plain = f"{size_text(self.plain_down)} and {size_text(self.plain_up)}"
        again = f", {self.resent} of them again and whole" if self.resent else ""
        return f"round {self.round} {self.phase}: {self.messages} messages{again}; {sizes} instead of {plain}"


class Traffic(list[Phase]):
    """Phases in the order they came."""

    def open(self, phase: str) -> Phase:
        trains = sum(one.phase == "train" for one in self)
        self.append(Phase(trains + (phase == "train"), phase))
        return self[-1]

    def metrics(self, since: int = 0) -> dict[int, dict[str, int]]:
        """round -> what Flower's results are told, from phase number `since` on; rounds count from 1 there."""
        before = sum(one.phase == "train" for one in self[:since])
        found: dict[int, dict[str, int]] = {}
        for one in self[since:]:
            sums = found.setdefault(max(one.round - before, 1), {})  # what precedes training belongs to the first round
            for way in ("down", "up"):
                sums[f"fedfp8-bytes-{way}"] = sums.get(f"fedfp8-bytes-{way}", 0) + getattr(one, way)
                sums[f"plain-bytes-{way}"] = sums.get(f"plain-bytes-{way}", 0) + getattr(one, f"plain_{way}")
        return found

    def __str__(self) -> str:
        sent = sum(one.down + one.up for one in self)
        plain = sum(one.plain_down + one.plain_up for one in self)
        if sent == plain:
            return f"{size_text(sent)}, as many bytes as without"
        times = f" ({plain / sent:.1f} times less)" if sent else ""
        return f"{size_text(sent)} instead of {size_text(plain)}{times}"
