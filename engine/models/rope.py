"""Rotary position embedding, in the variants that checkpoints use: how fast each pair of dimensions turns."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...checkpoints.folder import quoted
from ..core.errors import ConfigError, shown

# Fields of the parameters that no variant needs: they repeat what config.json says elsewhere, or say who trained it.
_INERT_PARAMETERS = frozenset({"rope_type", "type", "rope_theta", "max_position_embeddings", "finetuned"})
_OLDER_NAMES = {"su": "longrope"}


class _Parameters:
    """The object of config.json that describes a rotation, which remembers the fields that were read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields, self._read = fields, set(_INERT_PARAMETERS)
        variant = self.get("rope_type") or self.get("type") or "default"
        variant = _OLDER_NAMES.get(variant, variant) if isinstance(variant, str) else variant
        if not isinstance(variant, str) or variant not in _FREQUENCIES:
            raise ConfigError(
                f"config.json: RoPE type {shown(variant)} is not supported; {', '.join(_FREQUENCIES)} are"
            )
        self.variant: str = variant

    def get(self, name: str) -> Any:
        self._read.add(name)
        return self._fields.get(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if value is None or not _is_positive(value):
            raise ConfigError(
                f"config.json: {name} of {self.variant} RoPE must be a positive number, not {shown(value)}"
            )
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        values = self.get(name)
        if not isinstance(values, list) or not all(_is_positive(value) for value in values):
            raise ConfigError(f"config.json: {name} of {self.variant} RoPE must be a list of positive numbers")
        return tuple(float(value) for value in values)

    def refuse_unread(self) -> None:
        for name, value in self._fields.items():
            if name not in self._read and value not in (None, False, 0, "", [], {}):
                raise ConfigError(
                    f"config.json: {quoted(name)} of {self.variant} RoPE is {shown(value)}, which is not computed"
                )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value <= sys.float_info.max


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """
    variant             default, linear, llama3, yarn or longrope; dynamic is default within the model's positions
    theta               base of the geometric series of wavelengths
    factor              how much longer contexts are than those that the frequencies were trained for
    original_positions  the number of positions in training, which the variant extends
    attention_factor    multiplies cosines and sines
    share               of a head's dimensions, the first ones, that are rotated; 0: none
    max_positions       how many positions these frequencies are meant for; 0: those of the model

    low_freq_factor and high_freq_factor belong to llama3; beta_fast, beta_slow and truncate to yarn. Each pair's
    frequency is divided by one of `pair_factors` in longrope.
    """

    theta: float
    variant: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    share: float = 1.0
    max_positions: int = 0
    pair_factors: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated."""
        return int(head_dim * self.share)

    @staticmethod
    def parse(
        fields: Mapping[str, Any],
        theta: float,
        max_position_embeddings: int,
        original_positions: int | None = None,
        max_model_len: int | None = None,
    ) -> RopeConfig:
        """Reads an object of config.json.

        theta, original_positions  what config.json says elsewhere; the object goes before theta, and behind the other
        max_model_len              the context length that is wanted: longrope has other frequencies for long contexts

        Raises ConfigError for an unknown variant, and for a field that is broken or that the variant does not compute.
        """
        parameters = _Parameters(fields)
        rope = _read(parameters, theta, max_position_embeddings, original_positions, max_model_len)
        parameters.refuse_unread()
        return rope

    def check(self, head_dim: int) -> None:
        """Raise ConfigError if these numbers, each of them valid, give no frequencies."""
        rotary_dim = self.rotary_dim(head_dim)
        if rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
            raise ConfigError(f"config.json: RoPE turns pairs; it cannot turn {rotary_dim} of {head_dim} dimensions")
        if self.pair_factors and len(self.pair_factors) != rotary_dim // 2:
            raise ConfigError(
                f"config.json: longrope has {len(self.pair_factors)} factors for {rotary_dim // 2} pairs of dimensions"
            )
        try:
            is_finite = bool(_FREQUENCIES[self.variant](self, rotary_dim).isfinite().all())
        except (ArithmeticError, ValueError, RuntimeError):
            is_finite = False
        if not (is_finite and math.isfinite(self.attention_factor)):
            raise ConfigError(f"config.json: the parameters of {self.variant} RoPE give no finite frequencies")


def _read(
    parameters: _Parameters, theta: float, trained: int, original_positions: int | None, max_model_len: int | None
) -> RopeConfig:
    number, variant = parameters.number, parameters.variant
    theta = number("rope_theta", theta)
    if variant == "default":
        return RopeConfig(theta)
    if variant == "dynamic":
        # Beyond these positions the frequencies of a sequence would change with its length.
        number("factor")
        return RopeConfig(theta, max_positions=trained)
    if variant == "linear":
        return RopeConfig(theta, variant, number("factor"))
    of_object = int(number("original_max_position_embeddings", trained))
    original = original_positions or of_object
    if variant == "longrope":
        return _read_longrope(parameters, theta, trained, original, max_model_len)
    factor = number("factor")
    if variant == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise ConfigError(f"config.json: high_freq_factor {high} must exceed low_freq_factor {low}")
        return RopeConfig(theta, variant, factor, original, low_freq_factor=low, high_freq_factor=high)
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    gain = _yarn_gain(factor, 1.0)
    if mscale and mscale_all_dim:
        gain = _yarn_gain(factor, number("mscale")) / _yarn_gain(factor, number("mscale_all_dim"))
    truncate = parameters.get("truncate")
    longest = max(trained, int(min(factor * original, sys.float_info.max)))
    if parameters.get("llama_4_scaling_beta"):
        longest = original  # beyond, queries are multiplied by a factor of their position, which is not computed
    return RopeConfig(
        theta,
        variant,
        factor,
        original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=True if truncate is None else bool(truncate),
        attention_factor=number("attention_factor", gain),
        max_positions=longest,
    )


def _read_longrope(
    parameters: _Parameters, theta: float, trained: int, original: int, max_model_len: int | None
) -> RopeConfig:
    """The frequencies of short contexts, unless a longer one is wanted: then all sequences get the other ones."""
    short, long = parameters.numbers("short_factor"), parameters.numbers("long_factor")
    factor = parameters.number("factor", trained / original)
    gain = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    is_long = (max_model_len or 0) > original
    return RopeConfig(
        theta,
        "longrope",
        attention_factor=parameters.number("attention_factor", gain),
        max_positions=trained if is_long else min(original, trained),
        pair_factors=long if is_long else short,
    )


class Rope:
    """Cosines and sines of positions: computed for each step, or looked up in tables."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        # On the CPU, so that the frequencies are the same to the last bit whatever the device.
        rotary_dim = config.rotary_dim(head_dim)
        self._frequencies = (_FREQUENCIES[config.variant](config, rotary_dim) if rotary_dim else torch.empty(0)).to(
            device
        )
        self._num_still = (head_dim - rotary_dim) // 2  # pairs of dimensions that keep what they hold
        self._gain = config.attention_factor
        self._tables: tuple[Tensor, Tensor] | None = None

    def tabulate(self, num_positions: int) -> None:
        """Compute the rotations of all positions; they take 4 * head_dim bytes each."""
        self._tables = self._compute(torch.arange(num_positions, device=self._frequencies.device))

    @property
    def has_tables(self) -> bool:
        return self._tables is not None

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [num_tokens, head_dim / 2] float32, of positions [num_tokens]; or the tables."""
        return self._tables or self._compute(positions)

    def mean(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [head_dim / 2] float32, on average over the first positions."""
        half = self._frequencies * (num_positions / 2)  # the integrals of cosine and sine, divided by the last angle
        return self._of_all_pairs(torch.sinc(2 * half / math.pi), half * torch.sinc(half / math.pi).square())

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self._frequencies
        return self._of_all_pairs(angles.cos(), angles.sin())

    def _of_all_pairs(self, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = cosines * self._gain, sines * self._gain
        if not self._num_still:
            return cosines, sines
        return functional.pad(cosines, (0, self._num_still), value=1.0), functional.pad(sines, (0, self._num_still))


def _default(config: RopeConfig, head_dim: int) -> Tensor:
    """theta^(-2i / head_dim) radians for each position (Su et al., 2021)."""
    return 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _linear(config: RopeConfig, head_dim: int) -> Tensor:
    """Interpolates positions (Chen et al., 2023)."""
    return _default(config, head_dim) / config.factor


def _llama3(config: RopeConfig, head_dim: int) -> Tensor:
    """Interpolates long wavelengths, keeps short ones, and blends those between (Llama 3.1)."""
    kept = _default(config, head_dim)
    turns = config.original_positions * kept / (2 * math.pi)  # over the contexts of the training
    low, high = config.low_freq_factor, config.high_freq_factor
    share_kept = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(kept / config.factor, kept, share_kept)


def _yarn(config: RopeConfig, head_dim: int) -> Tensor:
    """Like llama3, but the blend is linear in the dimension (YaRN; Peng et al., 2023)."""
    kept = _default(config, head_dim)

    def dimension_that_turns(times: float) -> float:
        wavelength = config.original_positions / (times * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(config.theta))

    first, last = dimension_that_turns(config.beta_fast), dimension_that_turns(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    dimension = torch.arange(head_dim // 2, dtype=torch.float32)
    share_interpolated = ((dimension - first) / (max(last - first, 0.001))).clamp(0, 1)
    return torch.lerp(kept, kept / config.factor, share_interpolated)


def _longrope(config: RopeConfig, head_dim: int) -> Tensor:
    """Each pair has a factor of its own (LongRoPE; Ding et al., 2024)."""
    return _default(config, head_dim) / torch.tensor(config.pair_factors, dtype=torch.float32)


def _yarn_gain(factor: float, scale: float) -> float:
    """The factor that sharpens attention over longer contexts."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


_FREQUENCIES: dict[str, Callable[[RopeConfig, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "dynamic": _default,
}


def rotary_order(head_dim: int, rotary_dim: int, is_interleaved: bool) -> Tensor | None:
    """Which dimension of a checkpoint's head comes where, so that i and i + head_dim / 2 are turned as a pair.

    is_interleaved  the checkpoint turns 2i with 2i + 1; otherwise i with i + rotary_dim / 2

    Scores stay what they are if queries and keys have the same order. None: the checkpoint's own.
    """
    if rotary_dim == head_dim and not is_interleaved:
        return None
    turned, still = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    first, second = (turned[0::2], turned[1::2]) if is_interleaved else turned.chunk(2)
    return torch.cat((first, still[: len(still) // 2], second, still[len(still) // 2 :]))
