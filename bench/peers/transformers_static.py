"""transformers' `generate` in fixed, left-padded batches in order of arrival, as in a user's own script."""

from __future__ import annotations

import os
import time

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from bench.peers.peer import Arrivals, OnTokens, PeerRun, PeerSettings
from bench.workloads import Request, Workload

PAD_ID = 0


class Peer:
    def __init__(self, settings: PeerSettings, batch_size: int) -> None:
        torch.set_num_threads(settings.threads)
        transformers.utils.logging.disable_progress_bar()
        self.pid = os.getpid()
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__, "weights": "bfloat16"}
        self._batch_size = batch_size
        self._model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.bfloat16).eval()

    def run(self, workload: Workload, on_tokens: OnTokens) -> PeerRun:
        """Run batch after batch. A batch starts when its last request is due, and ends with its longest output."""
        requests = workload.requests
        order = sorted(range(len(requests)), key=lambda at: requests[at].arrival_s)
        arrivals = Arrivals(requests, on_tokens)
        steps = 0
        for first in range(0, len(order), self._batch_size):
            batch = order[first : first + self._batch_size]
            time.sleep(max(0.0, requests[batch[-1]].arrival_s - arrivals.now()))
            self._generate([requests[at] for at in batch], _Streamer(batch, arrivals))
            steps += max(requests[at].output_len for at in batch)
        return PeerRun(arrivals.times(), steps)

    def _generate(self, batch: list[Request], streamer: _Streamer) -> None:
        longest = max(len(request.prompt) for request in batch)
        ids = torch.full((len(batch), longest), PAD_ID)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(request.output_len for request in batch),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=PAD_ID,
                streamer=streamer,
            )


class _Streamer(BaseStreamer):
    """Receives the prompts first, then one token per row at each step."""

    def __init__(self, batch: list[int], arrivals: Arrivals) -> None:
        self._batch = batch
        self._arrivals = arrivals
        self._has_prompts = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompts:
            for at in self._batch:
                self._arrivals.add(at)
        self._has_prompts = True

    def end(self) -> None:
        pass
