"""Building blocks of the kernels in LLVM terms: float32 bits, codes and the dice, without Numba's widening to 64 bits.

Everything here is scalar and branch-free, so loops over it vectorise. Only `plus` may be reassociated: Numba's fastmath
flag would mark every addition of a kernel, and LLVM would then delete the rounding itself, (y + c) - c.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

I32 = ir.IntType(32)
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


def _one_to_two(builder: Any, index: Any, key0: Any, key1: Any) -> Any:
    """The hash as LLVM integer code (Numba would widen it to 64 bits): 23 random bits, as a float in [1, 2)."""
    h = builder.xor(builder.trunc(index, I32), key0)
    h = builder.mul(builder.xor(h, builder.lshr(h, I32(16))), I32(0x7FEB352D))
    h = builder.add(builder.xor(h, builder.lshr(h, I32(15))), key1)
    h = builder.mul(h, I32(0x846CA68B))
    h = builder.xor(h, builder.lshr(h, I32(16)))
    return builder.bitcast(builder.or_(builder.lshr(h, I32(9)), I32(0x3F800000)), F32)


@intrinsic
def uniform(typingctx: Any, index: Any, key0: Any, key1: Any) -> Any:
    """u of one element, in the open interval (0, 1)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fsub(_one_to_two(builder, *args), F32(1 - 2.0**-24))

    return types.float32(types.int64, types.uint32, types.uint32), codegen


@intrinsic
def centred(typingctx: Any, index: Any, key0: Any, key1: Any) -> Any:
    """u - 1/2 - 2**-24 with the same u, one operation cheaper."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fsub(_one_to_two(builder, *args), F32(1.5))

    return types.float32(types.int64, types.uint32, types.uint32), codegen


@intrinsic
def code_of(typingctx: Any, y: Any, b: Any, c: Any, shift: Any, offset: Any, sign_shift: Any) -> Any:
    """Code of snap(y, c). The low bits of y + c count steps: |count| on top of the binade's first code."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        y, b, c, shift, offset, sign_shift = args
        count = builder.sub(builder.bitcast(builder.fadd(y, c), I32), builder.bitcast(c, I32))
        llvm_abs = builder.module.declare_intrinsic("llvm.abs", [I32], ir.FunctionType(I32, [I32, ir.IntType(1)]))
        absolute = builder.call(llvm_abs, [count, ir.IntType(1)(0)])
        first = builder.sub(builder.lshr(builder.bitcast(b, I32), shift), offset)
        magnitude = builder.add(first, absolute)
        largest = builder.sub(builder.shl(I32(1), sign_shift), I32(1))
        over = builder.icmp_signed(">", magnitude, largest)
        magnitude = builder.select(over, largest, magnitude)
        sign = builder.shl(builder.lshr(count, I32(31)), sign_shift)
        return builder.trunc(builder.or_(magnitude, sign), ir.IntType(8))

    u32, f32 = types.uint32, types.float32
    return types.uint8(f32, f32, f32, u32, u32, u32), codegen


@intrinsic
def value_of(typingctx: Any, code: Any, shift: Any, offset: Any, lowest: Any, sign_shift: Any) -> Any:
    """The inverse of :func:`code_of`, on the standard grid."""

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
