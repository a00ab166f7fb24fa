"""Turns a step plan into tokens on a CPU, one step at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....checkpoints.progress import Progress, no_progress
from ....kernels import copy_blocks, keep_freed_memory, set_num_threads
from ....runtime.cores import usable_cores
from ....settings.engine import EngineConfig
from ....settings.request import MAX_DRAFT_TOKENS
from ...core.errors import ConfigError
from ...core.step import NOT_FINITE, Chunk, Reading, Sampled, StepPlan, TokenLogprobs
from ...loop.steps_in_flight import Computed
from ...models import StepInputs
from ...models.share import WHOLE, Share
from ..loaded_model import DEFAULT_CPU_BYTES, check_fp8, enough_memory, load_for_serving
from ..readings import StepHead, is_read, read
from ..runner_info import count_blocks
from .group_adapters import GroupAdapters, RankAdapters
from .host_memory import HostMemory
from .packed_step import SlotChanges, packed_copies, packed_inputs, packed_rows, unpacked
from .recorded_steps import RecordedSteps
from .sampler import Choice, Sampler
from .step_arrays import StepArrays

if TYPE_CHECKING:
    from .leader import Leader  # it imports torch.distributed, which others do not need


class ModelRunner:
    """A model with its paged KV cache on a CPU. `launch` returns when the step is computed.

    leader  what sends each step to the other ranks of a tensor-parallel group; None: there are none, or this is one
    share   the part of the model that a rank other than the leader has

    Raises ConfigError if the checkpoint cannot be served with these settings.
    """

    lookahead = 0

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress = no_progress,
        leader: Leader | None = None,
        share: Share = WHOLE,
    ) -> None:
        share = share if leader is None else leader.share
        if config.overlap == "on":
            raise ConfigError("--overlap on: a CPU has computed a step when it is launched")
        if config.kv_cache_dtype == "fp8":
            check_fp8("--kv-cache-dtype", torch.device("cpu"))
        num_threads = config.threads or max(1, min(torch.get_num_threads(), usable_cores()) // share.count)
        torch.set_num_threads(num_threads)
        set_num_threads(num_threads)
        loaded = load_for_serving(config, torch.device("cpu"), progress, share=share)
        keep_freed_memory()

        limits = config.step_limits("cpu")
        self.max_choices = limits.token_budget
        self._leader, self._ops = leader, loaded.ops
        self._model, self._vocab_size = loaded.model, loaded.model.config.vocab_size
        self._followed = torch.empty(0)  # the hidden states of the last step that another rank has packed
        self._sampler = Sampler(loaded.ops, self._vocab_size)
        groups, windows = loaded.spec.groups, loaded.model.config.windows
        self._arrays = StepArrays(limits.token_budget, loaded.longest, loaded.spec.block_size, groups, windows)
        budget = DEFAULT_CPU_BYTES if config.kv_cache_gb is None else int(config.kv_cache_gb * 1e9)
        num_blocks = count_blocks(loaded.spec, budget)
        with enough_memory("the KV cache", "--kv-cache-gb"):
            self._pages = loaded.allocate_pages(num_blocks)
        self._cache = groups.of_layers(self._pages)
        if config.deterministic and not loaded.ops.can_record(self._cache[0]):
            raise ConfigError(f"--deterministic: there is no compiled attention for heads of {loaded.spec.head_dim}")
        self._recorded: RecordedSteps | None = None
        if loaded.ops.can_record(self._cache[0]) and share.is_whole:  # sums over ranks cannot be recorded
            self._recorded = RecordedSteps(
                loaded.model,
                loaded.ops,
                self._cache,
                max(limits.max_num_seqs, 1 + MAX_DRAFT_TOKENS),
                loaded.longest,
                loaded.spec.block_size,
                groups,
            )
        self.info = loaded.info(num_blocks, config)
        banks = loaded.adapter_banks(config)
        self.adapters = GroupAdapters(banks, leader) if banks is not None and leader is not None else banks
        self._followed_adapters = RankAdapters(banks) if banks is not None and leader is None else None
        with enough_memory("the blocks of host memory", "--host-kv-gb", "--kv-cache-gb"):
            self._host = HostMemory(self._pages, self.info.num_host_blocks)
        if leader is not None:
            self.info = replace(self.info, weight_bytes=self.info.weight_bytes + leader.wait_until_loaded())

    def launch(self, plan: StepPlan) -> Computed:
        return Computed(self.execute(plan))

    def recover(self) -> None:
        """Raise if the ranks are out of step. Nothing else is kept that does not follow from the sequences' tokens."""
        if self._leader is not None:
            self._leader.check_in_step()

    def host_row(self, host: int) -> memoryview:
        """Return the bytes of a host block, which only its user touches."""
        return self._host.row(host)

    @torch.inference_mode()
    def copy(self, plan: StepPlan) -> None:
        """Make the saves and loads of a plan that has nothing else."""
        self._copy(plan)

    def _copy(self, plan: StepPlan) -> float:
        """Make the copies of a plan, here and on all other ranks. Returns the seconds that host memory took."""
        if self._leader is not None and (plan.saves or plan.loads or plan.copies):
            self._leader.send(packed_copies(plan))
        copied_s = self._host.copy(plan)
        if plan.copies:
            sources, targets = torch.tensor(plan.copies).T
            copy_blocks(self._pages, sources, targets)
        return copied_s

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Sampled:
        """Computes a plan. Computing the same plan twice writes the same cache and chooses the same tokens."""
        copied_s = self._copy(plan)
        if self.adapters is not None:
            self.adapters.place(plan.chunks)
        drafts = {index: chunk.drafts for index, chunk in enumerate(plan.chunks) if chunk.drafts}
        num_recorded = self._num_recorded
        logits, readings = self._forward(plan.chunks, one_row_each(plan.chunks) if drafts else plan.chunks)
        sampling = [index for index, chunk in enumerate(plan.chunks) if chunk.samples]
        by_place = {place: drafts[index] for place, index in enumerate(sampling) if index in drafts} if drafts else None
        seqs, has_others = [plan.chunks[index].seq for index in sampling], len(sampling) < len(plan.chunks)
        choices = iter(self._sampler.sample(seqs, logits, by_place, has_others=has_others))

        tokens = [-1] * len(plan.chunks)
        logprobs: list[TokenLogprobs | None] = [None] * len(plan.chunks)
        faults: dict[int, str] = {}
        more: dict[int, list[tuple[int, TokenLogprobs | None]]] = {}
        postponed: set[int] = set()
        for index in sampling:
            choice = next(choices)
            tokens[index], logprobs[index] = choice.token, choice.logprobs
            if choice.fault is not None:
                faults[index] = choice.fault
            if choice.is_late:
                postponed.add(index)
            if index in drafts:
                more[index] = accepted_run(
                    choice.token, drafts[index], list(itertools.islice(choices, len(drafts[index])))
                )
        faults |= {index: NOT_FINITE for index, reading in readings.items() if reading is None}
        found = {index: reading for index, reading in readings.items() if reading is not None}
        is_first = self._num_recorded > num_recorded
        return Sampled(tokens, logprobs, faults, copied_s, found, more, postponed, is_first)

    @property
    def _num_recorded(self) -> int:
        return self._recorded.num_taken if self._recorded is not None else 0

    def _forward(self, chunks: list[Chunk], rows: list[Chunk]) -> tuple[Tensor, dict[int, Reading | None]]:
        """Logits after what samples, and what is read from prompts; None for one that is not finite.

        rows  the chunks, with one of its own for each row of those with drafts
        """
        if is_read(chunks):
            inputs, hidden = self._hidden_states(rows)
            offsets = itertools.accumulate((chunk.length for chunk in chunks[:-1]), initial=0)
            head = StepHead(lambda rows: self._logits(hidden, torch.arange(rows.start, rows.stop)), self._vocab_size)
            pending = read(head, hidden, inputs.token_ids, chunks, offsets)
            readings = {index: each.result() for index, each in pending.items()}
            return self._logits(hidden, inputs.logit_rows), readings
        if self._recorded is not None and self._recorded.has_room_for(rows):
            return self._recorded.logits(rows), {}
        inputs, hidden = self._hidden_states(rows)
        return self._logits(hidden, inputs.logit_rows), {}

    def _hidden_states(self, chunks: list[Chunk]) -> tuple[StepInputs, Tensor]:
        """Embedding and layers, which every rank computes. The choice of tokens is rank 0's alone."""
        inputs = self._arrays.pack(chunks, self._ops, self._cache[0])
        with nullcontext() if self._leader is None else self._leader.step(packed_inputs(inputs)):
            return inputs, self._model.hidden_states(self._model.embed(inputs), inputs, self._cache)

    def _logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """[rows, vocab], of rows of the last step's hidden states, or of all. Every rank computes some columns."""
        rows = torch.arange(len(hidden)) if rows is None else rows
        if self._leader is None or not len(rows):
            return self._model.head(hidden, rows)
        with self._leader.step(packed_rows(rows)):
            return self._model.head(hidden, rows)

    @torch.inference_mode()
    def follow(self, message: bytes) -> None:
        """Do a rank's part of what another rank has packed."""
        step = unpacked(message, self._cache[0], self._ops, self._arrays)
        if isinstance(step, StepPlan):
            self._copy(step)
        elif isinstance(step, SlotChanges):
            assert self._followed_adapters is not None, "the leader has as many slots"
            self._followed_adapters.change(step)
        elif isinstance(step, Tensor):
            self._model.head(self._followed, step)
        else:
            self._followed = self._model.hidden_states(self._model.embed(step), step, self._cache)

    def answer(self, question: bytes) -> bytes:
        """Do a rank's part of loading an adapter, on a thread that computes no steps."""
        assert self._followed_adapters is not None, "the leader has as many slots"
        return self._followed_adapters.load(question)

    @torch.inference_mode()
    def logits(self, chunk: Chunk) -> Tensor:
        """Computes a chunk as `execute` would; returns the logits after each of its tokens.

        chunk   at most a token budget long; earlier tokens of its sequence are computed
        return  [chunk.length, vocab], in the dtype of the weights or float32
        """
        if self.adapters is not None:
            self.adapters.place([chunk])
        return self._logits(self._hidden_states([chunk])[1])


def one_row_each(chunks: list[Chunk]) -> list[Chunk]:
    """Makes a chunk of each row of the chunks with drafts. It is then computed as a decode is, to the last bit."""
    rows: list[Chunk] = []
    for chunk in chunks:
        if not chunk.drafts:
            rows.append(chunk)
            continue
        rows.append(Chunk(chunk.seq, chunk.start, 1, True))
        rows += [
            Chunk(chunk.seq, index, 1, True, (draft,)) for index, draft in enumerate(chunk.drafts, chunk.start + 1)
        ]
    return rows


def accepted_run(token: int, drafts: Iterable[int], choices: list[Choice]) -> list[tuple[int, TokenLogprobs | None]]:
    """The tokens that follow `token`, as long as each draft equals the token before.

    choices  the one after each draft; one with a fault, or a late mask, ends the run, and the next step meets it again
    """
    run: list[tuple[int, TokenLogprobs | None]] = []
    for draft, choice in zip(drafts, choices, strict=True):
        if draft != token or choice.token < 0:
            break
        token = choice.token
        run.append((token, choice.logprobs))
    return run
