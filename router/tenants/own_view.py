"""What a caller without the right to observe sees of a server that it shares with other tenants.

It sees all of its own tenant. Of the others it learns how many requests, sequences and tenants there are, and nothing
that follows the size of a single request: no tokens, no blocks, and no share in more than two digits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from pagoda.v1 import control_pb2, trace_pb2

from .caller import Right, caller

_SLICE = 64  # steps or moves between which the event loop serves others


def seen_load(load: control_pb2.Load) -> control_pb2.Load:
    """What the caller may see of the load. Leaves the load as it is."""
    if caller().may(Right.OBSERVE):
        return load
    tenant = caller().tenant
    seen = control_pb2.Load(requests=load.requests, num_tenants=load.num_tenants)
    for engine in load.engines:
        seen.engines.add(engine=engine.engine, waiting=engine.waiting, running=engine.running)
    for listed in load.tenants:
        if listed.name == tenant:
            seen.tenants.add().CopyFrom(listed)
            seen.tenants[0].share = round(listed.share, 2)
    return seen


def seen_info(info: control_pb2.ServerInfo) -> control_pb2.ServerInfo:
    """What the caller may see of the server: unless it may observe, nothing that names tenants, machines or engines."""
    if not caller().may(Right.OBSERVE):
        for settings in (info.settings, *(engine.info.settings for engine in info.engines)):
            for name in [name for name in settings if name.startswith("tenant") or name == "node"]:
                del settings[name]
        for engine in info.engines:
            engine.name = engine.refused = ""
    return info


async def seen_trace(parts: Sequence[trace_pb2.StepTracePart]) -> AsyncIterator[trace_pb2.StepTracePart]:
    """What the caller may see of an engine's trace: its own tenant's sequences alone unless it may observe."""
    if caller().may(Right.OBSERVE):
        for part in parts:
            yield part
        return
    tenant = caller().tenant
    own: set[int] = set()
    for part in parts:
        for index in range(0, len(part.moves), _SLICE):
            own.update(move.sequence for move in part.moves[index : index + _SLICE] if move.tenant == tenant)
            await asyncio.sleep(0)
    for part in parts:
        seen = trace_pb2.StepTracePart(
            taken_at_s=part.taken_at_s,
            token_budget=part.token_budget,
            max_num_seqs=part.max_num_seqs,
            is_partial=True,
        )
        sequences: Sequence[int] = ()
        for index in range(0, len(part.steps), _SLICE):
            for step in part.steps[index : index + _SLICE]:
                sequences = step.sequences or sequences
                seen.steps.append(_own_step(step, sequences, own))
            await asyncio.sleep(0)
        seen.moves.extend(move for move in part.moves if move.tenant == tenant)
        yield seen


def _own_step(step: trace_pb2.TracedStep, sequences: Sequence[int], own: set[int]) -> trace_pb2.TracedStep:
    num_decodes = len(sequences) - len(step.chunk_lengths)
    chunks = [at for at, sequence in enumerate(sequences[num_decodes:]) if sequence in own]
    idle = [at for at, sequence in enumerate(step.idle) if sequence in own]
    return trace_pb2.TracedStep(
        start_s=step.start_s,
        end_s=step.end_s,
        sequences=[sequence for sequence in sequences if sequence in own],
        chunk_starts=[step.chunk_starts[at] for at in chunks],
        chunk_lengths=[step.chunk_lengths[at] for at in chunks],
        idle=[step.idle[at] for at in idle],
        idle_reasons=[step.idle_reasons[at] for at in idle],
        waiting=step.waiting,
        next_in_line=step.next_in_line if step.HasField("next_in_line") and step.next_in_line in own else None,
        hold=step.hold,
        running=step.running,
    )
