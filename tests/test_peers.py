"""benchmarks/peers.py: every wire's bytes decode to what it claims, and the federation is the engine's."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfp8.errors import ConfigError
from fedfp8.link.wire import WIRES as LINKS
from fl_tools import Inline, rounds_with, start, tiny

SHAPES = {"a.weight": (40, 30), "a.bias": (40,), "b.weight": (7, 40), "b.bias": (7,)}
SIZES = [math.prod(shape) for shape in SHAPES.values()]
N = sum(SIZES)


@pytest.fixture(scope="module")
def peers() -> Iterator:
    """The two scripts, imported as they import each other."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    try:
        import peers

        yield peers
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def codecs(peers):
    import peer_codecs

    return peer_codecs


def draw(seed: int) -> np.ndarray:
    """Weights, some of them zero."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(N) * (rng.random(N) > 0.1)).astype(np.float32)


def round_trip(codec, x: np.ndarray, seed: int = 0) -> np.ndarray:
    data = codec.encode(x, seed)
    assert isinstance(data, bytes)
    found = codec.decode(data)
    assert found.dtype == np.float32 and found.shape == x.shape
    return found


def per_weight(values: np.ndarray, block: int) -> np.ndarray:
    return np.repeat(values, block)[:N]


def largest(x: np.ndarray, block: int) -> np.ndarray:
    """Of each block, for each weight."""
    return per_weight(np.array([np.abs(x[i : i + block]).max() for i in range(0, N, block)], np.float64), block)


@pytest.mark.parametrize("name", ["Float32", "Zlib", "Bz2", "Zstandard"])
def test_lossless_codecs_give_back_every_bit(codecs, name: str) -> None:
    if name == "Zstandard":
        pytest.importorskip("zstandard")
    x = draw(0)
    assert round_trip(getattr(codecs, name)(SHAPES), x).tobytes() == x.tobytes()


def test_float16_and_int8_are_off_by_at_most_half_a_step(codecs) -> None:
    x = draw(1)
    error = np.abs(round_trip(codecs.Float16(SHAPES), x) - x)
    assert (error <= np.abs(x) * 2.0**-11 + 2.0**-25).all()  # half a unit in the last of 11 bits; of subnormals
    error = np.abs(round_trip(codecs.Int8(SHAPES), x).astype(np.float64) - x)
    top = largest(x, codecs.Int8.block)
    assert (error <= top / 254 + 4 * top * 2.0**-23).all()  # half of a 127th, and four float32 roundings
    assert len(codecs.Int8(SHAPES).encode(x, 0)) == N + 4 * math.ceil(N / codecs.Int8.block)


def test_qsgd_has_four_bits_and_no_bias(codecs) -> None:
    """Draws are independent and within a step of x, so by Hoeffding their mean is off by more than t with a chance of
    at most 2 exp(-2 draws t² / step²); t makes that one in a million for all weights together."""
    x, codec, draws = draw(2), codecs.Qsgd(SHAPES), 400
    assert len(codec.encode(x, 0)) == math.ceil(N / 2) + 4 * math.ceil(N / codec.block)
    step = largest(x, codec.block) / codec.levels
    found = np.stack([round_trip(codec, x, seed) for seed in range(draws)]).astype(np.float64)
    slack = 8 * 2.0**-23 * np.abs(found).max()  # float32 roundings
    assert (np.abs(found - x) <= step + slack).all()
    t = step * math.sqrt(math.log(2e6 * N) / (2 * draws))
    assert (np.abs(found.mean(0) - x) <= t + slack).all()
    assert np.abs(found[0] - found[1]).max() > 0  # it does draw


def test_drive_has_one_bit_and_its_scale_is_unbiased(codecs) -> None:
    """With S = |x|² / |Rx|_1 the estimate x' has <x, x'> = |x|² in every block, whatever the rotation: its error is
    orthogonal to x, and over uniformly random rotations has mean 0 by symmetry. |x'|² is d S²."""
    x, codec = draw(3), codecs.Drive(SHAPES)
    rows = codecs.blocks(x, codec.block).astype(np.float64)
    assert len(codec.encode(x, 0)) == 8 + len(rows) * (codec.block // 8 + 4)
    full = codecs.Drive({"w": (rows.size,)})  # with the last block's zeros, which are not zero after decoding
    found = full.decode(full.encode(rows.ravel().astype(np.float32), 5)).reshape(rows.shape).astype(np.float64)
    np.testing.assert_allclose((found * rows).sum(1), (rows**2).sum(1), rtol=1e-5)
    scale = (rows**2).sum(1) / np.abs(codecs.hadamard(rows * full._signs(rows.shape, 5))).sum(1)
    np.testing.assert_allclose((found**2).sum(1), codec.block * scale**2, rtol=1e-5)
    np.testing.assert_array_equal(round_trip(codec, x, 5), found.ravel()[:N].astype(np.float32))
    np.testing.assert_allclose(codecs.hadamard(codecs.hadamard(rows)), rows, atol=1e-12)


def test_top_k_keeps_the_largest_and_feedback_loses_nothing(codecs) -> None:
    x, codec = draw(4), codecs.TopK(SHAPES)
    found = round_trip(codec, x)
    kept = np.flatnonzero(found)
    assert len(kept) == N // 100 and (found[kept] == x[kept]).all()
    assert np.abs(np.delete(x, kept)).max() <= np.abs(x[kept]).min()
    assert len(codec.encode(x, 0)) == 4 * codec.k + math.ceil(codec.k * math.ceil(math.log2(N)) / 8)
    peer, zero = codecs.Peer(codecs.Float32(SHAPES), codec, feedback=True), np.zeros(N, np.float32)
    sent, given = np.zeros(N), np.zeros(N)
    for number in range(5):
        peer.open(zero, [0], number)
        sent += peer.read_up(peer.up(draw(number), zero, 0), 0)
        given += draw(number)
    np.testing.assert_allclose(
        sent + peer.lost[0], given, atol=5 * 5 * 5 * 2.0**-23
    )  # 5 sums of up to 5 values below 5


def test_packing_takes_any_width(codecs) -> None:
    for width in (1, 3, 4, 11, 17, 24):
        values = np.random.default_rng(width).integers(0, 1 << width, 101)
        data = codecs.pack(values, width)
        assert len(data) == math.ceil(101 * width / 8)
        np.testing.assert_array_equal(codecs.unpack(data, width, 101), values)


def test_nncodec_is_within_two_steps(codecs) -> None:
    """Dependent quantization has two grids of spacing 2 * 2^(qp / 4), and may not take the nearest point."""
    pytest.importorskip("nncodec")
    for qp in (-32, -24):
        x = draw(5)
        found = round_trip(codecs.NNCodec(SHAPES, qp), x)
        assert np.abs(found - x).max() <= 2 * 2.0 ** (qp / 4)


def parts(*vectors: np.ndarray) -> Iterator:
    """Tensor by tensor."""
    cuts = np.cumsum(SIZES)[:-1]
    return zip(*(np.split(x.astype(np.float64), cuts) for x in vectors), strict=True)


def exchange(codecs, wire: str, model: np.ndarray, local: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(what the client receives, what the server gets back)."""
    peer = codecs.Ours(SHAPES, wire)
    peer.open(model, [3], 0)
    received = peer.read_down(peer.down(3), 3)
    return received, peer.read_up(peer.up(local, received, 3), 3)


def test_uq_rounds_to_a_neighbour_in_e4m3(codecs) -> None:
    """Its relative spacing is an eighth, its smallest one max|w| / 1.875 / 2^17: 16 exponents, 3 bits of mantissa."""
    model, local = draw(6), draw(6) + 0.05 * draw(7)
    received, update = exchange(codecs, "fp8", model, local)
    for want, found in ((model, received), (local, update)):
        for w, f in parts(want, found):
            spacing = np.maximum(np.abs(w) / 8, np.abs(w).max() / 1.875 / 2**17)
            assert (np.abs(f - w) <= spacing * (1 + 2.0**-20)).all()


def test_uq_plus_fits_ranges_between_the_clients_and_sends_with_them(codecs) -> None:
    """What is no FP8 weight is the mean's; the weights move by less than the spacing of the grid."""
    peer, names = codecs.Fitted(SHAPES, "fp8"), list(SHAPES)
    peer.open(draw(6), [1, 2], 0)
    ends: dict[str, list[float]] = {name: [] for name in names}
    updates = {}
    for client in (1, 2):
        received = peer.read_down(peer.down(client), client)
        updates[client] = peer.read_up(peer.up(received * (1 + client / 10), received, client), client)
        for name, (_, alpha) in codecs.ranges_of(peer.replies[client]).items():
            ends[name].append(alpha)
    mean = ((3 * updates[1].astype(np.float64) + updates[2]) / 4).astype(np.float32)
    model = peer.close(mean, {1: 3, 2: 1})
    fitted = peer.server.ranges
    assert fitted and set(fitted) == {name for name, found in ends.items() if found}
    assert all(min(ends[name]) <= alpha <= max(ends[name]) for name, alpha in fitted.items())
    for name, before, after in zip(names, *zip(*parts(mean, model), strict=True), strict=True):
        if name in fitted:
            assert np.abs(after - before).max() <= fitted[name] / 8
        else:
            np.testing.assert_array_equal(after, before)
    peer.open(model, [1], 1)
    assert {name: alpha for name, (_, alpha) in codecs.ranges_of(peer.server.round.model).items()} == fitted


def test_dq_is_within_half_a_step(codecs) -> None:
    """Of at most kappa times the root mean square: of the model down, of the change up. The server adds the change to
    its own model."""
    model, local = draw(6), draw(6) + 0.05 * draw(7)
    received, update = exchange(codecs, "dq", model, local)
    down, up = LINKS["dq"].kappa_down, LINKS["dq"].kappa_up
    for want, found, kappa in ((model, received, down), (local - received, update - model, up)):
        for w, f in parts(want, found):
            assert (np.abs(f - w) <= kappa / 2 * np.sqrt(np.mean(w**2)) + 8 * 2.0**-23).all()
    assert np.abs(received - model).max() > 0


def test_every_wire_of_the_table_carries_a_model_both_ways(codecs) -> None:
    """Two rounds; errors no larger than what was sent (top-k: 1 - 1/100 of it)."""
    start = draw(8)
    for name, make in codecs.WIRES.items():
        try:
            peer = make(SHAPES, start)
        except ImportError:
            continue
        for number in range(2):
            model = draw(9 + number)
            peer.open(model, [0, 1], number)
            received = peer.read_down(peer.down(1), 1)
            assert np.linalg.norm(received - model) < np.linalg.norm(model), name
            local = received + 0.1 * draw(20)
            update = peer.read_up(peer.up(local, received, 1), 1)
            assert np.linalg.norm(update - local) < np.linalg.norm(local), name


def test_the_federation_is_the_engines(peers, codecs, tmp_path: Path) -> None:
    """FP32 through the peers' loop is, bit for bit, the engine's FP32; so is what is lossless."""
    pytest.importorskip("sklearn")
    config = tiny("fp32", 3)
    federation, server, link = start(config, tmp_path)
    workers = Inline(config, federation, tmp_path)
    server, _ = rounds_with(workers, config, federation, server, link, 2)
    shapes = peers.shapes_of(federation.model)
    for codec in (codecs.Float32(shapes), codecs.Bz2(shapes)):
        peer = codecs.Peer(codec, codec, change=False)
        peers.run(peer, config, federation, shapes)
        for name, tensor in codecs.tensors(peer.model, shapes).items():  # what its third round began with
            assert torch.equal(tensor, server.state[name]), name


def test_the_table_has_bytes_gain_accuracy_and_speed(peers) -> None:
    pytest.importorskip("sklearn")
    rows, skipped, weights = peers.measure(tiny("fp32", 2), [0], ["FP32", "FP16", peers.OURS])
    assert not skipped and [r["wire"] for r in rows] == ["FP32", "FP16", peers.OURS]
    for r, size in zip(rows, (4, 2), strict=False):
        assert r["bytes_up"] == r["bytes_down"] == size * weights
        assert 0 < r["accuracy_2"] < 1 and r["encode_up_mbps"] > 0 and r["decode_down_mbps"] > 0
        assert r["gain"] is None or r["gain"] > 0  # "not learned yet" after two rounds
        assert (r["gain"] is None) == (r["gain_at"] is None)
    assert "| DQ (ours) |" in peers.markdown(rows)


def test_what_beats_us_is_listed_best_first(peers) -> None:
    rows = [
        {"wire": "DQ (ours)", "bytes_up": 10.0, "gain": 5.0, "gain_at": 0.5, "accuracy_20": 0.7},
        {"wire": "DQ with start (ours)", "bytes_up": 1.0, "gain": 50.0, "gain_at": 0.5, "accuracy_20": 0.8},
        {"wire": "one", "bytes_up": 9.0, "gain": None, "gain_at": None, "accuracy_20": 0.1},
        {"wire": "two", "bytes_up": 8.0, "gain": 4.0, "gain_at": 0.9, "accuracy_20": 0.9},
    ]
    assert peers.beaten(rows) == [
        "- bytes up: DQ 10, better are two 8; one 9",
        "- accuracy at round 20: DQ 70.0 %, better are two 90.0 %",
    ]


def test_the_docs_show_the_tables_that_were_kept(peers, tmp_path: Path) -> None:
    """`python benchmarks/peers.py --docs docs/peers.md` would change nothing, and a page without markers is refused."""
    page = Path(__file__).parents[1] / "docs/peers.md"
    assert peers.MARKS.search(page.read_text())[0].partition("\n\n")[2].strip() == peers.sections().strip()
    other = tmp_path / "page.md"
    other.write_text("before\n<!-- peers:begin -->\nold\n<!-- peers:end -->\nafter\n")
    peers.update_docs(other)
    assert "old" not in other.read_text() and peers.sections() in other.read_text()
    other.write_text("nothing")
    with pytest.raises(ConfigError, match="must hold"):
        peers.update_docs(other)


def test_a_wire_that_is_done_is_not_run_again(peers, tmp_path: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("sklearn")
    config, names = tiny("fp32", 2), ["FP32", peers.OURS]
    first = peers.measure(config, [0, 1], names, tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 4 and not list(tmp_path.glob("*.part"))
    (tmp_path / "FP32-seed1.json").unlink()
    ran, run = [], peers.run
    monkeypatch.setattr(peers, "run", lambda peer, config, *rest: ran.append(config.seed) or run(peer, config, *rest))
    again = peers.measure(config, [0, 1], names, tmp_path)
    assert ran == [1]  # only what was missing
    for one, other in zip(first[0], again[0], strict=True):
        assert {k: v for k, v in one.items() if "mbps" not in k} == {k: v for k, v in other.items() if "mbps" not in k}
    with pytest.raises(ConfigError, match="other settings"):
        peers.measure(tiny("fp32", 3), [0], names, tmp_path)


def test_the_command_makes_the_folder_it_writes_to(peers, tmp_path: Path, monkeypatch, capsys) -> None:
    """It used to end in a traceback after all the work."""
    pytest.importorskip("sklearn")
    folders = {"--work": str(tmp_path / "work"), "--out": str(tmp_path / "new/folder")}
    options = {"--rounds": "1", "--epochs": "1", "--only": "^FP16$"} | folders
    monkeypatch.setattr("sys.argv", ["peers.py", *(word for option in options.items() for word in option)])
    peers.main()
    (kept,) = (tmp_path / "new/folder").iterdir()
    assert [row["wire"] for row in json.loads(kept.read_text())["rows"]] == ["FP32", "FP16", peers.OURS]
    assert "| FP16 |" in capsys.readouterr().out


def test_no_two_wires_share_a_file(peers, codecs) -> None:
    """UQ+ was once shown with what UQ had left behind."""
    assert len({peers.file_name(wire).lower() for wire in codecs.WIRES}) == len(codecs.WIRES)


def test_gains_have_the_spread_between_seeds(peers) -> None:
    """And there is none where a side is at chance."""

    def run(accuracies: list[float], size: int) -> tuple:
        lines = [
            {"round": n, "accuracy": a, "bytes_total": n * size, "clients": []}
            for n, a in enumerate([0.1, *accuracies])
        ]
        return lines, {}

    config = tiny("fp32", 2)
    base, method = [run([0.5, 0.9], 100)] * 2, [run([0.5, 0.9], 10), run([0.5, 0.9], 20)]
    assert peers.gain(base, method, config) == (7.5, 0.9, pytest.approx(2.5 * 2**0.5))
    assert peers.gain(base[:1], method[:1], config) == (10.0, 0.9, None)
    assert peers.gain(base, [run([0.1, 0.11], 10)] * 2, config) == (None, None, None)
    rows = [
        {
            "wire": "x",
            "bytes_up": 1,
            "bytes_down": 1,
            "gain": 7.5,
            "gain_at": 0.9,
            "gain_std": 3.54,
            "bytes_of_dq": None,
        }
    ]
    rows = [r | {f"{side}_up_mbps": 1.0 for side in ("encode", "decode")} for r in rows]
    assert "7.50 ± 3.54" in peers.markdown(rows)
    assert "not learned yet" in peers.markdown([rows[0] | {"gain": None, "gain_at": None, "gain_std": None}])
