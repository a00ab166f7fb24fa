"""One sequence, as the sampler sees it: its parameters as arrays, and what must change in its logits."""

from __future__ import annotations

import math

import numpy as np

from pagoda_server.engine.core.sequence import SamplingParams, Sequence
from pagoda_server.engine.runners.cpu.seen_tokens import SeenTokens
from pagoda_server.kernels import noise_key

_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)  # below it, a division would give no number


class SamplingRow:
    """Made when a sequence is first sampled, kept while it goes on; `fault` tells why it cannot be sampled.

    draws                 a token is drawn at random; otherwise the most likely is taken
    seen                  tokens that penalties apply to; None: no penalties
    bias_ids, bias        int64 and float32
    stop_ids              int64, banned while fewer than min_tokens exist
    is_plain              the most likely token, and nothing else is asked for
    """

    def __init__(self, seq: Sequence, vocab_size: int) -> None:
        params = seq.params
        self.seq = seq
        self.fault = find_fault(params, vocab_size)
        self.draws = draws_at_random(params)
        self.seen = SeenTokens(seq) if params.has_penalties else None
        self.bias_ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self.stop_ids = np.array([token for token in params.stop_token_ids if 0 <= token < vocab_size], dtype=np.int64)

        holds_stops_back = params.min_tokens > 0 and len(self.stop_ids) > 0
        changes = params.has_penalties or len(self.bias) > 0 or holds_stops_back
        self.is_plain = not (self.fault or self.draws or changes or params.logprobs is not None)

    @property
    def bans_stops(self) -> bool:
        return self.seq.output_len < self.seq.params.min_tokens and len(self.stop_ids) > 0

    @property
    def changes_logits(self) -> bool:
        return self.seen is not None or len(self.bias) > 0 or self.bans_stops

    @property
    def noise_key(self) -> int:
        """The position is the number of tokens before the one to draw."""
        return noise_key(self.seq.params.seed, self.seq.num_tokens)


def draws_at_random(params: SamplingParams) -> bool:
    """Otherwise the most likely token is taken."""
    return params.temperature >= _SMALLEST_TEMPERATURE and params.top_k != 1


def find_fault(params: SamplingParams, vocab_size: int) -> str | None:
    """Why these parameters cannot be used with this vocabulary: one row's mistake must not spoil the batch."""
    for name, least, most in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.0, math.inf),
        ("presence_penalty", -math.inf, math.inf),
        ("frequency_penalty", -math.inf, math.inf),
    ):
        value = getattr(params, name)
        if not (math.isfinite(value) and least <= value <= most):
            return f"{name} is {value}, outside [{least}, {most}]"
    if params.repetition_penalty == 0:
        return "repetition_penalty is 0"
    if params.top_k < 0:
        return f"top_k is {params.top_k}, below 0"
    for token, bias in params.logit_bias:
        if not 0 <= token < vocab_size:
            return f"logit_bias names token {token}; the vocabulary has {vocab_size}"
        if not math.isfinite(bias):
            return f"logit_bias of token {token} is {bias}"
    if len({token for token, _ in params.logit_bias}) < len(params.logit_bias):
        return "logit_bias names a token twice"
    return None
