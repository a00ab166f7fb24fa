"""The models that a router serves: what requests to each of them need, and which one a request means."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagoda.v1 import control_pb2, inference_pb2

from ...checkpoints.folder import read_json_object
from ...settings import ServeConfig
from ..answers.formats import AnswerFormat, format_of
from ..engines.adapters import Adapters
from ..engines.channel import RETRY_AFTER_S
from ..engines.fleet import Engines
from ..errors import InvalidArgument, NotFound, PagodaError, Unavailable
from ..tenants.caller import caller
from ..text.pooling import pooling_of
from ..text.tokenizer import Tokenizer
from .fields import Limits
from .guided import GrammarChecker
from .sampling import default_sampling

LONGEST_CONTEXT = 1 << 20  # tokens; a longer one needs --max-model-len


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model and its engines.

    name          as clients call it
    folder        its files
    format        how it writes its answers; None: that is not known
    limits        those of now: an engine that becomes ready reports its own
    engines       that have it
    adapters      that requests may use it with
    architecture  as the engine that was ready last has reported it; empty: none has been ready
    """

    name: str
    folder: Path
    tokenizer: Tokenizer
    format: AnswerFormat | None
    limits: Limits
    grammars: GrammarChecker
    engines: Engines
    adapters: Adapters
    architecture: str = ""

    @classmethod
    def of(
        cls,
        config: ServeConfig,
        name: str,
        folder: Path,
        tokenizer: Tokenizer,
        engines: Engines,
        adapters: Adapters,
    ) -> ServedModel:
        """A model with the limits that hold until an engine reports its own."""
        template = tokenizer.chat_template.source if tokenizer.chat_template else None
        format = format_of(template, config.tool_format, config.reasoning_format)
        recommended = inference_pb2.Sampling()
        if config.sampling_defaults == "model":
            recommended = default_sampling(tokenizer.recommended)
        limits = Limits(
            max_model_len=config.max_model_len or 1 << 31,
            vocab_size=tokenizer.vocab_size,
            kv_token_capacity=1 << 62,
            hidden_size=1 << 31,
            has_chat_template=tokenizer.chat_template is not None,
            has_tool_format=bool(format and format.tool_format),
            max_text_bytes=config.max_text_bytes,
            default_max_tokens=config.default_max_tokens,
            pooling=pooling_of(folder),
            other_name=folder.name if folder.name.startswith(f"{name}-") else "",  # of a .gguf file
            recommended=recommended,
        )
        grammars = GrammarChecker(tokenizer, lambda: caller().tenant)
        return cls(name, folder, tokenizer, format, limits, grammars, engines, adapters)

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

    @property
    def is_ready(self) -> bool:
        """Whether requests can name it, and what --lora has them name in its place."""
        return self.engines.refusal() is None and self.adapters.are_loaded

    def check_ready(self) -> None:
        """Raise Unavailable if no engine that has the model is ready."""
        if (why := self.engines.refusal()) is not None:
            raise why


@dataclass(frozen=True, slots=True)
class Target:
    """What a request is for: a model, alone or with one of its adapters.

    adapter  its name; empty: none
    """

    model: ServedModel
    adapter: str = ""

    @property
    def name(self) -> str:
        """As the client calls it."""
        return self.adapter or self.model.name

    @property
    def identity(self) -> bytes:
        """That of the adapter, now; empty without one. Raises NotFound, Unavailable."""
        return self.model.adapters.identity_of(self.adapter) if self.adapter else b""

    def check_ready(self) -> None:
        """Raise Unavailable if no engine that is ready has the model and holds the adapter, NotFound if none will."""
        self.model.check_ready()
        if self.adapter and (why := self.model.engines.holding(self.identity).refusal()) is not None:
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

    def named(self, name: str, lora_name: str = "") -> Target:
        """What a request means by the name of a model, or of an adapter in its place, and that of an adapter.

        Raises NotFound, which says how all models are called. An adapter that the caller may not name does not exist.
        InvalidArgument for two different adapters.
        """
        for model in self._models:
            if not name or model.is_called(name):
                if lora_name and not _may_name(model, lora_name):
                    raise NotFound(f"lora_name: the model {model.name} has no adapter of this name")
                return Target(model, lora_name)
        for model in self._models:
            if _may_name(model, name):
                if lora_name not in ("", name):
                    raise InvalidArgument("lora_name", "is another adapter than the one that model names")
                return Target(model, name)
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

    def check_listable(self) -> None:
        """Raise Unavailable unless a model `is_ready`: a list would lack names that requests can use in a moment."""
        if (why := self.refusal()) is not None:
            raise why
        if not any(model.is_ready for model in self._models):
            raise Unavailable("the adapters of --lora are being loaded", retry_after_s=RETRY_AFTER_S[0])


def _may_name(model: ServedModel, adapter: str) -> bool:
    return adapter in model.adapters and caller().may_name(adapter)


def longest_context(folder: Path) -> int:
    """The longest context that config.json speaks of. It only bounds messages: the engine's own limit comes later."""
    try:
        config: dict[str, Any] = read_json_object(folder / "config.json")
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        positions = float(config["max_position_embeddings"]) * max(float(scaling.get("factor", 1)), 1)
        return min(math.ceil(positions), LONGEST_CONTEXT)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return LONGEST_CONTEXT
