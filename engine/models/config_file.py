"""config.json, each of whose fields is read and checked, or refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...checkpoints.folder import CheckpointError, quoted, read_json_object
from ...checkpoints.quantized_weights import quantization_method
from ..core.errors import ConfigError, shown
from .inert_fields import is_inert
from .rope import RopeConfig

DEFAULT_ROPE_THETA = 10_000.0
# A larger size is a mistake: tensors of it would overflow, and a list of so many layers would fill the memory.
MAX_SIZE = 1 << 24
MAX_SIZES = {
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_position_embeddings": (1 << 31) - 1,
    "sliding_window": (1 << 31) - 1,
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 1 << 20),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 1 << 12),
}


class ConfigFile:
    """config.json of a checkpoint, which remembers the fields that were read.

    Each method raises a ConfigError that names the field if it is missing or wrong.

    max_model_len  the context length that is wanted; None: what the model was trained for
    """

    def __init__(self, folder: Path, max_model_len: int | None = None) -> None:
        self.max_model_len = max_model_len
        path = folder / "config.json"
        try:
            self._fields: dict[str, Any] = dict(read_json_object(path))
        except FileNotFoundError:
            raise ConfigError(f"the model folder has no config.json: {folder}") from None
        except ValueError as error:
            raise ConfigError(f"{path} {error}") from None
        self._read: set[str] = set()
        self._written: dict[str, str] = {}  # the file's name of a field that was renamed

    def _get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self._fields.get(name, default)

    def error(self, name: str, problem: str) -> ConfigError:
        """An error whose message names the field as the file does; `problem` follows it in a sentence."""
        return ConfigError(f"config.json: {self._written.get(name, name)} {problem}")

    def refuse_unread(self) -> None:
        """Raise ConfigError for a field that was not read, unless it cannot change what is computed."""
        for name, value in self._fields.items():
            if name not in self._read and not is_inert(name, value):
                raise ConfigError(f"config.json: {quoted(name)} is {shown(value)}, which this family does not compute")

    @property
    def architecture(self) -> str:
        """The first name in `architectures`; empty if the file does not say."""
        architectures = self._get("architectures") or [""]
        if not isinstance(architectures, list) or not isinstance(architectures[0], str):
            raise ConfigError(f"config.json: architectures must be a list of names, not {shown(architectures)}")
        return architectures[0]

    def text(self, name: str, default: str) -> str:
        value = self._get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"must be a name, not {shown(value)}")
        return default if value is None else value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {shown(value)}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"config.json has no {self._written.get(name, name)}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"must be a positive whole number, not {shown(value)}")
        if value > (most := MAX_SIZES.get(name, MAX_SIZE)):
            raise self.error(name, f"is {shown(value)}, at most {most} is supported")
        return value

    def count(self, name: str, default: int) -> int:
        """A whole number, zero included."""
        value = self._get(name)
        return 0 if (default if value is None else value) == 0 else self.size(name, default)

    def optional_size(self, name: str, absent: int | None = None) -> int | None:
        """None if the file says null, `absent` if it says nothing."""
        return None if self._get(name, absent) is None else self.size(name, absent)

    def number(self, name: str, default: float) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, f"must be a number, not {shown(value)}")
        if not abs(value) <= sys.float_info.max:  # NaN, infinite, or a whole number beyond
            raise self.error(name, f"must be finite, not {shown(value)}")
        return float(value)

    def positive(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self.error(name, f"must be above 0, not {shown(value)}")
        return value

    def optional_positive(self, name: str, absent: float) -> float:
        """0 if the file says null, `absent` if it says nothing."""
        return 0.0 if self._get(name, absent) is None else self.positive(name, absent)

    def flags(self, name: str) -> list[bool]:
        """A list of true and false, or of 1 and 0; empty if the file does not say."""
        value = self._get(name) or []
        if not isinstance(value, list) or not all(item in (0, 1) for item in value):
            raise self.error(name, f"must be a list of 0 and 1, not {shown(value)}")
        return [bool(item) for item in value]

    def layer_numbers(self, name: str, num_layers: int, absent: float) -> list[float]:
        """A number for each layer, none of them negative; `absent` for all if the file does not say."""
        values = self._get(name)
        if values is None:
            return [absent] * num_layers
        if not isinstance(values, list) or len(values) != num_layers:
            raise self.error(name, f"must be a list of {num_layers} numbers, not {shown(values)}")
        for value in values:
            if not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
                raise self.error(name, f"must hold numbers from 0, not {shown(value)}")
        return [float(value) for value in values]

    def layers(self, name: str, num_layers: int) -> set[int]:
        """The numbers of layers in a list; none if the file does not say."""
        value = self._get(name) or []
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < num_layers for item in value):
            raise self.error(name, f"must be a list of layers below {num_layers}, not {shown(value)}")
        return set(value)

    def names(self, name: str) -> list[str]:
        value = self._get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, f"must be a list of names, not {shown(value)}")
        return value

    def refuse(self, *names: str) -> None:
        """Raise ConfigError for a field that changes what is computed, unless it is null, false or zero."""
        for name in names:
            if value := self._get(name):
                raise self.error(name, f"{shown(value)} is not supported")

    def rename(self, **names: str) -> None:
        """Give fields the names that `ModelConfig.read` knows: new=old."""
        for new, old in names.items():
            if new not in self._fields:
                self._written[new] = old
            if old in self._fields:
                self._fields.setdefault(new, self._fields.pop(old))

    def assume(self, name: str, value: Any) -> None:
        """Take a value for a field that the file does not have."""
        if self._fields.get(name) is None:
            self._fields[name] = value

    def expect(self, name: str, *values: Any) -> None:
        """Raise ConfigError if the file has another value of a field, which the family does not compute."""
        if (value := self._get(name)) is not None and value not in values:
            raise self.error(name, f"{shown(value)} is not supported; {shown(values[0])} is")

    def require(self, *names: str) -> None:
        """Raise ConfigError if the file has none of these fields, whose defaults no family assumes."""
        if not any(self.has(name) for name in names):
            raise ConfigError(f"config.json has no {' or '.join(names)}")

    def ignore(self, *names: str) -> None:
        """Take fields for read that have no effect beside the others of this file."""
        self._read.update(names)

    def has(self, name: str) -> bool:
        return self._get(name) is not None

    def quantization(self) -> str | None:
        """The format of quantized weights; None if there are none. Raises ConfigError for one that is not read."""
        try:
            return quantization_method(self._get("quantization_config"))
        except CheckpointError as error:
            raise ConfigError(str(error)) from None

    def rope(self, share: float | None = None, kind: str = "", theta: float = DEFAULT_ROPE_THETA) -> RopeConfig:
        """Read from `rope_parameters`, or from `rope_theta` and `rope_scaling` as older files have them.

        share  of a head's dimensions that are rotated if the file does not say; None: the family rotates all
        kind   of layers, for a family whose `rope_parameters` may have an object for each kind
        theta  what a family assumes if the file does not say
        """
        theta = self.number("rope_theta", theta)
        older, newer = self._get("rope_scaling"), self._get("rope_parameters")
        parameters = older or newer or {}
        is_nested = isinstance(parameters, dict) and bool(kind) and kind in parameters
        if kind and newer and parameters is newer and not is_nested:
            raise ConfigError(f"config.json: rope_parameters must have an object {kind}, one for each kind of layers")
        if is_nested:
            parameters = parameters[kind]
        if not isinstance(parameters, dict):
            raise ConfigError(f"config.json: the RoPE parameters must be an object, not {shown(parameters)}")
        parameters = dict(parameters)
        whole = self.number("partial_rotary_factor", 1.0 if share is None else share)
        part = parameters.pop("partial_rotary_factor", whole)
        if not isinstance(part, int | float) or not 0 <= part <= 1:
            raise ConfigError(f"config.json: partial_rotary_factor must be from 0 to 1, not {shown(part)}")
        if share is None and part != 1:
            raise ConfigError(f"config.json: partial_rotary_factor is {part}, but this family rotates whole heads")
        if is_nested and parameters.get("truncate") is False:
            raise ConfigError("config.json: truncate false is not supported in rope_parameters of a kind of layers")
        original = self.optional_size("original_max_position_embeddings")
        trained = self.size("max_position_embeddings")
        return replace(RopeConfig.parse(parameters, theta, trained, original, self.max_model_len), share=float(part))

    def fold_rope_alpha(self, head_dim: int) -> None:
        """Replace dynamic RoPE with an alpha, which fixes its frequencies, by the default RoPE of another theta."""
        for name in ("rope_scaling", "rope_parameters"):
            parameters = self._get(name)
            if not isinstance(parameters, dict) or not (alpha := parameters.get("alpha")):
                continue
            theta = parameters.get("rope_theta", self._get("rope_theta", DEFAULT_ROPE_THETA))
            if "dynamic" not in (parameters.get("rope_type"), parameters.get("type")):
                continue
            try:
                theta = float(theta * alpha ** (head_dim / (head_dim - 2)))
            except (ArithmeticError, TypeError):
                raise ConfigError(f"config.json: alpha {shown(alpha)} of dynamic RoPE gives no frequencies") from None
            self._fields[name] = {"rope_type": "default", "rope_theta": theta}

    def has_rope_of(self, kind: str) -> bool:
        """Whether the file has a rotation for this kind of layers alone."""
        parameters = self._get("rope_parameters")
        return isinstance(parameters, dict) and kind in parameters

    def windows(
        self,
        num_layers: int,
        window: int | None,
        otherwise: tuple[int | None, ...] | None = None,
        every: int = 0,
    ) -> tuple[int | None, ...]:
        """The window of each layer by `layer_types`; if the file has none, `otherwise`, or the window for all layers.

        every  if the file has no `layer_types`, each layer of this number has no window, unless
               `sliding_window_pattern` says otherwise
        """
        kinds = {"full_attention": None, "sliding_attention": window}
        layer_types = self.names("layer_types")
        self.ignore("sliding_window_pattern", "_sliding_window_pattern")
        if not layer_types:
            if every:
                every = self.size("sliding_window_pattern", every)
                return tuple(window if (number + 1) % every else None for number in range(num_layers))
            return (window,) * num_layers if otherwise is None else otherwise
        if len(layer_types) != num_layers or not set(layer_types) <= set(kinds):
            raise ConfigError(
                f"config.json: layer_types must name {' or '.join(kinds)} for each of {num_layers} layers"
            )
        return tuple(kinds[kind] for kind in layer_types)
