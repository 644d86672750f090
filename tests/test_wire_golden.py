"""Golden payloads: they decode for ever, and the same states encode to the same bytes. Changing one is a version bump.

`python tests/test_wire_golden.py` writes them again (only ever for a new version).
"""

import re
from pathlib import Path

import pytest

from fedfp8 import E4M3, E5M2, Format, wire
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.state import QuantState, State, quantize_state
from wire_cases import assert_same, small_model, small_state

GOLDEN = Path(__file__).parent / "golden"
DOCS = Path(__file__).parents[1] / "docs" / "wire-format.md"
FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": Format(2, 1)}


def cases() -> dict[str, tuple[QuantState, State | None, bytes]]:
    """name -> (state, reference, payload as encoded today)."""
    found: dict[str, tuple[QuantState, State | None, bytes]] = {}
    for name, format in FORMATS.items():
        layout = small_model(format, 60, 50)
        old, new = small_state(layout), small_state(layout, 1, 0.05, alpha=2.1)
        for rounding in ("none", "nearest", "stochastic", "dithered"):
            q = quantize_state(new, seed=20261116, rounding=rounding, step=0.3 if rounding == "dithered" else None)
            for kind, reference, payload in (
                ("reference", old, wire.encode(q, reference=old)),
                ("static", None, wire.encode(q, with_layout=True)),
                ("raw", None, wire.encode(q, lossless=False)),
            ):
                if rounding != "none" or kind == "raw":
                    found[f"v1-{name}-{rounding}-{kind}"] = q, reference, payload
    found["v1-e4m3-stochastic-same"] = _large()
    return found


def _large() -> tuple[QuantState, State, bytes]:
    """Four lanes, several blocks, a tensor that did not move, and one without dice would be cheaper."""
    layout = small_model(E4M3, 200, 200)
    state = small_state(layout)
    q = quantize_state(state, seed=1, rounding="stochastic")
    return q, state, wire.encode(q, reference=state)


def example() -> bytes:
    """The worked example of docs/wire-format.md: two weights and their range, nearest rounding, raw."""
    layout = Layout((TensorSpec("w", (2,), "float32", "fp8", E4M3, "a"), TensorSpec("a", (), "float32", "range")))
    import torch

    state = State(layout, {"w": torch.tensor([1.0, -0.25]), "a": torch.tensor(1.0)})
    return wire.encode(quantize_state(state, seed=7, rounding="nearest"), lossless=False)


CASES = cases()


def test_the_folder_holds_these_and_no_others() -> None:
    assert sorted(p.stem for p in GOLDEN.glob("*.bin")) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_golden_payload(name: str) -> None:
    q, reference, payload = CASES[name]
    stored = (GOLDEN / f"{name}.bin").read_bytes()
    assert_same(wire.decode(stored, q.layout, reference=reference), q)
    assert payload == stored


def test_worked_example_in_the_docs() -> None:
    block = re.search(r"```hex\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert block is not None
    digits = "".join(line.split("#")[0] for line in block[1].splitlines())
    assert bytes.fromhex(digits) == example()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, (_, _, payload) in CASES.items():
        (GOLDEN / f"{name}.bin").write_bytes(payload)
    print(example().hex(" "))
