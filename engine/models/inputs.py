"""What a model computes in one step, given explicitly: nothing is looked up behind its back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pagoda_server.kernels import AttentionPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The packed tokens of several sequences.

    token_ids, positions  [num_tokens] int64
    slots                 [num_tokens] int64, where their keys and values go; -1: nowhere
    logit_rows            [num_logits] int64, the tokens after which the next one is wanted; None: all
    attention             which tokens see which slots
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor | None
    attention: AttentionPlan
