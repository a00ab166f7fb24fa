"""The runner of a device that works while the host prepares the next step: from a step plan to tokens.

Only `DeviceStep.result` waits for the device. A sequence's last token stays on the device, so a step can be launched
before the tokens of the previous one have come back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pagoda_server.checkpoints.progress import Progress, no_progress
from pagoda_server.engine.core.errors import OutOfMemory
from pagoda_server.engine.core.sequence import Sequence
from pagoda_server.engine.core.step import Chunk, Sampled, StepPlan
from pagoda_server.engine.runners.cuda.copies import CopyInputs, HostCopies, nothing_copied
from pagoda_server.engine.runners.cuda.graphs import DecodeGraphs
from pagoda_server.engine.runners.cuda.outcomes import DeviceStep, Outcomes
from pagoda_server.engine.runners.cuda.rehearsal import free_after, largest_plan, prompts_of_all_sizes
from pagoda_server.engine.runners.cuda.rows import DeviceRows
from pagoda_server.engine.runners.cuda.step_inputs import DecodeInputs, PromptInputs
from pagoda_server.engine.runners.loaded_model import DEFAULT_CPU_BYTES, LoadedModel, enough_memory
from pagoda_server.engine.runners.runner_info import count_blocks
from pagoda_server.kernels import PagedKV, copy_blocks
from pagoda_server.settings.engine import EngineConfig

_STEP_FLAGS = ("--max-num-seqs", "--token-budget", "--kv-cache-gb")


class DeviceRunner:
    """A model with its paged KV cache on a device.

    A step is at most two launches: all decodes as one CUDA graph, and the chunks of prompts. Raises ConfigError if the
    device has too little memory for these settings.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, progress: Progress = no_progress) -> None:
        device, block_size, limits = loaded.device, loaded.spec.block_size, config.step_limits(loaded.device.type)
        self._most = limits.max_num_seqs
        self.lookahead = 0 if config.overlap == "off" else 1
        self._ops, self._model, self._device = loaded.ops, loaded.model, device
        model = loaded.model.config
        max_blocks = -(-loaded.longest // block_size)
        with enough_memory("the inputs of a step", *_STEP_FLAGS):
            # Twice as many as run at once, because rows of sequences that have just ended are not free yet.
            self._rows = DeviceRows(2 * self._most, max_blocks, model.vocab_size, device)
            self._outcomes = Outcomes(2 * self._most, device)
            self._copies = CopyInputs(self._most, device)
            self._decodes = DecodeInputs(self._most, self._rows, block_size, model.windows, device)
            self._prompts = PromptInputs(limits.token_budget, self._most, self._rows, block_size, model.windows, device)
        self._cache: list[PagedKV] = []
        self._host: HostCopies | None = None
        self._graphs = DecodeGraphs(self._decode, self._most)
        num_blocks = count_blocks(loaded.spec, self._cache_bytes(config, loaded))
        with enough_memory("the KV cache", "--kv-cache-gb"):
            self._cache = loaded.allocate_cache(num_blocks)
        self.info = loaded.info(num_blocks, config)
        if self.info.num_host_blocks:
            with enough_memory("the blocks of host memory", "--host-kv-gb", "--kv-cache-gb"):
                self._host = HostCopies(self._cache, self.info.num_host_blocks, num_blocks, device)
        if device.type == "cuda":
            with enough_memory("the graphs of decode steps", *_STEP_FLAGS), torch.inference_mode():
                self._decodes.send([], [], self._most)
                self._graphs.capture(progress)
            # After the captures, because each of them gives back all memory that is not in use.
            with enough_memory("prompts of the largest step", *_STEP_FLAGS):
                self.warm_up(limits.token_budget)

    def execute(self, plan: StepPlan) -> Sampled:
        """Launch a step and wait for its outcome."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> DeviceStep:
        """Launch a step. Raises OutOfMemory if it does not fit beside the cache."""
        with enough_memory("a step", *_STEP_FLAGS, error=OutOfMemory), torch.inference_mode():
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> DeviceStep:
        copied_s = self._host.launch(plan) if self._host else nothing_copied
        if plan.copies:
            copy_blocks(self._cache, *self._copies.send(plan.copies))
        rows = self._rows.place(plan.chunks)
        decodes = [at for at, chunk in enumerate(plan.chunks) if chunk.is_decode]
        prompts = [at for at, chunk in enumerate(plan.chunks) if not chunk.is_decode]
        places: dict[int, tuple[Sequence, int]] = {}
        if decodes:
            chunks = [plan.chunks[at] for at in decodes]
            size = self._graphs.size_for(len(chunks))
            self._decodes.send(chunks, [rows[at] for at in decodes], size)
            self._graphs.launch(size)
            places |= {at: (plan.chunks[at].seq, entry) for entry, at in enumerate(decodes)}
        if prompts:
            chunks = [plan.chunks[at] for at in prompts]
            self._prefill(chunks, [rows[at] for at in prompts])
            sampling = [at for at in prompts if plan.chunks[at].samples]
            places |= {at: (plan.chunks[at].seq, self._most + entry) for entry, at in enumerate(sampling)}
        return self._outcomes.read(len(plan.chunks), places, self._rows.faults(places), copied_s)

    def warm_up(self, num_tokens: int) -> None:
        """Compute prompts of up to this many tokens, so that the kernels for each size are compiled beforehand."""
        longest = self.info.max_model_len
        self._rehearse(
            prompts_of_all_sizes(min(num_tokens, self._most * longest), longest, self.info.kv_cache.block_size)
        )

    def recover(self) -> None:
        """Forget all rows, as a failed step may have changed them. Raises if the device cannot be used any more."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._rows.forget()

    def _decode(self, size: int) -> None:
        """Run a decode step of this many rows, padding included, on what was sent last. Graphs capture this."""
        logits = self._model.forward(self._decodes.inputs(size), self._cache)
        self._ops.sample_rows(
            logits,
            self._decodes.rows(size),
            self._decodes.next_positions(size),
            self._rows.sampling,
            self._outcomes.rows(0, size),
        )

    def _prefill(self, chunks: list[Chunk], rows: list[int]) -> None:
        inputs = self._prompts.send(chunks, rows)
        logits = self._model.forward(inputs, self._cache)
        num_sampling = len(logits)
        if num_sampling:
            out = self._outcomes.rows(self._most, self._most + num_sampling)
            positions = self._prompts.next_positions
            self._ops.sample_rows(logits, self._prompts.sampled_rows, positions, self._rows.sampling, out)

    def _cache_bytes(self, config: EngineConfig, loaded: LoadedModel) -> int:
        if config.kv_cache_gb is not None:
            return int(config.kv_cache_gb * 1e9)
        if loaded.device.type == "cpu":
            return DEFAULT_CPU_BYTES
        token_budget = min(config.step_limits(loaded.device.type).token_budget, self._most * loaded.longest)
        plan = largest_plan(token_budget, self._most, loaded.spec.block_size)
        num_blocks = max(chunk.seq.blocks[-1] for chunk in plan.chunks) + 1
        with enough_memory("one step", *_STEP_FLAGS):
            self._cache = loaded.allocate_cache(num_blocks)
            # The intermediate results of a decode step have memory of their own in the graphs.
            free = free_after((lambda: self._rehearse([plan]), self._rehearse_decodes), loaded.device)
            free += num_blocks * loaded.spec.bytes_per_block  # the cache of this rehearsal makes way for the real one
        self._cache = []
        return free

    @torch.inference_mode()
    def _rehearse_decodes(self) -> None:
        self._decodes.send([], [], self._most)
        self._decode(self._most)

    def _rehearse(self, plans: Iterable[StepPlan]) -> None:
        with torch.inference_mode():
            for plan in plans:
                self._launch(plan).result()
                self._rows.forget()
