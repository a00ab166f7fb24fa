"""A rehearsal of the GPU benchmark: its processes find a simulated card, on which every part runs with tiny shapes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu import breakdown
from pagoda_server.engine.runners import loaded_model
from pagoda_server.kernels import Backend, PagedKV, load_backend
from pagoda_server.kernels.triton import timing
from tests.simulated_cuda import SimulatedCuda

# Python imports a module of this name at its start: so the processes that a part starts find the card too.
STARTUP_FILE = "sitecustomize.py"
STARTUP = """import sys

if "pagoda_server.engine" in sys.orig_argv:
    from tests.rehearsal import simulated_card

    card = simulated_card()
    card.__enter__()
"""


class _RecordingCuda(SimulatedCuda):
    """It runs what is launched at once, so that a failure is its cause's, and records what ran if it is asked to."""

    def __init__(self) -> None:
        super().__init__(is_late=False)
        self.spans: list[tuple[str, float, float]] | None = None

    def launch(self, work: Any, *stream: Any) -> None:
        name, spans = _name(work), self.spans
        if name is None or spans is None or self.captured is not None:
            super().launch(work, *stream)
            return

        def recorded() -> None:
            started = time.perf_counter()
            work()
            spans.append((name, 1e6 * started, 1e6 * time.perf_counter()))

        super().launch(recorded, *stream)


@contextmanager
def simulated_card() -> Iterator[None]:
    """Within the block torch finds a simulated card, in every thread that is started there, and its profiler too.

    A model's attention, rotations and sampler are the reference's: Triton's interpreter takes seconds a step.
    """
    device = _RecordingCuda()
    patch = pytest.MonkeyPatch()
    start = threading.Thread.start

    def start_with_card(thread: threading.Thread) -> None:
        run = thread.run

        def run_with_card() -> None:
            with device:
                run()

        thread.run = run_with_card  # type: ignore[method-assign]
        start(thread)

    @contextmanager
    def profile(**_: object) -> Iterator[SimpleNamespace]:
        device.spans = []
        watched = SimpleNamespace(events=list)
        try:
            yield watched
        finally:
            spans, device.spans = device.spans, None
            watched.events = lambda: [_event(*span) for span in spans]

    reference = launched_reference(device)
    with device.in_place_of_cuda(patch), patch.context() as patched:
        patched.setattr(threading.Thread, "start", start_with_card)
        patched.setattr(breakdown, "profile", profile)
        patched.setattr(loaded_model, "load_backend", lambda *_: reference)
        for name, value in (("MIN_CALLS", 1), ("REPLAYS", 1), ("WARM_UP_S", 0.0)):
            patched.setattr(timing, name, value)
        yield


def launched_reference(device: SimulatedCuda) -> Backend:
    """The reference ops, treated as kernels of the simulated GPU: faster than Triton's interpreter."""
    reference = load_backend("reference")

    def queries(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: PagedKV, *_: object) -> Tensor:
        return qkv.new_empty(len(qkv), qkv.shape[1] - 2 * kv.num_kv_heads, kv.head_dim)

    return replace(
        reference,
        paged_attention=device.as_kernel(reference.paged_attention, lambda q, *_: torch.empty_like(q)),
        rope_and_store_kv=device.as_kernel(reference.rope_and_store_kv, queries),
        sample_rows=device.as_kernel(reference.sample_rows, lambda *_: None),
    )


def environment(folder: Path) -> dict[str, str]:
    """Return the variables with which a server's engine finds the simulated card; write the file that it needs."""
    (folder / STARTUP_FILE).write_text(STARTUP)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def _event(name: str, start: float, end: float) -> SimpleNamespace:
    """What torch's profiler tells of a kernel."""
    times = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=times, device_type=SimpleNamespace(name="CUDA"))


def _name(work: Any) -> str | None:
    """The op or the kernel that a launched work runs: its function refers to it. None: it is an event or the like."""
    held: dict[str, Any] = {}
    if (code := getattr(work, "__code__", None)) and work.__closure__:
        held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, work.__closure__, strict=True)}
    if "grid" in held:
        return str(held["grid"].fn.__name__)
    if "function" in held:
        return str(held["function"].__name__)
    return str(held["func"]) if "func" in held else "copy" if "values" in held else None
