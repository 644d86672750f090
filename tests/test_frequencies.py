"""Changes as frequencies: the same change in other numbers, fewer bytes, and nothing that a server must trust."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedfp8 import ClientLink, ServerLink, WireFormatError
from fedfp8.link.client import quantize_reply
from fedfp8.link.wire import Orders
from fedfp8.model.frequencies import from_frequencies, layout_of_frequencies, steps_of_frequencies, to_frequencies
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.quantized import dequantize_state
from fedfp8.model.state import State
from fedfp8.wire import decode, encode, header

SHAPES = {
    "stem.weight": (64, 3, 5, 5),  # small
    "conv.weight": (32, 64, 3, 3),
    "conv.bias": (32,),
    "audio.weight": (64, 64, 11),
    "point.weight": (128, 128, 1, 1),
    "last.weight": (16, 128, 5, 5),
    "first.weight": (64, 16 * 16),  # reads 4 x 4 pixels of each of the 16 outputs of last
    "second.weight": (256, 64),  # reads no convolution
}


def a_state(shapes: dict[str, tuple[int, ...]] = SHAPES, seed: int = 0) -> State:
    g = torch.Generator().manual_seed(seed)
    layout = Layout(tuple(TensorSpec(name, shape) for name, shape in shapes.items()))
    return State(layout, {name: torch.randn(shape, generator=g) for name, shape in shapes.items()})


def test_what_travels_as_frequencies() -> None:
    state = a_state()
    found = [(spec.name, spec.shape) for spec in layout_of_frequencies(state.layout)]
    names = [name for name, _ in found]
    assert [name for name in SHAPES if name in names] == [
        "stem.weight", "conv.bias", "point.weight", "second.weight",
    ]  # fmt: skip
    assert [pair for pair in found if pair[0].startswith("conv.weight")] == [
        (f"conv.weight~{i}", (n, 32 * 64)) for i, n in enumerate((1, 2, 3, 2, 1))
    ]
    assert [pair for pair in found if pair[0].startswith("audio")] == [
        (f"audio.weight~{i}", (1, 64 * 64)) for i in range(11)
    ]
    assert [n for n in names if n.startswith("first")] == [f"first.weight~{i}" for i in range(7)]
    # No square, too large a block, or the convolution was not the layer before: as it is
    for shapes in (
        {"a": (16, 128, 3, 3), "b": (64, 16 * 12)},
        {"a": (16, 16, 9, 9)},
        {"a": (16, 128, 3, 3), "b": (16, 16), "c": (1024, 16 * 16)},
    ):
        other = a_state(shapes).layout
        left = [spec for spec in layout_of_frequencies(other) if spec in other.tensors]
        assert len(left) == len(shapes) - (shapes["a"][2] == 3)


def test_there_and_back() -> None:
    """Orthonormal: lengths stay, and the inverse is the transpose; to float32's rounding of sums of at most 25."""
    state = a_state()
    there = to_frequencies(state)
    back = from_frequencies(there, state.layout)
    for name, tensor in state.items():
        # |basis| <= 1, sums of n terms: n + 1 roundings of 2**-24 there, and again back, of at most sqrt(n) max|x|
        bound = 2 * 26 * 2.0**-24 * 5 * float(tensor.abs().max())
        assert float((back[name] - tensor).abs().max()) <= bound
        parts = [there[n] for n in there if n == name or n.startswith(f"{name}~")]
        length = sum(float(part.double().square().sum()) for part in parts)
        assert length == pytest.approx(float(tensor.double().square().sum()), rel=1e-5)


def test_smooth_blocks_are_low_frequencies() -> None:
    x = torch.arange(5.0)
    flat = torch.full((64, 64, 5, 5), 2.0)
    wave = torch.cos(torch.pi * (2 * x + 1) / 10).expand(64, 64, 5, 5).contiguous()  # half a wave from left to right
    layout = Layout((TensorSpec("w", (64, 64, 5, 5)),))
    there = to_frequencies(State(layout, {"w": flat}))
    assert torch.allclose(there["w~0"], torch.tensor(10.0))  # 25 * 2 / 5
    assert max(float(there[f"w~{i}"].abs().max()) for i in range(1, 9)) < 1e-5
    there = to_frequencies(State(layout, {"w": wave}))
    assert torch.allclose(there["w~1"][0], torch.tensor(12.5).sqrt())  # all of its length; along rows: first
    assert max(float(there[f"w~{i}"].abs().max()) for i in (0, *range(2, 9))) < 1e-5
    assert float(there["w~1"][1].abs().max()) < 1e-5


def smooth(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """A change such as training makes: mostly the same over a kernel."""
    means = torch.randn((*shape[:2], 1, 1), generator=g)
    return 0.002 * (means + 0.3 * torch.randn(shape, generator=g))


def orders(**changes: object) -> Orders:
    given = Orders("dithered", None, 5.0, 228.0, seed=9, place=3, strata=10, frequencies=True)
    return replace(given, **changes)  # type: ignore[arg-type]


def a_change() -> tuple[State, State]:
    g = torch.Generator().manual_seed(4)
    received = a_state({"w": (96, 64, 5, 5), "b": (96,)}, 1)
    local = State(received.layout, {"w": received["w"] + smooth((96, 64, 5, 5), g), "b": received["b"] + 0.01})
    return received, local


def test_fewer_bytes_and_less_harm() -> None:
    received, local = a_change()
    found = {}
    for as_frequencies in (False, True):
        q, _ = quantize_reply(local, received, orders(frequencies=as_frequencies))
        assert (q.layout.fingerprint == local.layout.fingerprint) is not as_frequencies
        got = dequantize_state(q)
        got = from_frequencies(got, local.layout) if as_frequencies else got
        error = float((got["w"] - (local["w"] - received["w"])).square().mean())
        # s^2 / 12 for any values; the mean of 153,600 squares of spread s^2 / sqrt(180) each, five sigma
        counts = (1, 2, 3, 4, 5, 4, 3, 2, 1) if as_frequencies else (25,)
        steps = [q.steps[name] for name in q.steps if name.startswith("w")]
        mean = sum(n * step**2 / 12 for n, step in zip(counts, steps, strict=True)) / 25
        assert error == pytest.approx(mean, abs=5 * max(steps) ** 2 / np.sqrt(180 * 153_600))
        # The harm: error of every frequency, by how large changes are there
        wrong = to_frequencies(State(local.layout, {"w": got["w"] - (local["w"] - received["w"]), "b": received["b"]}))
        sizes = to_frequencies(State(local.layout, {"w": local["w"] - received["w"], "b": received["b"]}))
        harm = sum(float(wrong[n].square().sum()) * sizes.rms(n) ** 2 for n in wrong if n.startswith("w"))
        found[as_frequencies] = harm, len(encode(q))
    (harm, size), (less, smaller) = found[False], found[True]
    assert smaller < 0.6 * size and less < 0.8 * harm


def test_steps_follow_the_size_of_frequencies() -> None:
    """The root of how much larger the whole is: finer for large ones, at most four times as coarse for others."""
    weights = State(Layout((TensorSpec("w", (64, 64, 5, 5)),)), {"w": smooth((64, 64, 5, 5), torch.Generator())})
    frequencies = to_frequencies(weights)
    steps = steps_of_frequencies({"w": 0.1}, weights, frequencies)
    for name, step in steps.items():
        assert step == pytest.approx(0.1 * (weights.rms("w") / frequencies.rms(name)) ** 0.5)
    assert steps["w~0"] < 0.06 and steps["w~8"] > 0.1
    flat = State(weights.layout, {"w": torch.ones(64, 64, 5, 5)})
    steps = steps_of_frequencies({"w": 0.1}, flat, to_frequencies(flat))
    assert steps["w~8"] == pytest.approx(0.4) and steps["w~0"] == pytest.approx(0.1 / 5**0.5)
    nothing = State(weights.layout, {"w": torch.zeros(64, 64, 5, 5)})
    assert min(steps_of_frequencies({"w": 2.0**-100}, nothing, to_frequencies(nothing)).values()) >= 2.0**-100


def test_a_change_far_beyond_its_step_has_room() -> None:
    """All of a block that moved: its lowest frequency is five times as large as its weights."""
    received, local = a_change()
    local["w"][3, 5] += 0.5
    q, _ = quantize_reply(local, received, orders(kappa_up=1e-6))
    assert max(int(codes.abs().max()) for codes in q.codes.values()) > 2**18  # more than 2**20 would be refused
    got = from_frequencies(dequantize_state(q), local.layout)
    assert float((got["w"] - (local["w"] - received["w"])).abs().max()) < 1e-4


# Links


def a_model(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"conv.weight": 0.1 * torch.randn(48, 32, 5, 5, generator=g), "fc.weight": torch.randn(10, 48, generator=g)}


def trained(received: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(8)
    return {"conv.weight": received["conv.weight"] + smooth((48, 32, 5, 5), g), "fc.weight": received["fc.weight"]}


def test_a_server_takes_both() -> None:
    """A client is told; one that answers in weights, in part, or is told not to, is understood as well."""
    for told, whole in ((True, True), (True, False), (False, True)):
        server, client = ServerLink("dq", seed=3, frequencies=told), ClientLink()
        model = a_model(1)
        received = client.receive(server.broadcast(model, ["a"])["a"])
        local = trained(received)
        given = local if whole else {"conv.weight": local["conv.weight"]}
        reply = client.reply(given)
        assert header(reply).has_layout is not whole
        update = server.receive("a", reply)
        assert set(update) == set(given)
        moved, wanted = update["conv.weight"] - model["conv.weight"], local["conv.weight"] - received["conv.weight"]
        # A lone client's kappa is 1.2: an error of 1.44 / 12 of the change's square, 3.5 times that where frequencies
        # are that much smaller than the whole (1.04 / 0.3); 1 / sqrt(1 + 0.42) = 0.84
        assert float(torch.nn.functional.cosine_similarity(moved.flatten(), wanted.flatten(), dim=0)) > 0.82


def test_a_reply_in_frequencies_is_checked_like_any_other() -> None:
    server, client = ServerLink("dq", seed=3), ClientLink()
    received = client.receive(server.broadcast(a_model(1), ["a"])["a"])
    reply = client.reply(trained(received))
    layout = layout_of_frequencies(server.round.model.layout)  # type: ignore[union-attr]
    message = decode(reply, layout)
    for wrong in ("seed", "place"):
        forged = encode(replace(message, strata=2, **{wrong: 1}))
        with pytest.raises(WireFormatError, match="another round"):
            server.receive("a", forged)
    for strange in (replace(message, steps=dict.fromkeys(message.steps, 2.0**100)), replace(message, change=False)):
        try:
            update = server.receive("a", encode(strange))
        except WireFormatError:
            continue
        assert all(bool(tensor.isfinite().all()) for tensor in update.values())
    for cut in range(0, len(reply), 97):
        with pytest.raises(WireFormatError):
            server.receive("a", reply[:cut])
    assert bool(server.receive("a", reply)["conv.weight"].isfinite().all())


def test_orders_say_it_in_a_bit() -> None:
    for wanted in (True, False):
        told = orders(frequencies=wanted, kept=3)
        assert Orders.split(told.to_bytes() + b"rest") == (told, b"rest")
    raw = bytearray(orders().to_bytes())
    raw[5] |= 32  # a flag that nobody knows
    with pytest.raises(WireFormatError):
        Orders.split(bytes(raw))
