"""transformers' `generate` in fixed, left-padded batches: what a user's own script would do."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from bench.measure import Result
from bench.workloads import Request, Workload

PAD_ID = 0


class StaticBatches:
    def __init__(self, folder: Path, batch_size: int = 32, threads: int | None = None) -> None:
        if threads:
            torch.set_num_threads(threads)
        logging.disable_progress_bar()
        self._batch_size = batch_size
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def run(self, workload: Workload) -> Result:
        self._generate([Request([1, 2, 3], 2)])  # warms up
        started = time.perf_counter()
        for first in range(0, len(workload.requests), self._batch_size):
            self._generate(workload.requests[first : first + self._batch_size])
        return Result(
            f"transformers static batches of {self._batch_size}",
            workload.output_tokens,
            time.perf_counter() - started,
            times=[],
        )

    def _generate(self, batch: list[Request]) -> None:
        """Every batch runs to its longest output; only the tokens that were asked for count."""
        longest = max(len(request.prompt) for request in batch)
        ids = torch.full((len(batch), longest), PAD_ID)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        count = max(request.output_len for request in batch)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=PAD_ID,
            )
