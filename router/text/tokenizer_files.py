"""What a Hugging Face model folder says about its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ...checkpoints.folder import quoted, read_bounded, read_json_object
from ..errors import ConfigError

Json: TypeAlias = Mapping[str, Any]

_MAX_ID = 1 << 32
_MAX_TOKENIZER_BYTES = 256 << 20  # the largest known has 33 MB
_MAX_TEMPLATE_BYTES = 1 << 20
_TRUNCATIONS = ("top_k", "top_p", "min_p")
_REPETITION = ("repetition_penalty", "no_repeat_ngram_size")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A model folder's statements about its tokenizer and its sampling.

    tokenizer_json  the file's content
    special_tokens  role → text, such as eos_token → <|im_end|>; templates use them
    chat_template   jinja2; None if the model has none
    eos_token_ids   ids that end a sequence, besides special_tokens' eos_token
    recommended     sampling parameters in generation_config.json, by name, unchecked
    """

    tokenizer_json: bytes
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    recommended: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles:
        """Raises ConfigError if tokenizer.json is missing or a file is broken."""
        tokenizer_json = _read(folder / "tokenizer.json", _MAX_TOKENIZER_BYTES)
        if tokenizer_json is None:
            raise ConfigError(f"there is no tokenizer.json in {folder}")
        config = _read_object(folder / "tokenizer_config.json")
        return cls(
            tokenizer_json,
            _special_tokens(config),
            _chat_template(folder, config),
            _eos_token_ids(folder),
            _recommended(folder),
        )


def _read(path: Path, most_bytes: int) -> bytes | None:
    """None if there is no such file."""
    try:
        return read_bounded(path, most_bytes)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path} {error}") from error


def _read_object(path: Path) -> Json:
    """Empty if there is no such file."""
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} {error}") from error


def _special_tokens(config: Json) -> dict[str, str]:
    """Special tokens by role. The file gives each as its text, or as an object with the text as `content`.

    Raises ConfigError for a text that no tokenizer takes: JSON can name half of a surrogate pair.
    """
    texts = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            if any("\ud800" <= each <= "\udfff" for each in text):
                raise ConfigError(f"tokenizer_config.json: {quoted(name)} holds half a character")
            texts[name] = text
    return texts


def _chat_template(folder: Path, config: Json) -> str | None:
    """The chat template: its own file takes precedence over tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    content = _read(path, _MAX_TEMPLATE_BYTES)
    if content is not None:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        entries = (entry for entry in template if isinstance(entry, dict))
        template = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        return None
    if len(template.encode(errors="replace")) > _MAX_TEMPLATE_BYTES:
        raise ConfigError(f"{folder}: the chat template has more than {_MAX_TEMPLATE_BYTES} bytes, the limit")
    return template


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json takes precedence over config.json."""
    for name in ("generation_config.json", "config.json"):
        found = _read_object(folder / name).get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(type(id) is int and 0 <= id < _MAX_ID for id in ids):
                raise ConfigError(f"{folder / name}: eos_token_id is neither a token id nor a list of them")
            return tuple(ids)
    return ()


def _recommended(folder: Path) -> dict[str, Any]:
    """What generation_config.json says of sampling, with the meaning that transformers gives it."""
    generation = _read_object(folder / "generation_config.json")
    repetition = {name: generation[name] for name in _REPETITION if generation.get(name) is not None}
    if generation.get("do_sample") is False:  # transformers then ignores what shapes a random choice
        return {"temperature": 0.0, **repetition}
    drawing = {name: generation[name] for name in ("temperature", *_TRUNCATIONS) if generation.get(name) is not None}
    if (drawing or generation.get("do_sample") is True) and "temperature" not in drawing:
        drawing["temperature"] = 1.0  # transformers' own default
    return drawing | repetition
