"""The encoding of messages: msgpack with tensors and arrays, without pickle.

A tensor or array is one msgpack extension `[dtype, shape, data]`, recognisable wherever it stands, also in a
field of type `Any`. `data` has one of three types, for three ways that the bytes take:

- bytes: inline, below `size_threshold`;
- a map: out of band, where an `oob_tensor_consumer` took the tensor;
- an integer: the index of an auxiliary frame of the same message, sent without copying.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic, Protocol, TypeVar, cast

import msgspec

from nbengine.errors import WireError

if TYPE_CHECKING:
    import numpy as np
    import torch
    import zmq

    Buffer = bytes | bytearray | memoryview | zmq.Frame

EXT_TENSOR = 1
EXT_ARRAY = 2

DEFAULT_SIZE_THRESHOLD = 256
"""Bytes from which on a tensor travels in its own frame."""

INTEGER_DTYPES = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64"))
FLOAT_DTYPES = frozenset(("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"))
TORCH_DTYPES = INTEGER_DTYPES | FLOAT_DTYPES
_NUMPY_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")
"""The form of `numpy.dtype.str` for plain numbers; object arrays would need pickle."""

_ENCODING_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
_DECODING_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, RecursionError, MemoryError)

T = TypeVar("T")


class OOBTensorConsumer(Protocol):
    """A consumer that takes the bytes of tensors and arrays out of band, for example into shared memory."""

    def __call__(self, data: memoryview) -> dict[str, Any] | None:
        """Take `data` and return the handle with which the provider finds it,
        or None to leave it in the message."""

    def discard(self, handle: dict[str, Any]) -> None:
        """Give up the bytes that a handle stands for: its message is not going to be sent."""


class OOBTensorProvider(Protocol):
    """The other end of an `OOBTensorConsumer`."""

    def __call__(self, num_bytes: int, handle: dict[str, Any]) -> bytearray:
        """Return the `num_bytes` bytes that `handle` stands for; raise `WireError` if it stands for none."""

    def discard(self, handle: dict[str, Any]) -> None:
        """Give up the bytes that `handle` stands for, if any: its message cannot be decoded."""


class _ArrayHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=32)]
    data: int | bytes | dict[str, Any]


class MsgpackEncoder:
    """An encoder of messages into frames: the msgpack, then the auxiliary frames.

    It is for one thread at a time.
    """

    def __init__(
        self,
        size_threshold: int = DEFAULT_SIZE_THRESHOLD,
        oob_tensor_consumer: OOBTensorConsumer | None = None,
    ) -> None:
        self.size_threshold = size_threshold
        self.oob_tensor_consumer = oob_tensor_consumer
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._enc_hook)
        # Reused memory: in a new buffer, a long prompt would make the output grow many times.
        self._scratch = bytearray()
        self._frames: list[Buffer] = []
        self._placed: list[dict[str, Any]] = []
        self._consumer: OOBTensorConsumer | None = None

    def encode(self, obj: Any) -> list[Buffer]:
        """Return the frames of `obj`; the auxiliary ones are views of the tensors' own memory.

        Raises:
            WireError: `obj` holds something that has no encoding.
        """
        return self._encode(obj, None)

    def encode_into(self, obj: Any, buffer: bytearray) -> list[Buffer]:
        """Encode like `encode`, with `buffer` (overwritten and resized) as the first frame."""
        return self._encode(obj, buffer)

    def _encode(self, obj: Any, buffer: bytearray | None) -> list[Buffer]:
        frames: list[Buffer] = [b""]
        self._frames, self._placed = frames, []
        consumer = self._consumer = self.oob_tensor_consumer
        try:
            target = self._scratch if buffer is None else buffer
            self._encoder.encode_into(obj, target)
            frames[0] = bytes(target) if buffer is None else buffer
        except BaseException as error:
            if consumer is not None:
                for handle in self._placed:
                    consumer.discard(handle)
            if isinstance(error, _ENCODING_ERRORS):
                raise WireError(f"{type(obj).__name__} cannot be encoded: {error}") from error
            raise
        finally:
            self._frames, self._placed, self._consumer = [], [], None
        return frames

    def _enc_hook(self, obj: Any) -> Any:
        # An object can only be a tensor or an array if someone has imported torch or numpy.
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return self._encode_tensor(obj)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(obj, numpy.ndarray):
            return self._encode_array(obj)
        raise TypeError(f"objects of type {type(obj).__module__}.{type(obj).__qualname__} have no encoding")

    def _encode_tensor(self, tensor: torch.Tensor) -> msgspec.msgpack.Ext:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in TORCH_DTYPES or str(tensor.layout) != "torch.strided":
            raise WireError(f"tensors of dtype {tensor.dtype} and layout {tensor.layout} have no encoding")
        return _ext(EXT_TENSOR, dtype, tensor.shape, self._place(_tensor_bytes(tensor)))

    def _encode_array(self, array: np.ndarray[Any, Any]) -> msgspec.msgpack.Ext:
        import numpy as np

        if not _NUMPY_DTYPE.fullmatch(array.dtype.str) or isinstance(array, np.ma.MaskedArray):
            raise WireError(f"{type(array).__name__} of dtype {array.dtype} has no encoding")
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return _ext(EXT_ARRAY, array.dtype.str, array.shape, self._place(flat.data))

    def _place(self, data: memoryview) -> memoryview | dict[str, Any] | int:
        if data.nbytes < self.size_threshold:
            return data
        if self._consumer is not None:
            handle = self._consumer(data)
            if handle is not None:
                self._placed.append(handle)
                return handle
        self._frames.append(data)
        return len(self._frames) - 1


class MsgpackDecoder(Generic[T]):
    """A decoder of a message's frames as `type` (anything, if not given). It is for one thread at a time.

    Tensors own their memory. Arrays are read-only views of the frame, or of the memory, they came in.
    """

    def __init__(self, type: Any = Any, oob_tensor_provider: OOBTensorProvider | None = None) -> None:
        self.oob_tensor_provider = oob_tensor_provider
        self._decoder = msgspec.msgpack.Decoder(type, ext_hook=self._ext_hook, dec_hook=_dec_hook)
        self._frames: Sequence[Buffer] = ()

    def decode(self, frames: Buffer | Sequence[Buffer]) -> T:
        """Decode one buffer, or a message's main frame and its auxiliary frames.

        Raises:
            WireError: the bytes are not such a message.
        """
        if not isinstance(frames, (list, tuple)):
            frames = (cast("Buffer", frames),)
        if not frames:
            raise WireError("a message without frames cannot be decoded")
        self._frames = frames
        try:
            return cast("T", self._decoder.decode(cast("bytes", frames[0])))
        except _DECODING_ERRORS as error:
            raise WireError(f"the message cannot be decoded: {error}") from error
        finally:
            self._frames = ()

    def decode_without_tensors(self, frames: Sequence[Buffer]) -> Any:
        """Decode a message of any type without its tensors and arrays, with None in their places.

        Their out-of-band bytes are given up.

        Raises:
            WireError: the message has no frame, or the first is not msgpack.
        """
        if not frames:
            raise WireError("a message without frames cannot be decoded")
        skimmer = msgspec.msgpack.Decoder(ext_hook=self._skim_hook)
        try:
            return skimmer.decode(cast("bytes", frames[0]))
        except _DECODING_ERRORS as error:
            raise WireError(f"the message cannot be decoded: {error}") from error

    def _skim_hook(self, code: int, payload: memoryview) -> None:
        if self.oob_tensor_provider is None or code not in (EXT_TENSOR, EXT_ARRAY):
            return
        data = _header_decoder.decode(payload).data
        if isinstance(data, dict):
            self.oob_tensor_provider.discard(data)

    def _ext_hook(self, code: int, payload: memoryview) -> Any:
        if code not in (EXT_TENSOR, EXT_ARRAY):
            raise WireError(f"unknown msgpack extension {code}")
        header = _header_decoder.decode(payload)
        dtype, shape = header.dtype, tuple(header.shape)
        try:
            num_bytes = math.prod(shape) * _itemsize(code, dtype)
            data = self._data(header.data, num_bytes)
            if len(data) != num_bytes:
                raise WireError(f"shape {shape} needs {num_bytes} bytes, the message has {len(data)}")
            build = _build_tensor if code == EXT_TENSOR else _build_array
            return build(dtype, shape, data)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"no array of dtype {dtype} and shape {shape}: {error}") from error

    def _data(self, data: int | bytes | dict[str, Any], num_bytes: int) -> memoryview | bytearray:
        if isinstance(data, bytes):
            return memoryview(data)
        if isinstance(data, int):
            return self._frame(data)
        if self.oob_tensor_provider is None:
            raise WireError("the message refers to an out-of-band tensor, which this end did not agree to")
        return self.oob_tensor_provider(num_bytes, data)

    def _frame(self, index: int) -> memoryview:
        if not 1 <= index < len(self._frames):
            raise WireError(f"the message refers to auxiliary frame {index}, it has {len(self._frames) - 1}")
        return memoryview(cast("bytes", self._frames[index])).cast("B")


def _ext(code: int, dtype: str, shape: Sequence[int], data: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode((dtype, tuple(shape), data)))


def _dec_hook(expected: type, value: Any) -> Any:
    if not isinstance(value, expected):
        raise TypeError(f"expected {expected.__name__}, got {type(value).__name__}")
    return value


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    torch = sys.modules["torch"]
    contiguous = tensor.detach().resolve_neg().cpu().contiguous()
    # Tensors of up to one element count as contiguous whatever their strides are.
    flat = contiguous.as_strided((contiguous.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _itemsize(code: int, dtype: str) -> int:
    if code == EXT_ARRAY:
        if not _NUMPY_DTYPE.fullmatch(dtype):
            raise WireError(f"arrays of dtype {dtype!r} are not accepted")
        import numpy as np

        return np.dtype(dtype).itemsize
    if dtype not in TORCH_DTYPES:
        raise WireError(f"unknown tensor dtype {dtype!r}")
    import torch

    torch_dtype: torch.dtype = getattr(torch, dtype)
    return torch_dtype.itemsize


def _build_tensor(dtype: str, shape: tuple[int, ...], data: memoryview | bytearray) -> torch.Tensor:
    import numpy as np
    import torch

    torch_dtype = getattr(torch, dtype)
    if isinstance(data, bytearray) and data:
        return torch.frombuffer(data, dtype=torch_dtype).view(shape)
    tensor = torch.empty(shape, dtype=torch_dtype)
    if data:
        tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return tensor


def _build_array(dtype: str, shape: tuple[int, ...], data: memoryview | bytearray) -> np.ndarray[Any, Any]:
    import numpy as np

    numpy_dtype = np.dtype(dtype)
    array = np.frombuffer(data, numpy_dtype).reshape(shape) if data else np.empty(shape, numpy_dtype)
    array.flags.writeable = False
    return array


_header_decoder = msgspec.msgpack.Decoder(_ArrayHeader)
