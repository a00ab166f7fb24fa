"""`python -m pagoda_server.kernels.triton.tune` tunes launch configurations on a GPU.

It starts with an op's default, halves and doubles one field after another, and keeps what is faster, until nothing is.
It skips configurations that do not compile, that change the result, or that make the GPU fault.

Processes compile the configurations around the best one ahead, so that the GPU only times. OUT/GPU.jsonl is a log with
a line for every configuration that was tried. OUT/GPU.json is the table that servers read; it is written again with
every shape that is done. A run goes on from the log of earlier runs with the same card, versions and kernels.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch
import triton

from .configs import FOLDER, table_path
from .tuning_spaces import Space
from .tuning_worker import Answer, Fields, Worker, WorkerDied, known_spaces, start_worker

LIMIT_S = 520.0  # ends within a command's ten minutes
WORTH_IT = 0.97  # of the time before: a smaller gain may be noise
MAX_ROUNDS = 2
START_S = 120.0  # for a worker to import torch and to find the GPU
ANSWER_S = 60.0  # then a kernel is taken to hang
MOST_FAULTS = 5  # in a row: then it is not the configurations
MOST_COMPILERS = 14

Try = Callable[[Fields], Answer]
Ahead = Callable[[Sequence[Fields]], None]


class OutOfTime(Exception):
    """The time limit has passed."""


class CannotTune(Exception):
    """An op's default cannot be measured."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best configuration; `fields` is None if the default is. Times are summed over the workloads."""

    space: Space
    key: str
    fields: Fields | None
    default_us: float
    best_us: float

    def __str__(self) -> str:
        best = "default" if self.fields is None else " ".join(f"{name} {value}" for name, value in self.fields.items())
        return f"{self.space.name}: {self.default_us:.1f} µs, best {self.best_us:.1f} µs: {best}"


def search(space: Space, attempt: Try, ahead: Ahead) -> Found:
    """Find the best configuration of an op at one shape. Raises CannotTune.

    Fields are changed of the fastest configuration that launches a kernel of ours.

    attempt  measures a configuration; no fields: the default
    ahead    says which configurations may be attempted next
    """
    first = attempt({})
    if "error" in first:
        raise CannotTune(first["error"])
    default, default_us = first["default"], first["time_us"]
    tried, times = [default], [(default_us, default)]

    def time_of(fields: Fields) -> float:
        if fields in tried:
            return math.inf
        tried.append(fields)
        return float(attempt(fields).get("time_us", math.inf))

    ahead(begin(first))
    times += [(time_of(rival), rival) for rival in first["rivals"] if rival not in tried]
    best_us, best = min((each for each in times if any(each[1].values())), key=itemgetter(0))
    ahead(around(best))
    for _ in range(MAX_ROUNDS):
        before = best
        for name in best:
            for fields in neighbours(best, name):
                if (time_us := time_of(fields)) < WORTH_IT * best_us:
                    best, best_us = fields, time_us
                    ahead(around(best))
        if best == before:
            break
    best_us, best = min([*times, (best_us, best)], key=itemgetter(0))  # the library is in `times`
    is_better = best != default and best_us < WORTH_IT * default_us
    return Found(space, first["key"], best if is_better else None, default_us, min(best_us, default_us))


def neighbours(fields: Fields, name: str) -> Iterator[Fields]:
    """Yield configurations with one field changed. Sizes are powers of two; pipeline stages change by one."""
    value = fields[name]
    steps = (value - 1, value + 1) if name == "num_stages" else (value // 2, value * 2)
    return ({**fields, name: step} for step in steps if step > 0)


def around(fields: Fields) -> list[Fields]:
    return [each for name in fields for each in neighbours(fields, name)]


def begin(first: Answer) -> list[Fields]:
    """What may be attempted after the default: its rivals, and what is around each kernel of ours."""
    starts = [first["default"], *first["rivals"]]
    return [*first["rivals"], *(each for start in starts if any(start.values()) for each in around(start))]


class Log:
    """Every configuration that was tried, a line each, written at once.

    header  what times depend on: lines under another header are kept and not used
    """

    def __init__(self, path: Path, header: Mapping[str, str]) -> None:
        self._known: dict[tuple[str, str], Answer] = {}
        is_used = False
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            with suppress(json.JSONDecodeError):  # a run was killed as it wrote
                entry = json.loads(line)
                if "gpu" in entry:
                    is_used = entry == header
                elif is_used:
                    self._known[entry.pop("space"), _identity(entry.pop("asked"))] = entry
        self.num_known = len(self._known)
        self._file = path.open("a", buffering=1)
        if text and not text.endswith("\n"):
            self._file.write("\n")
        if not is_used:
            self._file.write(json.dumps(header) + "\n")

    def get(self, space: Space, fields: Fields) -> Answer | None:
        return self._known.get((space.name, _identity(fields)))

    def add(self, space: Space, fields: Fields, answer: Answer) -> None:
        self._known[space.name, _identity(fields)] = answer
        self._file.write(json.dumps({"space": space.name, "asked": fields, **answer}) + "\n")


class Compilers:
    """Processes that compile configurations ahead. A process that dies fails one configuration."""

    def __init__(self, count: int, start: Callable[[], Worker], capability: int) -> None:
        self._start, self._capability = start, capability
        self._pool = ThreadPoolExecutor(count)
        self._own = threading.local()
        self._lock = threading.RLock()
        self._workers: list[Worker] = []
        self._futures: dict[tuple[str, str], Future[Answer]] = {}
        self._is_closed = False

    def begin(self, space: Space) -> None:
        """Compile the default and what the search tries next."""

        def go_on(done: Future[Answer]) -> None:
            if not done.cancelled() and "default" in (answer := done.result()):
                self.ahead(space, [{}, *begin(answer)])

        with self._lock:
            if (space.name, _identity({})) not in self._futures:
                self._submit(space, {}).add_done_callback(go_on)

    def ahead(self, space: Space, candidates: Sequence[Fields]) -> None:
        """Compile these, in order, and none of the others that the space may have been waiting for."""
        wanted = {(space.name, _identity(fields)) for fields in candidates}
        with self._lock:
            stale = [key for key in self._futures if key[0] == space.name and key not in wanted]
            for key in stale:
                if self._futures[key].cancel():
                    del self._futures[key]
            for fields in candidates:
                self._submit(space, fields)

    def result(self, space: Space, fields: Fields, timeout_s: float) -> Answer:
        """Return what became of one configuration, compiling it if need be. Raises TimeoutError."""
        while True:
            try:
                return self._submit(space, fields).result(timeout_s)
            except CancelledError:  # another thread asked for others, just before this one asked for it
                continue

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._pool.shutdown(wait=False, cancel_futures=True)
            for worker in self._workers:
                worker.close()
        self._pool.shutdown()

    def _submit(self, space: Space, fields: Fields) -> Future[Answer]:
        key = space.name, _identity(fields)
        with self._lock:
            if self._is_closed:
                raise OutOfTime
            if key not in self._futures:
                self._futures[key] = self._pool.submit(self._compile, space, fields)
            return self._futures[key]

    def _compile(self, space: Space, fields: Fields) -> Answer:
        request = {"task": "compile", "space": space.name, "fields": fields, "capability": self._capability}
        try:
            return self._worker().ask(request, START_S)
        except WorkerDied as death:
            return {"error": str(death)}

    def _worker(self) -> Worker:
        """The worker of this thread."""
        if not hasattr(self._own, "worker"):
            self._own.worker = self._start()
            with self._lock:
                self._workers.append(self._own.worker)
        worker: Worker = self._own.worker
        return worker


class Tuner:
    """Measures configurations on the device, unless the log has them."""

    def __init__(self, device: Worker, compilers: Compilers, log: Log, ends: float) -> None:
        self._device, self._compilers, self._log, self._ends = device, compilers, log, ends
        self._faults_in_a_row = 0

    def tune(self, every: Sequence[Space]) -> Iterator[Found]:
        """Tune spaces in order. Raises OutOfTime."""
        for index, space in enumerate(every):
            for coming in every[index : index + 2]:
                if self._log.get(coming, {}) is None:
                    self._compilers.begin(coming)
            try:
                yield search(space, lambda fields: self._try(space, fields), lambda few: self._ahead(space, few))  # noqa: B023
            except CannotTune as failure:
                print(f"{space.name} cannot be tuned: {failure}", file=sys.stderr)

    def _ahead(self, space: Space, candidates: Sequence[Fields]) -> None:
        self._compilers.ahead(space, [fields for fields in candidates if self._log.get(space, fields) is None])

    def _try(self, space: Space, fields: Fields) -> Answer:
        if (known := self._log.get(space, fields)) is not None:
            return known
        try:
            compiled = self._compilers.result(space, fields, self._left_s())
        except TimeoutError:
            raise OutOfTime from None
        if fields and "error" in compiled:
            answer: Answer = {"error": f"does not compile: {compiled['error']}"}
        else:
            answer = self._time(space, fields)
        self._log.add(space, fields, answer)
        return answer

    def _time(self, space: Space, fields: Fields) -> Answer:
        timeout_s = min(ANSWER_S, self._left_s())
        try:
            answer = self._device.ask({"task": "time", "space": space.name, "fields": fields}, timeout_s)
        except WorkerDied as death:
            self._left_s()
            answer = {"error": str(death), "is_fault": True}
        self._faults_in_a_row = self._faults_in_a_row + 1 if "is_fault" in answer else 0
        if self._faults_in_a_row == MOST_FAULTS:
            raise WorkerDied(f"{MOST_FAULTS} configurations in a row ended the process, at last: {answer['error']}")
        return answer

    def _left_s(self) -> float:
        left_s = self._ends - time.monotonic()
        if left_s <= 0:
            raise OutOfTime
        return left_s


class Table:
    """The file that servers read. Rows that are there stay if the card and the versions are the same."""

    def __init__(self, path: Path, gpu: str) -> None:
        self._path = path
        self._head = {"gpu": gpu, "triton": triton.__version__, "torch": torch.__version__}
        self._configs: dict[str, dict[str, Fields]] = {}
        if path.exists():
            found = json.loads(path.read_text())
            if self._head.items() <= found.items():
                self._configs = found["configs"]
            else:
                print(f"{path.name} is of other versions: its rows are dropped", file=sys.stderr)

    def add(self, found: Found) -> None:
        """Write the table with this row, at once, so that whatever ends the process leaves a whole table."""
        rows = self._configs.setdefault(found.space.op, {})
        rows.pop(found.key, None)
        if found.fields is not None:
            rows[found.key] = found.fields
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        configs = {op: rows for op, rows in self._configs.items() if rows}
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps({**self._head, "date": date, "configs": configs}, indent=1) + "\n")
        os.replace(beside, self._path)


def header(gpu: str) -> dict[str, str]:
    """What the times of configurations depend on."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    return {"gpu": gpu, "triton": triton.__version__, "torch": torch.__version__, "kernels": digest}


def _identity(fields: Fields) -> str:
    return json.dumps(fields, sort_keys=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tune", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of table and log; servers read the default")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time limit; the next run goes on")
    parser.add_argument("--only", default="", help="tune the shapes whose names contain this")
    parser.add_argument("--compilers", type=int, default=0, help="processes that compile; 0: by the number of cores")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, interpreted, without a GPU")
    given = parser.parse_args(arguments)
    ends = time.monotonic() + given.limit_s
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `finally` blocks run
    given.out.mkdir(parents=True, exist_ok=True)
    printed = given.out / "tune.log"
    device = start_worker("time", printed, given.rehearse)
    compilers = None
    wanted = [space for space in known_spaces(given.rehearse) if given.only in space.name]
    num_done = 0
    try:
        card = device.ask({"task": "card"}, min(START_S, given.limit_s))
        path = given.out / table_path(card["gpu"]).name
        log = Log(path.with_suffix(".jsonl"), header(card["gpu"]))
        print(f"{card['gpu']}: {log.num_known} configurations are in the log already", flush=True)
        count = given.compilers or max(1, min(MOST_COMPILERS, (os.cpu_count() or 1) - 2))
        compilers = Compilers(count, lambda: start_worker("compile", printed, given.rehearse), card["capability"])
        table = Table(path, card["gpu"])
        for found in Tuner(device, compilers, log, ends).tune(wanted):
            num_done += 1
            table.add(found)
            print(found, flush=True)
    except OutOfTime:
        print("no time is left: run the command again to go on")
    except WorkerDied as death:
        print(f"error: the GPU cannot be used: {death}; see {printed}", file=sys.stderr)
        return 1
    finally:
        device.close()
        if compilers is not None:
            compilers.close()
    print(f"{num_done} of {len(wanted)} shapes are tuned; table and log are in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
