"""Channel messages to the engine's own types, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2
from pagoda_server.engine.core.output import Ended
from pagoda_server.engine.core.sequence import EndReason, SamplingParams, Sequence, TokenLogprobs
from pagoda_server.engine.kv.blocks import chain_root
from pagoda_server.engine.loop.loop import LoadSnapshot
from pagoda_server.engine.runners.sampling import AllowedTokens
from pagoda_server.engine.scheduling.tenants import TenantTable
from pagoda_server.settings.sampling import PARAMETERS

_END_REASONS = {
    EndReason.STOP: engine_pb2.END_REASON_STOP,
    EndReason.LENGTH: engine_pb2.END_REASON_LENGTH,
    EndReason.ABORTED: engine_pb2.END_REASON_ABORTED,
    EndReason.DEADLINE: engine_pb2.END_REASON_DEADLINE,
    EndReason.REJECTED: engine_pb2.END_REASON_REJECTED,
    EndReason.FAILED: engine_pb2.END_REASON_FAILED,
}
_NUMBERS = {parameter.name for parameter in PARAMETERS}
_SEED_MASK = (1 << 64) - 1


def sequence_from_submit(submit: engine_pb2.Submit, index: int, id: int, now: float) -> Sequence:
    """The request's sequence number `index` of n. Siblings draw from different seeds."""
    sampling = submit.sampling
    params = SamplingParams(
        **{name: value for field, value in sampling.ListFields() if (name := field.name) in _NUMBERS},
        logit_bias=tuple(sampling.logit_bias.items()),
        seed=(sampling.seed + index) & _SEED_MASK,
        max_tokens=submit.max_tokens,
        min_tokens=submit.min_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        logprobs=submit.logprobs if submit.HasField("logprobs") else None,
    )
    output = submit.outputs[index].ids if submit.outputs else ()
    return Sequence(
        id=id,
        tokens=[*submit.prompt, *output],
        prompt_len=len(submit.prompt),
        params=params,
        arrived=now,
        deadline=now + submit.timeout_s if submit.HasField("timeout_s") else math.inf,
        priority=submit.priority,
        tenant=submit.tenant,
        ttft_s=submit.slo.ttft_s if submit.slo.HasField("ttft_s") else math.inf,
        tpot_s=submit.slo.tpot_s if submit.slo.HasField("tpot_s") else math.inf,
        cache_root=chain_root(submit.cache.salt),
        bypass_cache=submit.cache.bypass,
        request_id=submit.request_id,
        token_mask=AllowedTokens(sampling.allowed_token_ids) if sampling.allowed_token_ids else None,
        age_s=submit.age_s,
    )


@dataclass(slots=True)
class PendingOutput:
    """What a router has not been sent yet. Steps that it is too slow to read gather here, to leave as one message."""

    sequences: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    ended: list[tuple[int, Ended]] = field(default_factory=list)
    load: LoadSnapshot | None = None

    @property
    def is_empty(self) -> bool:
        return self.load is None and not self.tokens and not self.ended

    def to_message(self) -> engine_pb2.StepOutput:
        return engine_pb2.StepOutput(
            sequences=self.sequences,
            tokens=self.tokens,
            logprobs=[
                engine_pb2.Logprobs(at=at, logprob=found.chosen, top_ids=found.top_ids, top_logprobs=found.top)
                for at, found in self.logprobs
            ],
            ended=[_ended_message(sequence, ended) for sequence, ended in self.ended],
            load=_load_message(self.load) if self.load else None,
        )


def _ended_message(sequence: int, ended: Ended) -> engine_pb2.Ended:
    seq = ended.seq
    return engine_pb2.Ended(
        sequence=sequence,
        reason=_END_REASONS[ended.reason],
        matched=ended.matched,
        cached_tokens=seq.cached_tokens,
        preemptions=seq.preemptions,
        recomputed_tokens=seq.recomputed_tokens,
        queue_s=seq.queue_s,
        prefill_s=seq.prefill_s,
        decode_s=seq.decode_s,
        preempted_s=seq.preempted_s,
        detail=ended.detail,
        preempted_tokens=seq.preempted_tokens,
        saved_tokens=seq.saved_tokens,
        loaded_tokens=seq.loaded_tokens,
    )


def _load_message(load: LoadSnapshot) -> control_pb2.EngineLoad:
    counters = load.counters
    return control_pb2.EngineLoad(
        waiting=load.waiting,
        running=load.running,
        blocks_total=load.blocks_total,
        blocks_free=load.blocks_free,
        blocks_evictable=load.blocks_evictable,
        blocks_referenced=load.blocks_total - load.blocks_free - load.blocks_evictable,
        kv_slots_unused=load.kv_slots_unused,
        steps=counters.steps,
        preemptions=counters.preemptions,
        recomputed_tokens=counters.recomputed_tokens,
        kv_slots=(load.blocks_total - load.blocks_free - load.blocks_evictable) * load.block_size,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        output_tokens=counters.output_tokens,
        step_sequences=counters.step_sequences,
        step_tokens=counters.step_tokens,
        step_s=load.step_s,
        preempted_tokens=counters.preempted_tokens,
        dropped_tokens=counters.dropped_tokens,
        host_blocks_total=load.host.blocks_total,
        host_blocks_used=load.host.blocks_used,
        saved_tokens=load.host.saved_tokens,
        loaded_tokens=load.host.loaded_tokens,
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
