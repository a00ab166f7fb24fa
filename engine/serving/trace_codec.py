"""The step trace as channel messages, in parts that take a few milliseconds each."""

from __future__ import annotations

from collections.abc import Iterator

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import trace_pb2
from pagoda_server.engine.core.output import Hold
from pagoda_server.engine.core.sequence import EndReason
from pagoda_server.engine.loop.step_trace import Move, MoveKind, Step, TraceSnapshot

PER_PART = 512  # steps, and moves

_HOLDS: dict[Hold | None, trace_pb2.HoldReason] = {
    None: trace_pb2.HOLD_REASON_UNSPECIFIED,
    "no place": trace_pb2.HOLD_REASON_NO_PLACE,
    "no blocks": trace_pb2.HOLD_REASON_NO_BLOCKS,
    "no budget": trace_pb2.HOLD_REASON_NO_BUDGET,
    "late": trace_pb2.HOLD_REASON_LATE,
    "token pending": trace_pb2.HOLD_REASON_TOKEN_PENDING,
}
_KINDS: dict[MoveKind, trace_pb2.MoveKind] = {
    "waits": trace_pb2.MOVE_KIND_WAITS,
    "started": trace_pb2.MOVE_KIND_STARTED,
    "preempted": trace_pb2.MOVE_KIND_PREEMPTED,
    EndReason.STOP: trace_pb2.MOVE_KIND_FINISHED,
    EndReason.LENGTH: trace_pb2.MOVE_KIND_FINISHED,
    EndReason.ABORTED: trace_pb2.MOVE_KIND_ABORTED,
    EndReason.DEADLINE: trace_pb2.MOVE_KIND_EXPIRED,
    EndReason.REJECTED: trace_pb2.MOVE_KIND_REJECTED,
    EndReason.FAILED: trace_pb2.MOVE_KIND_FAILED,
}


def trace_messages(number: int, snapshot: TraceSnapshot) -> Iterator[engine_pb2.Trace]:
    """At least one, each made when it is asked for. `number`: the request's."""
    steps, moves = snapshot.steps, snapshot.moves
    count = max(1, -(-max(len(steps), len(moves)) // PER_PART))
    for at in range(count):
        of_part = slice(at * PER_PART, (at + 1) * PER_PART)
        part = trace_pb2.StepTracePart(
            taken_at_s=snapshot.taken_at,
            token_budget=snapshot.token_budget,
            max_num_seqs=snapshot.max_num_seqs,
            blocks_total=snapshot.blocks_total,
            steps=_steps(steps[of_part]),
            moves=[_move(move) for move in moves[of_part]],
        )
        yield engine_pb2.Trace(number=number, part=part, is_last=at == count - 1)


def _steps(steps: list[Step]) -> Iterator[trace_pb2.TracedStep]:
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


def _move(move: Move) -> trace_pb2.TracedMove:
    at, kind, id, request_id, arrived, prompt_len, num_tokens, num_computed = move
    return trace_pb2.TracedMove(
        at_s=at,
        kind=_KINDS[kind],
        sequence=id,
        request_id=request_id,
        arrived_s=arrived,
        prompt_tokens=prompt_len,
        tokens=num_tokens,
        computed_tokens=num_computed,
    )
