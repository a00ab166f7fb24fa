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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .folder import CheckpointError, quoted
from .safetensors_header import LENGTH_BYTES, TensorEntry, parse_header

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 18
MOST_HEADER_BYTES_A_TENSOR = 512  # its name, shape and place, in a safetensors header
MAX_PATTERNS, MAX_PATTERN = 1024, 256  # entries of rank_pattern and alpha_pattern, and letters of each
MAX_REPETITIONS, MAX_ALTERNATIVES, MAX_GROUPS = 2, 8, 2  # in a pattern
MAX_AMBIGUOUS = 64  # entries with any of these
MAX_NUMBER = 10**9  # in adapter_config.json, or its negative
MAX_NAMED = 3  # modules in an error
PIECE_BYTES = 1 << 19  # of a file, read or hashed at once
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # dtypes of an AdapterPair

# Fields of adapter_config.json that change nothing here: how the adapter was trained.
_INERT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "inference_mode", "layers_pattern", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config",
        "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    }
)  # fmt: skip
_READ = frozenset(
    {
        "alpha_pattern", "exclude_modules", "init_lora_weights", "layers_to_transform", "lora_alpha", "peft_type", "r",
        "rank_pattern", "target_modules", "use_rslora",
    }
)  # fmt: skip
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")  # the others change the weights of the base model


Rest = Callable[[], None]  # is called between pieces of the work
_Named = tuple[str, float]  # a number, behind the name of its field


def no_rest() -> None:
    """Go on at once."""


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
    """What is added to the weight of one module: scale · up · down. Its values may be infinite or NaN: packing checks.

    down  [rank, in]
    up    [out, rank]; both as their file stores them: float32, float16, or uint16, the bits of bfloat16
    """

    down: NDArray[Any]
    up: NDArray[Any]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)


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
        return max(pair.rank for pair in self.pairs.values())


def read_adapter(path: Path, limits: AdapterLimits, rest: Rest = no_rest) -> AdapterFile:
    """Read a folder that PEFT has written.

    Raises AdapterNotFound, or CheckpointError for what is broken, not supported, or does not fit the model.
    """
    config_bytes = read_whole(path / CONFIG, MAX_CONFIG_BYTES, rest)
    config = AdapterConfig(bytes(config_bytes), limits.max_rank)
    content = read_whole(path / TENSORS, limits.most_bytes, rest)
    halves: dict[str, dict[str, NDArray[Any]]] = {}
    for entry in _entries(content, limits):
        module, half = _place(entry.name)
        halves.setdefault(module, {})[half] = _stored(content, entry)
        rest()
    pairs: dict[str, AdapterPair] = {}
    for module, found in halves.items():
        if len(found) < 2:
            raise CheckpointError(f"{quoted(module)} has no tensor {({_DOWN, _UP} - found.keys()).pop()[1:]}")
        down, up, (field, rank) = found[_DOWN], found[_UP], config.rank_of(module)
        pairs[module] = checked(module, down, up, config.scale_of(module, rank), limits)
        if len(down) != rank:
            raise CheckpointError(f"{CONFIG}: {field} is {rank}, but tensors of {quoted(module)} have rank {len(down)}")
        rest()
    config.check_targets(not_empty(pairs).keys(), limits.modules)
    return AdapterFile(identity_of(config_bytes, content, rest=rest), pairs)


def not_empty(pairs: dict[str, AdapterPair]) -> dict[str, AdapterPair]:
    if not pairs:
        raise CheckpointError("the adapter changes nothing: it has no tensors")
    return pairs


def identity_of(*contents: memoryview, rest: Rest = no_rest) -> bytes:
    """The SHA-256 of files, each behind its length, so that no two lists of files have the same."""
    digest = sha256(b"adapter")
    for content in contents:
        digest.update(len(content).to_bytes(8, "little"))
        for start in range(0, len(content), PIECE_BYTES):
            digest.update(content[start : start + PIECE_BYTES])
            rest()
    return digest.digest()


def checked(module: str, down: NDArray[Any], up: NDArray[Any], scale: float, limits: AdapterLimits) -> AdapterPair:
    """The pair of a module. Raises CheckpointError unless it fits the model."""
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
    # A file may have its values at any byte; a tensor needs them at a multiple of their size.
    down, up = (each if each.flags.aligned else each.copy() for each in (down, up))
    return AdapterPair(down, up, scale)


def read_whole(path: Path, most_bytes: int, rest: Rest = no_rest) -> memoryview:
    """The content of a regular file. Raises AdapterNotFound, or CheckpointError for one that is too large.

    It can be written to, because torch warns about memory that cannot.
    """
    try:
        # Without O_NONBLOCK the opening of a pipe would wait for its other end.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path.name} is not a file")
            if status.st_size > most_bytes:
                raise CheckpointError(f"{path.name} has {status.st_size} bytes; an adapter may have {most_bytes} here")
            content, size = np.empty(status.st_size, np.uint8).data, 0  # which is not filled with zeros first
            while count := file.readinto(content[size : size + PIECE_BYTES]):
                size += count
                rest()
            return content[:size]
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

    max_rank  that an adapter may have here
    """

    def __init__(self, content: bytes, max_rank: int) -> None:
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
        self._max_rank = max_rank
        self._rank = "r", self._number("r", fields.get("r"), whole=True)
        self._alpha = "lora_alpha", self._number("lora_alpha", fields.get("lora_alpha", 8))
        if fields.get("use_rslora") not in (None, False, True):
            raise CheckpointError(f"{CONFIG}: use_rslora is {quoted(fields['use_rslora'])}; true or false is needed")
        self._is_stabilized = bool(fields.get("use_rslora"))
        self._ranks = self._patterns("rank_pattern", whole=True)
        if not self._ranks:
            self.rank_of()
        self._alphas = self._patterns("alpha_pattern")

    def rank_of(self, module: str = "") -> tuple[str, int]:
        """The rank of a module, or of those that no pattern names, behind the name of the field that says so.

        Raises CheckpointError for one that is too high.
        """
        field, rank = _of_pattern(self._ranks, module, self._rank)
        if rank > self._max_rank:
            raise CheckpointError(f"{CONFIG}: {field} is {rank}; --max-lora-rank allows 1 to {self._max_rank}")
        return field, int(rank)

    def scale_of(self, module: str, rank: int) -> float:
        """α / r, or α / √r of a rank-stabilized adapter (Kalajdzievski, 2023)."""
        _, alpha = _of_pattern(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._is_stabilized else rank)

    def check_targets(self, adapted: Collection[str], modules: Iterable[str]) -> None:
        """Raise CheckpointError unless the modules with tensors are those that the configuration names.

        PEFT would serve half an adapter. A pattern that could take forever is not compared.

        modules  all that the model has
        """
        named, excluded = self._fields.get("target_modules"), self._selection("exclude_modules")
        targets = self._selection("target_modules")
        if named is None or targets is None or excluded is None:
            return

        def is_target(module: str) -> bool:
            return targets(module) and not excluded(module)

        if foreign := [each for each in adapted if not is_target(each)]:
            raise CheckpointError(f"{CONFIG}: target_modules does not name {_listed(foreign)}, which have tensors")
        known = {end for module in adapted for end in _ends(module)}
        unused = [each for each in named if each not in known and not excluded(each)] if isinstance(named, list) else []
        if missing := unused or [each for each in modules if each not in adapted and is_target(each)]:
            raise CheckpointError(f"{CONFIG}: target_modules names {_listed(missing)}, which have no tensors")

    def _selection(self, field: str) -> Callable[[str], bool] | None:
        """Whether a field that selects modules selects this one, as PEFT reads it; None: not known."""
        given = self._fields.get(field)
        if given is None:
            return lambda module: False
        if given == "all-linear":
            return lambda module: True
        if isinstance(given, str):
            pattern = None if _is_slow(given) else _compiled(field, given, given)
            return None if pattern is None else lambda module: pattern.fullmatch(module) is not None
        if not isinstance(given, list) or not all(isinstance(each, str) and len(each) <= MAX_PATTERN for each in given):
            raise CheckpointError(f"{CONFIG}: {field} is {quoted(given)}; a list of names or a pattern is needed")
        names, layers = frozenset(given), self._layers() if field == "target_modules" else frozenset()

        def selects(module: str) -> bool:
            if module in names or names.isdisjoint(_ends(module)):
                return module in names
            return not layers or not layers.isdisjoint(module.split("."))

        return selects

    def _layers(self) -> frozenset[str]:
        """The numbers of the layers that names in target_modules mean; empty: all."""
        given = self._fields.get("layers_to_transform")
        layers = [] if given is None else given if isinstance(given, list) else [given]
        if not all(isinstance(each, int) for each in layers):
            raise CheckpointError(f"{CONFIG}: layers_to_transform is {quoted(given)}; whole numbers are needed")
        return frozenset(map(str, layers))

    def _number(self, name: str, value: object, *, whole: bool = False) -> float:
        is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) < MAX_NUMBER or (whole and value < 1):  # type: ignore[arg-type,operator]
            allowed = f"from 1 to {MAX_NUMBER - 1}" if whole else f"between -{MAX_NUMBER} and {MAX_NUMBER}"
            needed = f"a {'whole ' * whole}number {allowed} is needed"
            raise CheckpointError(f"{CONFIG}: {name} is {quoted(value)}; {needed}")
        return value  # type: ignore[return-value]

    def _patterns(self, name: str, *, whole: bool = False) -> Sequence[tuple[re.Pattern[str], _Named]]:
        given = self._fields.get(name) or {}
        if not isinstance(given, dict) or len(given) > MAX_PATTERNS:
            raise CheckpointError(f"{CONFIG}: {name} is not an object with at most {MAX_PATTERNS} entries")
        if sum(re.search(r"[*+?{|]", key) is not None for key in given) > MAX_AMBIGUOUS:
            raise CheckpointError(f"{CONFIG}: {name} has more than {MAX_AMBIGUOUS} patterns with repetitions")
        fields = {key: f"{name}.{quoted(key)}" for key in given}
        return [
            (_pattern(name, key), (fields[key], self._number(fields[key], value, whole=whole)))
            for key, value in given.items()
        ]


def _pattern(field: str, key: str) -> re.Pattern[str]:
    """A pattern for the end of a module's name, as PEFT compiles it. One that could take forever is refused."""
    if _is_slow(key):
        raise CheckpointError(f"{CONFIG}: a pattern of {field} is too complex: {quoted(key)}")
    return _compiled(field, key, rf"(?:.*\.)?(?:{key})$")


def _is_slow(key: str) -> bool:
    """Whether to match a pattern could take forever: it has many ways to match a text."""
    most = {r"[*+?{]": MAX_REPETITIONS, r"\|": MAX_ALTERNATIVES, r"\(": MAX_GROUPS, r"\)[*+?{]": 0}
    return len(key) > MAX_PATTERN or any(len(re.findall(each, key)) > count for each, count in most.items())


def _compiled(field: str, key: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        raise CheckpointError(f"{CONFIG}: {field} has an invalid pattern: {quoted(key)}") from None


def _of_pattern(patterns: Sequence[tuple[re.Pattern[str], _Named]], module: str, default: _Named) -> _Named:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _ends(module: str) -> Iterator[str]:
    """A module's name, and what follows each of its dots."""
    parts = module.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" * (len(names) > MAX_NAMED)
    return ", ".join(map(quoted, names[:MAX_NAMED])) + more


def _entries(content: memoryview, limits: AdapterLimits) -> list[TensorEntry]:
    """The header of a safetensors file in memory, which is not parsed if it is too long for any adapter."""
    header_bytes = int.from_bytes(content[:LENGTH_BYTES], "little")
    if header_bytes > limits.most_header_bytes:
        most = limits.most_header_bytes
        raise CheckpointError(f"{TENSORS} has a header of {header_bytes} bytes; an adapter may have {most} here")
    try:
        if not 0 < header_bytes <= len(content) - LENGTH_BYTES:
            raise ValueError(f"its header has {header_bytes} bytes, the file {len(content)}")
        entries = parse_header(bytes(content[LENGTH_BYTES : LENGTH_BYTES + header_bytes]), len(content))
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


def _stored(content: memoryview, entry: TensorEntry) -> NDArray[Any]:
    if entry.dtype not in STORED or len(entry.shape) != 2:
        wanted = f"a matrix in {', '.join(STORED)} is needed"
        raise CheckpointError(
            f"tensor {quoted(entry.name)} has shape {list(entry.shape)} in {quoted(entry.dtype)}; {wanted}"
        )
    return np.frombuffer(content, STORED[entry.dtype], math.prod(entry.shape), entry.start).reshape(entry.shape)
