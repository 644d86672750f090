"""Transforms: exact values, every crop reachable, masks of the promised sizes, nothing beyond input_range."""

import pickle

import pytest
import torch

from fedfp8.data import transform_for
from fedfp8.data.transform import ImageTransform, SpecAugment, bands, crop_and_flip
from fedfp8.errors import DataError
from fedfp8.rng import generator

IMAGES = ("digits", "cifar10", "cifar100", "fashion_mnist")


def extremes(transform):
    channels = len(transform.mean)
    dark = torch.zeros(1, channels, 8, 8, dtype=torch.uint8)
    return torch.cat([dark, dark + int(transform.top)])


@pytest.mark.parametrize("name", IMAGES)
def test_input_range_is_reached_and_never_exceeded(name):
    transform = transform_for(name)
    for train in (False, True):
        out = transform(extremes(transform), generator(0, "x"), train)
        assert out.dtype == torch.float32
        assert out.abs().max().item() <= transform.input_range
        assert out.abs().max().item() == pytest.approx(transform.input_range, rel=1e-6)


def test_normalisation_is_the_textbook_formula():
    transform = transform_for("cifar10")
    x = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8, generator=generator(0, "x"))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (transform.mean, transform.std))
    expected = (x.double() / 255 - mean.double()) / std.double()
    # three float32 roundings of values below 4: 3 * 2 * 2^-24 * 2 (scale and shift rounded too)
    assert torch.allclose(transform(x, None, False).double(), expected, rtol=0, atol=12 * 2.0**-24)
    assert transform_for("digits").input_range == 1.0


def test_crop_and_flip_equals_the_slow_way_image_by_image():
    x = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8, generator=generator(0, "x"))
    out = crop_and_flip(x, generator(1, "a"), padding=4, flip=True)
    rng = generator(1, "a")
    top, left = (torch.randint(9, (64,), generator=rng) for _ in range(2))
    flipped = torch.rand(64, generator=rng) < 0.5
    for i in range(64):
        canvas = torch.zeros(3, 40, 40, dtype=torch.uint8)
        canvas[:, 4:36, 4:36] = x[i]
        cut = canvas[:, top[i] : top[i] + 32, left[i] : left[i] + 32]
        assert torch.equal(out[i], cut.flip(2) if flipped[i] else cut)


def test_all_162_crops_and_flips_occur_about_equally_often():
    """9 x 9 places, mirrored or not, 100 draws each: chi-square of mean 161 and deviation sqrt(322); 5 sigma."""
    n = 162 * 100
    x = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8).expand(n, 1, 8, 8)
    out = crop_and_flip(x, generator(2, "a"), padding=4, flip=True)
    _, counts = out.reshape(n, -1).unique(dim=0, return_counts=True)
    assert len(counts) == 162
    assert ((counts - 100.0) ** 2 / 100).sum().item() < 161 + 5 * 322**0.5


def test_evaluation_draws_nothing_and_leaves_the_stored_data_alone():
    for name, x in [
        ("cifar10", torch.full((2, 3, 32, 32), 7, dtype=torch.uint8)),
        ("speech_commands", torch.full((2, 40, 98), 9.0, dtype=torch.float16)),
        ("speech_commands", torch.full((2, 40, 98), 9.0, dtype=torch.float32)),
    ]:
        kept, rng = x.clone(), generator(0, "g")
        before = rng.get_state()
        transform_for(name)(x, rng, False)
        assert torch.equal(rng.get_state(), before)
        transform_for(name)(x, rng, True)
        assert not torch.equal(rng.get_state(), before)
        assert torch.equal(x, kept)


@pytest.mark.parametrize("name", [*IMAGES, "speech_commands"])
def test_same_generator_same_batch(name):
    transform = transform_for(name)
    shape = (6, 40, 98) if name == "speech_commands" else (6, len(transform.mean), 8, 8)
    x = torch.randint(16, shape, generator=generator(0, "x")).to(torch.uint8)
    assert torch.equal(transform(x, generator(3, "g"), True), transform(x, generator(3, "g"), True))
    assert pickle.loads(pickle.dumps(transform)) == transform


def test_bands_are_whole_inside_and_of_every_size():
    one = bands(20_000, 30, 1, 7, generator(0, "b"))
    sizes = one.sum(dim=1)
    edges = one.int().diff(dim=1, prepend=torch.zeros(20_000, 1, dtype=torch.int)).clamp(min=0).sum(dim=1)
    assert torch.equal(edges, (sizes > 0).to(edges.dtype))  # contiguous
    counts = torch.bincount(sizes, minlength=8)
    # 8 sizes, 2,500 each: chi-square mean 7, deviation sqrt(14)
    assert len(counts) == 8 and ((counts - 2500.0) ** 2 / 2500).sum().item() < 7 + 5 * 14**0.5
    starts = one[sizes == 7].int().argmax(dim=1).bincount(minlength=24)
    assert len(starts) == 24 and starts.min() > 0  # 24 places for a band of 7 in 30, all reached
    assert bands(4, 5, 2, 99, generator(0, "b")).shape == (4, 5)  # wider than the row: cut to it


def test_spec_augment_masks_whole_rows_and_columns_with_zero():
    transform = SpecAugment(time_masks=2, time_width=25, frequency_masks=2, frequency_width=7)
    out = transform(torch.ones(200, 40, 98, dtype=torch.float16), generator(0, "s"), True)
    assert set(out.unique().tolist()) == {0.0, 1.0}
    masked_rows, masked_columns = (out.sum(dim=2) == 0), (out.sum(dim=1) == 0)
    assert masked_rows.sum(dim=1).max() <= 14 and masked_columns.sum(dim=1).max() <= 50
    rebuilt = ~(masked_rows.unsqueeze(2) | masked_columns.unsqueeze(1))
    assert torch.equal(out.bool(), rebuilt)
    assert len(out.flatten(1).unique(dim=0)) > 190  # every example has masks of its own
    clipped = transform(torch.tensor([[[-99.0, 3.0, 99.0]]]), None, False)
    assert clipped.tolist() == [[[-8.0, 3.0, 8.0]]] and transform.input_range == 8.0


def test_refusals():
    with pytest.raises(DataError, match=r"torch\.Generator"):
        transform_for("cifar10")(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), None, True)
    with pytest.raises(DataError, match=r"cifar11.*known are digits"):
        transform_for("cifar11")
    with pytest.raises(DataError, match="lstm"):
        transform_for("speech_commands", "lstm")
    assert transform_for("speech_commands", "matchboxnet").frequency_width == 15
    plain = ImageTransform((0.5,), (0.5,))
    assert plain(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), None, True).max() == -1.0  # nothing random in it
