"""Runs at the start of each Python process of a server under test, whose PYTHONPATH has this folder: see faults.py.

On SIGUSR1 a process gives unused memory back, so that what remains is in use, and writes its asyncio tasks to
PAGODA_CHAOS_PROBE/PID.tasks. An engine counts there, in PID.cancels, how sequences were when they were aborted, and
after how many steps their blocks were free. The file is mapped, so that the counts of an engine that is killed are
complete.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

# Rows of the table: what a sequence was doing. Columns: steps from the abort's arrival; the last one is for more.
STAGES = ("waiting", "prefill", "decode", "preempted", "waiting, one of several", "prefill, one of several",
          "decode, one of several", "preempted, one of several", "still held")  # fmt: skip
NUM_COLUMNS = 16


def write_tasks(folder: Path) -> None:
    import asyncio
    import ctypes
    import gc
    import json
    from collections import Counter

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    names = Counter(getattr(task.get_coro(), "__qualname__", str(task.get_coro())) for task in asyncio.all_tasks())
    path = folder / f"{os.getpid()}.tasks"
    path.with_suffix(".new").write_text(json.dumps(names))
    path.with_suffix(".new").rename(path)


def count_cancels(path: Path) -> None:
    import mmap

    from pagoda_server.engine.core.sequence import State
    from pagoda_server.engine.loop.loop import Abort, Inbox
    from pagoda_server.engine.scheduling.scheduler import Scheduler

    size = 4 * len(STAGES) * NUM_COLUMNS
    try:
        path.write_bytes(bytes(size))
    except OSError:  # the disk is full, which is one of the faults: this engine's cancels are not counted
        path.unlink()
        return
    with path.open("r+b") as file:
        counts = memoryview(mmap.mmap(file.fileno(), size)).cast("I")
    schedulers: list[Scheduler] = []
    arrived: dict[int, int] = {}
    make, put, abort = Scheduler.__init__, Inbox.put, Scheduler.abort

    def counting_make(self: Scheduler, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        schedulers[:] = [self]

    def counting_put(self: Inbox, message: Any) -> None:
        if isinstance(message, Abort):
            arrived.update(dict.fromkeys(message.ids, schedulers[0].counters.steps))
        put(self, message)

    def stage_of(seq: Any, is_one_of_several: bool) -> int:
        if seq.state is State.RUNNING:
            stage = 1 if len(seq.tokens) == seq.request.prompt_len else 2
        else:
            stage = 3 if seq.account.preemptions else 0
        return stage + 4 * is_one_of_several

    def counting_abort(self: Scheduler, ids: list[int]) -> None:
        live = [seq for id in ids if (seq := self._live.get(id))]
        stages = [stage_of(seq, len(ids) > 1) for seq in live]
        abort(self, ids)
        for seq, stage in zip(live, stages, strict=True):
            row = STAGES.index("still held") if len(seq.blocks) or seq.id in self._live else stage
            counts[row * NUM_COLUMNS + min(self.counters.steps - arrived[seq.id], NUM_COLUMNS - 1)] += 1
        for id in ids:
            arrived.pop(id, None)

    Scheduler.__init__, Inbox.put, Scheduler.abort = counting_make, counting_put, counting_abort  # type: ignore


# A process that renders chats has limits that the imports in these functions would use up.
if (folder := os.environ.get("PAGODA_CHAOS_PROBE")) and not sys.orig_argv[-1].endswith("template_process"):
    signal.signal(signal.SIGUSR1, lambda *_: write_tasks(Path(folder)))
    if "pagoda_server.engine" in sys.orig_argv:
        count_cancels(Path(folder) / f"{os.getpid()}.cancels")
