"""A plain reference of beam search over the synthetic model: whole texts, no blocks, every candidate written out."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_server.engine.runners.synthetic import advance, expected_logprobs


@dataclass(frozen=True)
class Expected:
    """A hypothesis: its tokens, its score, and the stop id that ended it."""

    tokens: list[int]
    score: float
    matched: int | None


def expected_beams(
    prompt: list[int],
    max_tokens: int,
    vocab_size: int,
    *,
    width: int,
    length_penalty: float = 1.0,
    early_stopping: str = "estimated",
    stop_ids: frozenset[int] = frozenset(),
    min_tokens: int = 0,
) -> list[Expected]:
    """The hypotheses that a search finds, best first."""
    texts: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[Expected] = []
    for length in range(1, max_tokens + 1):
        longer = []
        for score, text in texts:
            checksum = 0
            for token in [*prompt, *text]:
                checksum = advance(checksum, token)
            likely = expected_logprobs(checksum, width + len(stop_ids), vocab_size)  # of which `width` do not end it
            allowed = [pair for pair in zip(likely.top_ids, likely.top, strict=True)
                       if length > min_tokens or pair[0] not in stop_ids]  # fmt: skip
            longer += [(score + logprob, [*text, token]) for token, logprob in allowed]
        longer.sort(key=lambda pair: -pair[0])
        for score, text in longer[:width]:
            if text[-1] in stop_ids or length == max_tokens:
                matched = text[-1] if text[-1] in stop_ids else None
                finished.append(Expected(text, score / length**length_penalty, matched))
        finished = sorted(finished, key=lambda one: -one.score)[:width]
        texts = [pair for pair in longer if pair[1][-1] not in stop_ids][:width]
        if len(finished) == width:
            is_best = early_stopping == "best"
            hoped = max_tokens if is_best and length_penalty > 0 else length
            if early_stopping == "enough":
                break
            if texts[0][0] / hoped**length_penalty <= finished[-1].score:
                break
    return finished
