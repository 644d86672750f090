"""Coverage-guided fuzzing of `wire.decode` and `wire.inspect` with atheris: only WireFormatError may come out.

    python fuzz/fuzz_decode.py fuzz/corpus -max_total_time=600       (needs: pip install atheris)
    python fuzz/fuzz_decode.py --seed-corpus fuzz/corpus             valid payloads to start from

The first byte chooses the layout (with or without the receiver's, with or without references); fingerprints and the
checksum are made valid before decoding, since a fuzzer would never find them and the code behind them is what is to be
tested. Both versions of the format are met. Whatever decodes must encode again to an equal state.
"""

import sys
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("fuzz_decode needs atheris: pip install atheris")

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import fedfp8.fp8.kernels  # noqa: F401  (before: Numba cannot compile instrumented kernels)

with atheris.instrument_imports(
    include=["fedfp8.wire", "fedfp8.model.layout"],
    exclude=[*(f"fedfp8.wire.{name}" for name in ("fused", "gaps", "kernels", "rans", "search")), "fedfp8.fp8"],
):
    from fedfp8 import wire
    from fedfp8.model.layout import Layout
    from fedfp8.wire import codec, container, inspection, message, model, rawbits, steps, stream  # noqa: F401

from fedfp8 import E4M3, Format
from fedfp8.errors import WireFormatError
from fedfp8.model.frequencies import Frequencies
from fedfp8.model.quantized import quantize_state
from fedfp8.model.state import State, Values
from wire_cases import a_kernel, assert_same, many_small, small_model, small_state

LAYOUTS = [
    small_model(E4M3), small_model(Format(2, 1), 3, 1), small_model(Format(5, 2), 130, 130), many_small(), a_kernel(),
]  # fmt: skip
STATES = [[small_state(layout, i, 0.5 * i) for i in range(3)] for layout in LAYOUTS]
REFERENCES = [[*states, *map(Frequencies, states)] for states in STATES]  # in both forms


def parts(data: bytes) -> tuple[Layout | None, list[Values], bytes]:
    choice = data[0] if data else 0
    layout, references = LAYOUTS[choice % 64 % 5], REFERENCES[choice % 64 % 5]
    return (None if choice & 64 else layout), ([] if choice & 128 else references), data[1:]


def patched(payload: bytes, layout: Layout | None, references: list[Values]) -> bytes:
    """Fingerprints and checksum made right where the header has room for them, so that decoding gets past them."""
    body = bytearray(payload)
    if len(body) >= 49:
        version = 1 + body[4] % 2
        start = 6 if version == 1 else 9  # of the layout fingerprint
        body[:5] = container.MAGIC + bytes([version])
        body[5] &= 15 if version == 1 else 63
        body[start + 15] &= 127
        if layout is not None:
            body[start : start + 8] = layout.fingerprint
        if references:
            for i in range(body[5] & (1 if version == 1 else 3)):
                state = references[i + (3 if version > 1 and body[5] & container.FREQUENCIES else 0)]
                body[start + 16 + 8 * i : start + 24 + 8 * i] = container.fingerprint_of(state, version)
    return container.seal(bytes(body))


def one_input(data: bytes) -> None:
    layout, references, rest = parts(data)
    for payload in (rest, patched(rest, layout, references)):
        try:
            wire.inspect(payload, layout)
        except WireFormatError:
            pass
        try:
            q = wire.decode(payload, layout, references=references)
        except WireFormatError:
            continue
        given = [state for state in references if state.layout == q.form][:3] if q.layout == layout else []
        assert_same(wire.decode(wire.encode(q, references=given), q.layout, references=given), q)


def write_seeds(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, layout in enumerate(LAYOUTS):
        near, far = small_state(layout, 1, 0.05), STATES[index][2]
        second = layout.tensors[1].name
        new = State(layout, {**near.tensors, second: far[second] + 0.01})  # a mix is best, and the third
        for rounding in ("none", "nearest", "stochastic", "dithered"):
            dithered = rounding == "dithered"
            kinds = {"": (1, {}), "-7": (7, {}), "-7-together": (7, {"together": True})}
            kinds["-7-frequencies"] = 7, {"together": True, "frequencies": True}
            for kind, (strata, marks) in kinds.items() if dithered else [("", (1, {}))]:
                where = {"place": strata - 1, "strata": strata, "change": strata > 1} | marks
                states = REFERENCES[index][3:] if "frequencies" in marks else STATES[index]
                q = quantize_state(new, seed=5, rounding=rounding, step=0.3 if dithered else None, **where)
                for name, references, options in (
                    ("reference", states[:1], {}),
                    ("references", states, {}),
                    ("alone", [], {"with_layout": True}),
                    ("raw", [], {"lossless": False}),
                ):
                    payload = wire.encode(q, references=references, **options)[: -container.CHECKSUM]
                    # `patched` writes the version from the parity of this byte
                    payload = payload[:4] + bytes([payload[4] - 1]) + payload[5:]
                    choice = index + (64 if options.get("with_layout") else 0)
                    (folder / f"{index}-{rounding}{kind}-{name}").write_bytes(bytes([choice]) + payload)


if __name__ == "__main__":
    if "--seed-corpus" in sys.argv:
        write_seeds(Path(sys.argv[-1]))
    else:
        atheris.Setup(sys.argv, one_input)
        atheris.Fuzz()
