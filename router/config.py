"""What `pagoda serve` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Quantization = Literal["auto", "none", "int8", "fp8"]
Schedule = Literal["sequential", "interleaved", "static", "continuous"]
Policy = Literal["fcfs", "priority", "fair", "deadline"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """
    model              name or path of the checkpoint; the engine's flags below it are passed on when it is spawned
    listen             HOST:PORT or unix:PATH; port 0 takes a free one
    engine             "spawn", or the addresses of running engines (unix:PATH or HOST:PORT), comma-separated
    workers            router processes that share the port; each takes an equal part of the limits below
    max_requests       admitted at once
    engine             "spawn", or the addresses of running engines (shm:PATH, unix:PATH, HOST:PORT), comma-separated
    channel            how a spawned engine is reached: shared memory, gRPC, or "auto": shared memory where there is any
    schedule           continuous is the way to serve; the others are there to be measured against it
    policy             who is next in line: docs/scheduling.md
    priority_ageing_s  seconds of waiting that are worth one step of priority
    tenant_weights     shares of the tenants under --policy fair, NAME=WEIGHT,…; 1 where not named
    target_itl_ms      of a step that holds decodes, whose share of prefill adapts; None: no such target
    max_itl_growth     of a step by prompts beside its decodes, as a factor; None: no such limit
    max_queued_tokens  prompt + max_tokens over all admitted requests; None: eight times what the KV cache holds
    reflection         None: on for loopback and Unix sockets
    auth_token_file    clients must send its content as a bearer token; $PAGODA_AUTH_TOKEN does the same
    allow_insecure     listen on a public address without TLS and token
    grace_s            how long SIGTERM waits for running requests
    step_ms            the synthetic model's step time, BASE[,PER_SEQUENCE[,PER_TOKEN]] in milliseconds
    stall_timeout_s    a client that takes no message for this long is given up
    hang_timeout_s     work under way and no step for this long: the engine counts as dead
    """

    model: str = "smollm2-135m-instruct"
    listen: str = "127.0.0.1:50051"
    engine: str = "spawn"
    workers: int = 1
    channel: Literal["auto", "shm", "grpc"] = "auto"
    device: str = "auto"
    dtype: str = "auto"
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
    target_itl_ms: float | None = None
    max_itl_growth: float | None = None
    schedule: Schedule = "continuous"
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

    def engine_arguments(self, model_folder: str, listen: str) -> list[str]:
        """The command line of an engine that serves as told here."""
        arguments = ["--model", model_folder, "--listen", listen, "--device", self.device, "--dtype", self.dtype]
        arguments += ["--quantization", self.quantization, "--kv-cache-dtype", self.kv_cache_dtype]
        arguments += ["--max-num-seqs", str(self.max_num_seqs)]
        arguments += ["--token-budget", str(self.token_budget), "--schedule", self.schedule]
        arguments += ["--overlap", self.overlap]
        arguments += ["--log-level", self.log_level]
        arguments += ["--policy", self.policy, "--priority-ageing-s", str(self.priority_ageing_s)]
        arguments += ["--tenant-weights", self.tenant_weights]
        if self.block_size is not None:
            arguments += ["--block-size", str(self.block_size)]
        if self.target_itl_ms is not None:
            arguments += ["--target-itl-ms", str(self.target_itl_ms)]
        if self.max_itl_growth is not None:
            arguments += ["--max-itl-growth", str(self.max_itl_growth)]
        if self.kv_cache_gb is not None:
            arguments += ["--kv-cache-gb", str(self.kv_cache_gb)]
        if self.host_kv_gb:
            arguments += ["--host-kv-gb", str(self.host_kv_gb)]
        if self.max_model_len is not None:
            arguments += ["--max-model-len", str(self.max_model_len)]
        if self.threads is not None:
            arguments += ["--threads", str(self.threads)]
        if self.step_ms is not None:
            arguments += ["--step-ms", self.step_ms]
        if not self.prefix_caching:
            arguments.append("--no-prefix-caching")
        return arguments
