"""Check channel messages, translate them into the engine's own types, and those into messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2, inference_pb2, trace_pb2

from ...channel.address import check_address
from ...channel.strides import IDENTITY_BYTES, chain_root
from ...settings.request import (
    MAX_ADAPTER_NAME,
    MAX_ADAPTER_PATH,
    MAX_BAD_WORDS,
    MAX_DRAFT_TOKENS,
    MAX_EOS_IDS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PRIORITY,
    MAX_REQUEST_ID,
    MAX_SALT_BYTES,
    MAX_SLO_S,
    MAX_STOP_IDS,
    TENANT_NAME,
)
from ...settings.sampling import LOGIT_BIAS, PARAMETERS
from ..core.adapter import Adapter
from ..core.guarded_mask import GuardedMask
from ..core.sequence import Account, EndReason, Lender, Pooling, Readout, Request, SamplingParams, Sequence, TokenMask
from ..core.step import Counters, Ended, Hold, Reading, TokenLogprobs
from ..loop.loop import LoadSnapshot
from ..loop.step_trace import Move, MoveKind, Step, TraceSnapshot
from ..scheduling.tenants import TenantTable

# What is counted goes into the message's field of the same name.
_COUNTED = [each.name for each in fields(Counters)]
_ACCOUNTED = [each.name for each in fields(Account) if each.name in engine_pb2.Ended.DESCRIPTOR.fields_by_name]
_END_REASONS = {
    EndReason.STOP: engine_pb2.END_REASON_STOP,
    EndReason.LENGTH: engine_pb2.END_REASON_LENGTH,
    EndReason.ABORTED: engine_pb2.END_REASON_ABORTED,
    EndReason.DEADLINE: engine_pb2.END_REASON_DEADLINE,
    EndReason.REJECTED: engine_pb2.END_REASON_REJECTED,
    EndReason.FAILED: engine_pb2.END_REASON_FAILED,
    EndReason.OVERLOADED: engine_pb2.END_REASON_OVERLOADED,
}
STEPS_PER_PART = 512  # of a trace; also the most moves: a part takes a few milliseconds

_HOLDS: dict[Hold | None, trace_pb2.HoldReason] = {
    None: trace_pb2.HOLD_REASON_UNSPECIFIED,
    "no place": trace_pb2.HOLD_REASON_NO_PLACE,
    "no blocks": trace_pb2.HOLD_REASON_NO_BLOCKS,
    "no budget": trace_pb2.HOLD_REASON_NO_BUDGET,
    "late": trace_pb2.HOLD_REASON_LATE,
    "token pending": trace_pb2.HOLD_REASON_TOKEN_PENDING,
    "no adapter": trace_pb2.HOLD_REASON_NO_ADAPTER,
}
_MOVE_KINDS: dict[MoveKind, trace_pb2.MoveKind] = {
    "waits": trace_pb2.MOVE_KIND_WAITS,
    "started": trace_pb2.MOVE_KIND_STARTED,
    "preempted": trace_pb2.MOVE_KIND_PREEMPTED,
    EndReason.STOP: trace_pb2.MOVE_KIND_FINISHED,
    EndReason.LENGTH: trace_pb2.MOVE_KIND_FINISHED,
    EndReason.ABORTED: trace_pb2.MOVE_KIND_ABORTED,
    EndReason.DEADLINE: trace_pb2.MOVE_KIND_EXPIRED,
    EndReason.REJECTED: trace_pb2.MOVE_KIND_REJECTED,
    EndReason.FAILED: trace_pb2.MOVE_KIND_FAILED,
    EndReason.OVERLOADED: trace_pb2.MOVE_KIND_REJECTED,
}
_POOLINGS: dict[int, Pooling | None] = {
    inference_pb2.POOLING_UNSPECIFIED: None,
    inference_pb2.POOLING_LAST: "last",
    inference_pb2.POOLING_MEAN: "mean",
    inference_pb2.POOLING_CLS: "cls",
}
_NUMBERS = {parameter.name for parameter in PARAMETERS}
_SEED_MASK = (1 << 64) - 1
_NUM_SEQUENCE_NUMBERS = 1 << 64
_MAX_BAD_WORDS = 2 * MAX_BAD_WORDS  # each with and without a space before it
_MAX_ADDRESS = 300  # characters
_MAX_ABORTED = 1 << 16  # sequences, of one message: more than a router ever aborts at once


class InvalidMessage(ConnectionError):
    """A router sent what no router sends: its connection ends. The message names the field."""


class Rejected(Exception):
    """This engine can never run the request. The message is for the client."""


def check_submit(submit: engine_pb2.Submit, vocab_size: int, max_model_len: int) -> None:
    """Check every field before anything is allocated, with the limits that routers have for their clients.

    Raises InvalidMessage, or Rejected for what depends on the model: lengths and token ids.
    """
    sampling, num_sequences = submit.sampling, submit.sampling.n or 1
    _check(num_sequences <= MAX_N, "sampling.n")
    _check(submit.first_sequence + num_sequences <= _NUM_SEQUENCE_NUMBERS, "first_sequence")
    _check(len(submit.outputs) in (0, num_sequences), "outputs")
    _check(len(submit.prompt) > 0, "prompt")
    _check(submit.max_tokens > 0, "max_tokens")
    _check(submit.min_tokens <= submit.max_tokens, "min_tokens")
    _check(len(submit.stop_token_ids) <= MAX_STOP_IDS + MAX_EOS_IDS, "stop_token_ids")
    _check(submit.logprobs <= MAX_LOGPROBS, "logprobs")
    _check(submit.max_draft_tokens <= MAX_DRAFT_TOKENS, "max_draft_tokens")
    _check(len(submit.cache.salt.encode()) <= MAX_SALT_BYTES, "cache.salt")
    _check(abs(submit.priority) <= MAX_PRIORITY, "priority")
    _check(0 <= submit.timeout_s < math.inf, "timeout_s")
    _check(0 <= submit.age_s < math.inf, "age_s")
    _check(not submit.tenant or TENANT_NAME.fullmatch(submit.tenant) is not None, "tenant")
    _check(len(submit.request_id) <= MAX_REQUEST_ID and submit.request_id.isprintable(), "request_id")
    for name in ("ttft_s", "tpot_s"):
        _check(not submit.slo.HasField(name) or 0 < getattr(submit.slo, name) <= MAX_SLO_S, f"slo.{name}")
    for each in PARAMETERS:
        _check(not sampling.HasField(each.name) or getattr(sampling, each.name) in each.interval, each.name)
    _check(len(sampling.logit_bias) <= MAX_LOGIT_BIAS, "sampling.logit_bias")
    _check(all(bias in LOGIT_BIAS for bias in sampling.logit_bias.values()), "sampling.logit_bias")
    _check(len(sampling.allowed_token_ids) <= vocab_size, "sampling.allowed_token_ids")
    if submit.HasField("readout"):
        _check_readout(submit)
    if submit.HasField("lender"):
        _check_lender(submit.lender)
    _check(len(submit.bad_words) <= _MAX_BAD_WORDS and all(word.ids for word in submit.bad_words), "bad_words")
    _check(not sampling.bad_words, "sampling.bad_words")
    _check(len(submit.adapter) in (0, IDENTITY_BYTES), "adapter")
    _check(submit.guided.ByteSize() <= 2 * MAX_GRAMMAR_BYTES, "guided")
    longest = len(submit.prompt) + max((len(output.ids) for output in submit.outputs), default=0)
    if longest >= max_model_len:
        raise Rejected(f"prompt of {longest} tokens, the limit is {max_model_len - 1}")
    lists = (each.ids for each in (*submit.outputs, *submit.bad_words))
    for ids in (submit.prompt, *lists, sampling.logit_bias, sampling.allowed_token_ids):
        if ids and (highest := max(ids)) >= vocab_size:
            raise Rejected(f"token id {highest} is not below {vocab_size}, the size of the vocabulary")


def _check_readout(submit: engine_pb2.Submit) -> None:
    readout = submit.readout
    if readout.HasField("logprobs_from"):
        _check(1 <= readout.logprobs_from <= len(submit.prompt), "readout.logprobs_from")
    _check(readout.num_top <= MAX_LOGPROBS, "readout.num_top")
    _check(readout.pooling in _POOLINGS, "readout.pooling")
    _check(not submit.outputs, "readout of a sequence that continues another one")


def _check_lender(lender: engine_pb2.Lender) -> None:
    _check(len(lender.address) <= _MAX_ADDRESS, "lender.address")
    try:
        check_address(lender.address, can_be_shm=False, lowest_port=1)
    except ValueError:
        raise InvalidMessage("it sent an invalid lender.address") from None


def check_abort(abort: engine_pb2.Abort) -> None:
    """Raises InvalidMessage."""
    _check(len(abort.sequences) <= _MAX_ABORTED, "abort.sequences")


def check_adapter(question: engine_pb2.LoadAdapter | engine_pb2.UnloadAdapter) -> None:
    """Raises InvalidMessage."""
    _check(0 < len(question.name) <= MAX_ADAPTER_NAME and question.name.isprintable(), "name of an adapter")
    if isinstance(question, engine_pb2.LoadAdapter):
        _check(0 < len(question.path) <= MAX_ADAPTER_PATH, "load_adapter.path")
        _check(len(question.identity) in (0, IDENTITY_BYTES), "load_adapter.identity")


def check_take_trace(take: engine_pb2.TakeTrace) -> None:
    """Raises InvalidMessage."""
    _check(not take.HasField("last_s") or take.last_s > 0, "take_trace.last_s")


def _check(is_valid: bool, field: str) -> None:
    if not is_valid:
        raise InvalidMessage(f"it sent an invalid {field}")


def sequences_from_submit(
    submit: engine_pb2.Submit,
    ids: Iterable[int],
    now: float,
    vocab_size: int,
    adapter: Adapter | None = None,
    make_mask: Callable[..., TokenMask] | None = None,
) -> list[Sequence]:
    """Return the sequences of a request that was checked; `ids` are theirs.

    adapter    the one that the request names
    make_mask  makes the masks of its grammar, if it has one, with the other arguments of GrammarMask
    """
    request = Request(
        prompt_len=len(submit.prompt),
        arrived=now,
        deadline=now + submit.timeout_s if submit.HasField("timeout_s") else math.inf,
        age_s=submit.age_s,
        priority=submit.priority,
        tenant=submit.tenant,
        ttft_s=submit.slo.ttft_s if submit.slo.HasField("ttft_s") else math.inf,
        tpot_s=submit.slo.tpot_s if submit.slo.HasField("tpot_s") else math.inf,
        cache_root=chain_root(submit.cache.salt, submit.adapter),
        bypass_cache=submit.cache.bypass,
        request_id=submit.request_id,
        shares_prompt=submit.sampling.n > 1 and not submit.outputs,
        readout=_readout(submit.readout) if submit.HasField("readout") else None,
        lender=Lender(submit.lender.address, submit.lender.num_tokens) if submit.HasField("lender") else None,
        adapter=adapter,
    )
    # A model's own ids may be beyond its vocabulary. They never occur, and runners count on ids that exist.
    stop_token_ids = frozenset(id for id in submit.stop_token_ids if id < vocab_size)
    return [_sequence(submit, request, stop_token_ids, index, id, make_mask) for index, id in enumerate(ids)]


def _readout(readout: engine_pb2.Readout) -> Readout:
    logprobs_from = readout.logprobs_from if readout.HasField("logprobs_from") else None
    return Readout(logprobs_from, readout.num_top, _POOLINGS[readout.pooling])


def _sequence(
    submit: engine_pb2.Submit,
    request: Request,
    stop_token_ids: frozenset[int],
    index: int,
    id: int,
    make_mask: Callable[..., TokenMask] | None,
) -> Sequence:
    """Return the request's sequence number `index`. Siblings draw from different seeds."""
    sampling = submit.sampling
    params = SamplingParams(
        **{name: value for field, value in sampling.ListFields() if (name := field.name) in _NUMBERS},
        logit_bias=tuple(sampling.logit_bias.items()),
        seed=(sampling.seed + index) & _SEED_MASK,
        max_tokens=submit.max_tokens,
        min_tokens=submit.min_tokens,
        stop_token_ids=stop_token_ids,
        logprobs=submit.logprobs if submit.HasField("logprobs") else None,
        max_draft_tokens=submit.max_draft_tokens if submit.HasField("max_draft_tokens") else None,
    )
    output = submit.outputs[index].ids if submit.outputs else ()
    mask = _mask(submit, params, request.prompt_len)
    if make_mask is not None:
        mask = make_mask(
            prompt_len=request.prompt_len,
            stop_ids=stop_token_ids,
            min_tokens=params.min_tokens,
            also=mask,
            jumps=params.logprobs is None,
        )
    return Sequence(id, [*submit.prompt, *output], request, params, None if mask is None else GuardedMask(mask))


def _mask(submit: engine_pb2.Submit, params: SamplingParams, prompt_len: int) -> TokenMask | None:
    allowed, has_bans = submit.sampling.allowed_token_ids, bool(params.no_repeat_ngram_size or submit.bad_words)
    if not allowed and not has_bans:
        return None
    # Only now: numpy takes a fifth of the time in which an engine of the synthetic model starts.
    from ..runners.sampling import AllowedTokens, TokenBans

    mask: TokenMask | None = AllowedTokens(allowed) if allowed else None
    if has_bans:
        mask = TokenBans(prompt_len, params.no_repeat_ngram_size, (word.ids for word in submit.bad_words), mask)
    return mask


def rejected(now: float, detail: str, field: str = "", reason: EndReason = EndReason.REJECTED) -> Ended:
    """The end of a sequence that never reaches the scheduler."""
    seq = Sequence(-1, [], Request(prompt_len=0, arrived=now), SamplingParams())
    return Ended(seq, reason, now, detail=detail, field=field)


@dataclass(slots=True)
class PendingOutput:
    """What a router has not been sent yet. If it reads slowly, several steps gather here and leave as one message."""

    sequences: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    ended: list[tuple[int, Ended]] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    readings: list[tuple[int, Reading]] = field(default_factory=list)
    load: LoadSnapshot | None = None

    @property
    def has_output(self) -> bool:
        return bool(self.tokens or self.ended or self.started or self.readings)

    def to_message(self) -> engine_pb2.StepOutput:
        return engine_pb2.StepOutput(
            sequences=self.sequences,
            tokens=self.tokens,
            logprobs=[_logprobs_message(at, found) for at, found in self.logprobs],
            ended=[_ended_message(sequence, ended) for sequence, ended in self.ended],
            load=_load_message(self.load) if self.load else None,
            started=self.started,
            readings=[
                engine_pb2.Reading(
                    sequence=sequence,
                    start=reading.start,
                    logprobs=[_logprobs_message(at, found) for at, found in enumerate(reading.logprobs, reading.start)],
                    embedding=reading.hidden,
                )
                for sequence, reading in self.readings
            ],
        )


def _logprobs_message(at: int, found: TokenLogprobs) -> engine_pb2.Logprobs:
    return engine_pb2.Logprobs(at=at, logprob=found.chosen, top_ids=found.top_ids, top_logprobs=found.top)


def _ended_message(sequence: int, ended: Ended) -> engine_pb2.Ended:
    return engine_pb2.Ended(
        sequence=sequence,
        reason=_END_REASONS[ended.reason],
        matched=ended.matched,
        detail=ended.detail,
        matched_grammar=ended.matched_grammar,
        field=ended.field,
        **{name: getattr(ended.seq.account, name) for name in _ACCOUNTED},
    )


def _load_message(load: LoadSnapshot) -> control_pb2.EngineLoad:
    referenced = load.blocks_total - load.blocks_free - load.blocks_evictable
    return control_pb2.EngineLoad(
        waiting=load.waiting,
        running=load.running,
        blocks_total=load.blocks_total,
        blocks_free=load.blocks_free,
        blocks_evictable=load.blocks_evictable,
        blocks_referenced=referenced,
        kv_slots=referenced * load.block_size,
        kv_slots_unused=load.kv_slots_unused,
        step_time_s=load.step_s,
        host_blocks_total=load.host.blocks_total,
        host_blocks_used=load.host.blocks_used,
        host_blocks_cached=load.host.blocks_cached,
        host_cached_tokens=load.host.hit_tokens,
        stored_blocks=load.host.stored_blocks,
        stored_read_tokens=load.host.read_tokens,
        stored_failed_blocks=load.host.failed_blocks,
        fetched_tokens=load.host.fetched_tokens,
        unfetched_blocks=load.host.unfetched_blocks,
        lent_tokens=load.host.lent_tokens,
        saved_tokens=load.host.saved_tokens,
        loaded_tokens=load.host.loaded_tokens,
        uncomputed_tokens=load.uncomputed_tokens,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        **{name: getattr(load.counters, name) for name in _COUNTED},
    )


def tenants_message(table: TenantTable) -> engine_pb2.Tenants:
    listed = [
        control_pb2.TenantLoad(
            name=tenant.name,
            waiting=tenant.waiting,
            running=tenant.running,
            service=tenant.service,
            recent_service=tenant.recent_service,
        )
        for tenant in table.listed
    ]
    return engine_pb2.Tenants(listed=listed, count=table.count, recent_service=table.recent_service)


def trace_messages(number: int, snapshot: TraceSnapshot) -> Iterator[engine_pb2.Trace]:
    """Yield a trace in parts, at least one. `number` is the one that the router gave its question."""
    steps, moves = snapshot.steps, snapshot.moves
    count = max(1, -(-max(len(steps), len(moves)) // STEPS_PER_PART))
    for index in range(count):
        of_part = slice(index * STEPS_PER_PART, (index + 1) * STEPS_PER_PART)
        part = trace_pb2.StepTracePart(
            taken_at_s=snapshot.taken_at,
            token_budget=snapshot.token_budget,
            max_num_seqs=snapshot.max_num_seqs,
            blocks_total=snapshot.blocks_total,
            steps=_traced_steps(steps[of_part]),
            moves=[_traced_move(move) for move in moves[of_part]],
        )
        yield engine_pb2.Trace(number=number, part=part, is_last=index == count - 1)


def _traced_steps(steps: list[Step]) -> Iterator[trace_pb2.TracedStep]:
    last_ids: tuple[int, ...] = ()
    for start, end, sketch in steps:
        ids, starts, lengths, idle, holds, waiting, next_in_line, hold, running, free, evictable = sketch
        yield trace_pb2.TracedStep(
            start_s=start,
            end_s=end,
            sequences=() if ids is last_ids else ids,
            chunk_starts=starts,
            chunk_lengths=lengths,
            idle=idle,
            idle_reasons=[_HOLDS[why] for why in holds],
            waiting=waiting,
            next_in_line=None if next_in_line < 0 else next_in_line,
            hold=_HOLDS[hold],
            running=running,
            blocks_free=free,
            blocks_evictable=evictable,
        )
        last_ids = ids


def _traced_move(move: Move) -> trace_pb2.TracedMove:
    at, kind, id, request_id, arrived, prompt_len, num_tokens, num_computed, tenant = move
    return trace_pb2.TracedMove(
        at_s=at,
        kind=_MOVE_KINDS[kind],
        sequence=id,
        request_id=request_id,
        arrived_s=arrived,
        prompt_tokens=prompt_len,
        tokens=num_tokens,
        computed_tokens=num_computed,
        tenant=tenant,
    )
