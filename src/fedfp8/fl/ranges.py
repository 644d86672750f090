"""Says when learned ranges of weights fall: what they cut is sent cut, and never comes back (docs/qat.md, Ranges)."""

from fedfp8.fl.config import Config
from fedfp8.model.state import State

__all__ = ["fallen_ranges"]

FALLEN = 0.25  # of what a range began with; under SGD they grow, under Adam they get to a twentieth


def fallen_ranges(config: Config, start: State, before: State, after: State) -> list[str]:
    """A note for the round in which the first ranges fall; none as long as there are some."""
    if config.qat.ranges != "learned" or _fallen(start, before) or not (names := _fallen(start, after)):
        return []
    name = min(names, key=lambda name: float(after[name]) / float(start[name]))
    return [
        f"learned ranges of weights have fallen below a quarter of what they began with: {len(names)}, the lowest "
        f"{name} ({float(start[name]):.3g}, now {float(after[name]):.3g}). Weights beyond them are cut for good, which "
        "may cost accuracy. Adam does this to small ranges; qat.ranges=largest keeps every range at its largest weight"
    ]


def _fallen(start: State, state: State) -> list[str]:
    names = [spec.range for spec in start.layout.tensors if spec.range is not None]
    return [name for name in names if float(state[name]) < FALLEN * float(start[name])]
