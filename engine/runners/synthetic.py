"""A model without weights, for tests of everything else: scheduler, blocks, loop, channel and router.

Each slot of its cache holds one number, a checksum of the sequence up to that position. A checksum is computed from the
one before it, which is read through the block table, and the next token follows from the last checksum. Where layers
have sliding windows, what they see must be there, too. A single wrong block, slot or position therefore changes every
later token. `expected_tokens` computes the right ones. A token mask
leaves the choice to the checksum too, among what it allows.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...settings.engine import EngineConfig
from ..core.adapter import Adapter
from ..core.errors import ConfigError
from ..core.layer_groups import LayerGroups
from ..core.sequence import BlockTable, Sequence, TokenMask
from ..core.step import Chunk, Reading, Sampled, StepPlan, TokenLogprobs
from .late_masks import read_masks
from .runner_info import KVCacheSpec, RunnerInfo, count_blocks, count_host_blocks

_MODULUS = (1 << 61) - 1
_POISON = -1
_BYTES_PER_TOKEN = 8  # one checksum
_MAX_VOCAB_SIZE = 1 << 24
_MAX_POSITIONS = (1 << 31) - 1
HIDDEN_SIZE = 8
_STATE_BITS = 7  # of a checksum's 61, for each value of a hidden state
_MAX_ADAPTER_BYTES = 64 << 20  # of each file
_CACHED_TOKENS = 131_072  # room in the cache by default


def advance(checksum: int, token: int) -> int:
    return (checksum * 1_000_003 + token + 1) % _MODULUS


def first_checksum(adapter: bytes = b"") -> int:
    """Return the checksum of no tokens, with the adapter of this identity; empty: with none."""
    return int.from_bytes(adapter[:7], "little")


def identity_of(seq: Sequence) -> bytes:
    """Return the identity of a sequence's adapter; empty if it has none."""
    return b"" if seq.request.adapter is None else seq.request.adapter.identity


def expected_tokens(prompt: Iterable[int], count: int, vocab_size: int, adapter: bytes = b"") -> list[int]:
    """Return the tokens that the synthetic model generates after `prompt`, with the adapter of this identity."""
    checksum = first_checksum(adapter)
    for token in prompt:
        checksum = advance(checksum, token)
    tokens = []
    for _ in range(count):
        tokens.append(checksum % vocab_size)
        checksum = advance(checksum, tokens[-1])
    return tokens


def expected_logprobs(checksum: int, count: int, vocab_size: int, token: int | None = None) -> TokenLogprobs:
    """Make up logprobs after a checksum: the model's own choice is the most likely, each next id is less likely.

    They look like logprobs but form no distribution. The first value and the differences follow from the checksum too.

    token  the one that is there; None: the model's own choice
    """
    rest = checksum // vocab_size
    first, fall = rest % 61 / 64, (1 + rest // 61 % 40) / 64
    ids = [(checksum + index) % vocab_size for index in range(count)]
    rank = 0 if token is None else (token - checksum) % vocab_size
    return TokenLogprobs(-first - rank * fall, ids, [-first - index * fall for index in range(count)])


def expected_hidden(checksum: int) -> list[float]:
    """Make up the hidden state after a checksum: values in [-1, 1), whose sums are exact."""
    values = (checksum >> index * _STATE_BITS & (1 << _STATE_BITS) - 1 for index in range(HIDDEN_SIZE))
    return [value / (1 << _STATE_BITS - 1) - 1 for value in values]


def _allowed(mask: TokenMask, tokens: list[int], checksum: int, vocab_size: int) -> int:
    """Return the token that a checksum chooses among those that a mask allows; -1 if it allows none."""
    words = array("I", bytes(4 * -(-vocab_size // 32)))
    mask.fill(tokens, memoryview(words))
    allowed = [id for id in range(vocab_size) if words[id // 32] >> id % 32 & 1]
    return allowed[checksum % len(allowed)] if allowed else -1


def _late_masks(plan: StepPlan) -> set[int]:
    """Return the positions of chunks whose token masks are not there in time."""
    masked = [(index, chunk.seq) for index, chunk in enumerate(plan.chunks) if chunk.samples and chunk.seq.token_mask]
    readers = [(seq.token_mask, partial(seq.token_mask.is_ready, seq.tokens)) for _, seq in masked if seq.token_mask]
    return {masked[each][0] for each in read_masks(readers, has_others=len(plan.chunks) > len(masked))}


def _has_mask(seq: Sequence, tokens: list[int]) -> bool:
    return seq.token_mask is None or seq.token_mask.is_ready(tokens, 0.0)


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step takes: a constant time, plus some for each sequence and each token."""

    base_s: float = 0.0
    per_sequence_s: float = 0.0
    per_token_s: float = 0.0

    @classmethod
    def parse(cls, milliseconds: str) -> StepTime:
        """Read "BASE[,PER_SEQUENCE[,PER_TOKEN]]". Raises ConfigError."""
        try:
            parts = [float(part) / 1e3 for part in milliseconds.split(",")]
            if not 1 <= len(parts) <= 3 or not all(0 <= part < 3600 for part in parts):
                raise ValueError
        except ValueError:
            raise ConfigError(f"--step-ms takes one to three numbers of milliseconds, not {milliseconds!r}") from None
        return cls(*parts)

    def of(self, plan: StepPlan) -> float:
        return self.base_s + self.per_sequence_s * len(plan.chunks) + self.per_token_s * plan.num_tokens


@dataclass(frozen=True, slots=True)
class SyntheticStep:
    """The outcome of a step. It can be read from `ready_at` on, as if a device computed until then."""

    sampled: Sampled
    ready_at: float

    def result(self) -> Sampled:
        time.sleep(max(0.0, self.ready_at - time.monotonic()))
        return self.sampled


class SyntheticAdapters:
    """Reads adapters as PEFT writes them, whatever their tensors are: the identity alone decides what is computed."""

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank

    def load(self, path: Path) -> Adapter:
        from ...checkpoints.adapters import CONFIG, TENSORS, AdapterConfig, identity_of, read_whole

        if path.suffix == ".gguf":
            content = read_whole(path, _MAX_ADAPTER_BYTES)
            return Adapter(identity_of(content), 1, len(content), None)
        config = read_whole(path / CONFIG, _MAX_ADAPTER_BYTES)
        content = read_whole(path / TENSORS, _MAX_ADAPTER_BYTES)
        _, rank = AdapterConfig(bytes(config), self.max_rank).rank_of()
        return Adapter(identity_of(config, content), rank, len(content), None)


class SyntheticRunner:
    """Computes as fast as it can, or takes a simulated time for each step.

    lookahead  1: it accepts a step while it computes another, as a device does; the next chunk may start from a token
               that the host has not read
    """

    def __init__(
        self,
        info: RunnerInfo,
        step_time: StepTime | None = None,
        lookahead: int = 0,
        num_adapter_slots: int = 0,
        max_rank: int = 0,
    ) -> None:
        self.info = info
        self.lookahead = lookahead
        self.max_choices = info.limits.token_budget
        self._block_size = info.kv_cache.block_size
        self._windows = info.kv_cache.groups.windows[1:]
        self._cache = [_POISON] * (info.num_blocks * self._block_size)
        self._host = array("q", [_POISON]) * (info.num_host_blocks * self._block_size)
        self._step_time = step_time
        self.adapters = SyntheticAdapters(num_adapter_slots, max_rank) if num_adapter_slots else None
        self._chosen: dict[int, int] = {}  # by sequence: its token in the last step
        self._busy_until = 0.0

    def launch(self, plan: StepPlan) -> SyntheticStep:
        started = max(time.monotonic(), self._busy_until)
        sampled = self._compute(plan)
        self._busy_until = started + (self._step_time.of(plan) if self._step_time else 0.0)
        return SyntheticStep(sampled, self._busy_until)

    def recover(self) -> None:
        self._chosen.clear()

    def host_row(self, host: int) -> memoryview:
        size = self._block_size
        return memoryview(self._host)[host * size : (host + 1) * size].cast("B")

    def copy(self, plan: StepPlan) -> None:
        self._copy_blocks(plan)

    def _compute(self, plan: StepPlan) -> Sampled:
        chosen: dict[int, int] = {}
        tokens = [-1] * len(plan.chunks)
        logprobs: list[TokenLogprobs | None] = [None] * len(plan.chunks)
        readings: dict[int, Reading] = {}
        more: dict[int, list[tuple[int, TokenLogprobs | None]]] = {}
        faults: dict[int, str] = {}
        postponed = _late_masks(plan)
        self._copy_blocks(plan)
        for index, chunk in enumerate(plan.chunks):
            seq = chunk.seq
            if chunk.start:
                checksum = self._cache[self._slot(seq.blocks, chunk.start - 1)]
            else:
                checksum = first_checksum(identity_of(seq))
            if checksum == _POISON:
                raise AssertionError(f"sequence {seq.id} reads a slot that was never written")
            if self._windows and not self._windows_hold(seq.blocks, chunk.start):
                checksum = advance(checksum, 0)
            for position in range(chunk.start, chunk.end - len(chunk.drafts)):
                checksum = advance(checksum, self._token(chunk, position))
                self._store(seq.blocks, position, checksum)
            if seq.reads(chunk.start, chunk.end):
                readings[index] = self._read(chunk)
            if chunk.samples and index not in postponed:
                token, logprobs[index] = self._choose(seq, checksum, seq.tokens)
                if token < 0:
                    faults[index] = "its token mask leaves no token to choose"
                    continue
                tokens[index] = chosen[seq.id] = token
            if chunk.drafts and index not in postponed:
                more[index] = self._verify(chunk, tokens[index], checksum)
        self._chosen = chosen
        return Sampled(tokens, logprobs, faults, readings=readings, more=more, postponed=postponed)

    def _read(self, chunk: Chunk) -> Reading:
        seq, readout = chunk.seq, chunk.seq.request.readout
        assert readout is not None, "there is something to read"
        scored = readout.scored_rows(chunk.start, chunk.end, seq.request.prompt_len)
        pooled = readout.pooled_rows(chunk.start, chunk.end, seq.request.prompt_len)
        checksums = {row: self._cache[self._slot(seq.blocks, row)] for row in {*scored, *pooled}}
        logprobs = [
            expected_logprobs(checksums[row], readout.num_top, self.info.vocab_size, seq.tokens[row + 1])
            for row in scored
        ]
        states = [expected_hidden(checksums[row]) for row in pooled]
        return Reading(scored.start + 1, logprobs, [sum(values) for values in zip(*states, strict=True)])

    def _choose(self, seq: Sequence, checksum: int, tokens: list[int]) -> tuple[int, TokenLogprobs | None]:
        """Choose the token that follows `tokens`, whose checksum is given; -1 if the sequence's mask allows none."""
        size, count = self.info.vocab_size, seq.params.logprobs
        token = checksum % size if seq.token_mask is None else _allowed(seq.token_mask, tokens, checksum, size)
        return token, None if count is None else expected_logprobs(checksum, count, size)

    def _verify(self, chunk: Chunk, token: int, checksum: int) -> list[tuple[int, TokenLogprobs | None]]:
        """Compute a chunk's drafts behind its last token; return the tokens behind accepted ones.

        token, checksum  chosen behind the chunk's last token, and that token's
        """
        run: list[tuple[int, TokenLogprobs | None]] = []
        tokens = [*chunk.seq.tokens]
        for position, draft in enumerate(chunk.drafts, chunk.end - len(chunk.drafts)):
            is_accepted = token >= 0 and draft == token
            checksum = advance(checksum, draft)
            self._store(chunk.seq.blocks, position, checksum)
            token = -1
            tokens.append(draft)
            if is_accepted and _has_mask(chunk.seq, tokens):
                token, logprobs = self._choose(chunk.seq, checksum, tokens)
                if token >= 0:
                    run.append((token, logprobs))
        return run

    def _copy_blocks(self, plan: StepPlan) -> None:
        size, cache, host = self._block_size, self._cache, self._host
        for source, target in plan.saves:
            host[target * size : (target + 1) * size] = array("q", cache[source * size : (source + 1) * size])
        for source, target in plan.loads:
            cache[target * size : (target + 1) * size] = host[source * size : (source + 1) * size]
        for source, target in plan.copies:
            cache[target * size : (target + 1) * size] = cache[source * size : (source + 1) * size]

    def _store(self, blocks: BlockTable, position: int, checksum: int) -> None:
        """Write a checksum to the position's slot of each group of layers."""
        self._cache[self._slot(blocks, position)] = checksum
        for table in blocks.windows:
            self._cache[self._slot(table, position)] = checksum

    def _windows_hold(self, blocks: BlockTable, start: int) -> bool:
        """Return whether all that a query at this position sees through a window is what layers without one see."""
        return all(
            self._cache[self._slot(table, position)] == self._cache[self._slot(blocks, position)]
            for table, window in zip(blocks.windows, self._windows, strict=True)
            if window is not None
            for position in range(max(0, start - window + 1), start)
        )

    def _token(self, chunk: Chunk, position: int) -> int:
        tokens = chunk.seq.tokens
        return tokens[position] if position < len(tokens) else self._chosen[chunk.seq.id]

    def _slot(self, blocks: list[int], position: int) -> int:
        return blocks[position // self._block_size] * self._block_size + position % self._block_size


def load_synthetic(config: EngineConfig, model_config: Mapping[str, object]) -> SyntheticRunner:
    """Make a runner of these settings. Raises ConfigError for settings that need a model."""
    _check(config)
    vocab_size = _size(model_config, "vocab_size", _MAX_VOCAB_SIZE)
    max_position_embeddings = _size(model_config, "max_position_embeddings", _MAX_POSITIONS)
    step_time = None if config.step_ms is None else StepTime.parse(config.step_ms)
    # One layer with one head of dimension one: a slot of its cache holds half a checksum as key and half as value.
    spec = KVCacheSpec(
        groups=LayerGroups.one(1),
        num_kv_heads=1,
        head_dim=1,
        element_bytes=_BYTES_PER_TOKEN // 2,
        block_size=config.tokens_a_block("cpu"),
    )
    budget = spec.bytes_per_token * _CACHED_TOKENS if config.kv_cache_gb is None else int(config.kv_cache_gb * 1e9)
    info = RunnerInfo(
        model="synthetic",
        architecture="synthetic",
        device="cpu",
        dtype="int64",
        kernel_backend="none",
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        max_model_len=config.max_model_len or max_position_embeddings,
        weight_bytes=0,
        kv_cache=spec,
        num_blocks=count_blocks(spec, budget),
        limits=config.step_limits("cpu"),
        num_host_blocks=count_host_blocks(spec, config.host_kv_gb),
    )
    try:
        num_slots = config.number_on("cpu", "max_adapters")
        return SyntheticRunner(info, step_time, int(config.overlap == "on"), num_slots, config.max_lora_rank)
    except MemoryError:
        raise ConfigError("not enough memory for the cache; --kv-cache-gb, --host-kv-gb can help") from None


def _size(model_config: Mapping[str, object], name: str, most: int) -> int:
    value = model_config.get(name)
    if not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"config.json: {name} must be a whole number from 1 to {most}")
    return value


def _check(config: EngineConfig) -> None:
    """Raise ConfigError for settings that need a model."""
    for flag, value, allowed in (
        ("--device", config.device, ("auto", "cpu")),
        ("--quantization", config.quantization, ("auto", "none")),
        ("--kv-cache-dtype", config.kv_cache_dtype, ("auto",)),
    ):
        if value not in allowed:
            raise ConfigError(f"{flag} {value}: the synthetic model has no weights and needs no device")
