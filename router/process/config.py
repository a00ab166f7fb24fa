"""What `pagoda serve` can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from pagoda_server.channel.address import check_address
from pagoda_server.router.errors import ConfigError

Quantization = Literal["auto", "none", "int4", "int8", "fp8"]
Policy = Literal["fcfs", "priority", "fair", "deadline"]
LogLevel = Literal["debug", "info", "warning", "error"]

SPAWN = "spawn"

# Settings of the engine alone: its command line has options of the same names and defaults.
ENGINE_SETTINGS = (
    "device", "dtype", "quantization", "kv_cache_dtype", "kv_cache_gb", "host_kv_gb", "block_size", "max_num_seqs",
    "token_budget", "policy", "priority_ageing_s", "tenant_weights", "target_itl_ms",
    "overlap", "max_model_len", "prefix_caching", "threads", "step_ms",
)  # fmt: skip

_MAX_UINT32 = (1 << 32) - 1  # what Control can tell
_MAX_QUEUED_TOKENS = 1 << 62
_SHORTEST_TIMEOUT_S = 0.1  # somebody looks several times within it whether it is over


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """
    model              name or path of the checkpoint
    served_model_name  what clients call it; None: its name, or that of its folder
    listen             HOST:PORT or unix:PATH; port 0 takes a free one
    workers            router processes that share the port; each takes an equal part of the limits below
    max_requests       admitted at once
    engine             "spawn", or the addresses of running engines (shm:PATH, unix:PATH, HOST:PORT), comma-separated
    channel            how a spawned engine is reached: shared memory, gRPC, or "auto": shared memory where there is any
    policy             who is next in line: docs/scheduling.md
    priority_ageing_s  seconds of waiting that are worth one step of priority
    tenant_weights     shares of the tenants under --policy fair, NAME=WEIGHT,…; 1 where not named
    target_itl_ms      longest step that holds decodes, whose share of prefill adapts; 0: no such target
    max_queued_tokens  prompt + max_tokens over all admitted requests; None: eight times what all KV caches hold
    reflection         None: on for loopback and Unix sockets
    auth_token_file    clients must send its content as a bearer token; $PAGODA_AUTH_TOKEN does the same
    allow_insecure     listen on a public address without TLS and token
    grace_s            how long SIGTERM waits for running requests
    step_ms            the synthetic model's step time, BASE[,PER_SEQUENCE[,PER_TOKEN]] in milliseconds
    stall_timeout_s    a client that takes no message for this long is given up
    hang_timeout_s     work under way and no step for this long: the engine counts as dead

    Those of ENGINE_SETTINGS are passed on to an engine that is spawned, which checks them.
    Raises ConfigError for a value of the others that cannot be.
    """

    model: str = "smollm2-135m-instruct"
    served_model_name: str | None = None
    listen: str = "127.0.0.1:50051"
    engine: str = SPAWN
    workers: int = 1
    channel: Literal["auto", "shm", "grpc"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Quantization = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    kv_cache_gb: float | None = None
    host_kv_gb: float = 0.0
    block_size: int | None = None
    max_num_seqs: int = 64
    token_budget: int = 512
    policy: Policy = "priority"
    priority_ageing_s: float = 60.0
    tenant_weights: str = ""
    target_itl_ms: float = 100.0
    overlap: Literal["auto", "on", "off"] = "auto"
    max_model_len: int | None = None
    prefix_caching: bool = True
    threads: int | None = None
    step_ms: str | None = None
    max_requests: int = 1024
    max_queued_tokens: int | None = None
    max_text_bytes: int = 1 << 20
    reflection: bool | None = None
    auth_token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    allow_insecure: bool = False
    grace_s: float = 30.0
    stall_timeout_s: float = 30.0
    hang_timeout_s: float = 60.0
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        if self.served_model_name is not None and not (self.served_model_name and self.served_model_name.isprintable()):
            raise ConfigError(f"--served-model-name must be printable and not empty, not {self.served_model_name!r}")
        _check_address("--listen", self.listen, can_be_shm=False, lowest_port=0)
        if self.engine != SPAWN:
            for address in self.engine_addresses:
                _check_address("--engine", address, can_be_shm=True, lowest_port=1)
        _check_count("--workers", self.workers, _MAX_UINT32)
        _check_count("--max-requests", self.max_requests, _MAX_UINT32)
        if self.max_queued_tokens is not None:
            _check_count("--max-queued-tokens", self.max_queued_tokens, _MAX_QUEUED_TOKENS)
        _check_count("--max-text-bytes", self.max_text_bytes, _MAX_UINT32)
        if not 0 <= self.grace_s < math.inf:
            raise ConfigError(f"--grace-s must be 0 or more and finite, not {self.grace_s}")
        _check_timeout("--stall-timeout-s", self.stall_timeout_s)
        _check_timeout("--hang-timeout-s", self.hang_timeout_s)

    @property
    def engine_addresses(self) -> list[str]:
        """Of engines that run elsewhere."""
        return self.engine.split(",")

    def check_engine_is_ours(self) -> None:
        """Raises ConfigError for settings of a spawned engine if there is none: they would change nothing."""
        if self.engine == SPAWN:
            return
        defaults = {field.name: field.default for field in fields(self)}
        given = [name for name in (*ENGINE_SETTINGS, "channel") if getattr(self, name) != defaults[name]]
        if given:
            flags = ", ".join(map(_flag, given))
            raise ConfigError(f"{flags}: of an engine that is spawned; give it to the one at {self.engine} itself")

    def engine_arguments(self, model_folder: str, listen: str) -> list[str]:
        """The command line of an engine that serves as told here."""
        arguments = ["--model", model_folder, "--listen", listen, "--log-level", self.log_level]
        for name in ENGINE_SETTINGS:
            match getattr(self, name):
                case None:
                    pass
                case bool(is_on):
                    arguments.append(_flag(name) if is_on else _flag(f"no_{name}"))
                case value:
                    arguments.append(f"{_flag(name)}={value}")
        return arguments


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_address(flag: str, address: str, *, can_be_shm: bool, lowest_port: int) -> None:
    try:
        check_address(address, can_be_shm=can_be_shm, lowest_port=lowest_port)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _check_count(flag: str, value: int, highest: int) -> None:
    if not 1 <= value <= highest:
        raise ConfigError(f"{flag} must be from 1 to {highest}, not {value}")


def _check_timeout(flag: str, value: float) -> None:
    if not _SHORTEST_TIMEOUT_S <= value < math.inf:
        raise ConfigError(f"{flag} must be at least {_SHORTEST_TIMEOUT_S} and finite, not {value}")
