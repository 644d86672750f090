"""Sound -> mel-frequency cepstral coefficients (MFCC), as the two keyword models' own papers compute them.

    wave [16000] -> power spectrum of windowed frames -> mel bands -> decibels (80 below the clip's peak at
    most) -> DCT -> first n coefficients [n, frames]

                 window   hop     mel bands         coefficients   frames of one second
    kwt          30 ms    10 ms   80, 20-7600 Hz    40             98 (only whole windows)
    matchboxnet  25 ms    10 ms   64, 0-8000 Hz     64             101 (centred windows), padded to 128

Sources: ARM-software/keyword-transformer (train.sh) and NVIDIA/NeMo (matchboxnet_3x1x64_v2.yaml); both use the HTK mel
scale and a 512-point FFT. What differs from them: coefficients are standardised (mean 0, deviation 1 over the training
set, per coefficient). MFCC 0 is in the hundreds and the last ones below one; an FP8 input with one range for all needs
them on one scale. Constant factors and offsets per band (filter norms, the reference level) drop out of standardised
coefficients.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedfp8.errors import DataError, extra

__all__ = ["FEATURES", "MFCC", "RATE", "features_named", "mfcc"]

RATE = 16_000  # samples per second, and per clip
TOP_DB = 80.0


@dataclass(frozen=True)
class MFCC:
    """Settings of the features; part of the cache key."""

    n_mfcc: int
    n_mels: int
    window_ms: float
    hop_ms: float
    fmin: float
    fmax: float
    centred: bool  # frames centred on multiples of the hop (edges mirrored), or only windows inside the clip
    frames: int  # padded with the mean or cut to this many, evenly on both sides
    n_fft: int = 512

    def __post_init__(self) -> None:
        if not 0 < self.n_mfcc <= self.n_mels:
            raise DataError(f"{self.n_mfcc} coefficients of {self.n_mels} mel bands; allowed are 1..{self.n_mels}")
        if not 0 < self.hop_ms <= self.window_ms or self.window > self.n_fft:
            raise DataError(
                f"window {self.window_ms} ms, hop {self.hop_ms} ms, FFT of {self.n_fft} samples; the hop must be "
                f"above 0 and at most the window, the window at most {1000 * self.n_fft / RATE:g} ms"
            )

    @property
    def window(self) -> int:
        return round(self.window_ms * RATE / 1000)

    @property
    def hop(self) -> int:
        return round(self.hop_ms * RATE / 1000)


FEATURES = {
    "kwt": MFCC(40, 80, window_ms=30, hop_ms=10, fmin=20, fmax=7600, centred=False, frames=98),
    "matchboxnet": MFCC(64, 64, window_ms=25, hop_ms=10, fmin=0, fmax=8000, centred=True, frames=128),
}


def features_named(features: str | MFCC) -> MFCC:
    """The settings of a preset, or the settings given."""
    if isinstance(features, MFCC):
        return features
    if features not in FEATURES:
        raise DataError(f"unknown features {features!r}; known are {', '.join(FEATURES)}, or give an MFCC(...)")
    return FEATURES[features]


def mfcc(waves: NDArray[np.float32], settings: MFCC) -> NDArray[np.float32]:
    """Raw coefficients [n, n_mfcc, frames] of a batch of clips [n, samples], each on its own."""
    with extra("data"):
        import librosa
    if not settings.centred:
        # librosa centres a short window in the FFT frame: these zeros make whole windows start at 0, hop, ...
        waves = np.pad(waves, ((0, 0), ((settings.n_fft - settings.window) // 2,) * 2))
    power = librosa.feature.melspectrogram(
        y=waves,
        sr=RATE,
        n_fft=settings.n_fft,
        win_length=settings.window,
        hop_length=settings.hop,
        center=settings.centred,
        pad_mode="reflect",
        n_mels=settings.n_mels,
        fmin=settings.fmin,
        fmax=settings.fmax,
        htk=True,
    )
    # Not librosa's top_db: on a batch it takes the peak of all clips, so a clip would depend on its neighbours.
    decibels = librosa.power_to_db(power, top_db=None)
    decibels = np.maximum(decibels, decibels.max(axis=(1, 2), keepdims=True) - TOP_DB)
    return librosa.feature.mfcc(S=decibels, n_mfcc=settings.n_mfcc).astype(np.float32)


def fit_frames(features: NDArray[np.float16], frames: int) -> NDArray[np.float16]:
    """Cut or zero-pad the last axis to `frames`, evenly on both sides (one more at the end if odd)."""
    have = features.shape[-1]
    if have >= frames:
        start = (have - frames) // 2
        return features[..., start : start + frames]
    before = (frames - have) // 2
    return np.pad(features, ((0, 0), (0, 0), (before, frames - have - before)))
