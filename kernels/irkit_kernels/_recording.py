"""A simulated CUDA device: it records what a call does to the device, and computes the right results.

Each tensor "on" the device wraps a CPU tensor, on which all operations run. Therefore also calls whose shapes
depend on values work, including gradients. Triton kernels are replaced by CPU code of the same operation.
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
_META = torch.device("meta")  # the device that C++ sees: a real CUDA device needs a build with CUDA
_SYNCHRONISING = {  # the host reads a value or the number of results, so it waits for the device
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten.equal,
}
_CPU_REPLACEMENTS = {  # for operations that torch has on CUDA alone
    aten._flash_attention_forward: flash_forward,
    aten._flash_attention_backward: flash_backward,
    aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
}
_PACKAGES = ("/irkit/", "/irkit_kernels/")


@dataclass
class Record:
    """What a call did to the device.

    Attributes:
        operations: Names of the operations that ran on the device, including Triton kernels.
        waits: Operations that made the host wait for the device, with the line of irkit that called them.
        pageable: Copies to or from memory that is not pinned; the device cannot make them asynchronously.
        device: The device to pass to calls: ``model.to(record.device)``.
    """

    operations: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)
    device: torch.device = _CUDA

    def clear(self) -> None:
        """Remove all entries."""
        for names in (self.operations, self.waits, self.pageable):
            names.clear()


@contextmanager
def recording() -> Iterator[Record]:
    """Make ``cuda`` a simulated device that records every operation.

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
    """A tensor that reports to be on the device; ``data_on_cpu`` holds its values."""

    data_on_cpu: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, data_on_cpu: Tensor) -> Any:
        with torch.inference_mode(False):  # views, in inference mode, of tensors made outside need it
            wrapper = torch.Tensor._make_wrapper_subclass(
                cls,
                data_on_cpu.size(),
                strides=data_on_cpu.stride(),
                storage_offset=data_on_cpu.storage_offset(),
                dtype=data_on_cpu.dtype,
                device=_META,
            )
        wrapper.data_on_cpu = data_on_cpu
        return wrapper

    device = property(lambda self: _CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:
        return f"on the device: {self.data_on_cpu!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a tensor of a recording is used after it")


class _Pinned:
    """The set of pinned CPU memory."""

    def __init__(self) -> None:
        self.storages: dict[int, Any] = {}  # kept alive, so that no other storage gets the same address

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.storages


class _Devices(TorchFunctionMode):
    """Replaces ``cuda`` in the arguments of calls by `_META`, which a build without CUDA supports."""

    def __init__(self, pinned: _Pinned) -> None:
        super().__init__()
        self.pinned = pinned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            func, args = Tensor.to, (args[0], _CUDA)
        if func is torch.device:
            return func(*args, **kwargs)
        if func is Tensor.backward:  # run the Python code of the backward under this mode, too
            with self:
                gradient = kwargs.pop("gradient", None)
                return torch.autograd.backward(args[0], gradient, **kwargs)
        if func is Tensor.tolist and isinstance(args[0], _OnDevice):
            return func(args[0].cpu())
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            device = _META if _is_cuda(kwargs.get("device")) else kwargs.get("device")
            return func(*args, **kwargs | {"device": None}).to(device)  # a meta tensor would lose the values
        pin = kwargs.pop("pin_memory", False)
        args, kwargs = tree_map(lambda leaf: _META if _is_cuda(leaf) else leaf, (args, kwargs))
        result = func(*args, **kwargs)
        return self.pinned.add(result) if pin else result


class _Operations(TorchDispatchMode):
    """Runs operations on the wrapped CPU tensors, and records them."""

    def __init__(self, record: Record, pinned: _Pinned, devices: _Devices) -> None:
        super().__init__()
        self.record, self.pinned, self.devices = record, pinned, devices
        self.irkit_operators = operators()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func._can_decompose():  # in inference mode torch leaves the decomposition to the mode
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        on_device = any(isinstance(tensor, _OnDevice) for tensor in tensors)
        name, packet = func.overloadpacket.__name__, func.overloadpacket

        # operators of irkit: run the code registered for CUDA, and record what it does, too
        if on_device and func.namespace == "irkit":
            self.record.operations.append(name)
            with self.devices, self:
                return self.irkit_operators[name](*args, **kwargs)

        # operations of torch: record, then run on the CPU tensors
        to_device = self._record_transfers(func, args, kwargs, on_device)
        if not on_device and not to_device:
            return func(*args, **kwargs)
        self.record.operations.append(name)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        cpu_args, cpu_kwargs = tree_map(_unwrap, (args, kwargs))
        run = _CPU_REPLACEMENTS.get(packet, _CPU_REPLACEMENTS.get(func, func))
        result = run(*cpu_args, **cpu_kwargs)

        # wrap the results that are on the device
        if packet is aten._to_copy and not to_device:
            return self.pinned.add(result.clone()) if kwargs.get("non_blocking") else result.clone()
        if packet is aten.copy_ and not to_device:
            return args[0]
        wrapped = tree_map(lambda leaf: _OnDevice(leaf) if isinstance(leaf, Tensor) else leaf, result)
        if packet is aten._to_copy or not tensors:
            return wrapped
        return return_and_correct_aliasing(func, args, kwargs, wrapped)

    def _record_transfers(self, func: Any, args: Any, kwargs: Any, on_device: bool) -> bool:
        """Record the copies and waits of an operation; return whether its results are on the device."""
        packet, target = func.overloadpacket, kwargs.get("device")
        if packet is aten._to_copy:
            to_device = on_device if target is None else target.type != "cpu"
            if to_device != on_device:
                self._record_copy(args[0], None, to_device, bool(kwargs.get("non_blocking")))
            return to_device
        if packet is aten.copy_:
            to_device = isinstance(args[0], _OnDevice)
            if to_device != isinstance(args[1], _OnDevice):
                flags = [*args[2:], kwargs.get("non_blocking", False)]
                self._record_copy(args[1], args[0], to_device, bool(flags[0]))
            return to_device
        if on_device:
            self._record_waits(packet, func, args, kwargs)
        return on_device or (target is not None and target.type != "cpu")

    def _record_copy(
        self, source: Tensor, target: Tensor | None, to_device: bool, non_blocking: bool
    ) -> None:
        """Record a copy between CPU and device.

        Without ``target`` torch allocates it, and pins it if the copy is not blocking.
        """
        host = source if to_device else target
        line = f"copy {'to' if to_device else 'from'} the device {_calling_line()}"
        if not (non_blocking if host is None else host in self.pinned):
            self.record.pageable.append(line)
            if not to_device:  # the call returns only after the last byte has arrived
                non_blocking = False
        if not non_blocking:
            self.record.waits.append(line)

    def _record_waits(self, packet: Any, func: Any, args: Any, kwargs: Any) -> None:
        """Record whether an operation on the device makes the host wait."""
        waits = packet in _SYNCHRONISING
        if packet is aten.repeat_interleave:
            waits = kwargs.get("output_size") is None
        tensors = [
            leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and leaf.dim()
        ]
        on_host = [tensor for tensor in tensors if not isinstance(tensor, _OnDevice)]
        if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            indices = [index for index in args[1] if index is not None]
            waits = any(index.dtype in (torch.bool, torch.uint8) for index in indices)  # counts the true ones
            if packet is not aten.index and args[2].numel() == 1:  # torch turns it into masked_fill
                waits = False
            for tensor in on_host:
                self._record_copy(tensor, None, True, False)
        elif on_host:
            raise RuntimeError(f"{func}: got tensors of the device and of the CPU, {_calling_line()}")
        if waits:
            self.record.waits.append(f"{func} {_calling_line()}")


def _unwrap(leaf: Any) -> Any:
    return leaf.data_on_cpu if isinstance(leaf, _OnDevice) else leaf


def _is_cuda(leaf: Any) -> bool:
    """Return whether an argument is the device or its name."""
    if isinstance(leaf, torch.device):
        return leaf.type == "cuda"
    return isinstance(leaf, str) and leaf.split(":")[0] == "cuda"


def _calling_line() -> str:
    """Return the line of irkit that made the current call."""
    frames = traceback.extract_stack()
    for frame in reversed(frames):
        if any(part in frame.filename for part in _PACKAGES) and frame.filename != __file__:
            return f"at {Path(frame.filename).name}:{frame.lineno} {frame.line}"
    return "outside of irkit"


@contextmanager
def _cuda(record: Record, pinned: _Pinned) -> Iterator[None]:
    """Replace the parts of `torch.cuda` that calls use; everything in a stream is done at once."""

    # events and streams that have nothing to wait for
    class Event:
        def __init__(self, **_: Any) -> None: ...

        def record(self, *_: Any) -> None: ...

        def wait(self, *_: Any) -> None: ...

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            record.waits.append(f"synchronize {_calling_line()}")

    class Stream(Event):
        device = _CUDA

        def wait_stream(self, _: Any) -> None: ...

        def wait_event(self, _: Any) -> None: ...

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

    def nothing(*_: Any, **__: Any) -> Any:
        return nullcontext()

    # functions of torch.cuda, and methods of tensors
    stand_ins = {
        "_lazy_init": nothing,  # called because autograd's engine runs Python code without `_Devices`
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
    """Replace Triton kernels by objects with the same way of launching, which run CPU code."""

    def launchable(name: str, run: Callable[..., None]) -> Any:
        class Kernel:
            def __getitem__(self, _: Any) -> Any:
                def launch(*args: Any, **options: Any) -> None:
                    record.operations.append(f"triton:{name}")
                    run(*map(_unwrap, args), **options)

                return launch

        return Kernel()

    with ExitStack() as stack:
        for name, (module, kernel, run) in stand_ins().items():
            stack.enter_context(patch.object(module, kernel, launchable(name, run)))
        yield
