"""The exchanges of a tensor-parallel group through shared memory, as operations of a program."""

from __future__ import annotations

import ctypes

from torch import Tensor

from nbengine.distributed.shm_exchange import ShmExchange
from nbengine.kernels.cpu.all_reduce import AllReduce, compile_all_gather, compile_all_reduce
from nbengine.kernels.cpu.codegen import Element
from nbengine.kernels.cpu.exchange_operation import ExchangeOperation, compile_exchange
from nbengine.kernels.cpu.jit import Function


class ShmOperations:
    """The `RankOperations` of a `ShmCommunicator`: they go through its end of the exchange, in turn with its own
    calls, and with the same functions. Up to `most_in_one_phase` elements are summed in one phase."""

    def __init__(self, exchange: ShmExchange, size: int, most_in_one_phase: int) -> None:
        self._exchange = exchange
        self._most = most_in_one_phase
        self._sum: AllReduce = compile_all_reduce(size, Element.FLOAT32)
        self._gather: Function = compile_all_gather(size)
        self._functions = {
            each.address: each for each in (self._sum.one_phase, self._sum.two_phases, self._gather)
        }

    def sum_rows(self, x: Tensor) -> tuple[Function, ctypes.Structure]:
        """See `RankOperations.sum_rows`."""
        operation = ExchangeOperation(
            items=1,
            exchange=self._exchange.address,
            x=x.data_ptr(),
            row=x.shape[1],
            short=self._sum.one_phase.address,
            long=self._sum.two_phases.address,
            most=self._most,
        )
        return compile_exchange(), operation

    def gather_rows(self, x: Tensor, output: Tensor) -> tuple[Function, ctypes.Structure]:
        """See `RankOperations.gather_rows`."""
        row = x.shape[1] * x.element_size()
        operation = ExchangeOperation(
            items=1,
            exchange=self._exchange.address,
            x=x.data_ptr(),
            row=row,
            output=output.data_ptr(),
            width=row,
            short=self._gather.address,
            long=self._gather.address,
        )
        return compile_exchange(), operation

    def finish(self, arguments: int) -> None:
        """See `RankOperations.finish`."""
        operation = ExchangeOperation.from_address(arguments)
        self._exchange.finish(self._functions[operation.function])
