"""The models that a router serves: what requests to each of them need, and which one a request means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pagoda.v1 import control_pb2

from ..answers.formats import AnswerFormat
from ..engines.fleet import Engines
from ..errors import NotFound, PagodaError, Unavailable
from ..text.tokenizer import Tokenizer
from .fields import Limits
from .guided import GrammarChecker


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model and its engines.

    name          as clients call it
    folder        its files
    format        how it writes its answers; None: that is not known
    limits        those of now: an engine that becomes ready reports its own
    engines       that have it
    architecture  as the engine that was ready last has reported it; empty: none has been ready
    """

    name: str
    folder: Path
    tokenizer: Tokenizer
    format: AnswerFormat | None
    limits: Limits
    grammars: GrammarChecker
    engines: Engines
    architecture: str = ""

    def is_called(self, name: str) -> bool:
        return name == self.name or (bool(name) and name == self.limits.other_name)

    def adopt(self, ready: Sequence[control_pb2.EngineInfo]) -> None:
        """Adopt the smallest limits of the engines that are ready, because any of them may get a request."""
        if not ready:
            return
        self.architecture = ready[0].architecture
        self.limits = replace(
            self.limits,
            max_model_len=min(info.max_model_len for info in ready),
            vocab_size=min(info.vocab_size for info in ready),
            kv_token_capacity=min(info.kv_cache.token_capacity for info in ready),
            hidden_size=min(info.hidden_size for info in ready),
        )

    def check_ready(self) -> None:
        """Raise Unavailable if no engine that has the model is ready."""
        if (why := self.engines.refusal()) is not None:
            raise why


class ServedModels:
    """All models of a router. The first one serves requests that name none."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def first(self) -> ServedModel:
        return self._models[0]

    @property
    def limits(self) -> Limits:
        """What holds for a message before it is known which model it means: the widest limits of those with engines."""
        if len(self._models) == 1:
            return self.first.limits
        known = [model.limits for model in self._models if model.architecture] or [self.first.limits]
        return replace(
            known[0],
            max_model_len=max(each.max_model_len for each in known),
            vocab_size=max(each.vocab_size for each in known),
            has_chat_template=any(each.has_chat_template for each in known),
        )

    def named(self, name: str) -> ServedModel:
        """The model that a request means by this name. Raises NotFound, which says how all models are called."""
        if not name:
            return self.first
        for model in self._models:
            if model.is_called(name):
                return model
        if len(self._models) == 1:
            raise NotFound(f"model: not served here; the served model is {self.first.name}")
        raise NotFound(f"model: not served here; the served models are {', '.join(each.name for each in self._models)}")

    def refusal(self) -> PagodaError | None:
        """Why no request can be served now, whatever model it means; None: some can."""
        if len(self._models) == 1:
            return self.first.engines.refusal()
        if any(model.engines.ready for model in self._models):
            return None
        delays = [delay for model in self._models if (delay := model.engines.retry_after_s) is not None]
        return Unavailable("no engine of any model is ready", retry_after_s=min(delays, default=None))
