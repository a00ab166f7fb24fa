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

from ..core.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """
    variant             default, linear, llama3 or yarn
    theta               base of the geometric series of wavelengths
    factor              how much longer contexts are than those that the frequencies were trained for
    original_positions  the number of positions in training, which the variant extends
    attention_factor    multiplies cosines and sines
    share               of a head's dimensions, the first ones, that are rotated; 0: none

    low_freq_factor and high_freq_factor belong to llama3; beta_fast, beta_slow and truncate to yarn.
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

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated."""
        return int(head_dim * self.share)

    @property
    def extended_positions(self) -> int:
        """How many positions the variant reaches, whatever max_position_embeddings says; 0 if it does not say."""
        return int(min(self.factor * self.original_positions, sys.float_info.max)) if self.variant == "yarn" else 0

    @staticmethod
    def parse(parameters: Mapping[str, Any], theta: float, max_position_embeddings: int) -> RopeConfig:
        """Reads an object of config.json. Raises ConfigError for an unknown variant or a broken field."""
        variant = parameters.get("rope_type") or parameters.get("type") or "default"
        if not isinstance(variant, str) or variant not in _FREQUENCIES:
            raise ConfigError(
                f"config.json: RoPE type {shown(variant)} is not supported; {', '.join(_FREQUENCIES)} are"
            )

        def number(name: str, default: float | None = None) -> float:
            value = parameters.get(name)
            value = default if value is None else value
            if not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
                raise ConfigError(
                    f"config.json: {name} of {variant} RoPE must be a positive number, not {shown(value)}"
                )
            return float(value)

        theta = number("rope_theta", theta)
        if variant == "default":
            return RopeConfig(theta)
        factor = number("factor")
        original = int(number("original_max_position_embeddings", max_position_embeddings))
        match variant:
            case "linear":
                return RopeConfig(theta, variant, factor)
            case "llama3":
                low, high = number("low_freq_factor"), number("high_freq_factor")
                if high <= low:
                    raise ConfigError(f"config.json: high_freq_factor {high} must exceed low_freq_factor {low}")
                return RopeConfig(theta, variant, factor, original, low_freq_factor=low, high_freq_factor=high)
            case _:
                gain = _yarn_gain(factor, 1.0)
                if parameters.get("mscale") and parameters.get("mscale_all_dim"):
                    gain = _yarn_gain(factor, number("mscale")) / _yarn_gain(factor, number("mscale_all_dim"))
                return RopeConfig(
                    theta,
                    variant,
                    factor,
                    original,
                    beta_fast=number("beta_fast", 32.0),
                    beta_slow=number("beta_slow", 1.0),
                    truncate=bool(parameters.get("truncate", True)),
                    attention_factor=number("attention_factor", gain),
                )

    def check(self, head_dim: int) -> None:
        """Raise ConfigError if these numbers, each of them valid, give no frequencies."""
        rotary_dim = self.rotary_dim(head_dim)
        if rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
            raise ConfigError(f"config.json: RoPE turns pairs; it cannot turn {rotary_dim} of {head_dim} dimensions")
        try:
            is_finite = bool(_FREQUENCIES[self.variant](self, rotary_dim).isfinite().all())
        except (ArithmeticError, ValueError, RuntimeError):
            is_finite = False
        if not (is_finite and math.isfinite(self.attention_factor)):
            raise ConfigError(f"config.json: the parameters of {self.variant} RoPE give no finite frequencies")


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

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self._frequencies
        cosines, sines = angles.cos() * self._gain, angles.sin() * self._gain
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


def _yarn_gain(factor: float, scale: float) -> float:
    """The factor that sharpens attention over longer contexts."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


_FREQUENCIES: dict[str, Callable[[RopeConfig, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
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
