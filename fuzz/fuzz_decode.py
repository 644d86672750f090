"""Coverage-guided fuzzing of `wire.decode` and `wire.inspect` with atheris: only WireFormatError may come out.

    python fuzz/fuzz_decode.py fuzz/corpus -max_total_time=600       (needs: pip install atheris)
    python fuzz/fuzz_decode.py --seed-corpus fuzz/corpus             valid payloads to start from

The first byte chooses the layout (with or without the receiver's, with or without a reference); the checksum is made
valid before decoding, since a fuzzer would never find one and the code behind it is what is to be tested. Whatever
decodes must encode again to an equal state.
"""

import sys
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("fuzz_decode needs atheris: pip install atheris")

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

# Numba cannot compile instrumented kernels.
with atheris.instrument_imports(
    include=["fedfp8.wire", "fedfp8.model.layout"], exclude=["fedfp8.wire.kernels", "fedfp8.wire.rans", "fedfp8.fp8"]
):
    from fedfp8 import wire
    from fedfp8.model.layout import Layout
    from fedfp8.wire import codec, container, inspection, message, model, rawbits, steps, stream  # noqa: F401

from fedfp8 import E4M3, Format
from fedfp8.errors import WireFormatError
from fedfp8.model.state import State, quantize_state
from wire_cases import assert_same, small_model, small_state

LAYOUTS = [small_model(E4M3), small_model(Format(2, 1), 3, 1), small_model(Format(5, 2), 130, 130)]
REFERENCES = [small_state(layout) for layout in LAYOUTS]


def parts(data: bytes) -> tuple[Layout | None, State | None, bytes]:
    choice = data[0] if data else 0
    layout, reference = LAYOUTS[choice % 4 % 3], REFERENCES[choice % 4 % 3]
    return (None if choice & 64 else layout), (None if choice & 128 else reference), data[1:]


def patched(payload: bytes, layout: Layout | None, reference: State | None) -> bytes:
    """Fingerprints and checksum made right where the header has room for them, so that decoding gets past them."""
    body = bytearray(payload)
    if len(body) >= 30:
        body[:5] = container.MAGIC + bytes([container.VERSION])
        body[5] &= 15
        body[21] &= 127
        if layout is not None:
            body[6:14] = layout.fingerprint
        if body[5] & container.HAS_REFERENCE and reference is not None:
            body[22:30] = reference.fingerprint
    return container.seal(bytes(body))


def one_input(data: bytes) -> None:
    layout, reference, rest = parts(data)
    for payload in (rest, patched(rest, layout, reference)):
        try:
            wire.inspect(payload, layout)
        except WireFormatError:
            pass
        try:
            q = wire.decode(payload, layout, reference=reference)
        except WireFormatError:
            continue
        given = reference if q.layout == layout else None
        assert_same(wire.decode(wire.encode(q, reference=given), q.layout, reference=given), q)


def write_seeds(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, layout in enumerate(LAYOUTS):
        new = small_state(layout, 1, 0.05)
        for rounding in ("none", "nearest", "stochastic", "dithered"):
            q = quantize_state(new, seed=5, rounding=rounding, step=0.3 if rounding == "dithered" else None)
            for name, reference, options in (
                ("reference", REFERENCES[index], {}),
                ("alone", None, {"with_layout": True}),
                ("raw", None, {"lossless": False}),
            ):
                payload = wire.encode(q, reference=reference, **options)[: -container.CHECKSUM]
                choice = index + (64 if options.get("with_layout") else 0)
                (folder / f"{index}-{rounding}-{name}").write_bytes(bytes([choice]) + payload)


if __name__ == "__main__":
    if "--seed-corpus" in sys.argv:
        write_seeds(Path(sys.argv[-1]))
    else:
        atheris.Setup(sys.argv, one_input)
        atheris.Fuzz()
