"""The walk of a CPU kernel over states that are matrices: a state for each head, in slots, to which tokens do something
that leaves its columns independent of each other.

A decode goes once over a state, from the source's memory to the slot's. For a prompt the columns lie on the stack in
panels, each of which stays in the first cache while `TOKENS` tokens pass over it. What tokens say for all columns is
written before into *records* on the thread's stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd

from llvmlite import ir

from nbengine.kernels.cpu.codegen import Code, Int, define
from nbengine.kernels.cpu.layout import FLOAT
from nbengine.kernels.cpu.recurrent_layout import Item, MatrixShape, Panel, RecurrentArguments, Work

TOKENS = 32
"""The tokens that pass over a panel before the next panel takes its place in the cache."""

AHEAD = 16384
"""Bytes from what a decode reads to what it asks for: more than a page, where the processor's own prefetching ends."""

UNROLL = 4
"""The rows of a state that a loop does at a time, if they divide its rows."""


@dataclass(frozen=True)
class Recurrence:
    """The functions that say what tokens do to a state; each defines one of the module's.

    `define_prepare(module, shape)`: prepare(records, args, row, head, start, end) writes the records, of `record_bytes`
    each, of some tokens of a request. `define_step(module, shape, from_zeros)`: step(source, target, record, value,
    output) does one token with a whole state. `define_pass(module, shape, columns)`: pass(panel, records, value,
    value_stride, output, output_stride, tokens) does some tokens with a panel, whose rows lie one after the other.
    """

    record_bytes: int
    define_prepare: Callable[[ir.Module, MatrixShape], ir.Function]
    define_step: Callable[[ir.Module, MatrixShape, bool], ir.Function]
    define_pass: Callable[[ir.Module, MatrixShape, Panel], ir.Function]


@dataclass(frozen=True)
class Token:
    """The places of a token's numbers for one head, the `token`-th of a request."""

    shape: MatrixShape
    item: Item
    head: Int

    def row(self, token: Int) -> Int:
        """Return the token's place in the batch."""
        return self.item.work(Work.FIRST_TOKEN) + token

    def key_head(self, name: str, token: Int) -> Int:
        """Return the address of the token's key, or of its query, for this head."""
        head_bytes = self.shape.key_dim * self.shape.element.size
        place = self.row(token) * self.item.get(f"{name}_stride")
        return self.item.get(name) + place + self.head // self.item.get("group") * head_bytes

    def value(self, token: Int) -> Int:
        """Return the address of the token's value."""
        return self.item.get("value") + self.row(token) * self.item.get("value_stride") + self._columns

    def output(self, token: Int) -> Int:
        """Return the address of the token's output."""
        return self.item.get("output") + self.row(token) * self.output_stride + self._columns

    def gate(self, name: str, token: Int) -> Int:
        """Return the address of a number that the token has for each head."""
        return self.item.get(name) + (self.row(token) * self.item.get("heads") + self.head) * FLOAT

    def state(self, slot: Int) -> Int:
        """Return the address of the head's state in a slot."""
        return self.item.get("states") + (slot * self.item.get("heads") + self.head) * self.shape.state_bytes

    @property
    def output_stride(self) -> Int:
        """Return the bytes from one token's output to the next's."""
        return self.item.get("heads") * (self.shape.value_dim * self.shape.element.size)

    @property
    def _columns(self) -> Int:
        return self.head * (self.shape.value_dim * self.shape.element.size)


def define_recurrence(module: ir.Module, name: str, shape: MatrixShape, rule: Recurrence) -> None:
    """Define `name`(address of `RecurrentArguments`), to be run by any number of threads at once."""
    prepare = rule.define_prepare(module, shape)
    decode = _define_decode(module, shape, rule, prepare)
    prompt = _define_prompt(module, shape, rule, prepare)

    def body(code: Code, args: Int) -> None:
        def get(name: str) -> Int:
            return code.load_int(args + getattr(RecurrentArguments, name).offset)

        parts = get("parts")
        with code.tickets(args + RecurrentArguments.counter.offset, get("items")) as ticket:
            part, number = ticket % parts, ticket // parts
            head, row = number % get("heads"), get("work") + number // get("heads") * (len(Work) * 4)
            tokens = Item(code, args, row).work(Work.TOKENS)
            with code.when(tokens.compare(">", 1)):
                code.call(prompt, args, row, head, part)
            with code.when((tokens + part).compare("==", 1)):
                code.call(decode, args, row, head)

    define(module, name, 1, body, exported=True)


def _define_decode(
    module: ir.Module, shape: MatrixShape, rule: Recurrence, prepare: ir.Function
) -> ir.Function:
    """Define decode(args, row, head): do a request's only token, from the source's memory to the slot's."""
    step, first_step = (rule.define_step(module, shape, from_zeros) for from_zeros in (False, True))

    def body(code: Code, args: Int, row: Int, head: Int) -> None:
        item, zero = Item(code, args, row), code.integer(0)
        place, record = Token(shape, item, head), code.stack(rule.record_bytes)
        target = place.state(item.work(Work.SLOT))
        value, output = place.value(zero), place.output(zero)
        code.call(prepare, record, args, row, head, zero, zero + 1)
        with code.when(item.goes_on):
            code.call(step, place.state(item.work(Work.SOURCE)), target, record, value, output)
        with code.when(item.begins):
            code.call(first_step, target, target, record, value, output)
        with item.checkpoints() as (_, slot):
            code.copy_bytes(target, place.state(slot), code.integer(shape.state_bytes))

    return define(module, "decode", 3, body)


def _define_prompt(
    module: ir.Module, shape: MatrixShape, rule: Recurrence, prepare: ir.Function
) -> ir.Function:
    """Define prompt(args, row, head, part): do the tokens of a request with the part's columns of a state, which lie on
    the stack meanwhile, panel after panel."""
    panels = shape.panels
    kinds = {width_of(panel): panel for panel in panels}
    passes = {width: rule.define_pass(module, shape, panel) for width, panel in kinds.items()}
    copies = {width: _define_copy(module, shape, panel) for width, panel in kinds.items()}

    def body(code: Code, args: Int, row: Int, head: Int, part: Int) -> None:
        item = Item(code, args, row)
        place, parts = Token(shape, item, head), item.get("parts")
        records, matrix = code.stack(TOKENS * rule.record_bytes), code.stack(shape.state_bytes)
        begin, stop = part * len(panels) // parts, (part + 1) * len(panels) // parts

        def own_panels() -> Iterator[tuple[Panel, Int, int]]:
            """Yield the part's panels with their places on the stack and in a row of the state."""
            for number, panel in enumerate(panels):
                inside = code.builder.and_(begin.compare("<=", number), stop.compare(">", number))
                with code.when(inside):
                    yield panel, matrix + panel[0][0] * shape.key_dim * FLOAT, panel[0][0]

        row_bytes = code.integer(shape.value_dim * FLOAT)
        with code.when(item.goes_on):
            source = place.state(item.work(Work.SOURCE))
            for panel, own, column in own_panels():
                width = code.integer(width_of(panel) * FLOAT)
                code.call(copies[width_of(panel)], source + column * FLOAT, row_bytes, own, width)
        with code.when(item.begins):
            for panel, own, _ in own_panels():
                _clear(code, shape, panel, own)
        with item.segments() as (first, last, slot):
            with code.loop(first, last, TOKENS) as token:
                end = (token + TOKENS).at_most(last)
                code.call(prepare, records, args, row, head, token, end)
                for panel, own, column in own_panels():
                    at = column * shape.element.size
                    value, output = place.value(token) + at, place.output(token) + at
                    strides = item.get("value_stride"), place.output_stride
                    code.call(
                        passes[width_of(panel)],
                        own,
                        records,
                        value,
                        strides[0],
                        output,
                        strides[1],
                        end - token,
                    )
            target = place.state(slot)
            for panel, own, column in own_panels():
                width = code.integer(width_of(panel) * FLOAT)
                code.call(copies[width_of(panel)], own, width, target + column * FLOAT, row_bytes)

    return define(module, "prompt", 4, body)


def _define_copy(module: ir.Module, shape: MatrixShape, panel: Panel) -> ir.Function:
    """Define copy(source, source_stride, target, target_stride): copy a panel's rows."""

    def body(code: Code, source: Int, source_stride: Int, target: Int, target_stride: Int) -> None:
        for row in rows_of(code, shape):
            for column, lanes in panel:
                at = (column - panel[0][0]) * FLOAT
                numbers = code.load(source + row * source_stride + at, lanes)
                code.store(numbers, target + row * target_stride + at)

    return define(module, f"copy_{width_of(panel)}", 4, body)


def _clear(code: Code, shape: MatrixShape, panel: Panel, target: Int) -> None:
    for row in rows_of(code, shape):
        for column, lanes in panel:
            at = row * (width_of(panel) * FLOAT) + (column - panel[0][0]) * FLOAT
            code.store(code.constant(0.0, lanes), target + at)


def rows_of(code: Code, shape: MatrixShape) -> Iterator[Int]:
    """Emit a loop over the rows of a state, and yield each that its body does."""
    unroll = gcd(shape.key_dim, UNROLL)
    with code.loop(0, code.integer(shape.key_dim), unroll) as first:
        for i in range(unroll):
            yield first + i


def width_of(panel: Panel) -> int:
    """Count the columns of a panel."""
    return sum(lanes for _, lanes in panel)
