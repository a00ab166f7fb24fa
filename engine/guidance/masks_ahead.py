"""Where and when masks are computed: on the loop's thread if they are quick, and ahead, on other threads, if not.

For a few quick masks no other thread is woken. Masks that take long, together or alone, are computed while the model
computes, without the interpreter's lock. Those that were slow have threads of their own, so that one slow grammar does
not delay the masks of the others.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher

LONG_S = 3e-4  # a step's masks are computed ahead if they will take longer together: a lone stream's step takes 4 ms
SLOW_S = 1e-3  # so is a mask that takes longer alone, on a thread for such masks
FORGETS = 0.9  # a slow mask is forgotten with each quick one: after 8 to 22, as no mask takes ten times SLOW_S
USUAL_S = 5e-5  # what a new grammar's masks are expected to take
OVERDUE_S = 1.0  # after so long, a mask is given up
SLOW_THREADS = 2


@dataclass(slots=True)
class Pace:
    """How long the masks of a grammar take: all its sequences learn it together.

    is_bounded  no state of the grammar forces a long text, so a mask takes some milliseconds at most
    expected_s  what a mask takes: a mean that forgets exponentially
    longest_s   what the longest of the last ones took, a little less with each that was quicker
    """

    is_bounded: bool = True
    expected_s: float = USUAL_S
    longest_s: float = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether the loop's thread must not compute a mask itself."""
        return not self.is_bounded or self.longest_s > SLOW_S

    def took(self, seconds: float) -> None:
        self.expected_s += (1 - FORGETS) * (seconds - self.expected_s)
        self.longest_s = max(seconds, FORGETS * self.longest_s)


@dataclass(slots=True, eq=False)
class Job:
    """The mask of one matcher's state. Once it is started, the matcher must not be used before it is done.

    words  [words] int32, written before `is_done` is set
    began  on time.monotonic's clock; 0 before a thread takes it
    """

    matcher: LLMatcher
    words: np.ndarray
    pace: Pace
    is_started: bool = False
    began: float = 0.0
    is_done: threading.Event = field(default_factory=threading.Event)

    @property
    def is_overdue(self) -> bool:
        return self.began > 0 and not self.is_done.is_set() and time.monotonic() - self.began > OVERDUE_S

    def compute(self) -> None:
        """Compute the mask on this thread, without the interpreter's lock."""
        self.began, started = time.monotonic(), time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)
        self.pace.took(time.thread_time() - started)
        self.is_done.set()


class MasksAhead:
    """Takes the masks that a step will need, and starts those that take long. One thread calls its methods."""

    def __init__(self, vocab_size: int) -> None:
        self.num_words = -(-vocab_size // 32)
        self._asked: dict[Job, float] = {}  # for the next step, not started: what each is expected to take
        self._asked_s = 0.0
        self._quick: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._slow: queue.SimpleQueue[Job] = queue.SimpleQueue()
        # As many threads as leave most cores to the model, and to the rest of the machine.
        self._num_threads = max(1, min(8, (os.cpu_count() or 1) // 4))
        self._executor = LLExecutor(self._num_threads)
        self._at_work: list[threading.Lock] = []  # one a thread, which has it while it computes
        for work in (self._compute_together, *[self._compute_alone] * SLOW_THREADS):
            self._at_work.append(threading.Lock())
            threading.Thread(target=work, args=(self._at_work[-1],), name="grammar-masks", daemon=True).start()
        atexit.register(self._let_none_work)

    def ask(self, job: Job) -> None:
        """Note a mask that will be needed. It is started now, with a later one, or when `compute` is called.

        Asked for again, it is started if its grammar was found to be slow meanwhile.
        """
        if job.is_started:
            return
        self.drop(job)
        if job.pace.is_slow:
            job.is_started = True
            self._slow.put(job)
            return
        self._asked[job] = job.pace.expected_s
        self._asked_s += job.pace.expected_s
        if self._asked_s > LONG_S:
            asked = list(self._asked)
            self._forget_asked()
            for each in asked:
                each.is_started = True
                self._quick.put(each)

    def drop(self, job: Job) -> None:
        """Take back a job that is not started."""
        self._asked_s -= self._asked.pop(job, 0.0)

    def compute(self, job: Job) -> None:
        """Compute a job that is not started. All masks of the step have been asked for by then."""
        self._forget_asked()
        job.is_started = True
        job.compute()

    def _forget_asked(self) -> None:
        self._asked.clear()
        self._asked_s = 0.0

    def _let_none_work(self) -> None:
        """Wait for masks that are being computed: a thread that takes the interpreter's lock as that ends, crashes."""
        until = time.monotonic() + OVERDUE_S
        for lock in self._at_work:
            lock.acquire(timeout=max(0.0, until - time.monotonic()))

    def _compute_alone(self, at_work: threading.Lock) -> None:
        while True:
            job = self._slow.get()
            with at_work:
                job.compute()

    def _compute_together(self, at_work: threading.Lock) -> None:
        """Take whatever jobs have gathered, and compute them together."""
        words = np.zeros((0, self.num_words), dtype=np.int32)
        while True:
            jobs = [self._quick.get()]
            while not self._quick.empty():
                jobs.append(self._quick.get())
            if len(jobs) > len(words):
                words = np.zeros((2 * len(jobs), self.num_words), dtype=np.int32)
            with at_work:
                self._compute_all(jobs, words)

    def _compute_all(self, jobs: list[Job], words: np.ndarray) -> None:
        """Compute several masks at once. `words` [len(jobs) or more, num_words] int32 may be overwritten."""
        if len(jobs) == 1:
            jobs[0].compute()
            return
        matchers = [(job.matcher, row) for row, job in enumerate(jobs)]
        expected_s = sum([job.pace.expected_s for job in jobs]) / self._num_threads
        began = time.monotonic()
        for job in jobs:
            job.began = began
        self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, 4 * self.num_words, len(words))
        spent_s = time.monotonic() - began
        # If one of them was slow, nothing tells which: each is then computed alone once, and timed.
        is_suspect = spent_s > SLOW_S + 2 * expected_s
        for job, row in zip(jobs, words, strict=False):
            job.words[:] = row
            job.pace.took(1.1 * SLOW_S if is_suspect else spent_s * self._num_threads / len(jobs))
            job.is_done.set()
