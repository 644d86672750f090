"""Building blocks of the kernels in LLVM terms: float32 bits, codes, random bits; without Numba's widening to 64 bits.

Everything here is scalar and branch-free, so loops over it vectorise. Only `plus` may be reassociated: Numba's fastmath
flag would mark every addition of a kernel, and LLVM would then delete the rounding itself, (y + c) - c.

Numba's cache on disk looks at the file of a kernel, not at this one: after a change here, touch the `kernels.py` files.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedfp8.fp8.parallel import WEYL

I1, I8, I16, I32 = (ir.IntType(width) for width in (1, 8, 16, 32))
F32 = ir.FloatType()


@intrinsic
def binade(typingctx: Any, y: Any) -> Any:
    """2**floor(log2|y|) from the exponent bits (0 for zeros and float32 subnormals, inf for NaN)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        exponent = builder.and_(builder.bitcast(args[0], I32), I32(0x7F800000))
        return builder.bitcast(exponent, F32)

    return types.float32(types.float32), codegen


@intrinsic
def poison(typingctx: Any, x: Any) -> Any:
    """0 for a finite x, other bits for NaN and Inf: the bits of x - x."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fsub(args[0], args[0]), I32)

    return types.uint32(types.float32), codegen


@intrinsic
def plus(typingctx: Any, total: Any, term: Any) -> Any:
    """total + term of a sum whose order does not matter, so that it is kept in vector lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(args[0], args[1], flags=("reassoc", "nsz"))

    return types.float32(types.float32, types.float32), codegen


@intrinsic
def snap(typingctx: Any, y: Any, c: Any) -> Any:
    """(y + c) - c: y rounded to the step that c stands for."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fsub(builder.fadd(args[0], args[1]), args[1])

    return types.float32(types.float32, types.float32), codegen


def _hash(builder: Any, index: Any, key0: Any, key1: Any) -> Any:
    """32 random bits of an element, as LLVM integer code (Numba would widen it to 64 bits)."""
    h = builder.add(builder.mul(builder.trunc(index, I32), I32(WEYL)), key0)  # LLVM makes an addition of the product
    h = builder.mul(builder.xor(h, builder.lshr(h, I32(16))), I32(0x7FEB352D))
    h = builder.xor(builder.xor(h, builder.lshr(h, I32(15))), key1)
    return builder.mul(h, I32(0x846CA68B))


def _one_to_two(builder: Any, h: Any) -> Any:
    """1 + u as float32: the upper 23 bits of h, counted from its smallest value as a signed number."""
    return builder.bitcast(builder.xor(builder.lshr(h, I32(9)), I32(0x3FC00000)), F32)


@intrinsic
def following(typingctx: Any, key0: Any) -> Any:
    """The key with which an index stands for the one after it.

    In a loop over index 0 it is an addition an element: LLVM does not always make one of the product in the hash.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.add(args[0], I32(WEYL))

    return types.uint32(types.uint32), codegen


@intrinsic
def hashed(typingctx: Any, index: Any, key0: Any, key1: Any) -> Any:
    """The 32 random bits of an element."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _hash(builder, *args)

    return types.uint32(types.int64, types.uint32, types.uint32), codegen


@intrinsic
def uniform(typingctx: Any, index: Any, key0: Any, key1: Any, turn: Any) -> Any:
    """u of one element, a multiple of 2**-23 in [0, 1), from the hash plus `turn`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *hashed, turn = args
        return builder.fsub(_one_to_two(builder, builder.add(_hash(builder, *hashed), turn)), F32(1))

    return types.float32(types.int64, types.uint32, types.uint32, types.uint32), codegen


@intrinsic
def half_minus_uniform(typingctx: Any, index: Any, key0: Any, key1: Any, turn: Any) -> Any:
    """1/2 - u, exact, one operation cheaper."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *hashed, turn = args
        return builder.fsub(F32(1.5), _one_to_two(builder, builder.add(_hash(builder, *hashed), turn)))

    return types.float32(types.int64, types.uint32, types.uint32, types.uint32), codegen


@intrinsic
def centred(typingctx: Any, index: Any, key0: Any, key1: Any) -> Any:
    """2**32 * (u - 1/2) in a single conversion, with all 32 random bits; `Grid.spread` holds the 2**-32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(_hash(builder, *args), F32)

    return types.float32(types.int64, types.uint32, types.uint32), codegen


@intrinsic
def code_of(typingctx: Any, y: Any, b: Any, c: Any, shift: Any, offset: Any, sign_shift: Any) -> Any:
    """Code of snap(y, c), which must not pass the top. The low byte of y + c counts steps from 0 (at most 2**(m+1),
    and that of c is 0): |count| on top of the binade's first code is the code. In bytes, for four times the lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        y, b, c, shift, offset, sign_shift = args
        count = builder.trunc(builder.bitcast(builder.fadd(y, c), I32), I8)
        llvm_abs = builder.module.declare_intrinsic("llvm.abs", [I8], ir.FunctionType(I8, [I8, I1]))
        first = builder.trunc(builder.lshr(builder.bitcast(b, I32), shift), I8)
        first = builder.sub(first, builder.trunc(offset, I8))
        magnitude = builder.add(first, builder.call(llvm_abs, [count, I1(0)]))
        sign_bit = builder.trunc(builder.shl(I32(1), sign_shift), I8)
        return builder.or_(magnitude, builder.and_(builder.ashr(count, I8(7)), sign_bit))

    u32, f32 = types.uint32, types.float32
    return types.uint8(f32, f32, f32, u32, u32, u32), codegen


@intrinsic
def value_of(typingctx: Any, code: Any, left: Any, right: Any, mask: Any) -> Any:
    """Value of a code with at most 4 exponent bits, in units of 2**(15 - bias): its fields are put where a float16 has
    them, and the processor converts that, subnormals included."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, left, right, mask = (builder.zext(args[0], I16), *(builder.trunc(arg, I16) for arg in args[1:]))
        fields = builder.ashr(builder.shl(code, left), right)  # copies of the sign go where the exponent has no bits
        return builder.fpext(builder.bitcast(builder.and_(fields, mask), ir.HalfType()), F32)

    return types.float32(types.uint8, types.uint32, types.uint32, types.uint32), codegen


@intrinsic
def value_of_wide(typingctx: Any, code: Any, shift: Any, offset: Any, lowest: Any, sign_shift: Any) -> Any:
    """Value of a code with 5 exponent bits, whose largest exponent a float16 reads as Inf: built as float32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, shift, offset, lowest, sign_shift = args
        code = builder.zext(code, I32)
        sign = builder.lshr(code, sign_shift)
        magnitude = builder.xor(code, builder.shl(sign, sign_shift))
        one_up = builder.shl(builder.add(magnitude, offset), shift)  # bits of the value with its exponent plus one
        normal = builder.bitcast(builder.sub(one_up, I32(1 << 23)), F32)
        # exponent 0: read the mantissa as if the exponent were 1, then take the hidden bit away again
        subnormal = builder.fsub(builder.bitcast(one_up, F32), lowest)
        value = builder.select(builder.fcmp_ordered("<", normal, lowest), subnormal, normal)
        signed = builder.or_(builder.bitcast(value, I32), builder.shl(sign, I32(31)))
        return builder.bitcast(signed, F32)

    u32, f32 = types.uint32, types.float32
    return f32(types.uint8, u32, u32, f32, u32), codegen


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """To the memory at an address, which whoever calls the kernel must hold."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], I8.as_pointer())

    return types.voidptr(types.int64), codegen
