"""Which of a router's models an engine has, by what the engine says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagoda.v1 import control_pb2

from ...checkpoints.fingerprint import weights_fingerprint
from ..errors import ConfigError
from .refusals import WrongEngine


@dataclass(frozen=True, slots=True)
class Signature:
    """What identifies one of a router's models.

    tokenizer  SHA-256 of its tokenizer.json, in hex
    weights    their fingerprint; empty: the tokenizer is no other model's, and the engines settle whose weights serve
    """

    name: str
    tokenizer: str
    weights: str = ""


def signatures(models: Sequence[tuple[str, Path, str]]) -> list[Signature]:
    """The signatures of models, of which each has a name, a folder and the fingerprint of its tokenizer.

    Raises ConfigError for two models with the same signature, CheckpointError for a folder without the weights that are
    needed.
    """
    count = Counter(tokenizer for _, _, tokenizer in models)
    found: dict[tuple[str, str], Signature] = {}
    for name, folder, tokenizer in models:
        weights = weights_fingerprint(folder) if count[tokenizer] > 1 else ""
        if count[tokenizer] > 1 and not weights:
            raise ConfigError(f"--also-serve: {name} has random weights, and the tokenizer of another model")
        if (other := found.get((tokenizer, weights))) is not None:
            raise ConfigError(f"--also-serve: {other.name} and {name} have the same tokenizer and the same weights")
        found[tokenizer, weights] = Signature(name, tokenizer, weights)
    return list(found.values())


def model_of(info: control_pb2.EngineInfo, known: Sequence[Signature]) -> str:
    """The name of the model that an engine has. Raises WrongEngine if that is none of these."""
    with_tokenizer = [each for each in known if each.tokenizer == info.tokenizer_sha256]
    if not with_tokenizer:
        whose = "another tokenizer" if len(known) == 1 else "the tokenizer of no model that this router serves"
        raise WrongEngine("tokenizer", f"it serves {info.model} with {whose}")
    for each in with_tokenizer:
        if each.weights in ("", info.weights_fingerprint):
            return each.name
    names = ", ".join(each.name for each in with_tokenizer)
    raise WrongEngine("weights", f"it serves {info.model}, whose weights are none of those of {names}")
