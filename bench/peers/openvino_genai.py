"""OpenVINO GenAI's ContinuousBatchingPipeline on the GGUF file, stepped by this process."""

from __future__ import annotations

import os
import time

import numpy as np
import openvino
import openvino_genai

from bench.peers.peer import Arrivals, OnTokens, PeerRun, PeerSettings
from bench.workloads import Request, Workload

# Whole gigabytes only. Its keys and values are 8-bit, so this holds several times as many as Pagoda's 0.5 GB.
CACHE_GB = 1
IDLE_S = 0.001


class Peer:
    def __init__(self, settings: PeerSettings) -> None:
        self.pid = os.getpid()
        self.versions = {"openvino-genai": openvino_genai.get_version(), "weights": os.path.basename(settings.gguf)}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = settings.max_num_seqs
        scheduler.enable_prefix_caching = settings.prefix_caching
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            settings.gguf, scheduler, "CPU", {"INFERENCE_NUM_THREADS": settings.threads}
        )

    def run(self, workload: Workload, on_tokens: OnTokens) -> PeerRun:
        """Step until all requests are done. A token has arrived when its handle is readable after a step."""
        requests = workload.requests
        due = sorted(range(len(requests)), key=lambda at: requests[at].arrival_s, reverse=True)
        handles: dict[int, openvino_genai.GenerationHandle] = {}
        steps = 0
        arrivals = Arrivals(requests, on_tokens)
        while due or handles:
            while due and requests[due[-1]].arrival_s <= arrivals.now():
                at = due.pop()
                handles[at] = self._add(at, requests[at])
            if not handles:
                time.sleep(IDLE_S)
                continue
            self._pipeline.step()
            steps += 1
            for at, handle in list(handles.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        arrivals.add(at, len(output.generated_ids))
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    del handles[at]
        return PeerRun(arrivals.times(), steps)

    def _add(self, at: int, request: Request) -> openvino_genai.GenerationHandle:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.output_len
        config.ignore_eos = True
        config.do_sample = False
        return self._pipeline.add_request(at, openvino.Tensor(np.array([request.prompt], dtype=np.int64)), config)
