"""Single machine instructions that numba has no name for. Import it only from compiled loops.

What loops call are plain functions around the intrinsics. Pickled, an intrinsic differs from one
process to the next, and numba's cache never finds a loop again that closes over what names one.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable


@intrinsic
def _trailing_zeros(typingctx, word):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), generate


@intrinsic
def _leading_zeros(typingctx, word):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctlz(arguments[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), generate


def _ask_for(context: Any, builder: Any, pointer: Any) -> None:
    reading, to_all_levels, of_data = 0, 3, 1
    options = [context.get_constant(types.int32, n) for n in (reading, to_all_levels, of_data)]
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, *(option.type for option in options)])
    function = builder.module.declare_intrinsic("llvm.prefetch", (pointer.type,), kind)
    builder.call(function, [pointer, *options])


@intrinsic
def _prefetch(typingctx, array, index):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(made.data, [arguments[1]]), cgutils.voidptr_t)
        _ask_for(context, builder, pointer)
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def _prefetch_at(typingctx, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _ask_for(context, builder, builder.inttoptr(arguments[0], cgutils.voidptr_t))
        return context.get_dummy_value()

    return types.void(types.uint64), generate


@intrinsic
def _load_byte_at(typingctx, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint8(types.uint64), generate


@intrinsic
def _load_at(typingctx, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(types.uint64), generate


@intrinsic
def _put_at(typingctx, address, word):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(arguments[0], arguments[1].type.as_pointer())
        builder.store(arguments[1], pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, word), generate


@register_jitable
def trailing_zeros(word):  # type: ignore[no-untyped-def]
    """Zero bits below the lowest one bit of a 64-bit word, which must not be 0."""
    return _trailing_zeros(word)


@register_jitable
def leading_zeros(word):  # type: ignore[no-untyped-def]
    """Zero bits above the highest one bit of a 64-bit word, which must not be 0."""
    return _leading_zeros(word)


@register_jitable
def prefetch(array, index):  # type: ignore[no-untyped-def]
    """Ask for the cache line of array[index], to read it. The index may lie outside."""
    return _prefetch(array, index)


@register_jitable
def prefetch_at(address):  # type: ignore[no-untyped-def]
    """Ask for the cache line at a 64-bit address, to read it. It may be any address."""
    return _prefetch_at(address)


@register_jitable
def load_byte_at(address):  # type: ignore[no-untyped-def]
    """The byte at an address, which must be inside a living array."""
    return _load_byte_at(address)


@register_jitable
def load_at(address):  # type: ignore[no-untyped-def]
    """The 64-bit word at an address, aligned or not, which must be inside a living array."""
    return _load_at(address)


@register_jitable
def put_at(address, word):  # type: ignore[no-untyped-def]
    """Put an unsigned word of any width at an address, which must be inside a living array."""
    return _put_at(address, word)
