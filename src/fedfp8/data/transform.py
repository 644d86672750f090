"""From stored arrays to network inputs: normalisation and augmentation of a whole batch at once.

A transform is a small frozen object: ``transform(batch, generator, train=True)`` takes a batch of stored
examples (uint8 images, float16 features) and returns float32. With ``train=True`` it augments, drawing from
the client's own generator; with ``train=False`` it only normalises and draws nothing. There is no Python loop
over examples.

``input_range`` is the largest magnitude an output can have. The first layer's input is quantized with this
fixed range, so it is computed from the transform itself and not from data.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedfp8.errors import DataError

__all__ = ["ImageTransform", "SpecAugment", "Transform", "transform_for"]


class Transform(Protocol):
    """What the engine needs of a transform."""

    @property
    def input_range(self) -> float: ...

    def __call__(self, x: Tensor, generator: torch.Generator | None, train: bool) -> Tensor: ...


@dataclass(frozen=True)
class ImageTransform:
    """uint8 [N, C, H, W] -> float32 (x / top - mean) / std; in training after a random crop and flip.

    The crop pads with black (0), as torchvision's does on the raw image, so padded pixels stay within
    `input_range`.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    top: float = 255.0  # largest stored value
    padding: int = 0
    flip: bool = False

    @property
    def input_range(self) -> float:
        ends = [(v - m) / s for m, s in zip(self.mean, self.std, strict=True) for v in (0.0, 1.0)]
        return max(abs(v) for v in ends)

    def __call__(self, x: Tensor, generator: torch.Generator | None, train: bool) -> Tensor:
        if train and (self.padding or self.flip):
            x = crop_and_flip(x, _needed(generator), self.padding, self.flip)
        scale = torch.tensor([1 / (self.top * s) for s in self.std], device=x.device).view(-1, 1, 1)
        shift = torch.tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)], device=x.device).view(-1, 1, 1)
        # In place on the fresh float32 copy: two passes. The clamp of the last bit keeps |output| <=
        # input_range.
        return x.to(torch.float32).mul_(scale).add_(shift).clamp_(-self.input_range, self.input_range)


def crop_and_flip(x: Tensor, generator: torch.Generator, padding: int, flip: bool) -> Tensor:
    """Each image of the batch padded with zeros, cut at its own random place and mirrored or not."""
    n, _, height, width = x.shape
    if padding:
        padded = torch.nn.functional.pad(x, (padding,) * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [N, C, 2p+1, 2p+1, H, W], a view
        top = torch.randint(2 * padding + 1, (n,), generator=generator)
        left = torch.randint(2 * padding + 1, (n,), generator=generator)
        x = windows[torch.arange(n), :, top, left]
    if flip:
        mirrored = torch.rand(n, generator=generator) < 0.5
        x = torch.where(mirrored.view(n, 1, 1, 1).to(x.device), x.flip(3), x)
    return x


@dataclass(frozen=True)
class SpecAugment:
    """Standardised features [N, coefficients, frames] -> float32, clipped; in training with bands masked.

    SpecAugment (Park et al. 2019) without time warping, as both keyword papers use it: `time_masks` bands of
    up to `time_width` frames and `frequency_masks` bands of up to `frequency_width` coefficients are set to
    0, which after standardising is the mean. Every example has its own bands.
    """

    time_masks: int = 2
    time_width: int = 25
    frequency_masks: int = 2
    frequency_width: int = 7
    clip: float = 8.0  # standard deviations; a few frames of digital silence lie further out

    @property
    def input_range(self) -> float:
        return self.clip

    def __call__(self, x: Tensor, generator: torch.Generator | None, train: bool) -> Tensor:
        out = x.to(torch.float32, copy=True).clamp_(-self.clip, self.clip)
        if not train:
            return out
        source, (n, coefficients, frames) = _needed(generator), out.shape
        time = bands(n, frames, self.time_masks, self.time_width, source)
        frequency = bands(n, coefficients, self.frequency_masks, self.frequency_width, source)
        return out.masked_fill_((time.unsqueeze(1) | frequency.unsqueeze(2)).to(x.device), 0.0)


def bands(n: int, length: int, count: int, width: int, generator: torch.Generator) -> Tensor:
    """Bool [n, length]: union of `count` bands per row, sizes uniform in 0..width, each inside the row."""
    sizes = torch.randint(min(width, length) + 1, (n, count), generator=generator)
    places = torch.rand(n, count, generator=generator)
    starts = (places * (length - sizes + 1)).long()  # uniform over the length - size + 1 places
    at = torch.arange(length)
    inside = (at >= starts.unsqueeze(2)) & (at < (starts + sizes).unsqueeze(2))  # [n, count, length]
    return inside.any(dim=1)


def _needed(generator: torch.Generator | None) -> torch.Generator:
    if generator is None:
        raise DataError("augmentation needs a torch.Generator; pass the client's (fedfp8.rng.generator) or train=False")
    return generator


_TRANSFORMS: dict[str, ImageTransform] = {
    "digits": ImageTransform(mean=(0.0,), std=(1.0,), top=16.0),
    # Means and deviations of the training pixels, as everywhere in the field (FedDyn's code too).
    "cifar10": ImageTransform((0.491, 0.482, 0.447), (0.247, 0.243, 0.262), padding=4, flip=True),
    "cifar100": ImageTransform((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), padding=4, flip=True),
    "fashion_mnist": ImageTransform((0.2860,), (0.3530,)),
}
_SPEECH = {"kwt": SpecAugment(frequency_width=7), "matchboxnet": SpecAugment(frequency_width=15)}


def transform_for(name: str, features: str = "kwt") -> Transform:
    """The transform of a data set; `features` tells the two flavours of Speech Commands apart."""
    if name == "speech_commands" and features in _SPEECH:
        return _SPEECH[features]
    if name in _TRANSFORMS:
        return _TRANSFORMS[name]
    raise DataError(
        f"no transform for data set {name!r} (features {features!r}); known are {', '.join(_TRANSFORMS)} and "
        f"speech_commands with features {' or '.join(_SPEECH)}"
    )
