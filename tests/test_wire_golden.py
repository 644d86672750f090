"""Golden payloads: they decode for ever, and the same states encode to the same bytes. Changing one is a version bump.

`python tests/test_wire_golden.py` writes them again (only ever for a new version).
"""

import re
from pathlib import Path

import pytest
import torch

from fedfp8 import E4M3, E5M2, Format, wire
from fedfp8.model.frequencies import Frequencies
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.quantized import QuantState, Remade, quantize_state
from fedfp8.model.state import State, Values
from fedfp8.wire.container import Reader, checked_body
from fedfp8.wire.message import read_plain, records
from fedfp8.wire.steps import GAPS
from wire_cases import a_kernel, assert_same, many_small, small_model, small_state

GOLDEN = Path(__file__).parent / "golden"
DOCS = Path(__file__).parents[1] / "docs" / "wire-format.md"
FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": Format(2, 1)}


Case = tuple[QuantState, tuple[Values, ...], bytes]


def cases() -> dict[str, Case]:
    """name -> (state, references, payload as encoded today)."""
    found: dict[str, Case] = {}
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
                    found[f"v1-{name}-{rounding}-{kind}"] = q, () if reference is None else (reference,), payload
    found["v1-e4m3-stochastic-same"] = _large()
    return found | _version_2()


def _version_2() -> dict[str, Case]:
    layout = small_model(E4M3, 60, 50)
    start, last, new = small_state(layout), small_state(layout, 1, 0.3), small_state(layout, 1, 0.35, alpha=2.1)
    mixed = State(layout, {**new.tensors, "net.bias": start["net.bias"] * 1.001})  # its bias is nearer to the start
    where = {"seed": 20261116, "rounding": "dithered", "place": 11, "strata": 16}
    change = quantize_state(small_state(layout, 2, 0.01), step=8.0, change=True, **where)  # type: ignore[arg-type]
    strata = quantize_state(mixed, step=0.3, **where)  # type: ignore[arg-type]
    fp8 = quantize_state(mixed, seed=20261116)
    both, three = (start, last), (start, small_state(layout, 2, 0.3), small_state(layout, 3, 0.4))
    near = State(layout, {**mixed.tensors, "net.weight": last["net.weight"] + 0.02 * new["net.weight"].flip(0)})
    apart = quantize_state(near, step=0.3, **where)  # type: ignore[arg-type]
    mean = {name: (three[0][name] + three[1][name] + three[2][name]) / 3 for name in ("net.weight", "net.bias")}
    middle = quantize_state(State(layout, {**new.tensors, **mean}), step=0.3, **where)  # type: ignore[arg-type]
    return {
        "v2-change-static": (change, (), wire.encode(change, with_layout=True)),
        "v2-change-raw": (change, (), wire.encode(change, lossless=False)),
        "v2-strata-reference": (strata, (last,), wire.encode(strata, reference=last)),
        "v2-strata-two-references": (apart, both, wire.encode(apart, references=both)),
        "v2-strata-mix-of-two": (strata, both, wire.encode(strata, references=both)),  # the weight goes on as it did
        "v2-strata-mix-of-three": (middle, three, wire.encode(middle, references=three)),
        "v2-strata-same": (strata, (start, mixed), wire.encode(strata, references=(start, mixed))),
        "v2-stochastic-two-references": _two_weights(),
        "v2-change-gaps": _gaps(change=True),
        "v2-strata-gaps": _gaps(change=False),
        "v2-together": _together(),
        "v2-frequencies": _frequencies(),
        "v1-one-of-three-references": (
            fp8,
            (last,),
            wire.encode(fp8, references=(start, small_state(layout, 9, 50.0), last)),
        ),
    }


def _two_weights() -> Case:
    """FP8 weights: one did not move from the first reference, one is near the second."""
    names = ("a", "b")
    layout = Layout(
        (
            *(TensorSpec(f"{n}.weight", (40, 30), "float32", "fp8", E4M3, f"{n}.alpha") for n in names),
            *(TensorSpec(f"{n}.alpha", (), "float32", "range") for n in names),
        )
    )
    one, other = small_state(layout), small_state(layout, 3, 2.0)
    q = quantize_state(State(layout, {**one.tensors, "b.weight": other["b.weight"] * 1.01}), seed=4)
    return q, (one, other), wire.encode(q, references=(one, other))


def _gaps(change: bool) -> Case:
    """A weight of which one in ten moved, in several blocks, and steps that need extra bits; with extreme hazards."""
    layout = small_model(E4M3, 200, 100)
    old, moved = small_state(layout), small_state(layout, 1, 0.02)
    far = moved["net.weight"] + 40 * (torch.arange(20_000) % 997 == 0).view(200, 100)
    new = State(layout, {**moved.tensors, "net.weight": far - old["net.weight"] if change else far})
    q = quantize_state(
        new, seed=20261117, rounding="dithered", step={"net.weight": 0.2, "net.bias": 0.05, "nothing": 1.0}, place=5,
        strata=7, change=change,
    )  # fmt: skip
    given = () if change else (old,)
    return q, given, wire.encode(q, references=given)


def _together() -> Case:
    """Small vectors and small matrices, each as one; of the vectors, one is all zero."""
    layout = many_small()
    start, last, new = small_state(layout), small_state(layout, 1, 0.3), small_state(layout, 1, 0.35)
    new = State(layout, {**new.tensors, "b": torch.zeros(40)})
    q = quantize_state(new, seed=20261117, rounding="dithered", step=0.3, place=2, strata=5, together=True)
    return q, (start, last), wire.encode(q, references=(start, last))


def _frequencies() -> Case:
    """Kernels and the layer behind them, given the frequencies of a start and what was sent before."""
    layout = a_kernel()
    start, last, new = small_state(layout), small_state(layout, 1, 0.3), small_state(layout, 1, 0.35)
    how = {"rounding": "dithered", "step": 1.5, "place": 2, "strata": 5, "together": True, "frequencies": True}
    given = Frequencies(start), Remade(quantize_state(last, seed=1, **how))  # type: ignore[arg-type]
    q = quantize_state(new, seed=20261117, **how)  # type: ignore[arg-type]
    return q, given, wire.encode(q, references=given)


def _large() -> Case:
    """Four lanes, several blocks, a tensor that did not move, and one without random bits would be cheaper."""
    layout = small_model(E4M3, 200, 200)
    state = small_state(layout)
    q = quantize_state(state, seed=1, rounding="stochastic")
    return q, (state,), wire.encode(q, reference=state)


def example() -> bytes:
    """The worked example of docs/wire-format.md: two weights and their range, nearest rounding, raw."""
    layout = Layout((TensorSpec("w", (2,), "float32", "fp8", E4M3, "a"), TensorSpec("a", (), "float32", "range")))
    state = State(layout, {"w": torch.tensor([1.0, -0.25]), "a": torch.tensor(1.0)})
    return wire.encode(quantize_state(state, seed=7, rounding="nearest"), lossless=False)


def example_2() -> bytes:
    """The second one: the change of three weights, dithered at place 1 of 4."""
    layout = Layout((TensorSpec("w", (3,)),))
    change = State(layout, {"w": torch.tensor([0.5, -0.25, 0.0])})
    where = {"seed": 7, "place": 1, "strata": 4, "change": True}
    return wire.encode(quantize_state(change, rounding="dithered", step={"w": 0.25}, **where))  # type: ignore[arg-type]


CASES = cases()


def test_the_folder_holds_these_and_no_others() -> None:
    assert sorted(p.stem for p in GOLDEN.glob("*.bin")) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_golden_payload(name: str) -> None:
    q, references, payload = CASES[name]
    stored = (GOLDEN / f"{name}.bin").read_bytes()
    assert_same(wire.decode(stored, q.layout, references=references), q)
    assert payload == stored


def test_golden_payloads_meet_every_mode_of_version_2() -> None:
    found = {}
    for name in CASES:
        if name.startswith("v2"):
            q, _, payload = CASES[name]
            rows = wire.inspect(payload, q.layout).rows
            assert rows is not None
            found[name] = wire.header(payload).version, [r.mode for r in rows if r.name in q.codes and r.elements]
    assert found == {
        "v2-change-static": (2, ["static", "static"]),
        "v2-change-raw": (2, ["raw", "raw"]),
        "v2-strata-reference": (2, ["reference", "reference"]),
        "v2-strata-two-references": (2, ["reference 2", "reference 1"]),
        "v2-strata-mix-of-two": (2, ["mix", "reference 1"]),
        "v2-strata-mix-of-three": (2, ["mix", "reference 1"]),
        "v2-strata-same": (2, ["same", "same"]),
        "v2-stochastic-two-references": (2, ["same 1", "reference 2"]),
        "v2-change-gaps": (2, ["static", "static"]),
        "v2-strata-gaps": (2, ["reference", "reference"]),
        "v2-together": (2, ["mix", "mix"]),  # those that are coded alone
        "v2-frequencies": (2, [*["mix"] * 4, "reference 1", "mix", "mix", "reference 1", "mix"]),  # 5 and 3 diagonals
    }
    for name in ("v2-change-gaps", "v2-strata-gaps"):
        q, given, payload = CASES[name]
        plan, _, data = next(records(q, given, _body(q, payload)))
        assert plan.name == "net.weight" and data[0] & 31 == GAPS


def test_small_tensors_of_the_golden_payload_are_two() -> None:
    q, _, payload = CASES["v2-together"]
    rows = wire.inspect(payload, q.layout).rows
    assert rows is not None and wire.header(payload).together
    assert [(row.name, row.elements) for row in rows] == [
        ("a", 1200),
        ("4 small vectors", 40 + 1 + 1023),
        ("2 small tensors", 35 + 66),
        ("f", 1024),
    ]


def _body(q: QuantState, payload: bytes) -> Reader:
    """At the first coded tensor."""
    head, layout, reader = checked_body(payload, q.layout)
    read_plain(head, layout, reader)
    return reader


def test_worked_examples_in_the_docs() -> None:
    blocks = re.findall(r"```hex\n(.*?)```", DOCS.read_text(), re.DOTALL)
    digits = ["".join(line.split("#")[0] for line in block.splitlines()) for block in blocks]
    assert [bytes.fromhex(d) for d in digits] == [example(), example_2()]


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, (_, _, payload) in CASES.items():
        (GOLDEN / f"{name}.bin").write_bytes(payload)
    print(example().hex(" "), example_2().hex(" "), sep="\n")
