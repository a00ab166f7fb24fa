"""transformers' continuous batching, on which `generate_batch` runs, with each request's own output length."""

from __future__ import annotations

import inspect
import os
import time
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench import BenchError
from bench.measure import RequestTimes
from bench.peers.peer import OnTokens, PeerRun, PeerSettings
from bench.workloads import Workload

PAGE_SIZE = 256  # its default
POLL_S = 1.0


class Peer:
    def __init__(self, settings: PeerSettings) -> None:
        torch.set_num_threads(settings.threads)
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        self.pid = os.getpid()
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__, "weights": "bfloat16"}
        self._model = _load(settings)
        concurrent = min(settings.count, settings.max_num_seqs)
        self._config = ContinuousBatchingConfig(
            **_page_size(),
            num_blocks=concurrent * -(-settings.longest // PAGE_SIZE) + 1,
            max_batch_tokens=settings.token_budget,
            max_requests_per_batch=settings.max_num_seqs,
            allow_block_sharing=settings.prefix_caching,
        )

    def run(self, workload: Workload, on_tokens: OnTokens) -> PeerRun:
        """Run a workload. transformers itself stamps each token, with time.perf_counter."""
        requests = workload.requests
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
        with self._model.continuous_batching_context_manager(
            generation, continuous_batching_config=self._config
        ) as manager:
            started = time.perf_counter()
            for at in sorted(range(len(requests)), key=lambda at: requests[at].arrival_s):
                time.sleep(max(0.0, requests[at].arrival_s - (time.perf_counter() - started)))
                request = requests[at]
                manager.add_request(
                    request.prompt, str(at), max_new_tokens=request.output_len, record_timestamps=True, eos_token_id=-1
                )
            arrivals: dict[int, list[float]] = {}
            while len(arrivals) < len(requests):
                result = manager.get_result(timeout=POLL_S)
                if result is None and not manager.is_running():
                    raise BenchError("transformers' continuous batching ended before its requests did")
                if result is not None and result.is_finished():
                    at = int(result.request_id)
                    stamps = (result.timestamps or [])[: requests[at].output_len]
                    if result.error or len(stamps) != requests[at].output_len:
                        raise BenchError(f"transformers' continuous batching failed a request: {result.error}")
                    arrivals[at] = [stamp - started for stamp in stamps]
                    on_tokens(len(stamps))
        return PeerRun(
            [
                RequestTimes(request.arrival_s, arrivals[at], request.kind, len(request.prompt))
                for at, request in enumerate(requests)
            ]
        )


def _page_size() -> dict[str, Any]:
    """Return the page size under the name that the installed release gives it."""
    names = inspect.signature(ContinuousBatchingConfig).parameters
    return {"page_size" if "page_size" in names else "block_size": PAGE_SIZE}


def _load(settings: PeerSettings) -> Any:
    config = AutoConfig.from_pretrained(settings.model)
    with torch.device(settings.device):
        if getattr(config, "random_weights", False):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        return AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.bfloat16).eval()
