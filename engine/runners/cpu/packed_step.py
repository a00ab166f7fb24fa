"""A step as arrays of int32, for ranks that have no scheduler: token ids, positions, slots and block tables.

They name no sequence, so a rank keeps nothing from one step to the next but its pages. The first number of a message
says what it is: how many tokens a step has, or one of those below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....kernels import Backend, PagedKV
from ...core.step import StepPlan
from ...models import GroupInputs, StepInputs
from .step_arrays import StepArrays

_COPIES, _ROWS, _SLOTS = 0, -1, -2


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """What the slots of adapters get, and what a rank need not keep any longer.

    puts     slots, each with the number of the load whose adapter it gets
    dropped  numbers of loads
    """

    puts: list[tuple[int, int]]
    dropped: list[int]


def packed_copies(plan: StepPlan) -> bytes:
    """A plan's copies, without its chunks."""
    pairs = [np.array(each, dtype=np.int32).ravel() for each in (plan.saves, plan.loads, plan.copies)]
    return np.concatenate((np.array([_COPIES, *map(len, pairs)], dtype=np.int32), *pairs)).tobytes()


def packed_rows(rows: Tensor) -> bytes:
    """The rows [count] int64 of the last step whose logits are wanted."""
    return np.concatenate(([_ROWS], rows.numpy()), dtype=np.int32, casting="same_kind").tobytes()


def packed_slots(changes: SlotChanges) -> bytes:
    numbers = [_SLOTS, len(changes.puts), *(number for pair in changes.puts for number in pair), *changes.dropped]
    return np.array(numbers, dtype=np.int32).tobytes()


def packed_inputs(inputs: StepInputs) -> bytes:
    """A step's inputs, without the rows of its logits."""
    plans = [next(iter(group.attention.values())) for group in inputs.groups]
    first = plans[0]
    parts = [inputs.token_ids, inputs.positions, first.query_start, first.context_len]
    for group, plan in zip(inputs.groups, plans, strict=True):
        parts += [group.slots, plan.block_table.flatten()]
    if inputs.adapter_slots is not None:
        parts.append(inputs.adapter_slots)
    has_adapters = inputs.adapter_slots is not None
    sizes = [len(inputs.token_ids), len(first.context_len), first.block_table.shape[1], has_adapters]
    return np.concatenate((sizes, *(part.numpy() for part in parts)), dtype=np.int32, casting="same_kind").tobytes()


def unpacked(
    message: bytes, kv: PagedKV, ops: Backend, arrays: StepArrays
) -> StepPlan | StepInputs | Tensor | SlotChanges:
    """What one of the functions above has packed. A plan has copies alone."""
    numbers = np.frombuffer(bytearray(message), dtype=np.int32)
    if numbers[0] == _ROWS:
        return torch.from_numpy(numbers[1:].astype(np.int64))
    if numbers[0] == _COPIES:
        saves, loads, copies = (
            [(first, second) for first, second in part.reshape(-1, 2).tolist()]
            for part in _split(numbers[4:], *numbers[1:4].tolist())
        )
        return StepPlan([], copies, saves, loads)
    if numbers[0] == _SLOTS:
        end = 2 + 2 * int(numbers[1])
        puts = [(slot, number) for slot, number in numbers[2:end].reshape(-1, 2).tolist()]
        return SlotChanges(puts, numbers[end:].tolist())
    num_tokens, num_parts, num_blocks, has_adapters = numbers[:4].tolist()
    of_group = [num_tokens, num_parts * num_blocks]
    token_ids, positions, query_start, context_len, *rest = _split(
        numbers[4:],
        *(num_tokens, num_tokens, num_parts + 1, num_parts),
        *of_group * len(arrays.windows),
        has_adapters * num_tokens,
    )
    adapter_slots = rest.pop()
    groups = []
    for slots, block_table, windows in zip(rest[::2], rest[1::2], arrays.windows, strict=True):
        table = block_table.reshape(num_parts, num_blocks)
        plans = {
            window: ops.plan_attention(query_start, context_len, table, kv, window, ops.is_deterministic)
            for window in windows
        }
        groups.append(GroupInputs(torch.from_numpy(slots.astype(np.int64)), plans))
    return StepInputs(
        token_ids=torch.from_numpy(token_ids.astype(np.int64)),
        positions=torch.from_numpy(positions.astype(np.int64)),
        logit_rows=None,
        groups=groups,
        group_of=arrays.group_of,
        adapter_slots=torch.from_numpy(adapter_slots) if has_adapters else None,
    )


def _split(numbers: np.ndarray, *sizes: int) -> Iterator[np.ndarray]:
    return iter(np.split(numbers, np.cumsum(sizes)[:-1]))
