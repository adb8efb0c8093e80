"""Cache write on the CPU: keys transposed inside their block, values as they are."""

from __future__ import annotations

import ctypes

from llvmlite import ir

from nbengine.kernels.cpu_ir import Code, Int, define

TOKENS_PER_ITEM = 16


class WriteArguments(ctypes.Structure):
    """Addresses, and strides in bytes; `slots` holds int64, negative where nothing is to be written."""

    _fields_ = [
        ("counter", ctypes.c_int64),
        ("items", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("key", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("value", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("key_cache", ctypes.c_int64),
        ("value_cache", ctypes.c_int64),
    ]


def define_write_kv(module: ir.Module, name: str, head_dim: int, block_size: int, size: int) -> None:
    """Define `name`(address of `WriteArguments`), to be run by any number of threads at once.

    `size` is the bytes of an element. An item is `TOKENS_PER_ITEM` tokens.
    """
    head_bytes = head_dim * size

    def body(code: Code, args: Int) -> None:
        def argument(field: str) -> Int:
            return code.load_int(args + getattr(WriteArguments, field).offset)

        kv_heads, tokens = argument("kv_heads"), argument("tokens")
        with code.tickets(args + WriteArguments.counter.offset, argument("items")) as item:
            first = item * TOKENS_PER_ITEM
            with code.loop(first, (first + TOKENS_PER_ITEM).at_most(tokens)) as token:
                slot = code.load_int(argument("slots") + token * 8)
                with code.when(slot.compare(">=", 0)), code.loop(0, kv_heads) as head:
                    block = (slot // block_size * kv_heads + head) * (block_size * head_bytes)
                    row = slot % block_size
                    key = argument("key") + token * argument("key_stride") + head * head_bytes
                    value = argument("value") + token * argument("value_stride") + head * head_bytes
                    key_place = argument("key_cache") + block + row * size
                    code.copy(key, key_place, head_dim, size, target_step=block_size * size)
                    value_place = argument("value_cache") + block + row * head_bytes
                    code.copy(value, value_place, head_dim, size, target_step=size)

    define(module, name, 1, body, exported=True)
