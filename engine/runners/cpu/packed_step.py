"""A step as arrays of int32, for ranks that have no scheduler: token ids, positions, slots and block tables.

They name no sequence, so a rank keeps nothing from one step to the next but its pages. The first number of a message
says what it is: how many tokens a step has, or one of those below.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ....kernels import Backend, PagedKV
from ...core.step import StepPlan
from ...models import GroupInputs, StepInputs
from .step_arrays import StepArrays

_COPIES, _ROWS = 0, -1


def packed_copies(plan: StepPlan) -> bytes:
    """A plan's copies, without its chunks."""
    pairs = [np.array(each, dtype=np.int32).ravel() for each in (plan.saves, plan.loads, plan.copies)]
    return np.concatenate((np.array([_COPIES, *map(len, pairs)], dtype=np.int32), *pairs)).tobytes()


def packed_rows(rows: Tensor) -> bytes:
    """The rows [count] int64 of the last step whose logits are wanted."""
    return np.concatenate(([_ROWS], rows.numpy()), dtype=np.int32, casting="same_kind").tobytes()


def packed_inputs(inputs: StepInputs) -> bytes:
    """A step's inputs, without the rows of its logits."""
    plans = [next(iter(group.attention.values())) for group in inputs.groups]
    first = plans[0]
    parts = [inputs.token_ids, inputs.positions, first.query_start, first.context_len]
    for group, plan in zip(inputs.groups, plans, strict=True):
        parts += [group.slots, plan.block_table.flatten()]
    sizes = [len(inputs.token_ids), len(first.context_len), first.block_table.shape[1]]
    return np.concatenate((sizes, *(part.numpy() for part in parts)), dtype=np.int32, casting="same_kind").tobytes()


def unpacked(message: bytes, kv: PagedKV, ops: Backend, arrays: StepArrays) -> StepPlan | StepInputs | Tensor:
    """What one of the functions above has packed: a plan that has copies alone, the inputs of a step, or rows."""
    numbers = np.frombuffer(bytearray(message), dtype=np.int32)
    if numbers[0] == _ROWS:
        return torch.from_numpy(numbers[1:].astype(np.int64))
    if numbers[0] == _COPIES:
        saves, loads, copies = (
            [(first, second) for first, second in part.reshape(-1, 2).tolist()]
            for part in _split(numbers[4:], *numbers[1:4].tolist())
        )
        return StepPlan([], copies, saves, loads)
    num_tokens, num_parts, num_blocks = numbers[:3].tolist()
    of_group = [num_tokens, num_parts * num_blocks]
    token_ids, positions, query_start, context_len, *rest = _split(
        numbers[3:], num_tokens, num_tokens, num_parts + 1, num_parts, *of_group * len(arrays.windows)
    )
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
    )


def _split(numbers: np.ndarray, *sizes: int) -> Iterator[np.ndarray]:
    return iter(np.split(numbers, np.cumsum(sizes)[:-1]))
