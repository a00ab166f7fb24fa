"""Reads LoRA adapters as PEFT writes them (Hu et al., 2021). What is not understood is refused, never left out.

Files are read whole, within limits that follow from the model, because a client may have named them. A file that is
mapped could be cut short while it is read, which would end the process.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .folder import CheckpointError, quoted
from .safetensors_header import LENGTH_BYTES, TensorEntry, parse_header
from .stored import widened

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 18
MOST_HEADER_BYTES_A_TENSOR = 512  # its name, shape and place, in a safetensors header
MAX_PATTERNS, MAX_PATTERN = 1024, 256  # entries of rank_pattern and alpha_pattern, and letters of each
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}

# Fields of adapter_config.json that change nothing here: what was trained, and how. Tensors say what is adapted.
_INERT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
        "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "target_modules", "task_type",
    }
)  # fmt: skip
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"})
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")  # the others change the weights of the base model


class AdapterNotFound(CheckpointError, FileNotFoundError):
    """Nothing is at an adapter's path."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """
    modules   what the model has products for, by name: inputs and outputs
    max_rank  of an adapter
    head_dim  of the model's attention
    """

    modules: Mapping[str, tuple[int, int]]
    max_rank: int
    head_dim: int

    @property
    def most_bytes(self) -> int:
        """The size of the largest adapter: all modules, of the highest rank, in float32."""
        values = sum((in_size + out_size) * self.max_rank for in_size, out_size in self.modules.values())
        return 4 * values + self.most_header_bytes

    @property
    def most_header_bytes(self) -> int:
        return 65_536 + 2 * len(self.modules) * MOST_HEADER_BYTES_A_TENSOR


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """What is added to the weight of one module: scale · up · down.

    down  [rank, in] float32
    up    [out, rank] float32
    """

    down: NDArray[np.float32]
    up: NDArray[np.float32]
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """
    identity  SHA-256 of all that was read
    pairs     by module
    """

    identity: bytes
    pairs: Mapping[str, AdapterPair]

    @property
    def rank(self) -> int:
        """The largest."""
        return max(len(pair.down) for pair in self.pairs.values())


def read_adapter(path: Path, limits: AdapterLimits) -> AdapterFile:
    """Read a folder that PEFT has written.

    Raises AdapterNotFound, or CheckpointError for what is broken, not supported, or does not fit the model.
    """
    config_bytes = read_whole(path / CONFIG, MAX_CONFIG_BYTES)
    config = AdapterConfig(config_bytes)
    content = read_whole(path / TENSORS, limits.most_bytes)
    halves: dict[str, dict[str, NDArray[np.float32]]] = {}
    for entry in _entries(content, limits):
        module, half = _place(entry.name)
        halves.setdefault(module, {})[half] = _values(content, entry)
    pairs: dict[str, AdapterPair] = {}
    for module, found in halves.items():
        if len(found) < 2:
            raise CheckpointError(f"{quoted(module)} has no tensor {({_DOWN, _UP} - found.keys()).pop()[1:]}")
        down, up, rank = found[_DOWN], found[_UP], config.rank_of(module)
        pairs[module] = checked(module, down, up, config.scale_of(module, rank), limits)
        if len(down) != rank:
            raise CheckpointError(f"{CONFIG} gives {quoted(module)} rank {rank}, but its tensors have {len(down)}")
    return AdapterFile(identity_of(config_bytes, content), not_empty(pairs))


def not_empty(pairs: dict[str, AdapterPair]) -> dict[str, AdapterPair]:
    if not pairs:
        raise CheckpointError("the adapter changes nothing: it has no tensors")
    return pairs


def identity_of(*contents: bytes) -> bytes:
    """The SHA-256 of files, each behind its length, so that no two lists of files have the same."""
    digest = sha256(b"adapter")
    for content in contents:
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.digest()


def checked(
    module: str, down: NDArray[np.float32], up: NDArray[np.float32], scale: float, limits: AdapterLimits
) -> AdapterPair:
    """The pair of a module. Raises CheckpointError unless it fits the model, and all values are finite."""
    if module not in limits.modules:
        known = ", ".join(sorted({each.rpartition(".")[2] for each in limits.modules}))
        raise CheckpointError(f"{quoted(module)} cannot be adapted in this model; what can is called {known}")
    in_size, out_size = limits.modules[module]
    rank = len(down)
    if not 1 <= rank <= limits.max_rank:
        raise CheckpointError(f"{quoted(module)} has rank {rank}; --max-lora-rank allows 1 to {limits.max_rank}")
    if down.shape != (rank, in_size) or up.shape != (out_size, rank):
        found, wanted = [list(down.shape), list(up.shape)], [[rank, in_size], [out_size, rank]]
        raise CheckpointError(f"{quoted(module)} has tensors of shapes {found}, but the model needs {wanted}")
    with np.errstate(over="ignore"):
        scaled = up * np.float32(scale)
    if not (np.isfinite(down).all() and np.isfinite(scaled).all()):
        raise CheckpointError(f"{quoted(module)} has values that are not finite")
    return AdapterPair(down, up, scale)


def read_whole(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file. Raises AdapterNotFound, or CheckpointError for one that is too large."""
    try:
        # Without O_NONBLOCK the opening of a pipe would wait for its other end.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path.name} is not a file")
            if status.st_size > most_bytes:
                raise CheckpointError(f"{path.name} has {status.st_size} bytes; an adapter may have {most_bytes} here")
            return file.read(status.st_size)
    except (FileNotFoundError, NotADirectoryError):
        raise AdapterNotFound(_missing(path)) from None
    except ValueError:  # a path with a zero byte
        raise AdapterNotFound(f"there is no file {quoted(path)}") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from None


def _missing(path: Path) -> str:
    if path.name == TENSORS and (path.parent / "adapter_model.bin").exists():
        return f"{quoted(path.parent)} has adapter_model.bin, whose format can run code; convert it to {TENSORS}"
    return f"{quoted(path.parent)} has no {quoted(path.name)}"


class AdapterConfig:
    """What adapter_config.json says of ranks and scales. Raises CheckpointError for what is wrong or not supported.

    rank  of modules that no pattern names
    """

    def __init__(self, content: bytes) -> None:
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError):
            raise CheckpointError(f"{CONFIG} is not JSON") from None
        if not isinstance(fields, dict):
            raise CheckpointError(f"{CONFIG} is not an object")
        self._fields: dict[str, Any] = fields
        if fields.get("peft_type") != "LORA":
            raise CheckpointError(f"{CONFIG}: peft_type is {quoted(fields.get('peft_type'))}; only LORA is supported")
        if fields.get("init_lora_weights") not in _INITIAL:
            initial = quoted(fields["init_lora_weights"])
            raise CheckpointError(
                f"{CONFIG}: init_lora_weights {initial} has changed the base model; convert it to LoRA"
            )
        for name, value in fields.items():
            if name not in _INERT | _READ and value not in (None, False, "none", "", [], {}):
                raise CheckpointError(f"{CONFIG}: {quoted(name)} is {quoted(value)}, which is not supported")
        self.rank = int(self._number("r", fields.get("r"), whole=True))
        self._alpha = self._number("lora_alpha", fields.get("lora_alpha", 8))
        self._is_stabilized = fields.get("use_rslora") is True
        self._ranks = self._patterns("rank_pattern", whole=True)
        self._alphas = self._patterns("alpha_pattern")

    def rank_of(self, module: str) -> int:
        return int(_of_pattern(self._ranks, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        """α / r, or α / √r of a rank-stabilized adapter (Kalajdzievski, 2023)."""
        alpha = _of_pattern(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._is_stabilized else rank)

    def _number(self, name: str, value: object, *, whole: bool = False) -> float:
        is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) < 1e9 or (whole and value < 1):  # type: ignore[arg-type,operator]
            raise CheckpointError(f"{CONFIG}: {name} is {quoted(value)}; a {'positive whole ' * whole}number is needed")
        return value  # type: ignore[return-value]

    def _patterns(self, name: str, *, whole: bool = False) -> Sequence[tuple[re.Pattern[str], float]]:
        given = self._fields.get(name) or {}
        if not isinstance(given, dict) or len(given) > MAX_PATTERNS:
            raise CheckpointError(f"{CONFIG}: {name} is not an object with at most {MAX_PATTERNS} entries")
        return [
            (_pattern(name, key), self._number(f"{name}.{quoted(key)}", value, whole=whole))
            for key, value in given.items()
        ]


def _pattern(field: str, key: str) -> re.Pattern[str]:
    """A pattern for the end of a module's name, as PEFT compiles it.

    One with more than two repetitions, or with one of a group, is refused: to match it could take forever.
    """
    is_slow = len(re.findall(r"[*+?{]", key)) > 2 or re.search(r"\)[*+?{]", key)
    if len(key) > MAX_PATTERN or is_slow:
        raise CheckpointError(f"{CONFIG}: a pattern of {field} is too complex: {quoted(key)}")
    try:
        return re.compile(rf"(?:.*\.)?(?:{key})$")
    except (re.error, RecursionError, OverflowError):
        raise CheckpointError(f"{CONFIG}: {field} has an invalid pattern: {quoted(key)}") from None


def _of_pattern(patterns: Sequence[tuple[re.Pattern[str], float]], module: str, default: float) -> float:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _entries(content: bytes, limits: AdapterLimits) -> list[TensorEntry]:
    """The header of a safetensors file in memory, which is not parsed if it is too long for any adapter."""
    header_bytes = int.from_bytes(content[:LENGTH_BYTES], "little")
    if header_bytes > limits.most_header_bytes:
        most = limits.most_header_bytes
        raise CheckpointError(f"{TENSORS} has a header of {header_bytes} bytes; an adapter may have {most} here")
    try:
        if not 0 < header_bytes <= len(content) - LENGTH_BYTES:
            raise ValueError(f"its header has {header_bytes} bytes, the file {len(content)}")
        entries = parse_header(content[LENGTH_BYTES : LENGTH_BYTES + header_bytes], len(content))
    except ValueError as error:
        raise CheckpointError(f"{TENSORS} is truncated or corrupt: {quoted(error)}") from None
    if len(entries) > 2 * len(limits.modules):
        raise CheckpointError(
            f"{TENSORS} has {len(entries)} tensors; an adapter may have {2 * len(limits.modules)} here"
        )
    return entries


def _place(name: str) -> tuple[str, str]:
    """The module of a tensor, and which of its two it is."""
    if "lora_magnitude_vector" in name:
        raise CheckpointError(f"tensor {quoted(name)} belongs to DoRA, which is not supported")
    for half in (_DOWN, _UP):
        if name.startswith(_PREFIX) and name.endswith(half):
            return name[len(_PREFIX) : -len(half)], half
    raise CheckpointError(f"tensor {quoted(name)} is not supported: adapters have {_DOWN[1:]} and {_UP[1:]} alone")


def _values(content: bytes, entry: TensorEntry) -> NDArray[np.float32]:
    if entry.dtype not in _WIDTHS or len(entry.shape) != 2:
        wanted = f"a matrix in {', '.join(_WIDTHS)} is needed"
        raise CheckpointError(
            f"tensor {quoted(entry.name)} has shape {list(entry.shape)} in {quoted(entry.dtype)}; {wanted}"
        )
    return widened_values(content, entry.dtype, entry.start, entry.shape)


def widened_values(content: bytes, encoding: str, start: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A tensor in F32, F16 or BF16 that begins at a byte of a file, in float32."""
    count = math.prod(shape)
    if encoding == "BF16":
        return widened(np.frombuffer(content, "<u2", count, start)).reshape(shape)
    values = np.frombuffer(content, "<f4" if encoding == "F32" else "<f2", count, start)
    return values.astype(np.float32).reshape(shape)
