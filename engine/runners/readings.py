"""What is read from prompts while they are computed: log-probabilities of their tokens, and hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.step import Chunk, Reading, TokenLogprobs

_MAX_LOGITS = 1 << 22  # at once: 16 MB in float32, however long the chunk and large the vocabulary


def is_read(chunks: Iterable[Chunk]) -> bool:
    """Whether anything is to be read from the prompts of these chunks."""
    asking = [chunk for chunk in chunks if chunk.seq.request.readout is not None]  # in most steps none
    return any(chunk.seq.reads(chunk.start, chunk.end) for chunk in asking)


@dataclass(frozen=True, slots=True)
class PendingReading:
    """A reading whose values are on the device that computes them, perhaps not all computed yet.

    scores  [rows, 1 + num_top] float32, log-probabilities of the prompt's token and of the most likely ones
    ids     [rows, num_top] int64, the most likely tokens
    hidden  [hidden] float32, or empty
    """

    start: int
    scores: Tensor
    ids: Tensor
    hidden: Tensor

    def result(self) -> Reading | None:
        """Wait for the values. Returns None if one is not finite."""
        scores, hidden = self.scores.cpu(), self.hidden.cpu()
        if not (scores.isfinite().all() and hidden.isfinite().all()):
            return None
        rows = zip(scores.tolist(), self.ids.tolist(), strict=True)
        logprobs = [TokenLogprobs(chosen, ids, top) for (chosen, *top), ids in rows]
        return Reading(self.start, logprobs, hidden.tolist())


@dataclass(frozen=True, slots=True)
class StepHead:
    """What gives the logits [rows, vocab_size] after some of a step's tokens."""

    logits: Callable[[slice], Tensor]
    vocab_size: int


def read(
    head: StepHead, hidden: Tensor, token_ids: Tensor, chunks: Sequence[Chunk], offsets: Iterable[int]
) -> dict[int, PendingReading]:
    """Read what is wanted of the prompts in a step; the keys are chunk positions. Copies nothing to the device.

    hidden     [num_tokens, hidden], after the last norm
    token_ids  [num_tokens] int64
    offsets    the place of each chunk's first token among the step's
    """
    return {
        index: _read(head, hidden, token_ids, offset, chunk)
        for index, (chunk, offset) in enumerate(zip(chunks, offsets, strict=True))
        if chunk.seq.reads(chunk.start, chunk.end)
    }


def _read(head: StepHead, hidden: Tensor, token_ids: Tensor, offset: int, chunk: Chunk) -> PendingReading:
    seq, readout = chunk.seq, chunk.seq.request.readout
    assert readout is not None, "the caller has checked it"
    prompt_len = seq.request.prompt_len
    scored = readout.scored_rows(chunk.start, chunk.end, prompt_len)
    pooled = readout.pooled_rows(chunk.start, chunk.end, prompt_len)
    next_ids = token_ids[offset + 1 : offset + chunk.length]
    if scored.stop == chunk.end:
        next_ids = torch.cat((next_ids, token_ids.new_full((1,), seq.tokens[chunk.end])))
    of_scored = slice(scored.start - chunk.start, scored.stop - chunk.start) if scored else slice(0)
    scores, ids = _score(head, offset + (of_scored.start or 0), next_ids[of_scored], readout.num_top)
    first = offset - chunk.start
    states = hidden[first + pooled.start : first + pooled.stop] if pooled else hidden[:0]
    vector = states.float().sum(0) if pooled else states.float().flatten()
    return PendingReading(scored.start + 1, scores, ids, vector)


def _score(head: StepHead, first: int, next_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and most likely ids, as in PendingReading, of the token after each row.

    first     the first of the rows
    next_ids  [rows] int64, the tokens that come after them
    """
    at_once, num_top = max(1, _MAX_LOGITS // head.vocab_size), min(num_top, head.vocab_size)
    scores, ids = [next_ids.new_empty(0, 1 + num_top, dtype=torch.float32)], [next_ids.new_empty(0, num_top)]
    for start in range(0, len(next_ids), at_once):
        chosen_ids = next_ids[start : start + at_once]
        rows = slice(first + start, first + start + len(chosen_ids))
        logprobs = head.logits(rows).float().log_softmax(dim=-1)
        top, top_ids = logprobs.topk(num_top, dim=-1)
        chosen = logprobs.gather(1, chosen_ids[:, None])
        scores.append(torch.cat((chosen, top), dim=1))
        ids.append(top_ids)
    return torch.cat(scores), torch.cat(ids)
