"""A CUDA device simulated on the CPU: it shows faults that a card punishes and a CPU forgives.

- Its tensors say that they are on "cuda". An op that mixes them with the host's tensors fails.
- Launched work runs as late as CUDA's rules allow, when the host waits: pinned memory that is written too early, and
  results that are read too early, give wrong numbers. Or it runs at once, which shows what is overwritten too early.
- Streams order work only by events. Each runs as late as it may, or the newest stream runs as early as it may and the
  others late: whatever a forgotten wait leaves unordered comes in the wrong order.
- Uninitialized memory holds NaN. Memory is limited and counted, and it runs out as on a card.
- A graph records launches and repeats them at the same addresses. Its intermediate results are lost after a replay.
- Ops that make the host wait are noted. They are an error if torch is told so, or during the capture of a graph.

Ops are computed by torch's CPU kernels, Triton's by its interpreter. There is no speed.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA = torch.device("cuda", 0)
BYTES_OF_A_NODE = 16  # that a graph's launch takes on the device, beside torch's allocator
Work = Callable[[], object]

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_VALUE_DECIDES_SIZE = (aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.repeat_interleave)
_READS = (aten._local_scalar_dense, aten.equal, aten.is_nonzero)
_INDEXING = (aten.index, aten.index_put, aten.index_put_)
_UNWRITTEN = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)


class Memory:
    """The device memory of one allocation, held as long as the host holds a tensor in it."""

    _size = 0  # of one that there was no room for

    def __init__(self, device: SimulatedCuda, size: int) -> None:
        self._device = device
        if size > device.free:
            device.empty_cache()
        if size > device.free:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes. It is simulated")
        self._size = size
        device.allocated += size
        device.peak = max(device.peak, device.allocated)
        device.reserved = max(device.reserved, device.allocated)

    def __del__(self) -> None:
        self._device.allocated -= self._size


class CudaTensor(Tensor):
    """A tensor on the device. `contents` are its values once the launched work has run; torch sees a meta tensor."""

    contents: Tensor
    memory: Memory
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)

    @staticmethod
    def __new__(cls, real: Tensor, memory: Memory) -> CudaTensor:
        layout: Any = {"strides": real.stride(), "storage_offset": real.storage_offset(), "device": "meta"}
        with torch.inference_mode(False):  # torch wants no view that is of that mode of a tensor that is not
            tensor: Any = torch.Tensor._make_wrapper_subclass(cls, real.shape, dtype=real.dtype, **layout)
        tensor.contents, tensor.memory = real, memory
        return cast(CudaTensor, tensor)

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(without_lists(index), value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} on a tensor of the simulated device, which is not there any more")


class Event:
    """A point in a stream's work. It passes when the work before it has run."""

    def __init__(self, device: SimulatedCuda) -> None:
        self._device, self._stream = device, device.default_stream
        self._recorded = self._passed = 0
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or self._device.current
        self._recorded += 1
        number = self._recorded

        def passes() -> None:
            self._passed, self._time = number, time.perf_counter()

        self._device.launch(passes, self._stream)

    @property
    def point(self) -> Point:
        return Point(self, self._stream, self._recorded)

    def synchronize(self) -> None:
        self._device.run(self.point)

    def has_passed(self, number: int) -> bool:
        return self._passed >= number

    def elapsed_time(self, end: Event) -> float:
        if self._passed < self._recorded or end._passed < end._recorded:
            raise RuntimeError("CUDA error: device not ready")
        return (end._time - self._time) * 1e3


class Point(NamedTuple):
    """An event as it was recorded last, which may be recorded again."""

    event: Event
    stream: Stream
    number: int

    @property
    def has_passed(self) -> bool:
        return self.event.has_passed(self.number)


class Stream:
    """Works that run in order. One that is a point of a stream waits for that."""

    def __init__(self, device: SimulatedCuda) -> None:
        self._device = device
        self.works: deque[Work | Point] = deque()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._device)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self._device.launch(event.point, self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._device.run(self.record_event().point)


class SimulatedCuda(TorchDispatchMode):
    """
    capacity         bytes of device memory
    processors       that kernels share their work out to
    is_late          it runs what is launched when the host waits; else at once
    newest_is_early  the stream that was made last runs its work as soon as its events allow

    waits       what the host has waited for, in ops that a card cannot answer at once
    is_broken   a kernel has read where it must not: whatever is called fails from then on
    current     the stream on which work is launched
    """

    def __init__(
        self, capacity: int = 64 << 20, processors: int = 3, is_late: bool = True, newest_is_early: bool = False
    ) -> None:
        super().__init__()
        self.capacity, self.processors, self.is_late = capacity, processors, is_late
        self.newest_is_early = newest_is_early
        self.allocated = self.reserved = self.peak = self.taken_by_graphs = 0
        self.waits: list[str] = []
        self.waiting_is_an_error = self.is_broken = False
        self.captured: Graph | None = None
        self.default_stream = self.current = Stream(self)
        self._streams = [self.default_stream]
        self._pinned: dict[int, Tensor] = {}
        self._results: dict[Any, Any] = {}  # meta tensors like an op's results, by the layout of its arguments

    # -- time -------------------------------------------------------------------------------------------------------

    def launch(self, work: Work | Point, stream: Stream | None = None) -> None:
        """Launch work on a stream, or on the current one."""
        self._refuse_if_broken()
        stream = stream or self.current
        if self.captured is not None and stream is self.captured.stream:
            assert not isinstance(work, Point), "a graph of several streams is not simulated"
            self.captured.works.append(work)
            return
        stream.works.append(work)
        if not self.is_late:
            self.run()
        elif self.newest_is_early:
            with _on_the_device():
                self._run_early()

    def run(self, until: Point | None = None) -> None:
        """Run what the point needs to pass, or all launched work."""
        self._refuse_if_broken()
        with _on_the_device():
            if until is not None:
                self._reach(until)
            for stream in self._streams if until is None else ():
                while stream.works:
                    self._run_next(stream)

    def new_stream(self) -> Stream:
        self._streams.append(Stream(self))
        return self._streams[-1]

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def _reach(self, point: Point) -> None:
        while not point.has_passed:
            self._run_next(point.stream)

    def _run_next(self, stream: Stream) -> None:
        """Run the next work of a stream, and before it what it waits for."""
        work = stream.works[0]
        if isinstance(work, Point):
            self._reach(work)
        if stream.works and stream.works[0] is work:  # else it has run early
            self._run_first(stream)
            if self.newest_is_early:
                self._run_early()

    def _run_early(self) -> None:
        newest = self._streams[-1]
        while newest.works and not (isinstance(newest.works[0], Point) and not newest.works[0].has_passed):
            self._run_first(newest)

    def _run_first(self, stream: Stream) -> None:
        work = stream.works.popleft()
        if not isinstance(work, Point):
            work()

    def _refuse_if_broken(self) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def wait(self, reason: str) -> None:
        """Make the host wait for all launched work, as an op does that synchronizes implicitly."""
        assert self.captured is None, f"{reason}: operation not permitted when stream is capturing"
        if self.waiting_is_an_error:
            raise RuntimeError(f"called a synchronizing CUDA operation: {reason}")
        self.waits.append(reason)
        self.current.synchronize()

    @property
    def num_launched(self) -> int:
        """How many launched works have not run."""
        return sum(len(stream.works) for stream in self._streams)

    # -- memory -----------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return self.capacity - self.reserved - self.taken_by_graphs

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other takes its address
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def allocate(self, like: Tensor) -> CudaTensor:
        """An uninitialized tensor on the device."""
        span = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True)) + 1
        memory = Memory(self, span * like.dtype.itemsize if like.numel() else 0)
        real = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        poison(real)
        if self.captured is not None:
            self.captured.buffers.append((weakref.ref(memory), real))
        return CudaTensor(real, memory)

    # -- ops --------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        target = kwargs.get("device")
        if CudaTensor not in types and not is_of_device(target):
            is_to_be_pinned = kwargs.pop("pin_memory", False)
            result = func(*args, **kwargs)
            return self.pin(result) if is_to_be_pinned else result
        args, kwargs = mapped(with_index, (args, kwargs))
        known = Schema.of(func)
        if known.is_composite:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        op = func.overloadpacket
        if op is aten.copy_:
            return self._copy(*args, **kwargs)
        if op is aten._to_copy and is_to_other_side(args[0], target):
            return self._move(*args, **kwargs)
        if op in _INDEXING:
            args = (args[0], [self._on_device(index) for index in args[1]], *args[2:])
        self._refuse_the_hosts_tensors(func, (args, kwargs))
        if known.is_view:
            views = func(*real(args), **real(kwargs))
            return mapped(lambda view: CudaTensor(view, args[0].memory), views)
        if op in _READS or op in _VALUE_DECIDES_SIZE or (op in _INDEXING and any(has_mask(args[1]))):
            self.wait(str(func))
            result = func(*real(args), **real(kwargs))
            return mapped(lambda found: self._upload(found) if isinstance(found, Tensor) else found, result)
        if known.written:
            return self._write(func, args, kwargs, known.written)
        return self._compute(func, args, kwargs)

    def _on_device(self, index: Tensor | None) -> Tensor | None:
        return index if index is None or isinstance(index, CudaTensor) else self._move(index, device=CUDA)

    def _refuse_the_hosts_tensors(self, func: Any, arguments: Any) -> None:
        """Numbers may be the host's: they travel with the launch."""
        for leaf in leaves(arguments):
            if isinstance(leaf, Tensor) and not isinstance(leaf, CudaTensor) and leaf.dim() > 0:
                raise RuntimeError(f"{func}: Expected all tensors to be on the same device, cuda:0 and cpu")

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(to, CudaTensor) and isinstance(source, CudaTensor):
            place, values = to.contents, source.contents
            self.launch(lambda: place.copy_(values))
        elif isinstance(to, CudaTensor):
            place, values = to.contents, source
            if source.dim() == 0 and not self.is_pinned(source):
                values = source.clone()
            elif not (non_blocking and self.is_pinned(source)):
                self.wait("a copy to the device that is not both pinned and non_blocking")
            self.launch(lambda: place.copy_(values))
        else:
            assert isinstance(source, CudaTensor)
            values = source.contents
            if non_blocking and self.is_pinned(to):
                self.launch(lambda: to.copy_(values))
            else:
                self.wait("a copy to the host that is not both pinned and non_blocking")
                to.copy_(values)
        return to

    def _move(self, source: Tensor, **kwargs: Any) -> Tensor:
        """`to` between host and device: never to pinned memory."""
        kwargs.pop("pin_memory", None)
        if isinstance(source, CudaTensor):
            self.wait("a copy to the host")
            return cast(Tensor, torch.ops.aten._to_copy.default(source.contents, **kwargs))
        if not (kwargs.get("non_blocking") and self.is_pinned(source)):
            self.wait("a copy to the device that is not both pinned and non_blocking")
        converted = torch.ops.aten._to_copy.default(source, **(kwargs | {"device": "cpu"}))
        return self._upload(converted)

    def _upload(self, values: Tensor) -> CudaTensor:
        result = self.allocate(values)
        place = result.contents
        self.launch(lambda: place.copy_(values))
        return result

    def _write(self, func: Any, args: Any, kwargs: Any, written: list[str]) -> Any:
        real_args, real_kwargs = real(args), real(kwargs)
        self.launch(lambda: func(*real_args, **real_kwargs))
        by_name = dict(zip((arg.name for arg in func._schema.arguments), args, strict=False)) | kwargs
        results = [by_name[name] for name in written]
        return results[0] if len(func._schema.returns) == 1 else tuple(results) if func._schema.returns else None

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        told = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        has_device = "device" in kwargs
        key = func, has_device, layout(args), layout(told)
        shapes = self._results.get(key)
        if shapes is None:
            shapes = func(*to_meta(args), **to_meta(told), **({"device": "meta"} if has_device else {}))
            self._results[key] = shapes
        results = mapped(lambda shape: self.allocate(shape) if isinstance(shape, Tensor) else shape, shapes)
        places = [result.contents for result in leaves(results) if isinstance(result, CudaTensor)]
        if func.overloadpacket in _UNWRITTEN:
            self.launch(lambda: poison(*places))
            return results
        real_args, real_kwargs = real(args), real(told) | ({"device": "cpu"} if has_device else {})

        def work() -> None:
            values = [value for value in leaves(func(*real_args, **real_kwargs)) if isinstance(value, Tensor)]
            for place, value in zip(places, values, strict=True):
                place.copy_(value)

        self.launch(work)
        return results

    def as_kernel(self, function: Callable[..., Tensor | None], out: Callable[..., Tensor | None]) -> Any:
        """`function` as one launch, though it looks at what it is given. `out`: of the same arguments, its result."""

        def launch(*args: Any) -> Tensor | None:
            result = out(*args)
            real_args, place = real(args), real(result)

            def work() -> None:
                value = function(*real_args)
                if place is not None:
                    place.copy_(value)

            self.launch(work)
            return result

        return launch

    # -- torch.cuda -------------------------------------------------------------------------------------------------

    @contextmanager
    def in_place_of_cuda(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
        """Within the block torch finds this device, and Triton launches on it."""
        from triton.runtime.interpreter import GridExecutor

        interpret = GridExecutor.__call__

        def launch_kernel(grid: GridExecutor, *args: Any, **kwargs: Any) -> None:
            host = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
            if not any(isinstance(tensor, CudaTensor) for tensor in host):
                interpret(grid, *args, **kwargs)
                return
            if not all(isinstance(tensor, CudaTensor) for tensor in host):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
            real_args, real_kwargs = real(args), real(kwargs)
            self.launch(lambda: interpret(grid, *real_args, **real_kwargs))

        device = self
        simulated: dict[str, object] = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_name": lambda *_: "simulated",
            "get_device_capability": lambda *_: (9, 0),
            "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=self.processors),
            "synchronize": lambda *_: self.run(),
            "Stream": lambda *_: self.new_stream(),
            "stream": self.on,
            "current_stream": lambda *_: self.current,
            "default_stream": lambda *_: self.default_stream,
            "set_stream": self.set_stream,
            "set_sync_debug_mode": lambda mode: setattr(self, "waiting_is_an_error", mode == "error"),
            "memory_allocated": lambda *_: self.allocated,
            "max_memory_allocated": lambda *_: self.peak,
            "memory_reserved": lambda *_: self.reserved,
            "reset_peak_memory_stats": lambda *_: setattr(self, "peak", self.allocated),
            "empty_cache": self.empty_cache,
            "mem_get_info": lambda *_: (self.free, self.capacity),
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": lambda: Graph(device),
            "graph": lambda graph, pool=None, stream=None, capture_error_mode="global": graph.capture(stream),
            "Event": lambda **_: Event(device),
        }
        with monkeypatch.context() as patch, self:
            for name, value in simulated.items():
                patch.setattr(torch.cuda, name, value)
            patch.setattr(torch, "tensor", made_on_the_host(torch.tensor))
            patch.setattr(GridExecutor, "__call__", launch_kernel)
            yield self


class Graph:
    """A captured graph.

    stream   what it was captured on
    works    what was launched during the capture
    buffers  what was allocated then; replays use the memory of those that the host no longer holds
    """

    def __init__(self, device: SimulatedCuda) -> None:
        self._device = device
        self.stream: Stream | None = None
        self.works: list[Work] = []
        self.buffers: list[tuple[weakref.ref[Memory], Tensor]] = []

    @contextmanager
    def capture(self, stream: Stream | None) -> Iterator[None]:
        self._device.run()
        self._device.empty_cache()
        self._device.captured, self.stream = self, stream or self._device.new_stream()
        try:
            with self._device.on(self.stream):
                yield
        finally:
            self._device.captured = None
        self._device.taken_by_graphs += len(self.works) * BYTES_OF_A_NODE

    def replay(self) -> None:
        for work in self.works:
            self._device.launch(work)
        lost = [buffer for memory, buffer in self.buffers if memory() is None]
        self._device.launch(lambda: poison(*lost))

    def __del__(self) -> None:
        self._device.taken_by_graphs -= len(self.works) * BYTES_OF_A_NODE


def made_on_the_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `torch.tensor` to make tensors on the host; torch would ask CUDA for a device first."""

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        return made.to(CUDA) if is_of_device(device) else made

    return tensor


class Schema(NamedTuple):
    """What an op does with its arguments, which takes torch a while to tell.

    is_composite  it is made of other ops
    is_view       its results are views of its arguments
    written       the names of the arguments that it writes to
    """

    is_composite: bool
    is_view: bool
    written: list[str]

    @staticmethod
    @cache
    def of(func: Any) -> Schema:
        named = {arg.name: arg.alias_info for arg in func._schema.arguments}
        written = [name for name, alias in named.items() if alias is not None and alias.is_write]
        return Schema(func.has_kernel_for_dispatch_key(_COMPOSITE), func.is_view, written)


def mapped(of: Callable[[Any], Any], values: Any) -> Any:
    """Map the leaves of tuples, lists and dictionaries, in a fraction of the time of torch's `tree_map`."""
    kind = type(values)
    if kind is tuple or kind is list:
        return kind([mapped(of, value) for value in values])
    if kind is dict:
        return {name: mapped(of, value) for name, value in values.items()}
    return of(values)


def leaves(values: Any) -> list[Any]:
    found: list[Any] = []
    mapped(found.append, values)
    return found


def layout(values: Any) -> Any:
    """Return a key of what decides an op's results except the contents of its tensors."""
    kind = type(values)
    if kind is tuple or kind is list:
        return kind, *map(layout, values)
    if kind is dict:
        return kind, *((name, layout(value)) for name, value in values.items())
    if isinstance(values, Tensor):
        return values.shape, values.stride(), values.dtype
    return kind, values


@contextmanager
def _on_the_device() -> Iterator[None]:
    """Within the block ops compute at once, on real tensors."""
    with _disable_current_modes(), torch.inference_mode():
        yield


def is_of_device(target: Any) -> bool:
    """Whether a target is the simulated device; torch calls it meta where it converts a number to a tensor."""
    return target is not None and torch.device(target).type in ("cuda", "meta")


def without_lists(index: Any) -> Any:
    """Replace lists in an index by device tensors; a card needs that copy, and the host waits for it."""
    if isinstance(index, tuple):
        return tuple(without_lists(part) for part in index)
    return torch.tensor(index).to(CUDA) if isinstance(index, list) else index


def with_index(leaf: Any) -> Any:
    """Give a CUDA device its index, for which torch would ask CUDA."""
    return CUDA if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf


def is_to_other_side(source: Tensor, target: Any) -> bool:
    return target is not None and isinstance(source, CudaTensor) != is_of_device(target)


def has_mask(indices: Sequence[Tensor | None]) -> Iterator[bool]:
    return (index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def real(values: Any) -> Any:
    """Replace device tensors by their contents, inside dataclasses too."""

    def of(leaf: Any) -> Any:
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return replace(leaf, **{field.name: real(getattr(leaf, field.name)) for field in fields(leaf)})
        return leaf.contents if isinstance(leaf, CudaTensor) else leaf

    return mapped(of, values)


def to_meta(values: Any) -> Any:
    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    return mapped(shape, values)


def poison(*tensors: Tensor) -> None:
    """Fill tensors with values whose use shows: NaN, and integers that are not an index."""
    for tensor in tensors:
        if tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0x7F)  # NaN in float8
        elif tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max // 3)
