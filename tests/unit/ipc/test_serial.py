"""Whatever is encoded comes back equal; whatever cannot be decoded is a `WireError`."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from nbengine.errors import WireError
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from nbengine.ipc.serial import EXT_ARRAY, EXT_TENSOR, MsgpackDecoder, MsgpackEncoder
from nbengine.metrics.stats import SchedulerStats
from nbengine.sampling_params import SamplingParams
from tests.support.thorough import amount

TENSOR_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


class Holder(msgspec.Struct, array_like=True):
    anything: Any = None
    tensor: torch.Tensor | None = None
    array: np.ndarray | None = None


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8)


def round_trip(obj: Any, kind: Any = Any, threshold: int = 256) -> Any:
    frames = MsgpackEncoder(size_threshold=threshold).encode(obj)
    return MsgpackDecoder(kind).decode([bytes(frame) for frame in frames])


@given(
    dtype=st.sampled_from(TENSOR_DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=4),
    transpose=st.booleans(),
    step=st.integers(1, 3),
    threshold=st.sampled_from([0, 16, 256]),
)
@settings(max_examples=amount(25, thorough=4000), deadline=None)
def test_tensors_survive(dtype, shape, transpose, step, threshold) -> None:
    tensor = torch.randint(0, 2, shape, dtype=torch.uint8).to(dtype)
    if transpose:
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    if tensor.dim():
        tensor = tensor[::step]
    back = round_trip([tensor, {"again": tensor}], threshold=threshold)
    for result in (back[0], back[1]["again"]):
        assert result.dtype is dtype
        assert result.shape == tensor.shape
        assert torch.equal(bits(result), bits(tensor))


@given(
    array=stnp.arrays(
        dtype=st.one_of(
            stnp.boolean_dtypes(),
            stnp.integer_dtypes(endianness="?"),
            stnp.floating_dtypes(endianness="?"),
            stnp.complex_number_dtypes(endianness="?"),
        ),
        shape=stnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    transpose=st.booleans(),
    threshold=st.sampled_from([0, 16, 256]),
)
@settings(max_examples=amount(25, thorough=4000), deadline=None)
def test_arrays_survive(array, transpose, threshold) -> None:
    array = array.T if transpose else array
    back = round_trip(array, threshold=threshold)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert not back.flags.writeable


@given(size=st.integers(0, 200))
@settings(max_examples=amount(15, thorough=1200), deadline=None)
def test_a_tensor_gets_its_own_frame_from_the_threshold_on(size) -> None:
    tensor = torch.arange(size, dtype=torch.int16)
    frames = MsgpackEncoder().encode(tensor)
    assert len(frames) == (1 if size * 2 < 256 else 2)


def test_a_frame_is_a_view_of_the_tensor_and_keeps_it_alive() -> None:
    tensor = torch.arange(1000)
    frame = memoryview(MsgpackEncoder().encode(tensor)[1])
    tensor[0] = 77
    assert frame[0] == 77
    del tensor
    gc.collect()
    assert frame[8] == 1


def test_a_decoded_tensor_owns_its_memory() -> None:
    frames = [bytearray(frame) for frame in MsgpackEncoder().encode(torch.arange(1000))]
    tensor = MsgpackDecoder().decode(frames)
    frames[1][:] = bytes(len(frames[1]))
    tensor[0] = 5
    assert tensor[:3].tolist() == [5, 1, 2]


def test_zmq_frames_can_be_decoded() -> None:
    frames = [
        zmq.Frame(bytes(frame)) for frame in MsgpackEncoder().encode([np.arange(500), torch.arange(500)])
    ]
    array, tensor = MsgpackDecoder().decode(frames)
    assert (array == np.arange(500)).all()
    assert torch.equal(tensor, torch.arange(500))


def test_typed_fields_get_their_type_and_refuse_another() -> None:
    holder = Holder(torch.ones(2), torch.ones(300), np.ones(3))
    back = round_trip(holder, Holder)
    assert torch.equal(back.anything, holder.anything)
    assert torch.equal(back.tensor, holder.tensor)
    assert (back.array == holder.array).all()
    with pytest.raises(WireError, match="Tensor"):
        round_trip([None, np.ones(3)], Holder)


def test_grad_and_negated_views_are_encoded_by_value() -> None:
    tensor = torch.ones(3, requires_grad=True)
    assert torch.equal(round_trip(tensor), torch.ones(3))
    imaginary = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert imaginary.is_neg()
    assert round_trip(imaginary).tolist() == [-2.0, 4.0]


def test_prompt_embeds_travel_in_a_request() -> None:
    embeds = torch.randn(10, 64).bfloat16()
    request = EngineCoreRequest("r", None, SamplingParams(), prompt_embeds=embeds)
    back = round_trip(request, EngineCoreRequest)
    assert torch.equal(back.prompt_embeds, embeds)
    assert back.prompt_embeds.dtype is torch.bfloat16


text = st.text(max_size=20)
outputs = st.builds(
    EngineCoreOutputs,
    engine_index=st.integers(0, 7),
    outputs=st.lists(
        st.builds(
            EngineCoreOutput,
            request_id=text,
            new_token_ids=st.lists(st.integers(0, 2**31)),
            stop_reason=st.none() | st.integers(0, 2**31) | text,
            error=st.none() | text,
        ),
        max_size=5,
    ),
    scheduler_stats=st.none() | st.builds(SchedulerStats, num_running_reqs=st.integers(0, 256)),
    timestamp=st.floats(allow_nan=False),
)


@given(outputs)
@settings(max_examples=amount(20, thorough=2000), deadline=None)
def test_outputs_survive_and_a_reused_buffer_gives_the_same_bytes(message) -> None:
    encoder = MsgpackEncoder()
    buffer = bytearray(b"left from before" * 10)
    frames = encoder.encode_into(message, buffer)
    assert frames[0] is buffer
    assert bytes(buffer) == bytes(encoder.encode(message)[0])
    assert MsgpackDecoder(EngineCoreOutputs).decode(frames) == message


@pytest.mark.parametrize(
    "unknown",
    [
        object(),
        np.array([object()]),
        np.zeros(2, dtype="i4,f4"),
        np.ma.masked_array([1, 2], mask=[True, False]),
        np.array(["text"]),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, dtype=torch.complex64),
        lambda: None,
        2**80,
    ],
    ids=[
        "object",
        "object array",
        "record array",
        "masked array",
        "string array",
        "sparse",
        "complex",
        "function",
        "huge int",
    ],
)
def test_what_has_no_encoding_is_refused(unknown) -> None:
    with pytest.raises(WireError):
        MsgpackEncoder().encode([unknown])


def extension(code: int, *header: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(header)))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([extension(EXT_TENSOR, "float32", (3,), b"x")], "needs 12 bytes, the message has 1"),
        ([extension(EXT_TENSOR, "float32", (-1,), b"")], ">= 0"),
        ([extension(EXT_TENSOR, "float32", (1,) * 33, b"1234")], "length <= 32"),
        ([extension(EXT_TENSOR, "float32", (1,), 1)], "frame 1, it has 0"),
        ([extension(EXT_TENSOR, "float32", (1,), 0)], "frame 0"),
        ([extension(EXT_TENSOR, "float32", (1,), -1)], "frame -1"),
        ([extension(EXT_TENSOR, "float32", (2,), 1), b"1234"], "needs 8 bytes"),
        ([extension(EXT_TENSOR, "float32", (0, 2**62, 2**62), b"")], "no array"),
        ([extension(EXT_TENSOR, "float32", (0, 2**64 - 1), b"")], "no array"),
        ([extension(EXT_TENSOR, "load", (1,), b"1")], "unknown tensor dtype"),
        ([extension(EXT_TENSOR, "float32", (1,), {"name": "x"})], "out-of-band"),
        ([extension(EXT_ARRAY, "|O", (1,), b"12345678")], "not accepted"),
        ([extension(EXT_ARRAY, "<f4,<f4", (1,), b"12345678")], "not accepted"),
        ([extension(EXT_ARRAY, "<f3", (1,), b"123")], "no array"),
        ([extension(EXT_ARRAY, "<f4", (0, 2**62, 2**62), b"")], "no array"),
        ([extension(EXT_ARRAY, "<f4", (1,), {"name": "x"})], "out-of-band"),
        ([extension(EXT_TENSOR, 5, 5, 5)], "cannot be decoded"),
        ([extension(99, 1)], "unknown msgpack extension 99"),
        ([b"\x91" * 100_000], "recursion"),
        ([b"\xdd\xff\xff\xff\xff"], "truncated"),
        ([b"\xa2\xff\xff"], "utf-8"),
        ([b""], "truncated"),
        ([], "without frames"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_messages_are_refused(frames, reason) -> None:
    with pytest.raises(WireError, match=reason):
        MsgpackDecoder().decode(frames)


def check_value_or_wire_error(decode: Callable[[], Any], kind: Any) -> None:
    """Check that decoding gives a value of the kind that was asked for, or a `WireError` with a message."""
    try:
        value, message = decode(), ""
    except WireError as error:
        value, message = error, str(error)
    assert message or kind is Any or isinstance(value, kind)


@given(
    st.lists(st.binary(max_size=60), max_size=3), st.sampled_from([Any, EngineCoreRequest, EngineCoreOutputs])
)
@settings(max_examples=amount(40, thorough=6000), deadline=None)
def test_garbage_is_a_wire_error_or_a_value_but_never_a_crash(frames, kind) -> None:
    decoder = MsgpackDecoder(kind)
    check_value_or_wire_error(lambda: decoder.decode(frames), kind)
    check_value_or_wire_error(lambda: decoder.decode_without_tensors(frames), Any)


@given(st.data())
@settings(max_examples=amount(40, thorough=6000), deadline=None)
def test_a_flipped_byte_is_a_wire_error_or_a_value_but_never_a_crash(data) -> None:
    message = EngineCoreRequest("r", [1, 2, 3], SamplingParams(stop=["x"]), prompt_embeds=torch.ones(4, 4))
    frame = bytearray(MsgpackEncoder().encode(message)[0])
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    decoder = MsgpackDecoder(EngineCoreRequest)
    check_value_or_wire_error(lambda: decoder.decode(bytes(frame)), EngineCoreRequest)


class Store:
    """Both ends of an out-of-band transport."""

    def __init__(self, takes: bool = True) -> None:
        self.takes = takes
        self.held: dict[int, bytes] = {}

    def __call__(self, *args: Any) -> Any:
        if isinstance(args[0], memoryview):
            if not self.takes:
                return None
            self.held[len(self.held)] = bytes(args[0])
            return {"slot": len(self.held) - 1}
        num_bytes, handle = args
        data = self.held.pop(handle["slot"])
        assert len(data) == num_bytes
        return bytearray(data)

    def discard(self, handle: dict[str, Any]) -> None:
        del self.held[handle["slot"]]


@pytest.mark.parametrize("large", [torch.arange(1000).view(10, 100), np.arange(1000.0).reshape(2, 500)])
def test_a_consumer_takes_what_is_large_out_of_band(large) -> None:
    store = Store()
    frames = MsgpackEncoder(oob_tensor_consumer=store).encode([torch.ones(2), large])
    assert len(frames) == 1
    assert store.held[0] == (large.numpy() if isinstance(large, torch.Tensor) else large).tobytes()
    back = MsgpackDecoder(oob_tensor_provider=store).decode(frames)
    assert type(back[1]) is type(large)
    assert (back[1] == large).all()
    assert torch.equal(back[0], torch.ones(2))


def test_a_tensor_that_came_out_of_band_is_writable_and_its_own() -> None:
    store = Store()
    sent = torch.zeros(1000, dtype=torch.bfloat16)
    frames = MsgpackEncoder(oob_tensor_consumer=store).encode([sent, sent])
    assert len(store.held) == 2
    first, second = MsgpackDecoder(oob_tensor_provider=store).decode(frames)
    first.add_(1)
    assert (first == 1).all()
    assert not second.any()
    assert not sent.any()


def test_what_a_consumer_leaves_gets_a_frame() -> None:
    frames = MsgpackEncoder(oob_tensor_consumer=Store(takes=False)).encode(torch.arange(1000))
    assert len(frames) == 2
    assert torch.equal(MsgpackDecoder().decode(frames), torch.arange(1000))


@pytest.mark.parametrize(
    "unknown", [object(), torch.zeros(2, dtype=torch.complex64)], ids=["object", "dtype"]
)
def test_what_a_consumer_took_of_a_message_that_cannot_be_encoded_is_given_back(unknown) -> None:
    store = Store()
    with pytest.raises(WireError):
        MsgpackEncoder(oob_tensor_consumer=store).encode([torch.arange(1000), np.arange(1000), unknown])
    assert store.held == {}


def test_a_message_can_be_read_past_broken_tensors_which_are_given_up() -> None:
    store = Store()
    frames = MsgpackEncoder(oob_tensor_consumer=store).encode(["id", torch.arange(1000)])
    broken = msgspec.msgpack.Ext(EXT_TENSOR, msgspec.msgpack.encode(("load", (1,), b"")))
    fields = [*msgspec.msgpack.decode(frames[0], ext_hook=msgspec.msgpack.Ext), broken]
    decoder = MsgpackDecoder(oob_tensor_provider=store)
    assert decoder.decode_without_tensors([msgspec.msgpack.encode(fields)]) == ["id", None, None]
    assert store.held == {}
    for frames in ([], [b""], [b"\xc1"], [msgspec.msgpack.encode(msgspec.msgpack.Ext(EXT_TENSOR, b"x"))]):
        with pytest.raises(WireError):
            decoder.decode_without_tensors(frames)


def test_an_encoder_keeps_nothing_of_its_last_message() -> None:
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder()
    with pytest.raises(WireError):
        encoder.encode([torch.arange(1000), object()])
    frames = encoder.encode(torch.arange(1000))
    assert len(frames) == 2
    with pytest.raises(WireError, match="frame 1, it has 0"):
        decoder.decode(frames[:1])
    assert torch.equal(decoder.decode(frames), torch.arange(1000))


def test_plain_messages_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder\n"
        "assert MsgpackDecoder().decode(MsgpackEncoder().encode([1, 'a'])) == [1, 'a']\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
