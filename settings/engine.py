"""The engine's settings, and those that it shares with the router. To add one, add an entry here and use it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..channel.address import check_address
from .request import MAX_DRAFT_TOKENS
from .setting import (
    ENGINE_KV_CACHE,
    ENGINE_MODEL,
    ENGINE_SCHEDULING,
    EXPOSURE,
    LIMITS,
    MAX_UINT32,
    SHORTEST_TIMEOUT_S,
    SettingError,
    Settings,
    check_cores,
    flag,
    setting,
)

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "none", "int4", "int8", "fp8"]
KVCacheDType = Literal["auto", "int8", "fp8"]
PolicyName = Literal["fcfs", "priority", "fair", "deadline"]
Overlap = Literal["auto", "on", "off"]
Role = Literal["prefill", "decode", "both"]
Speculation = Literal["auto", "off"]

MAX_GB = 1_000_000_000  # more than any machine has, and as bytes it still fits into 64 bits
MAX_CONTEXT = 1 << 28  # tokens, whose ids fit into a message of gRPC
MAX_BLOCK_SIZE = 1 << 20
MAX_RANKS = 64
MAX_NODE_NAME = 64
MAX_ADAPTERS, MAX_LOADED_ADAPTERS, MAX_LORA_RANK = 1024, 4096, 512


def _check_power_of_two(value: int) -> None:
    if value & (value - 1):
        raise ValueError(f"must be a power of two, not {value}")


def _check_listen(address: str) -> None:
    check_address(address, can_be_shm=True, lowest_port=0)


def _check_node(name: str) -> None:
    if name and not (name.isprintable() and len(name) <= MAX_NODE_NAME):
        raise ValueError(f"must be printable and have at most {MAX_NODE_NAME} characters, not {name[:MAX_NODE_NAME]!r}")


def _check_health_listen(address: str) -> None:
    check_address(address, can_be_shm=False, lowest_port=1)


def weights_of_tenants(text: str) -> dict[str, float]:
    """Parse NAME=WEIGHT,NAME=WEIGHT. Raises ValueError."""
    weights: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, weight = part.partition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = math.nan
        if not name or not 0 < weights[name] < math.inf:
            raise ValueError(f"takes NAME=WEIGHT,… with positive weights, not {part!r}")
    return weights


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How many sequences run at once, and how many tokens one step computes at most."""

    max_num_seqs: int
    token_budget: int


@dataclass(frozen=True)
class CommonSettings(Settings):
    """Settings of both processes."""

    model: str = setting(
        "smollm2-135m-instruct",
        "Model to serve: a name that `pagoda models` lists, a folder, a .gguf file, a name on the Hugging Face Hub, or "
        "the URL of a folder or a .gguf file in an object store.",
        is_private=True,
    )
    grace_s: float = setting(
        30.0, "Seconds that running requests have to finish after SIGTERM.", unit="seconds", at_least=0
    )
    hang_timeout_s: float = setting(
        60.0,
        "Seconds without an answer of its loop after which an engine counts as dead, and so does one of several "
        "routers. Prompts are cut so that no step is expected to take more than a quarter of it.",
        panel=LIMITS, unit="seconds", at_least=SHORTEST_TIMEOUT_S,
    )  # fmt: skip
    log_level: LogLevel = setting("info", "Lowest severity of messages to log.")
    log_format: LogFormat = setting("text", "How lines of the log are written: for people, or one JSON object a line.")
    channel_tls_cert: str | None = setting(
        None,
        "PEM file with this end's certificate for the channel at HOST:PORT. Needs --channel-tls-key and "
        "--channel-tls-ca. All files of the channel are read again when they change.",
        panel=EXPOSURE, is_private=True,
    )  # fmt: skip
    channel_tls_key: str | None = setting(
        None, "PEM file with the private key of --channel-tls-cert.", panel=EXPOSURE, is_private=True
    )
    channel_tls_ca: str | None = setting(
        None,
        "PEM file with the authorities that sign the certificates of the channel's other ends.",
        panel=EXPOSURE, is_private=True,
    )  # fmt: skip
    channel_token_file: str | None = setting(
        None,
        "File with a token that routers send and engines at HOST:PORT ask for. While it is replaced, two lines hold "
        "the old and the new one.",
        panel=EXPOSURE, is_private=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({self.channel_tls_cert is None, self.channel_tls_key is None, self.channel_tls_ca is None}) > 1:
            raise SettingError("--channel-tls-cert, --channel-tls-key and --channel-tls-ca must be given together")

    @property
    def guards_of_channel(self) -> list[str]:
        """The options given that guard the channel at HOST:PORT."""
        names = ("channel_tls_cert", "channel_tls_key", "channel_tls_ca", "channel_token_file")
        return [flag(name) for name in names if getattr(self, name) is not None]


@dataclass(frozen=True)
class EngineSettings(CommonSettings):
    """Settings that a router passes to an engine that it spawns."""

    device: Device = setting(
        "auto", "Where the model runs. auto takes a GPU if torch finds one, else the CPU.", panel=ENGINE_MODEL
    )
    dtype: DType = setting(
        "auto",
        "Number format of the model. auto takes float32 for a float32 checkpoint, else bfloat16.",
        panel=ENGINE_MODEL,
    )
    quantization: Quantization = setting(
        "auto",
        "Number format of weights in matrix products. int4 keeps the values of a file that is quantized in groups, and "
        "rounds those of any other file to 4 bits while loading. auto keeps the values of a quantized file where that "
        "is fast; else it takes int8 on a CPU that is fast at it, and none on a GPU.",
        panel=ENGINE_MODEL,
    )
    deterministic: bool = setting(
        False,
        "Compute the same logits for a request, bit by bit, whatever runs beside it and however its prompt is cut, "
        "cached or computed again. Slower.",
        panel=ENGINE_MODEL,
    )
    max_model_len: int | None = setting(
        None,
        "Longest sequence: prompt and output together.",
        panel=ENGINE_MODEL, unit="tokens", at_least=2, at_most=MAX_CONTEXT,
        shown_default="the model's, as far as the KV cache holds it",
    )  # fmt: skip
    threads: int | None = setting(
        None,
        "CPU threads that compute the model, at most four for each core of the machine.",
        panel=ENGINE_MODEL, unit="threads", at_least=1, check=check_cores,
        shown_default="one per physical core, of those that the process may use",
    )  # fmt: skip
    tensor_parallel: int = setting(
        1,
        "Processes that compute the model together, each with a part of every layer. CPU only. Without --threads they "
        "share the processor's cores; with it each has so many threads.",
        panel=ENGINE_MODEL, unit="processes", at_least=1, at_most=MAX_RANKS,
    )  # fmt: skip
    max_adapters: int | None = setting(
        None,
        "LoRA adapters that the sequences of one step can have. Sequences with others wait. 0: the engine loads none. "
        "On a GPU each takes the memory of one of rank --max-lora-rank.",
        panel=ENGINE_MODEL, unit="adapters", at_least=0, at_most=MAX_ADAPTERS,
        on_device={"cpu": 8, "cuda": 0},
    )  # fmt: skip
    max_loaded_adapters: int = setting(
        64,
        "LoRA adapters that the engine holds in memory.",
        panel=ENGINE_MODEL, unit="adapters", at_least=1, at_most=MAX_LOADED_ADAPTERS,
    )  # fmt: skip
    max_lora_rank: int = setting(
        64,
        "Highest rank of a LoRA adapter.",
        panel=ENGINE_MODEL, unit="ranks", at_least=1, at_most=MAX_LORA_RANK,
    )  # fmt: skip
    step_ms: str | None = setting(
        None,
        "Duration of a step of the synthetic model, in ms: BASE[,PER_SEQUENCE[,PER_TOKEN]]. For tests.",
        panel=ENGINE_MODEL, shown_default="as fast as it can",
    )  # fmt: skip

    kv_cache_gb: float | None = setting(
        None,
        "Size of the KV cache, in GB (10^9 bytes).",
        panel=ENGINE_KV_CACHE, unit="GB", above=0, at_most=MAX_GB,
        shown_default="0.5 on a CPU, the free memory on a GPU",
    )  # fmt: skip
    kv_cache_dtype: KVCacheDType = setting(
        "auto",
        "Number format of the KV cache. auto takes the model's. int8 and fp8 take about half the memory; fp8 needs a "
        "GPU.",
        panel=ENGINE_KV_CACHE,
    )
    host_kv_gb: float = setting(
        0.0,
        "Host memory that keeps keys and values of preempted sequences, and of prefixes for which the KV cache has no "
        "room, in GB. With 0 they are computed again.",
        panel=ENGINE_KV_CACHE, unit="GB", at_least=0, at_most=MAX_GB,
    )  # fmt: skip
    kv_store: str = setting(
        "",
        "Folder with a file of blocks that several requests have found in the prefix cache. They outlive the engine, "
        "and the engines of a host share them. Needs --host-kv-gb. Empty: there is none.",
        panel=ENGINE_KV_CACHE, is_private=True,
    )  # fmt: skip
    kv_store_gb: float = setting(
        10.0,
        "Largest size of the file in --kv-store, in GB; it holds a million blocks at most. What was not used for "
        "longest makes room.",
        panel=ENGINE_KV_CACHE, unit="GB", above=0, at_most=MAX_GB,
    )  # fmt: skip
    block_size: int | None = setting(
        None,
        "Tokens that a block of the KV cache holds: a power of two.",
        panel=ENGINE_KV_CACHE, unit="tokens", at_least=1, at_most=MAX_BLOCK_SIZE, check=_check_power_of_two,
        on_device={"cpu": 4, "cuda": 16},  # small blocks waste few slots; a GPU's kernels read 16 tokens at a time
    )  # fmt: skip
    prefix_caching: bool = setting(
        True, "Reuse the keys and values of prompts that start with the same tokens.", panel=ENGINE_KV_CACHE
    )

    max_num_seqs: int | None = setting(
        None,
        "Most sequences that run at once. Others wait.",
        panel=ENGINE_SCHEDULING, unit="sequences", at_least=1, at_most=MAX_UINT32,
        on_device={"cpu": 64, "cuda": 256},
    )  # fmt: skip
    token_budget: int | None = setting(
        None,
        "Most tokens that one step computes. Must exceed --max-num-seqs. On a GPU that is too small for the "
        "defaults of both, they are halved until they fit.",
        panel=ENGINE_SCHEDULING, unit="tokens", at_least=2, at_most=MAX_UINT32,
        on_device={"cpu": 512, "cuda": 8192},
    )  # fmt: skip
    target_itl_ms: float = setting(
        100.0,
        "Longest a decoding step may take, in ms. The engine computes less prefill per step to hold it. "
        "0 turns it off.",
        panel=ENGINE_SCHEDULING, unit="ms", at_least=0,
    )  # fmt: skip
    policy: PolicyName = setting(
        "priority",
        "Order in which waiting requests start: by arrival (fcfs), by priority, by the shares of tenants (fair) "
        "or by latency targets (deadline).",
        panel=ENGINE_SCHEDULING,
    )
    priority_ageing_s: float = setting(
        60.0,
        "Seconds of waiting that raise a request's priority by one.",
        panel=ENGINE_SCHEDULING, unit="seconds", above=0,
    )  # fmt: skip
    tenant_weights: str = setting(
        "",
        "Shares of tenants with --policy fair: NAME=WEIGHT,NAME=WEIGHT. A tenant that is not named has weight 1.",
        panel=ENGINE_SCHEDULING, check=weights_of_tenants,
    )  # fmt: skip
    overlap: Overlap = setting(
        "auto",
        "Launch a step before the tokens of the last one have been read. auto does so on a GPU.",
        panel=ENGINE_SCHEDULING,
    )
    speculation: Speculation = setting(
        "auto",
        "Draft tokens that are likely to follow, and verify them in the next step. It changes no token. auto drafts as "
        "many as pay, which under load is none.",
        panel=ENGINE_SCHEDULING,
    )
    draft_model: str = setting(
        "",
        "A smaller model with the same tokenizer, which drafts instead of prompt lookup: named like --model. It can "
        "pay for answers that repeat nothing, if it is many times smaller. Needs a CPU.",
        panel=ENGINE_SCHEDULING, is_private=True,
    )  # fmt: skip
    max_draft_tokens: int = setting(
        8,
        "Most tokens that one step drafts for a sequence.",
        panel=ENGINE_SCHEDULING, unit="tokens", at_least=1, at_most=MAX_DRAFT_TOKENS,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        devices = ("cpu", "cuda") if self.device == "auto" else (self.device,)
        faults = [fault for device in devices if (fault := self._fault_of_limits(device))]
        if len(faults) == len(devices):  # with auto, a fault on one of them shows when the device is known
            raise SettingError(faults[0])
        if self.weight_of_tenant() and self.policy != "fair":
            raise SettingError(f"--tenant-weights needs --policy fair, not {self.policy}")
        if self.kv_store and not self.host_kv_gb:
            raise SettingError("--kv-store needs --host-kv-gb above 0: blocks pass through host memory")

    @property
    def target_itl_s(self) -> float | None:
        """The target in seconds; None: no target."""
        return self.target_itl_ms / 1e3 if self.target_itl_ms else None

    @property
    def longest_step_s(self) -> float:
        """How long prompts may make a step: a prediction may be wrong, and other work may take the processor."""
        return self.hang_timeout_s / 4

    def tokens_a_block(self, device_type: str) -> int:
        """The block size on a device of this type."""
        return self.number_on(device_type, "block_size")

    def step_limits(self, device_type: str) -> StepLimits:
        """The limits of a step on a device of this type. Raises SettingError if they contradict each other."""
        if fault := self._fault_of_limits(device_type):
            raise SettingError(fault)
        return StepLimits(self.number_on(device_type, "max_num_seqs"), self.number_on(device_type, "token_budget"))

    def step_limits_to_try(self, device_type: str) -> Iterator[StepLimits]:
        """Yield the limits of a step, then smaller ones: a limit that is not set is halved, down to a CPU's default."""
        limits = self.step_limits(device_type)
        while True:
            yield limits
            smaller = StepLimits(
                self._halved("max_num_seqs", limits.max_num_seqs), self._halved("token_budget", limits.token_budget)
            )
            if smaller == limits or smaller.token_budget <= smaller.max_num_seqs:
                return
            limits = smaller

    def _halved(self, name: str, number: int) -> int:
        return number if getattr(self, name) is not None else max(number // 2, min(number, self.number_on("cpu", name)))

    def _fault_of_limits(self, device_type: str) -> str:
        token_budget, max_num_seqs = (self.number_on(device_type, name) for name in ("token_budget", "max_num_seqs"))
        if token_budget > max_num_seqs:
            return ""
        return (
            f"--token-budget ({token_budget}) must exceed --max-num-seqs ({max_num_seqs}): "
            "otherwise decodes fill every step and a waiting prompt never advances"
        )

    def weight_of_tenant(self) -> dict[str, float]:
        return weights_of_tenants(self.tenant_weights)


@dataclass(frozen=True)
class EngineConfig(EngineSettings):
    """Settings of `python -m pagoda_server.engine`."""

    listen: str = setting(
        "127.0.0.1:50052",
        "Address for routers to connect to: shm:PATH, unix:PATH or HOST:PORT (port 0 takes a free one).",
        check=_check_listen, is_private=True,
    )  # fmt: skip
    health_listen: str | None = setting(
        None,
        "Address at which anyone may ask for the engine's health, and nothing else: for probes without a certificate. "
        "HOST:PORT or unix:PATH.",
        check=_check_health_listen, is_private=True,
    )  # fmt: skip
    role: Role = setting(
        "both",
        "What routers give the engine: prompts up to their first token (prefill), what follows it (decode), or whole "
        "requests. An engine with another role than both needs --host-kv-gb: keys and values pass through it.",
    )
    allow_insecure: bool = setting(False, "Listen at an address that other hosts can reach without TLS or a token.")
    node: str = setting(
        "",
        f"Name of the machine, shown by `pagoda top` and pages beside the engine: at most {MAX_NODE_NAME} characters.",
        check=_check_node,
    )
    exit_with_parent: bool = setting(
        False, "Exit when standard input ends, as it does when the process that holds its other end dies."
    )
