"""FP8 numerics: tensors in, tensors out. No modules, no bytes, no files."""

from fedfp8.fp8.format import E3M4, E4M3, E5M2, Format
from fedfp8.fp8.measure import rms, squared_error
from fedfp8.fp8.quantizers import (
    dither,
    from_codes,
    hash_uniform,
    quantize,
    to_codes,
    undither,
)
from fedfp8.fp8.ste import fake_quantize
from fedfp8.fp8.strides import use_kernels

__all__ = [
    "E3M4",
    "E4M3",
    "E5M2",
    "Format",
    "dither",
    "fake_quantize",
    "from_codes",
    "hash_uniform",
    "quantize",
    "rms",
    "squared_error",
    "to_codes",
    "undither",
    "use_kernels",
]
