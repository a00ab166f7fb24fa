"""Where and when masks are computed: on the loop's thread if they are quick, and ahead, on other threads, if not.

For a few quick masks no other thread is woken. Masks that take long, together or alone, are computed while the model
computes, without the interpreter's lock. Those that were slow have threads of their own, so that one slow grammar does
not delay the masks of the others.

On a CPU, sampling first asks for the token that it would choose without a mask, so most masks are not needed, and which
are is known once the model has computed. There only slow ones are computed ahead.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import get_bitmask_shape

from ...runtime.cores import usable_cores

LONG_S = 3e-4  # a step's masks are computed ahead if they will take longer together: a lone stream's step takes 3 ms
MOST_HERE_S = 1e-3  # where they are not, the loop's thread computes so many of a step, and other threads the rest
SLOW_S = 1e-3  # a mask that takes longer alone is computed ahead, too, on a thread for such masks
FORGETS = 0.9  # a slow mask is forgotten with each quick one: after 8 to 22, as no mask takes ten times SLOW_S
USUAL_S = 5e-5  # what a new grammar's masks are expected to take
OVERDUE_S = 1.0  # after so long, a mask is given up
SLOW_THREADS = 2


def num_words(vocab_size: int) -> int:
    """Words of 32 bits in a mask as llguidance writes it. `compute_bitmask` may return one more, which is 0."""
    return get_bitmask_shape(1, vocab_size)[1]


@dataclass(slots=True)
class Pace:
    """How long the masks of a grammar take: all its sequences learn it together.

    is_bounded  no state of the grammar forces a long text, so a mask takes some milliseconds at most
    is_hard     the grammar has met a limit of a step's work, and has larger ones now
    expected_s  what a mask takes: a mean that forgets exponentially
    longest_s   what the longest of the last ones took, a little less with each that was quicker
    """

    is_bounded: bool = True
    is_hard: bool = False
    expected_s: float = USUAL_S
    longest_s: float = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether the loop's thread must not compute a mask itself."""
        return not self.is_bounded or self.is_hard or self.longest_s > SLOW_S

    def took(self, seconds: float) -> None:
        self.expected_s += (1 - FORGETS) * (seconds - self.expected_s)
        self.longest_s = max(seconds, FORGETS * self.longest_s)


@dataclass(slots=True, eq=False)
class Job:
    """The masks of one matcher, one after the other. Between `start` and `ends`, the matcher must not be used.

    words    [words] int32, the mask of the matcher's state when it is computed
    is_done  set when another thread has computed the mask; None: none was asked to
    began    when it began to, on time.monotonic's clock; 0 before
    renew    makes the matcher first, where that takes long; None: the matcher is there
    error    what that, or computing the mask, has raised: the sequence's own thread raises it when the job ends
    """

    matcher: LLMatcher
    words: np.ndarray
    pace: Pace
    is_done: threading.Event | None = None
    began: float = 0.0
    renew: Callable[[], LLMatcher] | None = None
    error: BaseException | None = None

    @property
    def is_started(self) -> bool:
        return self.is_done is not None

    @property
    def is_overdue(self) -> bool:
        return self.began > 0 and not self.wait(0.0) and time.monotonic() - self.began > OVERDUE_S

    def start(self) -> Job:
        """Note that another thread will compute the mask."""
        self.is_done = threading.Event()
        return self

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether no other thread computes the mask; wait for that at most so long."""
        return self.is_done is None or self.is_done.wait(timeout_s)

    def ends(self, timeout_s: float | None = None) -> bool:
        """`wait`, and take the matcher back. Raises what computing the mask raised."""
        if not self.wait(timeout_s):
            return False
        self.is_done, self.began = None, 0.0
        error, self.error = self.error, None
        if error is not None:
            raise error
        return True

    def compute(self) -> float:
        """Compute the mask on this thread, without the interpreter's lock. Return the processor time that it took.

        Raises nothing, so that the threads that compute masks live on: `ends` raises it.
        """
        self.began, started = time.monotonic(), time.thread_time()
        try:
            renew, self.renew = self.renew, None
            if renew is not None:
                self.matcher = renew()
            self.matcher.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of llguidance derives from nothing narrower
            self.error = error
        took_s = time.thread_time() - started
        self.pace.took(took_s)
        if self.is_done is not None:
            self.is_done.set()
        return took_s


class MasksAhead:
    """Takes the masks that a step may need, and starts those that take long. One thread calls its methods.

    needs_all  it will need all of them
    """

    def __init__(self, vocab_size: int, *, needs_all: bool = True) -> None:
        self._needs_all = needs_all
        self.num_words = num_words(vocab_size)
        self._asked: dict[Job, float] = {}  # for the next step, not started: what each is expected to take
        self._asked_s = 0.0
        self._computed_s = 0.0  # on this thread since `ask` was called last: what was expected
        self._quick: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._slow: queue.SimpleQueue[Job] = queue.SimpleQueue()
        # As many threads as leave most cores to the model, and to the rest of the machine.
        self._num_threads = max(1, min(8, usable_cores() // 4))
        self._executor = LLExecutor(self._num_threads)
        self._at_work: list[threading.Lock] = []  # one a thread, which has it while it computes
        for work in (self._compute_together, *[self._compute_alone] * SLOW_THREADS):
            self._at_work.append(threading.Lock())
            threading.Thread(target=work, args=(self._at_work[-1],), name="grammar-masks", daemon=True).start()
        atexit.register(self._let_none_work)

    def ask(self, job: Job) -> None:
        """Note a mask that the next step may need. It is started now, with a later one, or when `compute` is called.

        Asked for again, it is started if its grammar was found to be slow meanwhile.
        """
        if job.is_started:
            return
        self.drop(job)
        self._computed_s = 0.0
        if job.pace.is_slow:
            self._slow.put(job.start())
            return
        if not self._needs_all:
            return
        self._asked[job] = job.pace.expected_s
        self._asked_s += job.pace.expected_s
        if self._asked_s > LONG_S:
            asked = list(self._asked)
            self._forget_asked()
            for each in asked:
                self._quick.put(each.start())

    def drop(self, job: Job) -> None:
        """Take back a job that is not started."""
        self._asked_s -= self._asked.pop(job, 0.0)

    def compute(self, job: Job) -> float:
        """Compute a job that is not started, or start it if too much was computed here since `ask` was called last.

        Return the processor time that it took on this thread.
        """
        self._forget_asked()
        self._computed_s += job.pace.expected_s
        if self._computed_s > MOST_HERE_S or job.pace.is_slow:
            (self._slow if job.pace.is_slow else self._quick).put(job.start())
            return 0.0
        return job.compute()

    def compute_apart(self, job: Job) -> None:
        """Start a job that is not started on a thread for slow masks."""
        self.drop(job)
        self._slow.put(job.start())

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
            del job  # its matcher may be large

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
            del jobs

    def _compute_all(self, jobs: list[Job], words: np.ndarray) -> None:
        """Compute several masks at once. `words` [len(jobs) or more, num_words] int32 may be overwritten."""
        if len(jobs) == 1 or any(job.renew for job in jobs):
            for job in jobs:
                job.compute()
            return
        matchers = [(job.matcher, row) for row, job in enumerate(jobs)]
        expected_s = sum([job.pace.expected_s for job in jobs]) / self._num_threads
        began = time.monotonic()
        for job in jobs:
            job.began = began
        try:
            self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, 4 * self.num_words, len(words))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # nothing says whose mask it was: each is computed alone, and fails alone
            for job in jobs:
                job.compute()
            return
        spent_s = time.monotonic() - began
        # If one of them was slow, nothing shows which: each is then computed alone once, and timed.
        is_suspect = spent_s > SLOW_S + 2 * expected_s
        for job, row in zip(jobs, words, strict=False):
            job.words[:] = row
            job.pace.took(1.1 * SLOW_S if is_suspect else spent_s * self._num_threads / len(jobs))
            assert job.is_done is not None, "it was started"
            job.is_done.set()
