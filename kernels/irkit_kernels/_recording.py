"""A CUDA device that is not there: counts what a call would do to it, with the right numbers as results.

Each tensor "on" the device holds a CPU tensor on which all operations run, so calls whose shapes depend on
values, gradients included, go through. Triton kernels are replaced by the CPU kernels of the same operation.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from ._recording_kernels import flash_backward, flash_forward, operators, stand_ins

__all__ = ["Record", "recording"]

aten = torch.ops.aten
_CUDA = torch.device("cuda", 0)
_PLACE = torch.device("meta")  # what C++ takes the device for: its real one needs a build with CUDA
_WAITING = {  # the host reads a value, or the number of results
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten.equal,
}
_MISSING = {  # on CPUs
    aten._flash_attention_forward: flash_forward,
    aten._flash_attention_backward: flash_backward,
}
_HERE = ("/irkit/", "/irkit_kernels/")


@dataclass
class Record:
    """What a call did to the device.

    Attributes:
        operations: Names of the operations that ran on the device, Triton kernels among them.
        waits: What let the host wait for the device, with the line of irkit that did it.
        pageable: Copies to or from memory that is not pinned, which the device cannot do by itself.
        device: To be named in calls: ``model.to(record.device)``.
    """

    operations: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)
    device: torch.device = _CUDA

    def clear(self) -> None:
        """Begin anew."""
        for names in (self.operations, self.waits, self.pageable):
            names.clear()


@contextmanager
def recording() -> Iterator[Record]:
    """Let ``cuda`` be a device on which every operation is noted.

    Examples:
        >>> with recording() as record:
        ...     x = torch.arange(3.0).to("cuda")
        ...     record.clear()
        ...     total = (2 * x).sum().item()
        >>> total, record.operations, len(record.waits)
        (6.0, ['mul', 'sum', '_local_scalar_dense'], 1)
    """
    record, pinned = Record(), _Pinned()
    devices = _Devices(pinned)
    with _cuda(record, pinned), _triton(record), devices, _Operations(record, pinned, devices):
        yield record


class _OnDevice(torch.Tensor):
    """A tensor that says it is on the device; ``held`` is on the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, held: Tensor) -> Any:
        with torch.inference_mode(False):  # views in inference mode of what was made outside need it
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=_PLACE,
            )
        made.held = held
        return made

    device = property(lambda self: _CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:
        return f"on the device: {self.held!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a tensor of a recording is used after it")


class _Pinned:
    """Which memory of the CPU is pinned."""

    def __init__(self) -> None:
        self.storages: dict[int, Any] = {}  # kept, that no other gets the address

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.storages


class _Devices(TorchFunctionMode):
    """Calls that name the device get `_PLACE` in its stead, which a build without CUDA knows."""

    def __init__(self, pinned: _Pinned) -> None:
        super().__init__()
        self.pinned = pinned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            func, args = Tensor.to, (args[0], _CUDA)
        if func is torch.device:
            return func(*args, **kwargs)
        if func is Tensor.backward:  # whose own Python code is to find this mode, too
            with self:
                gradient = kwargs.pop("gradient", None)
                return torch.autograd.backward(args[0], gradient, **kwargs)
        if func is Tensor.tolist and isinstance(args[0], _OnDevice):
            return func(args[0].cpu())
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            place = _PLACE if _named(kwargs.get("device")) else kwargs.get("device")
            return func(*args, **kwargs | {"device": None}).to(place)  # meta would not hold the values
        pin = kwargs.pop("pin_memory", False)
        args, kwargs = tree_map(lambda each: _PLACE if _named(each) else each, (args, kwargs))
        made = func(*args, **kwargs)
        return self.pinned.add(made) if pin else made


class _Operations(TorchDispatchMode):
    """Runs operations on what the tensors hold, and notes them."""

    def __init__(self, record: Record, pinned: _Pinned, devices: _Devices) -> None:
        super().__init__()
        self.record, self.pinned, self.devices = record, pinned, devices
        self.own = operators()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func._can_decompose():  # inference mode leaves it to us
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        on_device = any(isinstance(each, _OnDevice) for each in tensors)
        name, packet = func.overloadpacket.__name__, func.overloadpacket
        if on_device and func.namespace == "irkit":  # what is registered for CUDA runs, and is looked at
            self.record.operations.append(name)
            with self.devices, self:
                return self.own[name](*args, **kwargs)
        there = self._goes_there(func, args, kwargs, on_device)
        if not on_device and not there:
            return func(*args, **kwargs)
        self.record.operations.append(name)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        bare = tree_map(_bare, (args, kwargs))
        found = _MISSING.get(packet, func)(*bare[0], **bare[1])
        if packet is aten._to_copy and not there:
            return self.pinned.add(found.clone()) if kwargs.get("non_blocking") else found.clone()
        if packet is aten.copy_ and not there:
            return args[0]
        wrapped = tree_map(lambda each: _OnDevice(each) if isinstance(each, Tensor) else each, found)
        if packet is aten._to_copy or not tensors:
            return wrapped
        return return_and_correct_aliasing(func, args, kwargs, wrapped)

    def _goes_there(self, func: Any, args: Any, kwargs: Any, on_device: bool) -> bool:
        """Whether results are on the device; copies and waits are noted."""
        packet, target = func.overloadpacket, kwargs.get("device")
        if packet is aten._to_copy:
            there = on_device if target is None else target.type != "cpu"
            if there != on_device:
                self._copied(args[0], None, there, bool(kwargs.get("non_blocking")))
            return there
        if packet is aten.copy_:
            there = isinstance(args[0], _OnDevice)
            if there != isinstance(args[1], _OnDevice):
                flags = [*args[2:], kwargs.get("non_blocking", False)]
                self._copied(args[1], args[0], there, bool(flags[0]))
            return there
        if on_device:
            self._looked_at(packet, func, args, kwargs)
        return on_device or (target is not None and target.type != "cpu")

    def _copied(self, source: Tensor, target: Tensor | None, there: bool, non_blocking: bool) -> None:
        """A copy between CPU and device; torch pins the target itself where it makes it, unless it waits."""
        host = source if there else target
        line = f"copy {'to' if there else 'from'} the device {_line()}"
        if not (non_blocking if host is None else host in self.pinned):
            self.record.pageable.append(line)
            if not there:  # the call returns when the last byte has come
                non_blocking = False
        if not non_blocking:
            self.record.waits.append(line)

    def _looked_at(self, packet: Any, func: Any, args: Any, kwargs: Any) -> None:
        waits = packet in _WAITING
        if packet is aten.repeat_interleave:
            waits = kwargs.get("output_size") is None
        host = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Tensor) and a.dim()]
        host = [each for each in host if not isinstance(each, _OnDevice)]
        if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            indices = [each for each in args[1] if each is not None]
            waits = any(each.dtype in (torch.bool, torch.uint8) for each in indices)
            if packet is not aten.index and args[2].numel() == 1:  # becomes masked_fill
                waits = False
            for each in host:
                self._copied(each, None, True, False)
        elif host:
            raise RuntimeError(f"{func}: got tensors of the device and of the CPU, {_line()}")
        if waits:
            self.record.waits.append(f"{func} {_line()}")


def _bare(each: Any) -> Any:
    return each.held if isinstance(each, _OnDevice) else each


def _named(each: Any) -> bool:
    """Whether it names the device."""
    if isinstance(each, torch.device):
        return each.type == "cuda"
    return isinstance(each, str) and each.split(":")[0] == "cuda"


def _line() -> str:
    """Where in irkit the call comes from."""
    frames = traceback.extract_stack()
    for frame in reversed(frames):
        if any(part in frame.filename for part in _HERE) and frame.filename != __file__:
            return f"at {Path(frame.filename).name}:{frame.lineno} {frame.line}"
    return "outside of irkit"


@contextmanager
def _cuda(record: Record, pinned: _Pinned) -> Iterator[None]:
    """The parts of `torch.cuda` that a call needs: streams in which everything is done at once."""

    class Event:
        def __init__(self, **_: Any) -> None: ...

        def record(self, *_: Any) -> None: ...

        def wait(self, *_: Any) -> None: ...

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            record.waits.append(f"synchronize {_line()}")

    class Stream(Event):
        device = _CUDA

        def wait_stream(self, _: Any) -> None: ...

        def wait_event(self, _: Any) -> None: ...

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

    def nothing(*_: Any, **__: Any) -> Any:
        return nullcontext()

    stand_ins = {
        "_lazy_init": nothing,  # where the engine of autograd runs Python code it leaves `_Devices` out
        "Event": Event,
        "Stream": Stream,
        "stream": nothing,
        "device": nothing,
        "current_stream": lambda *_: Stream(),
        "synchronize": lambda *_: Event().synchronize(),
        "get_device_capability": lambda *_: (9, 0),
        "current_device": lambda: 0,
    }
    with (
        patch.multiple(torch.cuda, **stand_ins),
        patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True),
        patch.object(Tensor, "record_stream", nothing),
        patch.object(Tensor, "pin_memory", lambda tensor, *_: pinned.add(tensor.clone())),
        patch.object(Tensor, "is_pinned", lambda tensor, *_: tensor in pinned),
    ):
        yield


@contextmanager
def _triton(record: Record) -> Iterator[None]:
    """Triton kernels are launched as always; what runs then are the kernels for CPUs."""

    def launched(name: str, run: Callable[..., None]) -> Any:
        class Kernel:
            def __getitem__(self, _: Any) -> Any:
                def launch(*args: Any, **options: Any) -> None:
                    record.operations.append(f"triton:{name}")
                    run(*map(_bare, args), **options)

                return launch

        return Kernel()

    with ExitStack() as stack:
        for name, (module, kernel, run) in stand_ins().items():
            stack.enter_context(patch.object(module, kernel, launched(name, run)))
        yield
