"""Speech Commands, from parquet files or from the unpacked official archive, to standardised MFCC arrays.

Words and speakers are taken from the data: ten words and 1,468 training speakers in the v0.01 subset, 35 and
2,112 in v0.02. Rows that are no words (labels ``_silence_``, ``_unknown_``; background noise) are left out.
Clips shorter than one second are padded with silence. The validation split is not used: the paper trains
on the training speakers and tests on the test set.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedfp8.data.cache import Arrays, Meta
from fedfp8.data.features import MFCC, RATE, fit_frames, mfcc
from fedfp8.data.images import check_files, class_names, read_table
from fedfp8.data.source import Source
from fedfp8.data.spec import Spec
from fedfp8.errors import DataError, extra

__all__ = ["read_speech"]

BATCH = 256  # clips whose features are computed at once


@dataclass(frozen=True)
class Clips:
    """The clips of one split: what is said, by whom, and where the sound is (a row, or a file)."""

    words: list[str]
    speakers: list[str]
    places: list[int] | list[Path]
    files: tuple[Path, ...]  # parquet files `places` are rows of; empty for an archive

    def sounds(self, column: str) -> Iterator[bytes]:
        """Encoded sounds in the order of `words`, without holding more than a batch of them."""
        if not self.files:
            yield from (Path(str(place)).read_bytes() for place in self.places)
            return
        import pyarrow.parquet as pq

        wanted, row = set(self.places), 0
        for file in self.files:
            for batch in pq.ParquetFile(file).iter_batches(BATCH, columns=[column]):
                for encoded in batch.column(0).field("bytes"):
                    if row in wanted:
                        yield encoded.as_py()
                    row += 1


def read_speech(spec: Spec, source: Source, settings: MFCC) -> tuple[Arrays, Meta]:
    """Decode all clips (3 to 4 ms each), compute their features and standardise them by the training set."""
    known = check_files(spec, source)
    train, test = (_archive(source, s) if source.archive else _rows(spec, source, s) for s in ("train", "test"))
    classes, speakers = _vocabulary(source, train, test), sorted(set(train.speakers))
    train_x, test_x = _features(spec, train, settings), _features(spec, test, settings)
    mean, std = _statistics(train_x)
    number = {word: i for i, word in enumerate(classes)}
    speaker = {name: i for i, name in enumerate(speakers)}
    arrays: Arrays = {
        "train_x": _standardised(train_x, mean, std, settings.frames),
        "train_y": np.array([number[w] for w in train.words], dtype=np.int64),
        "train_groups": np.array([speaker[s] for s in train.speakers], dtype=np.int64),
        "test_x": _standardised(test_x, mean, std, settings.frames),
        "test_y": np.array([number[w] for w in test.words], dtype=np.int64),
    }
    verified = f"sha256 of {known} files" if known else f"{len(train.words)} + {len(test.words)} clips decoded"
    return arrays, {"classes": classes, "groups": speakers, "verified": verified}


def _rows(spec: Spec, source: Source, split: str) -> Clips:
    files = source.train if split == "train" else source.test
    table = read_table(files, ["label", "speaker_id"])
    names = class_names(files[0], spec.label)
    labels = table["label"].to_pylist()
    words = [names[label] if names else str(label) for label in labels]
    keep = [i for i, word in enumerate(words) if not word.startswith("_")]
    speakers = table["speaker_id"].to_pylist()
    if nameless := [i for i in keep if not speakers[i]]:
        raise DataError(f"{len(nameless)} clips of {files[0]} have no speaker_id (first: row {nameless[0]})")
    return Clips([words[i] for i in keep], [speakers[i] for i in keep], keep, files)


def _archive(source: Source, split: str) -> Clips:
    """``word/speaker_nohash_n.wav``; training clips are those in neither of the two lists."""
    root = source.folder
    test = set((root / "testing_list.txt").read_text().split())
    other = test | set((root / "validation_list.txt").read_text().split())
    found = sorted(p for p in root.glob("[!_]*/*_nohash_*.wav"))
    if split == "test":
        paths = [p for p in found if p.relative_to(root).as_posix() in test]
    else:
        paths = [p for p in found if p.relative_to(root).as_posix() not in other]
    if not paths:
        raise DataError(f"{root} has no {split} clips <word>/<speaker>_nohash_<n>.wav; unpack the archive again")
    return Clips([p.parent.name for p in paths], [p.name.split("_nohash_")[0] for p in paths], paths, ())


def _vocabulary(source: Source, train: Clips, test: Clips) -> list[str]:
    """Training words in the order of the files' own labels, else sorted; the test set may have fewer."""
    said, tested = set(train.words), set(test.words)
    if not tested <= said:
        raise DataError(
            f"{source.folder}: {len(said)} training and {len(tested)} test words; not in training: "
            f"{', '.join(sorted(tested - said))}. Use both splits of the same version"
        )
    names = class_names(source.train[0], "label") if train.files else ()
    in_order = sorted(said, key=lambda w: (int(w) if w.isdigit() else 0, w))  # unnamed labels: by number
    return [w for w in names if w in said] or in_order


def _features(spec: Spec, clips: Clips, settings: MFCC) -> NDArray[np.float16]:
    """Raw coefficients [clips, n_mfcc, frames]; float16 keeps 11 bits, FP8 inputs have 4."""
    sounds = clips.sounds(spec.input)
    out: NDArray[np.float16] | None = None
    for start in range(0, len(clips.words), BATCH):
        stop = min(start + BATCH, len(clips.words))
        block = mfcc(np.stack([_wave(next(sounds), clips, i) for i in range(start, stop)]), settings)
        if out is None:
            out = np.empty((len(clips.words), *block.shape[1:]), dtype=np.float16)
        out[start:stop] = block
    if out is None:
        raise DataError("a split of speech_commands has no clips")
    return out


def _wave(encoded: bytes | None, clips: Clips, index: int) -> NDArray[np.float32]:
    with extra("data"):
        import soundfile
    where = f"clip {clips.places[index]} ({clips.words[index]!r} by {clips.speakers[index]})"
    if encoded is None:
        raise DataError(f"{where}: the file holds a path but no sound; fetch the parquet files with embedded audio")
    try:
        wave, rate = soundfile.read(io.BytesIO(encoded), dtype="float32")
    except RuntimeError as error:  # soundfile.LibsndfileError
        raise DataError(f"{where}: not a readable sound ({error})") from error
    if rate != RATE or wave.ndim != 1 or not 0 < len(wave) <= RATE:
        raise DataError(
            f"{where}: {wave.shape} samples at {rate} Hz; expected one channel, {RATE} Hz, at most one second"
        )
    return np.pad(wave, (0, RATE - len(wave)))


def _statistics(features: NDArray[np.float16]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and deviation of every coefficient over clips and frames, in float64 and a block at a time."""
    total = np.zeros(features.shape[1])
    squares = np.zeros(features.shape[1])
    for start in range(0, len(features), 1024):
        block = features[start : start + 1024].astype(np.float64)
        total += block.sum(axis=(0, 2))
        squares += np.square(block).sum(axis=(0, 2))
    count = features.shape[0] * features.shape[2]
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0.0))
    return mean, np.where(std > 0, std, 1.0)  # a constant coefficient stays constant: 0


def _standardised(
    features: NDArray[np.float16], mean: NDArray[np.float64], std: NDArray[np.float64], frames: int
) -> NDArray[np.float16]:
    shift, scale = mean[:, None].astype(np.float32), std[:, None].astype(np.float32)
    for start in range(0, len(features), 1024):  # in place: the raw values are not needed again
        block = features[start : start + 1024]
        block[:] = (block.astype(np.float32) - shift) / scale
    return fit_frames(features, frames)
