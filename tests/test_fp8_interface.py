"""What a caller may pass: shapes, strides, dtypes, threads, other processes; and what is refused, in which words."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfp8 import E4M3, E5M2, Format, dither, fake_quantize, from_codes, quantize, to_codes, undither
from fedfp8.errors import QuantizationError
from fedfp8.fp8 import eager, hash_uniform, squared_error
from fedfp8.fp8.grid import grid_for
from fedfp8.fp8.parallel import random_keys
from fedfp8.fp8.strides import setting
from tools import FORMATS

of_the_kernels = pytest.mark.skipif(setting() != "1", reason="FEDFP8_KERNELS is set; this is about the kernels")
roundings = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def all_functions(x: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, k = to_codes(x, 1.5), dither(x, 0.1, seed=1)
    return {
        "quantize": quantize(x, 1.5),
        "quantize stochastic": quantize(x, 1.5, rounding="stochastic", seed=1),
        "to_codes": codes,
        "to_codes stochastic": to_codes(x, 1.5, rounding="stochastic", seed=1),
        "from_codes": from_codes(codes, 1.5),
        "dither": k,
        "undither": undither(k, 0.1, seed=1),
        "fake_quantize": fake_quantize(x, 1.5),
    }


def layouts() -> dict[str, torch.Tensor]:
    x = normal(4, 6, 5, 7)
    return {
        "channels last": x.to(memory_format=torch.channels_last),
        "transposed": normal(40, 30).t(),
        "permuted": x.permute(2, 0, 3, 1),
        "every second": normal(100)[::2],
        "columns": normal(30, 20)[:, 3:11],
        "offset": normal(101)[1:],
        "expanded": normal(1, 9).expand(5, 9),
        "size one dimensions": normal(3, 1, 4, 1).transpose(0, 1),
        "channels last 3d": normal(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "negative bit": torch.view_as_complex(normal(8, 2)).conj().imag,
        "no dimensions": normal(1)[0],
        "empty": torch.zeros(0),
        "empty with shape": torch.zeros(3, 0, 2),
        "empty transposed": torch.zeros(3, 0, 2).transpose(0, 2),
    }


@pytest.mark.parametrize("name", layouts())
def test_any_shape_and_stride(name: str) -> None:
    x = layouts()[name]
    plain = x.clone(memory_format=torch.contiguous_format).resolve_neg()
    before = plain.clone()
    for function, expected in all_functions(plain).items():
        got = all_functions(x)[function]
        assert got.shape == x.shape and torch.equal(got, expected), function
        assert got.stride() == torch.empty_like(x).stride(), function  # channels-last stays channels-last
    assert torch.equal(x, before), "the input is not touched"


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@roundings
def test_torch_operations_give_the_kernels_bits(format: Format, rounding: str) -> None:
    """Other devices run `eager`; on the CPU both can be had."""
    keys = random_keys(7) if rounding == "stochastic" else None
    for alpha in (480.0, 1.0, 3.7, 1e-6, 1e6):
        x = normal(5003) * (alpha / 2)
        x[:6] = torch.tensor([0.0, -0.0, alpha, -alpha, 2 * alpha, 1e-42])
        grid = grid_for(alpha, format)
        codes = to_codes(x, alpha, format, rounding=rounding, seed=7)
        assert torch.equal(codes, eager.to_codes(x, grid, keys))
        value = quantize(x, alpha, format, rounding=rounding, seed=7)
        assert torch.equal(value.view(torch.int32), eager.quantize(x, grid, keys).view(torch.int32))
        every_code = torch.arange(2**format.bits, dtype=torch.uint8)
        ours = from_codes(every_code, alpha, format)
        assert torch.equal(ours.view(torch.int32), eager.from_codes(every_code, grid).view(torch.int32))


def test_torch_operations_give_the_kernels_dither() -> None:
    x, step = normal(70_001), float(np.float32(0.013))
    k = dither(x, step, seed=3)
    assert torch.equal(k, eager.dither(x, float(np.float32(1 / step)), random_keys(3)))
    assert torch.equal(undither(k, step, seed=3), eager.undither(k, step, random_keys(3)))


@roundings
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_float32_inside(dtype: torch.dtype, rounding: str) -> None:
    x = normal(3, 1000).to(dtype)
    q = quantize(x, 2.0, rounding=rounding, seed=1)
    assert q.dtype == dtype
    assert torch.equal(q, quantize(x.float(), 2.0, rounding=rounding, seed=1).to(dtype))
    codes = to_codes(x, 2.0, rounding=rounding, seed=1)
    assert torch.equal(codes, to_codes(x.float(), 2.0, rounding=rounding, seed=1))
    assert torch.equal(dither(x, 0.1, seed=1), dither(x.float(), 0.1, seed=1))
    columns = x.t()
    assert torch.equal(
        quantize(columns, 2.0, rounding=rounding, seed=1),
        quantize(columns.contiguous(), 2.0, rounding=rounding, seed=1),
    )


def test_large_results_in_other_memory_are_the_same() -> None:
    """From 8 MB on results live in huge pages; they must look and count like any other."""
    x = normal(3, 1024, 1024)
    for y in (x, x.permute(2, 0, 1)):
        q = quantize(y, 1.5)
        assert q.stride() == y.stride() and q.data_ptr() % 64 == 0
        assert torch.equal(q[1], quantize(y[1], 1.5))
        assert torch.equal(from_codes(to_codes(y, 1.5), 1.5), q)
        again = dither(y, 0.1, seed=1)
        assert again.stride() == y.stride() and torch.equal(
            undither(again, 0.1, seed=1), undither(again.clone(), 0.1, seed=1)
        )


def test_float64_beyond_float32_is_clipped_not_refused() -> None:
    x = torch.tensor([1e300, -1e300], dtype=torch.float64)
    assert quantize(x, 1.0).tolist() == [1.0, -1.0]
    assert to_codes(x, 1.0).tolist() == [127, 255]


def test_alpha_as_float_or_tensor() -> None:
    x = normal(100)
    expected = quantize(x, 1.25)
    for alpha in (torch.tensor(1.25), torch.tensor([1.25]), torch.tensor(1.25, dtype=torch.float64), np.float32(1.25)):
        assert torch.equal(quantize(x, alpha), expected)
    learned = torch.nn.Parameter(torch.tensor(1.25))
    assert torch.equal(quantize(x, learned), expected)  # without torch's warning, which is an error here
    assert torch.equal(to_codes(x.requires_grad_(), learned), to_codes(x.detach(), 1.25))
    assert not quantize(x, learned).requires_grad


@of_the_kernels
def test_results_do_not_depend_on_threads() -> None:
    x, target = normal((1 << 20) + 4099), normal((1 << 20) + 4099, seed=1)
    results = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        all_results = all_functions(x)
        all_results["uniforms"] = hash_uniform(3, x.numel())
        for rounding in ("nearest", "stochastic", "expected"):
            all_results[f"error {rounding}"] = squared_error(x, target, [1.0, 2.0], rounding=rounding, seed=1)
        for rounding in ("nearest", "stochastic"):
            leaf, alpha = x.clone().requires_grad_(), torch.tensor(1.5, requires_grad=True)
            fake_quantize(leaf, alpha, rounding=rounding, seed=2).backward(target)
            all_results[f"gradients {rounding}"] = torch.cat([leaf.grad, alpha.grad.view(1)])
        results.append(all_results)
    for name, expected in results[0].items():
        for other in results[1:]:
            assert torch.equal(other[name], expected), name


@of_the_kernels
def test_threads_after_a_fork() -> None:
    code = """
import os, torch, fedfp8
torch.set_num_threads(2)
x = torch.randn(1 << 19)
expected = fedfp8.quantize(x, 1.0)
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.equal(fedfp8.quantize(x, 1.0), expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "0"


@of_the_kernels
def test_compiled_kernels_are_kept_for_the_next_process(tmp_path: Path) -> None:
    code = """
import torch, fedfp8
from fedfp8.fp8 import kernels
fedfp8.quantize(torch.ones(3), 1.0)
print(sum(kernels.quantize.stats.cache_hits.values()), sum(kernels.quantize.stats.cache_misses.values()))
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.split() for run in runs] == [["0", "1"], ["1", "0"]]


# Refusals


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-30, 1e35])
def test_alpha_out_of_range(alpha: float) -> None:
    for call in (quantize, to_codes, fake_quantize):
        with pytest.raises(QuantizationError, match=r"alpha is .*(must be finite and > 0|supported are)"):
            call(torch.ones(3), alpha)
    with pytest.raises(ValueError, match="alpha of 'conv1'"):
        from_codes(torch.zeros(3, dtype=torch.uint8), alpha, name="conv1")
    with pytest.raises(ValueError, match="alpha of 'conv1'"):
        quantize(torch.ones(3), torch.tensor(alpha), name="conv1")


def test_alpha_of_several_numbers() -> None:
    with pytest.raises(QuantizationError, match=r"shape \(2,\).*one number per tensor"):
        quantize(torch.ones(3), torch.ones(2))


@roundings
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 5, 262_150])
def test_nan_and_inf_are_not_encoded(rounding: str, dtype: torch.dtype, bad: float, place: int) -> None:
    x = torch.zeros(262_151, dtype=dtype)
    x[place] = bad
    with pytest.raises(QuantizationError, match=r"tensor 'fc\.weight' holds 1 NaN or Inf of 262151 values"):
        to_codes(x, 1.0, rounding=rounding, seed=1, name="fc.weight")


@pytest.mark.parametrize("format", [f for f in FORMATS if f.bits < 8], ids=lambda f: f.name)
def test_codes_outside_the_format(format: Format) -> None:
    codes = torch.tensor([0, 2**format.bits], dtype=torch.uint8)
    with pytest.raises(
        QuantizationError, match=rf"codes of 'w' hold {2**format.bits}.*{format.name}.*0 to {2**format.bits - 1}"
    ):
        from_codes(codes, 1.0, format, name="w")
    from_codes(codes[:1], 1.0, format)


def test_wrong_dtypes() -> None:
    for call in (quantize, to_codes, fake_quantize):
        with pytest.raises(QuantizationError, match=r"torch\.int64"):
            call(torch.arange(3), 1.0)
    with pytest.raises(QuantizationError, match=r"torch\.int32.*torch\.uint8"):
        from_codes(torch.zeros(3, dtype=torch.int32), 1.0)
    with pytest.raises(QuantizationError, match=r"torch\.int64.*int32"):
        undither(torch.arange(3), 1.0, seed=1)
    with pytest.raises(QuantizationError, match=r"torch\.bool"):
        dither(torch.zeros(3, dtype=torch.bool), 1.0, seed=1)
    with pytest.raises(QuantizationError, match=r"torch\.int64"):
        squared_error(torch.arange(3), torch.zeros(3), [1.0])


def test_rounding_and_seed() -> None:
    with pytest.raises(QuantizationError, match="needs a seed"):
        quantize(torch.ones(3), 1.0, rounding="stochastic")
    with pytest.raises(QuantizationError, match=r"of 'w' needs a seed"):
        to_codes(torch.ones(3), 1.0, rounding="stochastic", name="w")
    with pytest.raises(QuantizationError, match=r"'up'.*'nearest' or 'stochastic'"):
        quantize(torch.ones(3), 1.0, rounding="up")
    with pytest.raises(TypeError):
        quantize(torch.ones(3), 1.0, rounding="stochastic", seed=1.5)  # not silently cut to 1


@pytest.mark.parametrize(("e", "m"), [(1, 3), (6, 1), (4, 4), (5, 3), (2, 0), (4, -1), (4.0, 3), ("4", 3)])
def test_formats_that_do_not_exist(e: object, m: object) -> None:
    with pytest.raises(ValueError, match="exponent_bits must be 2 to 5"):
        Format(e, m)  # type: ignore[arg-type]


def test_format_names() -> None:
    for format in FORMATS:
        assert Format.parse(format.name) == format == Format.parse(format.name.lower())
        assert eval(repr(format)) == format
    assert (E4M3.top, E5M2.top, E4M3.bits) == (480.0, 114688.0, 8)
    for name in ("E4", "4M3", "E4M3FN", "", "E9M9"):
        with pytest.raises(ValueError):
            Format.parse(name)
