"""Speech Commands from tiny files made here: features, words, speakers, both kinds of folder."""

import io
import json

import librosa
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch

from fedfp8.data import FEATURES, MFCC, load, partition
from fedfp8.data.features import fit_frames, mfcc
from fedfp8.errors import DataError

WORDS = ["yes", "no", "_silence_"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDFP8_CACHE", str(tmp_path / "cache"))


def tone(seed, samples=16_000):
    rng = np.random.default_rng(seed)
    t = np.arange(samples) / 16_000
    wave = np.sin(2 * np.pi * rng.uniform(100, 4000) * t) * np.linspace(0, 0.5, samples)
    return (wave + rng.normal(0, 0.01, samples)).astype(np.float32)


def wav(wave, rate=16_000):
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def write_speech(file, rows, names=WORDS):
    """rows: (encoded sound, label, speaker)."""
    table = pa.table(
        {
            "file": [f"{names[label]}/{who}_nohash_0.wav" for _, label, who in rows],
            "audio": [{"bytes": sound, "path": None} for sound, _, _ in rows],
            "label": pa.array([label for _, label, _ in rows], pa.int64()),
            "speaker_id": pa.array([who for _, _, who in rows], pa.string()),
        }
    )
    info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata({b"huggingface": json.dumps(info).encode()}), file)


@pytest.fixture
def tiny(tmp_path):
    """12 training clips of 2 words by 3 speakers, 4 test clips, and silence by nobody, which is no word."""
    folder = tmp_path / "data" / "speech_commands_v0.02"
    train = [(wav(tone(i, 16_000 - 500 * (i % 3))), i % 2, f"speaker{i % 3}") for i in range(12)]
    train.insert(5, (wav(np.zeros(40_000, np.float32)), 2, None))
    write_speech(folder / "train-00000-of-00001.parquet", train)
    write_speech(folder / "test-00000-of-00001.parquet", [(wav(tone(50 + i)), i % 2, "other") for i in range(4)])
    return tmp_path / "data"


@pytest.mark.parametrize("name", ["kwt", "matchboxnet"])
def test_batched_features_equal_librosa_clip_by_clip(name):
    settings = FEATURES[name]
    waves = np.stack([tone(i) * 10.0 ** (-i) for i in range(4)])  # loud beside quiet: no clip may see its neighbour
    batch = mfcc(waves, settings)
    for wave, found in zip(waves, batch, strict=True):
        edge = 0 if settings.centred else (512 - settings.window) // 2
        alone = librosa.feature.mfcc(
            y=np.pad(wave, edge),
            sr=16_000,
            n_mfcc=settings.n_mfcc,
            n_mels=settings.n_mels,
            n_fft=512,
            win_length=settings.window,
            hop_length=160,
            center=settings.centred,
            pad_mode="reflect",
            fmin=settings.fmin,
            fmax=settings.fmax,
            htk=True,
        )
        # decibels of up to 100 summed over 80 bands in float32: 80 * 100 * 2^-23
        np.testing.assert_allclose(found, alone, rtol=0, atol=80 * 100 * 2.0**-23)
    assert batch.shape == {"kwt": (4, 40, 98), "matchboxnet": (4, 64, 101)}[name]


def test_kwt_frames_are_whole_windows_of_30_ms_every_10():
    """A click can be seen exactly by the frames whose 480 samples hold it."""
    wave = np.zeros((1, 16_000), np.float32)
    wave[0, 8000] = 1.0
    found = mfcc(wave, FEATURES["kwt"])[0]
    seen = [t for t in range(98) if np.abs(found[:, t] - found[:, 0]).max() > 1e-3]
    # frame t covers 160 t .. 160 t + 479; a Hann window is 0 at its first sample, so frame 50 (8000) sees nothing
    assert seen == [48, 49]


def test_fit_frames_pads_and_cuts_evenly():
    x = np.ones((1, 1, 5), np.float16)
    assert fit_frames(x, 8)[0, 0].tolist() == [0, 1, 1, 1, 1, 1, 0, 0]
    assert fit_frames(np.arange(5, dtype=np.float16).reshape(1, 1, 5), 2)[0, 0].tolist() == [1, 2]


@pytest.mark.parametrize(("name", "shape"), [("kwt", (40, 98)), ("matchboxnet", (64, 128))])
def test_parquet_to_standardised_features(tiny, name, shape):
    data = load("speech_commands", tiny, features=name)
    assert data.train_x.shape == (12, *shape) and data.train_x.dtype == torch.float16
    assert data.test_x.shape == (4, *shape) and data.test_x.isfinite().all()
    assert data.classes == ("yes", "no") and data.train_y.tolist() == [i % 2 for i in range(12)]
    assert data.groups == ("speaker0", "speaker1", "speaker2")
    assert data.train_groups.tolist() == [i % 3 for i in range(12)]
    inside = data.train_x[:, :, 13:114] if name == "matchboxnet" else data.train_x
    assert inside.float().mean(dim=(0, 2)).abs().max() < 2e-3  # float16: 2^-11 of values up to a few
    assert (inside.float().std(dim=(0, 2)) - 1).abs().max() < 2e-3
    parts = partition("group", data.train_y, None, 0, groups=data.train_groups)
    assert [part.tolist() for part in parts] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_cache_key_has_the_feature_settings(tiny, monkeypatch):
    first = load("speech_commands", tiny, features="kwt")
    own = MFCC(10, 40, window_ms=32, hop_ms=20, fmin=0, fmax=4000, centred=False, frames=49)
    assert load("speech_commands", tiny, features=own).input_shape == (10, 49)
    monkeypatch.setattr("fedfp8.data.speech.mfcc", lambda *_: pytest.fail("computed again"))
    assert torch.equal(load("speech_commands", tiny, features="kwt").train_x, first.train_x)


def test_unpacked_archive_gives_the_same_as_parquet(tiny, tmp_path):
    """The official layout: validation clips are left out, so are background noises."""
    root = tmp_path / "archive" / "speech_commands_v0.02"
    lists = {"testing_list.txt": [], "validation_list.txt": []}

    def put(place, wave, split=None):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(wav(wave))
        if split:
            lists[split].append(place)

    for i in range(12):
        put(f"{WORDS[i % 2]}/speaker{i % 3}_nohash_{i}.wav", tone(i, 16_000 - 500 * (i % 3)))
    for i in range(4):
        put(f"{WORDS[i % 2]}/other_nohash_{i}.wav", tone(50 + i), "testing_list.txt")
    put("yes/third_nohash_0.wav", tone(99), "validation_list.txt")
    put("_background_noise_/rain.wav", np.zeros(40_000, np.float32))
    for name, lines in lists.items():
        (root / name).write_text("\n".join(lines) + "\n")
    packed, found = load("speech_commands", tiny), load("speech_commands", tmp_path / "archive")
    assert found.classes == ("no", "yes") and found.groups == packed.groups  # archives: alphabetical
    assert len(found.train_y) == 12 and len(found.test_y) == 4
    # In another order, sums round differently on some CPUs: a raw coefficient by one float16, 2**-10 of its size, and
    # raw sizes are within 16 deviations, which become 1. Other clips are whole deviations away.
    for x, y, g in zip(found.train_x, found.train_y, found.train_groups, strict=True):
        near = [torch.allclose(x, other, rtol=2**-9, atol=2**-6) for other in packed.train_x]
        assert near.count(True) == 1
        assert packed.train_y[near.index(True)] == 1 - y and packed.train_groups[near.index(True)] == g


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(wav(tone(0), 8000), 0, "a"), (wav(tone(1)), 1, "a")], r"row 0 .*8000 Hz|'yes' by a.*8000 Hz"),
        ([(wav(tone(0)), 0, "a"), (b"noise", 1, "a")], r"clip 1 \('no' by a\): not a readable sound"),
        ([(wav(tone(0, 17_000)), 0, "a"), (wav(tone(1)), 1, "a")], r"17000,\) samples"),
        ([(None, 0, "a"), (wav(tone(1)), 1, "a")], "a path but no sound"),
        ([(wav(tone(0)), 0, None), (wav(tone(1)), 1, "a")], "1 clips .* have no speaker_id"),
        ([(wav(tone(0)), 0, "a")], r"1 training and 2 test words; not in training: no"),
    ],
)
def test_bad_clips_are_named(tiny, rows, message):
    write_speech(tiny / "speech_commands_v0.02" / "train-00000-of-00001.parquet", rows)
    with pytest.raises(DataError, match=message):
        load("speech_commands", tiny)


def test_bad_settings_are_refused(tiny):
    with pytest.raises(DataError, match="'lstm'; known are kwt, matchboxnet"):
        load("speech_commands", tiny, features="lstm")
    with pytest.raises(DataError, match="50 coefficients of 40 mel bands"):
        MFCC(50, 40, window_ms=30, hop_ms=10, fmin=0, fmax=8000, centred=True, frames=98)
    with pytest.raises(DataError, match="at most 32 ms"):
        MFCC(10, 40, window_ms=40, hop_ms=10, fmin=0, fmax=8000, centred=True, frames=98)
