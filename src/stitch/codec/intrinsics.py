"""Single machine instructions that numba has no name for. Import it only from compiled loops."""

from __future__ import annotations

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def trailing_zeros(typingctx, word):  # type: ignore[no-untyped-def]
    """Zero bits below the lowest one bit of a 64-bit word, which must not be 0."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), generate


@intrinsic
def leading_zeros(typingctx, word):  # type: ignore[no-untyped-def]
    """Zero bits above the highest one bit of a 64-bit word, which must not be 0."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctlz(arguments[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), generate


@intrinsic
def prefetch(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Ask for the cache line of array[index], to read it. The index may lie outside."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(made.data, [arguments[1]]), cgutils.voidptr_t)
        reading, to_all_levels, of_data = 0, 3, 1
        options = [context.get_constant(types.int32, n) for n in (reading, to_all_levels, of_data)]
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, *(option.type for option in options)])
        function = builder.module.declare_intrinsic("llvm.prefetch", (pointer.type,), kind)
        builder.call(function, [pointer, *options])
        return context.get_dummy_value()

    return types.void(array, index), generate
