"""Changes as frequencies: the same change in other numbers, fewer bytes, and nothing that a server must trust."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfp8 import ClientLink, LostReference, QuantizationError, ServerLink, WireFormatError
from fedfp8.link.client import quantize_reply
from fedfp8.link.store import narrow_codes, pack_message, unpack_message
from fedfp8.link.wire import Orders
from fedfp8.model.frequencies import Frequencies, from_frequencies, layout_of_frequencies, steps_of_frequencies
from fedfp8.model.layout import Layout, TensorSpec
from fedfp8.model.quantized import Remade, dequantize_state, quantize_state
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


@pytest.mark.parametrize("other", ["w~0", "w~7", "~1", "w~x", "w~²"])
def test_a_model_may_have_names_like_those_of_frequencies(other: str) -> None:
    state = {"w": torch.randn(32, 64, 3, 3), other: torch.randn(150, 150)}
    payload = ServerLink("dq", seed=1).broadcast(state, ["a"])["a"]
    got = ClientLink().receive(payload)
    assert list(got) == list(state)
    for name, tensor in state.items():  # steps of at most 2.1 * 0.8 of the rms, which is 1; sums of 9 errors
        assert float((got[name] - tensor).abs().max()) < 9 * 2.1 * 0.8 / 2
    layout = Layout(tuple(TensorSpec(name, tuple(tensor.shape)) for name, tensor in state.items()))
    assert (layout_of_frequencies(layout) == layout) == (other in ("w~0", "w~7"))


def test_there_and_back() -> None:
    """Orthonormal: lengths stay, and the inverse is the transpose; to float32's rounding of sums of at most 25."""
    state = a_state()
    there = Frequencies(state)
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
    there = Frequencies(State(layout, {"w": flat}))
    assert torch.allclose(there["w~0"], torch.tensor(10.0))  # 25 * 2 / 5
    assert max(float(there[f"w~{i}"].abs().max()) for i in range(1, 9)) < 1e-5
    there = Frequencies(State(layout, {"w": wave}))
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
        assert q.layout.fingerprint == local.layout.fingerprint and q.frequencies is as_frequencies
        got = dequantize_state(q)
        wrong = State(local.layout, {n: got[n] - (local[n] - received[n]) for n in local})
        # s^2 / 12 for any values; the mean of 153,600 squares of spread s^2 / sqrt(180) each, five sigma
        counts = (1, 2, 3, 4, 5, 4, 3, 2, 1) if as_frequencies else (25,)
        steps = [q.steps[name] for name in q.steps if name.startswith("w")]
        mean = sum(n * step**2 / 12 for n, step in zip(counts, steps, strict=True)) / 25
        assert wrong.rms("w") ** 2 == pytest.approx(mean, abs=5 * max(steps) ** 2 / np.sqrt(180 * 153_600))
        # The harm: error of every frequency, by how large changes are there
        errors, sizes = Frequencies(wrong), Frequencies(State(local.layout, {n: local[n] - received[n] for n in local}))
        harm = sum(float(errors[n].square().sum()) * sizes.rms(n) ** 2 for n in errors if n.startswith("w"))
        found[as_frequencies] = harm, len(encode(q))
    (harm, size), (less, smaller) = found[False], found[True]
    assert smaller < 0.6 * size and less < 0.8 * harm


def test_steps_grow_with_frequency() -> None:
    """From 0.7 to 2.1 times the tensor's, a factor at a time; never below what 2**19 of them to the largest need."""
    state = a_state({"w": (64, 64, 5, 5), "v": (64, 64, 11), "m": (3, 3)})
    steps = steps_of_frequencies({"w": 0.1, "v": 1.0, "m": 2.0}, state)
    assert [steps[f"w~{i}"] for i in (0, 4, 8)] == pytest.approx([0.07, 0.07 * 3**0.5, 0.21])
    assert (steps["v~0"], steps["v~10"], steps["m"]) == pytest.approx((0.7, 2.1, 2.0))
    assert steps_of_frequencies({"w": 2.0**-100, "v": 0.0}, state)["w~8"] == 5 * state.largest("w") / 2**19
    assert set(steps_of_frequencies({"w": 0.0, "v": 0.0}, state).values()) == {0.0}  # all zero


def test_a_change_far_beyond_its_step_has_room() -> None:
    """All of a block that moved: its lowest frequency is five times as large as its weights."""
    received, local = a_change()
    local["w"][3, 5] += 0.5
    q, _ = quantize_reply(local, received, orders(kappa_up=1e-6))
    assert max(int(codes.abs().max()) for codes in q.codes.values()) > 2**18  # more than 2**20 would be refused
    got = dequantize_state(q)
    assert float((got["w"] - (local["w"] - received["w"])).abs().max()) < 1e-4


def test_messages_hold_frequencies_of_a_layout_that_says_nothing_of_them() -> None:
    received, local = a_change()
    q, _ = quantize_reply(local, received, orders())
    for with_layout in (False, True):
        payload = encode(q, with_layout=with_layout)
        assert header(payload).frequencies and header(payload).layout_fingerprint == local.layout.fingerprint
        back = decode(payload, None if with_layout else local.layout)
        assert all(torch.equal(back.codes[name], q.codes[name]) for name in q.codes) and back.steps == q.steps
    # References are in the same form, whichever side has them
    held = Remade(q)
    again = quantize_state(
        dequantize_state(q), seed=3, rounding="dithered", step=0.001, change=True, together=True, frequencies=True
    )
    payload = encode(again, references=[held])
    assert len(payload) < 0.9 * len(encode(again))
    assert torch.equal(decode(payload, local.layout, references=[held]).codes["w~0"], again.codes["w~0"])
    with pytest.raises(WireFormatError, match="of another model"):
        encode(again, references=[local])
    unpacked, _ = unpack_message(pack_message(narrow_codes(q), held.quick_fingerprint))
    assert Remade(unpacked).quick_fingerprint == held.quick_fingerprint
    for rounding in ("stochastic", "none"):
        with pytest.raises(QuantizationError, match="belong to 'dithered'"):
            quantize_state(local, rounding=rounding, frequencies=True)


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
        assert header(reply).has_layout is not whole and header(reply).frequencies is told
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
    message = decode(reply, server.round.model.layout)  # type: ignore[union-attr]
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


@pytest.mark.parametrize("kind", ["memory", "store", "packed", "saved"])
def test_models_down_are_frequencies_too(kind: str, tmp_path: Path) -> None:
    """Given a start and the last visits, wherever a client keeps them; what it works with are weights."""
    start, state = a_model(1), a_model(1)
    server, client = ServerLink("dq", seed=3, start=start), ClientLink(start=start)
    if kind == "store":
        client = ClientLink(start=start, store=tmp_path)
    elif kind == "packed":
        client = ClientLink(start=start, packed=())
    for _ in range(4):
        message = server.broadcast(state, ["a"])["a"]
        payload = Orders.split(message)[1]
        assert header(payload).frequencies and header(payload).reference_fingerprints
        assert len(message) < 48 * 32 * 25 * 0.35  # bytes a weight
        received = client.receive(message)
        # What the server takes a client to work with is what it works with, bit for bit
        assert server.round is not None
        assert torch.equal(server.round.sent("a")["conv.weight"], received["conv.weight"])
        # 0.36 for a lone client: noise of at most 0.21 / sqrt(12) of the rms, up to 2.1 times that
        rms = float(state["conv.weight"].square().mean().sqrt())
        assert (
            float((received["conv.weight"] - state["conv.weight"]).square().mean().sqrt()) < 0.36 * 2.1 / 12**0.5 * rms
        )
        if kind == "saved":
            saved, client = client.state_dict(), ClientLink(start=start)
            client.load_state_dict(saved)
        state = server.receive("a", client.reply(trained(received)))
        if kind == "store":
            client = ClientLink(start=start, store=tmp_path)
        elif kind == "packed":
            client = ClientLink(start=start, packed=client.packed)
    with pytest.raises(LostReference):
        ClientLink(start=start).receive(server.broadcast(state, ["a"])["a"])


def test_orders_say_it_in_a_bit() -> None:
    for wanted in (True, False):
        told = orders(frequencies=wanted, kept=3)
        assert Orders.split(told.to_bytes() + b"rest") == (told, b"rest")
    raw = bytearray(orders().to_bytes())
    raw[5] |= 32  # a flag that nobody knows
    with pytest.raises(WireFormatError):
        Orders.split(bytes(raw))


def test_sums_are_those_of_the_format_bit_for_bit() -> None:
    """Each product rounded, then added, from the first to the last: a start has the same frequencies anywhere."""
    state = a_state({"w": (70, 64, 3, 3), "fc": (64, 70 * 16)})
    there = Frequencies(state)
    back = from_frequencies(there, state.layout)
    for name, sides in (("w", (3, 3)), ("fc", (4, 4))):
        one = [
            [np.sqrt((2 - (i == 0)) / n) * np.cos(np.pi * i * (2 * a + 1) / (2 * n)) for a in range(n)]
            for n in sides[:1] for i in range(n)
        ]  # fmt: skip
        order = sorted(np.ndindex(*sides), key=lambda ij: (sum(ij), ij))
        basis = np.array([np.outer(one[i], one[j]).ravel() for i, j in order], np.float32)
        blocks = state[name].view(-1, len(basis)).numpy()
        sums = [np.zeros(len(blocks), np.float32) for _ in order]
        for f, weights in enumerate(basis):
            for j, weight in enumerate(weights):
                sums[f] = sums[f] + weight * blocks[:, j]
        parts = [there[n] for n in there if n.startswith(f"{name}~")]
        assert torch.equal(torch.cat(parts), torch.from_numpy(np.stack(sums)))
        rows = [np.zeros(len(blocks), np.float32) for _ in order]
        for j in range(len(order)):
            for f in range(len(order)):
                rows[j] = rows[j] + basis[f, j] * sums[f]
        assert torch.equal(back[name].view(-1, len(basis)), torch.from_numpy(np.stack(rows, axis=1)))


def test_a_server_makes_the_frequencies_of_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message of many rounds asks for them: they are in files, counted and forgotten as the models are."""
    from fedfp8.model import frequencies

    made, parted = [], frequencies._parted
    monkeypatch.setattr(frequencies, "_parted", lambda name, *a: made.append(name) or parted(name, *a))
    server, clients, state = ServerLink("dq", seed=1, history=2), [ClientLink() for _ in range(3)], a_state()
    plain = dict(state)
    for round in range(4):
        plain = {name: tensor + 0.01 * torch.randn(tensor.shape) for name, tensor in plain.items()}
        messages = server.broadcast(plain, range(3))
        assert len(made) == (round + 1) * 4  # as many tensors travel so
        for i, client in enumerate(clients):
            client.receive(messages[i])
            server.confirm(i)
    # Nothing of it is in the folder, which workers of a run share: two that made the same file met there
    files = sorted(path.name for path in server.history.folder.iterdir())
    assert files == [f"model-0000000{n}.safetensors" for n in (2, 3, 4)]
    written = sum(path.stat().st_size for path in server.history.folder.iterdir())
    assert 1.9 * written < server.history.size() < 2.1 * written
    server.close()
    assert len(server.history._forms) == 2


def test_models_that_have_their_frequencies_made_are_not_mapped() -> None:
    """They would count as memory of the server twice; small tensors of a message keep no file mapped either."""
    server, clients, model = ServerLink("dq", seed=1), [ClientLink() for _ in range(3)], dict(a_state())
    for _ in range(4):
        model = {name: tensor + 0.01 * torch.randn(tensor.shape) for name, tensor in model.items()}
        for i, message in server.broadcast(model, range(3)).items():
            received = clients[i].receive(message)
            update = server.receive(i, clients[i].reply(received))
            assert all(torch.allclose(update[name], model[name], atol=1e-6) for name in model)
    assert len(server.history._forms) == 4 and not server.history._mapped
