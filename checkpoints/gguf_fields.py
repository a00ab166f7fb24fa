"""The metadata of a GGUF file's architecture: typed access with clear errors, and the refusal of what nobody reads."""

from __future__ import annotations

from collections.abc import Mapping

from .folder import CheckpointError, quoted
from .gguf_file import GgufFile

# Fields that change nothing: sizes that tensors have too, the epsilon of norms that the architecture does not have,
# how a model was trained, and how texts are embedded, which origin.json keeps.
_INERT = frozenset(
    {
        "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon", "attention.sliding_window_pattern", "pooling_type",
        "expert_feed_forward_length", "expert_shared_feed_forward_length",
    }
)  # fmt: skip
# Values of other fields that switch nothing on, where that is neither 0 nor false.
_NEUTRAL: Mapping[str, object] = {
    "attention.causal": True,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}


class Fields:
    """The metadata of a file's architecture, by names without that of the architecture.

    Each method raises a CheckpointError that names the field and its value if it is missing or wrong.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def key(self, name: str) -> str:
        return f"{self.file.architecture}.{name}"

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file.name}: {self.key(name)} is {quoted(problem)}")

    def has(self, name: str) -> bool:
        return self.file.has(self.key(name))

    def text(self, name: str, default: str) -> str:
        return self.file.text(self.key(name), default)

    def flag(self, name: str, default: bool) -> bool:
        return self.file.flag(self.key(name), default)

    def count(self, name: str, default: int) -> int:
        """A whole number, zero included."""
        if (value := self.file.integer(self.key(name), default)) < 0:
            raise self.error(name, f"{value}, below 0")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        if (value := self.file.integer(self.key(name), default)) < 1:
            raise self.error(name, f"{value}; a positive number is needed")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        if (value := self.file.number(self.key(name), default)) <= 0:
            raise self.error(name, f"{value}; a positive number is needed")
        return value

    def norm_eps(self, name: str) -> float:
        if not 0 <= (value := self.file.number(self.key(name))) <= 1:
            raise self.error(name, f"{value}; a number from 0 to 1 is needed")
        return value

    def expect(self, name: str, *values: object) -> None:
        """Raise CheckpointError for another whole number or flag, which the architecture does not have here."""
        if not self.has(name):
            return
        value = self.flag(name, False) if isinstance(values[0], bool) else self.count(name, 0)
        if value not in values:
            raise self.error(name, f"{value}; {values[0]} is supported")

    def layer_types(self, num_layers: int, every: int) -> list[str]:
        """Which layers have a window: all but one of each `every`, the last, unless the file has another pattern."""
        key = self.key("attention.sliding_window_pattern")
        if self.file.is_list(key):
            if len(has_window := self.file.integers(key)) != num_layers:
                raise self.error(
                    "attention.sliding_window_pattern", f"a list of {len(has_window)} for {num_layers} layers"
                )
        else:
            every = self.size("attention.sliding_window_pattern", every)
            has_window = [(number + 1) % every for number in range(num_layers)]
        return ["sliding_attention" if each else "full_attention" for each in has_window]

    def refuse_unread(self) -> None:
        """Raise CheckpointError for a field that was not read, unless it cannot change what is computed."""
        prefix = self.key("")
        for key, value in self.file.unread(prefix).items():
            name = key.removeprefix(prefix)
            if name not in _INERT and value not in (_NEUTRAL.get(name, 0), 0, ""):
                raise CheckpointError(
                    f"{self.file.name}: {quoted(key)} is {quoted(value)}, which is not computed for this architecture"
                )
            if name == "attention.causal" and value is False:
                raise self.error(name, "false; only causal attention is supported")
