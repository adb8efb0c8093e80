"""A device that is late: it does the copies and kernels that it is given afterwards, in order, whenever it
likes.

Tensors on it say that they are on a CUDA device, so that the code under test takes the same ways as on a GPU,
with nothing of it replaced; their memory is the host's. `LateDevice` stands behind torch's own functions:
while it is entered, tensors made on the device, pinned memory and copies are its own. A copy that is not
waited for reads pinned memory when it is carried out, not when it is asked for, and memory that no work has
written yet is full of nonsense. As with CUDA, a caller that asks for values waits for everything before them,
and work keeps the memory that it needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)

aten = torch.ops.aten


class LateTensor(Tensor):
    """A tensor on a late device. torch takes it for one without data; `memory` has its data once they are computed."""

    memory: Tensor
    late: LateDevice

    @staticmethod
    def __new__(cls, real: Tensor, late: LateDevice) -> Self:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=torch.device("meta"),
        )
        tensor.memory, tensor.late = real, late
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:
        return DEVICE

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, _ = tree_flatten((args, kwargs))
        late = next(each.late for each in flat if isinstance(each, LateTensor))
        return late.call(func, args, kwargs or {})


class LateDevice(TorchFunctionMode):
    """`haste` is how likely it is to do some of its work whenever it is given more: at 0 it does nothing before someone waits
    or asks."""

    def __init__(self, seed: int, haste: float) -> None:
        super().__init__()
        self._random = Random(seed)
        self._haste = haste
        self._undone: deque[Callable[[], object]] = deque()
        self.num_given = 0
        self._num_done = 0
        self._pinned: dict[int, Tensor] = {}
        self._shapes: dict[Any, Any] = {}
        self.num_waits = 0
        """The number of times that someone waited for what was not done."""
        self.most_undone = 0

    # What is given and done.

    def give(self, work: Callable[[], object]) -> int:
        """Have something done later; returns its number."""
        self._undone.append(work)
        self.num_given += 1
        self.most_undone = max(self.most_undone, len(self._undone))
        if self._random.random() < self._haste:
            self.go_on()
        return self.num_given

    def go_on(self) -> None:
        """Do some of what is undone, or all of it."""
        if self._undone:
            self.advance(self._num_done + self._random.randint(1, len(self._undone)))

    def wait(self, number: int | None = None) -> None:
        """Return when the work of that number has been done; all work if None."""
        number = self.num_given if number is None else number
        self.num_waits += number > self._num_done
        self.advance(number)

    def is_done(self, number: int) -> bool:
        """Go on for a while, perhaps, and return whether the work with this number is done."""
        if self._random.random() < 0.5:
            self.go_on()
        return self._num_done >= number

    @torch.inference_mode()
    def advance(self, number: int) -> None:
        """Do what is undone, up to the work of that number."""
        while self._num_done < number:
            self._undone.popleft()()
            self._num_done += 1

    def event(self, device: torch.device) -> LateEvent:
        """Make a stand-in for `torch.Event`."""
        assert device == DEVICE
        return LateEvent(self)

    # Memory.

    def put(self, real: Tensor) -> LateTensor:
        """Make the device's view of memory that is its own from now on."""
        return LateTensor(real, self)

    def new(self, shape: Any, dtype: torch.dtype, stride: Any = None) -> LateTensor:
        """Make memory without sense in it."""
        real = torch.empty(shape, dtype=dtype)
        if stride is not None:
            real = torch.empty_strided(shape, stride, dtype=dtype)
        return self.put(real.fill_(-7 if dtype.is_signed else 1))

    def compute(self, function: Callable[[], Tensor], result: LateTensor) -> LateTensor:
        """Have `result` filled with what `function` returns, as one kernel."""
        self.give(lambda: result.memory.copy_(function()))
        return result

    def _pin(self, tensor: Tensor) -> Tensor:
        # Kept, so that no other memory gets the same address.
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _source(self, tensor: Tensor, *, non_blocking: bool) -> Tensor:
        """Host memory as a copy to the device reads it: pinned memory is read when the copy is carried out."""
        is_pinned = tensor.untyped_storage().data_ptr() in self._pinned
        return tensor if non_blocking and is_pinned else tensor.clone()

    # torch's functions, as they are called.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        subject = args[0] if args and isinstance(args[0], Tensor) else None
        if func is Tensor.data_ptr and isinstance(subject, LateTensor):
            return subject.memory.data_ptr()
        if func is Tensor.tolist and isinstance(subject, LateTensor):
            self.wait()
            return subject.memory.tolist()
        if func is Tensor.__setitem__ and isinstance(subject, LateTensor):
            index, value = tree_map(_value, args[1:])
            return self.give(lambda: subject.memory.__setitem__(_real(index), _real(value)))
        if func is Tensor.pin_memory:
            return self._pin(subject.clone())
        if func is Tensor.to and not isinstance(subject, LateTensor) and _is_here(args[1]):
            result = self.new(subject.shape, subject.dtype)
            return result.copy_(subject, non_blocking=kwargs.get("non_blocking", False))
        if _is_here(kwargs.get("device")):
            assert not isinstance(subject, LateTensor)
            return self.put(func(*args, **{**kwargs, "device": "cpu"}))
        if kwargs.pop("pin_memory", False):
            return self._pin(func(*args, **kwargs))
        return func(*args, **kwargs)

    # What becomes of them for tensors on the device.

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _is_composite(func):
            return func.decompose(*args, **kwargs)
        if func in (aten._local_scalar_dense.default, aten.equal.default):
            self.wait()
            return func(*_real(args), **_real(kwargs))
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return self._to_host(*args, **kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": None}
        if func.is_view:
            return tree_map(self._put_tensor, func(*_real(args), **_real(kwargs)))
        args, kwargs = tree_map(_value, args), tree_map(_value, kwargs)
        if func._schema.is_mutable:
            assert func._schema.name.endswith("_"), f"{func} is not known here"
            self.give(lambda: func(*_real(args), **_real(kwargs)))
            return args[0]
        results = tree_map(self._new_like, self._shape(func, args, kwargs))
        self.give(lambda: _fill(results, func(*_real(args), **_real(kwargs))))
        return results

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not isinstance(source, LateTensor):
            source = self._source(source, non_blocking=non_blocking)
        self.give(lambda: _real(target).copy_(_real(source)))
        is_on_device = isinstance(target, LateTensor) and isinstance(source, LateTensor)
        if not (non_blocking or is_on_device):
            self.wait()
        return target

    def _to_host(
        self, source: LateTensor, *, device: torch.device, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Tensor:
        assert torch.device(device).type == "cpu"
        target = self.new(source.shape, dtype or source.dtype).memory
        return self._pin(self._copy(target, source, kwargs.get("non_blocking", False)))

    def _shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Tensors that look like the results: what comes of zeros, which are an index into anything."""
        flat, spec = tree_flatten((args, kwargs))
        key = func, spec, tuple(map(_look, flat))
        if key not in self._shapes:
            self._shapes[key] = func(*tree_map(_zeros, args), **tree_map(_zeros, kwargs))
        return self._shapes[key]

    def _new_like(self, look: Any) -> Any:
        return self.new(look.shape, look.dtype, look.stride()) if isinstance(look, Tensor) else look

    def _put_tensor(self, value: Any) -> Any:
        return self.put(value) if isinstance(value, Tensor) else value


class LateEvent:
    """A mark among the device's work."""

    def __init__(self, late: LateDevice) -> None:
        self._late = late
        self._number = 0

    def record(self) -> None:
        self._number = self._late.give(lambda: None)

    def query(self) -> bool:
        return self._late.is_done(self._number)

    def synchronize(self) -> None:
        self._late.wait(self._number)


def _is_here(device: Any) -> bool:
    return isinstance(device, torch.device) and device.type == DEVICE.type


def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _real(values: Any) -> Any:
    return tree_map(lambda value: value.memory if isinstance(value, LateTensor) else value, values)


def _value(value: Any) -> Any:
    """A kernel's argument: a single number of the host's goes along with the kernel, other memory cannot be reached."""
    if isinstance(value, Tensor) and not isinstance(value, LateTensor):
        assert value.ndim == 0, "a kernel was given memory of the host's"
        return value.clone()
    return value


def _look(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return type(value), value


def _zeros(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu").zero_()
    return value


def _fill(targets: Any, values: Any) -> None:
    for target, value in zip(tree_flatten(targets)[0], tree_flatten(values)[0], strict=True):
        if isinstance(target, LateTensor):
            target.memory.copy_(value)
