"""The runner of a device that works while the host prepares the next step: from a step plan to tokens.

Only `DeviceStep.result` waits for the device. A sequence's last token stays on the device, so a step can be launched
before the tokens of the previous one have come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ....checkpoints.progress import Progress, no_progress
from ....kernels import PagedKV, copy_blocks
from ....settings.engine import EngineConfig
from ...core.errors import OutOfMemory
from ...core.step import Chunk, Sampled, StepPlan
from ..loaded_model import DEFAULT_CPU_BYTES, LoadedModel, enough_memory
from ..readings import PendingReading, StepHead, is_read, read
from ..runner_info import count_blocks
from .copies import CopyInputs, HostCopies, nothing_copied
from .graphs import MIXED_CHUNKS, MIXED_TOKENS, StepGraphs, StepShape
from .outcomes import DeviceStep, Outcomes
from .rehearsal import GPU_SHARE, free_after, largest_plan, prompts_of_all_sizes
from .rows import DeviceRows
from .step_inputs import PackedInputs, places_of

_STEP_FLAGS = ("--max-num-seqs", "--token-budget", "--kv-cache-gb")


class DeviceRunner:
    """A model with its paged KV cache on a device.

    A step is one pass over the model, for decodes and chunks of prompts together. Make the runner on the thread that
    launches its steps: cuBLAS's handles and workspaces belong to a thread and a stream, and the size of the cache
    counts on them. Raises ConfigError if the device has too little memory for these settings.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, progress: Progress = no_progress) -> None:
        self.lookahead = 0 if config.overlap == "off" else 1
        self._ops, self._model, self._device = loaded.ops, loaded.model, loaded.device
        limits = config.step_limits(self._device.type)
        self._most, self._token_budget = limits.max_num_seqs, limits.token_budget
        self._verifies = config.speculation != "off"
        self.max_choices = max(self._most, 1 + config.max_draft_tokens) if self._verifies else self._most
        self._stream = torch.cuda.Stream() if self._device.type == "cuda" else None
        if self._stream is not None:
            torch.cuda.synchronize()  # this stream does not wait for the one that weights were loaded on
        self.adapters = loaded.adapter_banks(config)
        self._pages: list[PagedKV] = []
        self._host: HostCopies | None = None
        with torch.cuda.stream(self._stream):
            self._allocate(config, loaded)
            if self._stream is not None:
                with enough_memory("the graphs of steps", *_STEP_FLAGS), torch.inference_mode():
                    self._graphs.capture(progress)
                # After the captures, because each of them gives back all memory that is not in use.
                with enough_memory("prompts of the largest step", *_STEP_FLAGS):
                    self.warm_up(self._token_budget)

    def _allocate(self, config: EngineConfig, loaded: LoadedModel) -> None:
        """Allocate a step's inputs and outcomes, then the cache, whose size they decide."""
        device, block_size, model = self._device, loaded.spec.block_size, loaded.model.config
        groups = self._groups = loaded.spec.groups
        num_entries = self.max_choices + MIXED_CHUNKS + 1
        num_tokens = max(self.max_choices, self._token_budget, MIXED_TOKENS)
        max_drafts = self.max_choices if self._verifies else 0
        with enough_memory("the inputs of a step", *_STEP_FLAGS):
            # Twice as many as run at once, because rows of sequences that have just ended are not free yet.
            max_blocks = -(-loaded.longest // block_size)
            num_groups = len(groups.windows)
            self._rows = DeviceRows(2 * self._most, max_blocks, model.vocab_size, device, max_drafts, num_groups)
            self._inputs = PackedInputs(
                num_tokens, num_entries, self._rows, block_size, model, device, groups, self._ops.is_deterministic
            )
            self._outcomes = Outcomes(num_entries, device)
            self._copies = CopyInputs(self._most, device)
        has_adapters = self.adapters is not None
        self._graphs = StepGraphs(
            self._pad, self._compute, self.max_choices, self._token_budget, self._stream, has_adapters
        )
        num_blocks = count_blocks(loaded.spec, self._cache_bytes(config, loaded))
        with enough_memory("the KV cache", "--kv-cache-gb"):
            self._pages = loaded.allocate_pages(num_blocks)
        self.info = loaded.info(num_blocks, config)
        if self.info.num_host_blocks:
            with enough_memory("the blocks of host memory", "--host-kv-gb", "--kv-cache-gb"):
                self._host = HostCopies(self._pages, self.info.num_host_blocks, device)

    @property
    def _cache(self) -> list[PagedKV]:
        """The pages of each layer."""
        return self._groups.of_layers(self._pages)

    def execute(self, plan: StepPlan) -> Sampled:
        """Launch a step and wait for its outcome."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> DeviceStep:
        """Launch a step. Raises OutOfMemory if it does not fit beside the cache."""
        with enough_memory("a step", *_STEP_FLAGS, error=OutOfMemory), self._ready():
            return self._launch(plan)

    def host_row(self, host: int) -> memoryview:
        """Return the bytes of a host block, which only its user touches."""
        assert self._host is not None, "it has blocks of host memory"
        return self._host.row(host)

    def copy(self, plan: StepPlan) -> None:
        """Make the saves and loads of a plan that has nothing else, and wait for them."""
        assert self._host is not None, "it has blocks of host memory"
        with self._ready():
            self._host.copy(plan)

    def _launch(self, plan: StepPlan) -> DeviceStep:
        copied_s = self._host.launch(plan) if self._host else nothing_copied
        if plan.copies:
            copy_blocks(self._pages, *self._copies.send(plan.copies))
        if self.adapters is not None:
            self.adapters.place(plan.chunks)
        reads = is_read(plan.chunks)
        shape = StepShape.of(plan.chunks) if reads else self._graphs.fit(StepShape.of(plan.chunks))
        entries, tokens = places_of(plan.chunks, shape.decodes)
        rows = self._rows.place(plan.chunks, entries)
        num_choices = self._rows.num_choices
        late = {index for index, count in num_choices.items() if not count}
        self._inputs.send(plan.chunks, rows, shape, late)
        readings: dict[int, PendingReading] = {}
        if reads:
            readings = self._compute_and_read(shape, plan.chunks, tokens)
        else:
            self._graphs.launch(shape)
        places = {
            index: (chunk, entries[index])
            for index, chunk in enumerate(plan.chunks)
            if chunk.samples and index not in late
        }
        faults = self._rows.faults(places)
        return self._outcomes.read(len(plan.chunks), places, faults, copied_s, readings, num_choices)

    def _compute(self, shape: StepShape) -> None:
        """Compute the step of this shape that was sent last. Graphs capture this."""
        self._sample(self._model.forward(self._inputs.of_model(shape), self._cache), shape)

    def _compute_and_read(self, shape: StepShape, chunks: list[Chunk], tokens: list[int]) -> dict[int, PendingReading]:
        """`_compute` kernel by kernel, with what is read from prompts.

        tokens  the place of each chunk's first token among the step's
        """
        inputs = self._inputs.of_model(shape)
        hidden = self._model.hidden_states(self._model.embed(inputs), inputs, self._cache)
        head = StepHead(lambda rows: self._model.head(hidden[rows]), self._model.config.vocab_size)
        readings = read(head, hidden, inputs.token_ids, chunks, tokens)
        self._sample(self._model.head(hidden, inputs.logit_rows), shape)
        return readings

    def _sample(self, logits: Tensor, shape: StepShape) -> None:
        self._ops.sample_rows(
            logits,
            self._inputs.sampled_rows(shape),
            self._inputs.next_positions(shape),
            self._rows.sampling,
            self._outcomes.rows(shape.num_seqs),
            self._inputs.verified(shape) if self._verifies else None,
        )

    def warm_up(self, num_tokens: int) -> None:
        """Compute prompts of up to this many tokens, so that the kernels for each size are compiled beforehand."""
        longest, spec = self.info.max_model_len, self.info.kv_cache
        num_tokens, num_windows = min(num_tokens, self._most * longest), len(spec.groups.windows) - 1
        self._rehearse(prompts_of_all_sizes(num_tokens, longest, spec.block_size, num_windows))

    def recover(self) -> None:
        """Forget all rows, as a failed step may have changed them. Raises if the device cannot be used any more."""
        if self._stream is not None:
            torch.cuda.synchronize()
        self._rows.forget()

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Within, this thread launches on the runner's stream, and torch keeps nothing for gradients."""
        with torch.cuda.stream(self._stream), torch.inference_mode():
            yield

    def _pad(self, shape: StepShape) -> None:
        self._inputs.send([], [], shape)

    def _cache_bytes(self, config: EngineConfig, loaded: LoadedModel) -> int:
        if config.kv_cache_gb is not None:
            return int(config.kv_cache_gb * 1e9)
        if loaded.device.type == "cpu":
            return DEFAULT_CPU_BYTES
        token_budget = min(self._token_budget, self._most * loaded.longest)
        num_windows = len(loaded.spec.groups.windows) - 1
        plan = largest_plan(token_budget, self._most, loaded.spec.block_size, num_windows)
        num_blocks = max(chunk.seq.blocks[-1] for chunk in plan.chunks) + 1
        with enough_memory("one step", *_STEP_FLAGS):
            self._pages = loaded.allocate_pages(num_blocks)
            with torch.inference_mode():
                # The intermediate results of captured steps have memory of their own, which all graphs share.
                free = free_after((lambda: self._rehearse([plan]), self._rehearse_captured), loaded.device)
                free -= self._graphs.num_bytes()
            free += num_blocks * loaded.spec.bytes_per_block  # the cache of this rehearsal makes way for the real one
        self._pages = []
        return int(free * GPU_SHARE)

    def _rehearse_captured(self) -> None:
        for shape in (self._graphs.shapes[0], max(self._graphs.shapes, key=lambda shape: shape.num_seqs)):
            self._pad(shape)
            self._compute(shape)

    def _rehearse(self, plans: Iterable[StepPlan]) -> None:
        with self._ready():
            for plan in plans:
                self._launch(plan).result()
                self._rows.forget()
