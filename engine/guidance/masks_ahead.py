"""Computes masks on a thread of their own, while the model computes the logits that they apply to."""

from __future__ import annotations

import os
import queue
import threading
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher


@dataclass(slots=True, eq=False)
class Job:
    """The mask of one matcher's state. The matcher must not be used before the job is done.

    words  [words] int32, written before `is_done` is set
    """

    matcher: LLMatcher
    words: np.ndarray
    is_done: threading.Event = field(default_factory=threading.Event)


class MasksAhead:
    """A thread that takes whatever jobs have gathered, and computes them together without the interpreter's lock."""

    def __init__(self, vocab_size: int) -> None:
        self.num_words = -(-vocab_size // 32)
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        # As many threads as leave most cores to the model, and to the rest of the machine.
        self._executor = LLExecutor(max(1, min(8, (os.cpu_count() or 1) // 4)))
        threading.Thread(target=self._work, name="grammar-masks", daemon=True).start()

    def start(self, job: Job) -> None:
        self._jobs.put(job)

    def _work(self) -> None:
        words = np.zeros((0, self.num_words), dtype=np.int32)
        while True:
            jobs = [self._jobs.get()]
            while not self._jobs.empty():
                jobs.append(self._jobs.get())
            if len(jobs) == 1:  # without waking another thread
                (job,) = jobs
                job.matcher.unsafe_compute_mask_ptr(job.words.ctypes.data, job.words.nbytes)
                job.is_done.set()
                continue
            if len(jobs) > len(words):
                words = np.zeros((2 * len(jobs), self.num_words), dtype=np.int32)
            matchers = [(job.matcher, row) for row, job in enumerate(jobs)]
            self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, 4 * self.num_words, len(words))
            for job, row in zip(jobs, words, strict=False):
                job.words[:] = row
                job.is_done.set()
