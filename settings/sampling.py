"""The specification of sampling parameters, from which the router checks requests and the engine samples.

Each number that a request may set is one entry here. Its field in protos/pagoda/v1/inference.proto has the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Interval:
    """The values that a number may have. NaN is in no interval."""

    low: float
    high: float
    includes_low: bool = True

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and (self.includes_low or value > self.low)

    def __str__(self) -> str:
        return f"{'[' if self.includes_low else '('}{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number of `Sampling`. Its default changes nothing; the temperature's takes the most likely token."""

    name: str
    default: float
    interval: Interval
    help: str

    @property
    def is_integer(self) -> bool:
        return isinstance(self.default, int)


LOGIT_BIAS = Interval(-100, 100)

# Requests for a model whose authors recommend no temperature are drawn as llama.cpp draws them by default. Small models
# repeat themselves under greedy decoding, and write nonsense if they are drawn at a temperature of 1.
UNRECOMMENDED: Mapping[str, float] = MappingProxyType({"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05})


def _spec(interval: Interval, help: str) -> dict[str, Any]:
    return {"interval": interval, "help": help}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's next token is chosen; the defaults take the most likely token.

    logit_bias  (token id, bias): no id twice, each bias within LOGIT_BIAS
    seed        determines the randomness, with the position of the token to choose: the same at any load
    """

    temperature: float = field(default=0.0, metadata=_spec(Interval(0, 100), "0 takes the most likely token."))
    top_k: int = field(
        default=0, metadata=_spec(Interval(0, (1 << 32) - 1), "Keep this many of the most likely tokens; 0 keeps all.")
    )
    top_p: float = field(
        default=1.0,
        metadata=_spec(Interval(0, 1, includes_low=False), "Keep the most likely tokens up to this probability."),
    )
    min_p: float = field(
        default=0.0, metadata=_spec(Interval(0, 1), "Keep tokens at least this many times as likely as the best one.")
    )
    top_n_sigma: float = field(
        default=0.0,
        metadata=_spec(Interval(0, 100), "Keep tokens within so many standard deviations of the best; 0 keeps all."),
    )
    repetition_penalty: float = field(
        default=1.0,
        metadata=_spec(Interval(0, 10, includes_low=False), "Make tokens of prompt and output less likely, above 1."),
    )
    presence_penalty: float = field(
        default=0.0, metadata=_spec(Interval(-10, 10), "Subtract this from the logits of tokens in the output.")
    )
    frequency_penalty: float = field(
        default=0.0, metadata=_spec(Interval(-10, 10), "Subtract this for each time that the output holds a token.")
    )
    no_repeat_ngram_size: int = field(
        default=0, metadata=_spec(Interval(0, 64), "Repeat no sequence of this many tokens; 0 allows all.")
    )
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0


PARAMETERS = tuple(
    Parameter(each.name, cast(float, each.default), each.metadata["interval"], each.metadata["help"])
    for each in fields(Sampling)
    if each.metadata
)
