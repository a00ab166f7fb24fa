"""What the GPU does during a step: time by kernel, and time in which no kernel runs, from torch's profiler."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from bench.report import Cells

FILES = "breakdown-*.json"
SHOWN = 20  # kernels in a table; the file has all
LONGEST_NAME = 90  # characters in a table: templates of libraries have names of a page


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel or a copy on the GPU, and when it ran, in µs."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    calls: int
    time_us: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """
    steps           steps that ended in the window
    window_us       from the start of the first kernel to the end of the last one
    busy_us         time in which at least one kernel ran
    longest_gap_us  longest time in which none did
    kernels         by name, longest in total first
    """

    what: str
    steps: int
    window_us: float
    busy_us: float
    longest_gap_us: float
    kernels: list[Kernel] = field(default_factory=list)

    @classmethod
    def of(cls, what: str, steps: int, spans: Sequence[Span]) -> Breakdown:
        """Raise ValueError if the profiler saw nothing."""
        if not spans:
            raise ValueError("the profiler saw no kernel")
        spans = sorted(spans, key=lambda span: span.start)
        calls: dict[str, list[float]] = {}
        for span in spans:
            calls.setdefault(span.name, []).append(span.end - span.start)
        kernels = [Kernel(name, len(times), sum(times)) for name, times in calls.items()]
        kernels.sort(key=lambda kernel: -kernel.time_us)
        busy = _union(spans)
        gaps = [after[0] - before[1] for before, after in pairwise(busy)]
        return cls(
            what,
            steps,
            window_us=busy[-1][1] - busy[0][0],
            busy_us=sum(end - start for start, end in busy),
            longest_gap_us=max(gaps, default=0.0),
            kernels=kernels,
        )

    @property
    def idle_fraction(self) -> float:
        return 1.0 - self.busy_us / self.window_us

    def write(self, folder: Path) -> None:
        number = len(list(folder.glob(FILES)))
        (folder / FILES.replace("*", str(number))).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Breakdown:
        values = json.loads(path.read_text())
        return cls(**values | {"kernels": [Kernel(**kernel) for kernel in values["kernels"]]})

    def table(self) -> Cells:
        """Times per step, as shares of the window. Kernels that overlap count in full, each of them."""
        steps = max(1, self.steps)
        rows = [
            _line(kernel.name[:LONGEST_NAME], kernel.calls / steps, kernel.time_us / steps, self.window_us / steps)
            for kernel in self.kernels[:SHOWN]
        ]
        if others := self.kernels[SHOWN:]:
            calls, time_us = sum(kernel.calls for kernel in others), sum(kernel.time_us for kernel in others)
            rows.append(_line(f"{len(others)} others", calls / steps, time_us / steps, self.window_us / steps))
        idle_us = self.window_us - self.busy_us
        rows.append(_line("no kernel", None, idle_us / steps, self.window_us / steps))
        title = f"{self.what}: {self.steps} steps in {self.window_us / 1e3:,.1f} ms, "
        title += f"longest gap {self.longest_gap_us:,.0f} µs"
        return Cells(title, ["kernel", "calls a step", "µs a step", "share"], rows)


@contextmanager
def profiled() -> Iterator[list[Span]]:
    """Yield a list that holds what ran on the GPU once the block has ended. Raise the profiler's error if forbidden."""
    spans: list[Span] = []
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        yield spans
    spans += [
        Span(event.name, float(event.time_range.start), float(event.time_range.end))
        for event in watched.events()
        if event.device_type.name == "CUDA"
    ]


def _union(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Join spans, which are in order of their starts, into intervals that do not overlap."""
    joined: list[tuple[float, float]] = []
    for span in spans:
        if joined and span.start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], span.end))
        else:
            joined.append((span.start, span.end))
    return joined


def _line(name: str, calls: float | None, time_us: float, window_us: float) -> list[str]:
    return [
        name,
        "" if calls is None else f"{calls:,.1f}",
        f"{time_us:,.1f}",
        f"{100 * time_us / window_us:.1f} %",
    ]
