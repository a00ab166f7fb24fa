"""A small model that drafts for a larger one (Leviathan et al., 2023)."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path

from ....checkpoints.progress import Progress, no_progress
from ....settings.engine import EngineConfig
from ...core.errors import ConfigError
from ...core.sequence import BlockTable, Sequence, WindowTable
from ...core.step import Chunk, StepPlan
from ...kv.blocks import BlockPool
from .runner import ModelRunner

WEIGHT = 0.1  # of the last token in the mean time that one takes
FEW = 17  # tokens that are computed as decodes, whose steps are recorded


class DraftModel:
    """Runs a model of its own for each token that it drafts, with a KV cache of its own.

    It samples with the sequence's parameters, and with the noise of the same seed and positions. Where the two models'
    logits are alike, it then draws the same token, not only where both take the most likely one.

    token_s  mean time of a token; 0 before the first
    """

    def __init__(self, config: EngineConfig, folder: Path, vocab_size: int, progress: Progress = no_progress) -> None:
        """Load the model. Raises ConfigError if it cannot draft for the one of these settings."""
        if _tokenizer_of(folder) != _tokenizer_of(Path(config.model)):
            raise ConfigError(f"--draft-model {folder.name}: it has another tokenizer than {Path(config.model).name}")
        settings = replace(
            config,
            model=str(folder),
            quantization="auto",
            max_model_len=None,
            host_kv_gb=0.0,
            kv_store="",
            tensor_parallel=1,
            max_adapters=0,
        )
        self._runner = ModelRunner(settings, progress)
        info = self._runner.info
        if info.vocab_size != vocab_size:
            raise ConfigError(
                f"--draft-model {folder.name}: its vocabulary has {info.vocab_size} ids, not {vocab_size}"
            )
        self._pool = BlockPool(info.num_blocks, info.kv_cache.block_size)
        self._num_windows = len(info.kv_cache.groups.windows) - 1  # groups of layers, which keep all their blocks here
        self._mirrors: dict[int, Sequence] = {}  # by sequence, the one that drafted last at the end
        self.token_s = 0.0
        self._is_first = False  # one of the steps that are being computed was the first of its shape

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Compute drafts. A prompt longer than a step is computed a step at a time, and gets no drafts until then."""
        info = self._runner.info
        if seq.num_tokens + most > info.max_model_len:
            return []
        mirror = self._mirror(seq)
        if not self._has_blocks(mirror, mirror.num_tokens + most):
            return []
        missing = mirror.num_tokens - mirror.num_computed
        if missing > info.limits.token_budget:
            self._compute(Chunk(mirror, mirror.num_computed, info.limits.token_budget, False))
            return []
        started, self._is_first = time.perf_counter(), False
        chunks = [Chunk(mirror, mirror.num_computed, missing, True)]
        if missing <= FEW:
            chunks = [Chunk(mirror, index, 1, True) for index in range(mirror.num_computed, mirror.num_tokens)]
        while (token := self._compute(*chunks)) >= 0:
            mirror.tokens.append(token)
            if mirror.num_tokens == seq.num_tokens + most:
                break
            chunks = [Chunk(mirror, mirror.num_computed, 1, True)]
        drafts = mirror.tokens[seq.num_tokens :]
        if drafts and missing <= FEW and not self._is_first:
            spent = (time.perf_counter() - started) / len(drafts)
            self.token_s += (WEIGHT if self.token_s else 1.0) * (spent - self.token_s)
        return drafts

    def forget(self, seq: Sequence) -> None:
        mirror = self._mirrors.pop(seq.id, None)
        if mirror is not None:
            self._release(mirror)

    def _release(self, mirror: Sequence) -> None:
        for table in (mirror.blocks, *mirror.blocks.windows):
            self._pool.release(table)

    def _compute(self, *chunks: Chunk) -> int:
        """Compute chunks of one sequence; return the token that it chooses, or -1."""
        sampled = self._runner.execute(StepPlan(list(chunks)))
        self._is_first |= sampled.is_first
        mirror = chunks[-1].seq
        mirror.num_computed = chunks[-1].end
        return -1 if sampled.faults else sampled.tokens[-1]

    def _mirror(self, seq: Sequence) -> Sequence:
        """Return the sequence as this model knows it: the same tokens, of which those that were right are computed."""
        mirror = self._mirrors.pop(seq.id, None)
        if mirror is None or mirror.request is not seq.request:
            if mirror is not None:
                self._release(mirror)
            mirror = Sequence(seq.id, [], seq.request, replace(seq.params, logprobs=None), seq.token_mask)
        self._mirrors[seq.id] = mirror
        # Drafts that were refused are the only tokens of the mirror that may differ.
        common = max(0, mirror.num_tokens - FEW)
        while common < min(mirror.num_tokens, seq.num_tokens) and mirror.tokens[common] == seq.tokens[common]:
            common += 1
        mirror.tokens[common:] = seq.tokens[common:]
        mirror.num_computed = min(mirror.num_computed, common, seq.num_tokens - 1)
        return mirror

    def _has_blocks(self, mirror: Sequence, length: int) -> bool:
        """Give a mirror blocks for so many tokens, if need be those of sequences that have not drafted for longest."""
        count = self._pool.blocks_for(length) - len(mirror.blocks)
        needed = count * (1 + self._num_windows)
        for id, other in list(self._mirrors.items()):
            if needed <= self._pool.num_available:
                break
            if other is not mirror:
                self._release(other)
                del self._mirrors[id]
        if needed > self._pool.num_available:
            return False
        if count > 0:
            windows = mirror.blocks.windows or [WindowTable() for _ in range(self._num_windows)]
            longer = [WindowTable([*table, *self._pool.allocate(count)]) for table in windows]
            mirror.blocks = BlockTable([*mirror.blocks, *self._pool.allocate(count)], windows=longer)
        return True


def _tokenizer_of(folder: Path) -> bytes:
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest()
