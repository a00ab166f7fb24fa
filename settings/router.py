"""The router's settings. A new one is an entry here and its use."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from ..channel.address import check_address, check_distinct, is_local, is_unix, named_address
from .engine import CommonSettings, EngineSettings
from .request import MAX_ADAPTER_NAME, MAX_ADAPTER_PATH
from .setting import (
    EXPOSURE,
    LIMITS,
    MAX_UINT32,
    SHORTEST_TIMEOUT_S,
    TELEMETRY,
    SettingError,
    check_cores,
    flag,
    setting,
)

AUTH_TOKEN_VARIABLE = "PAGODA_AUTH_TOKEN"
SPAWN = "spawn"
FILE_PREFIX, DNS_PREFIX = "file:", "dns:"  # what else --engine may be, beside a list
ToolFormatName = Literal[
    "auto", "none", "deepseek", "deepseek-v3", "functiongemma", "gemma", "gemma4", "glm", "harmony", "hermes",
    "llama3", "mistral", "mistral-v3", "pythonic", "qwen3-coder"
]  # fmt: skip
ReasoningFormatName = Literal["auto", "none", "gemma4", "harmony", "mistral", "think"]
ChoiceName = Literal["auto", "load", "hash", "prefix"]
MAX_QUEUED_TOKENS = 1 << 62
MAX_TEXT_BYTES = 1 << 30  # a message of gRPC, which has 2 GiB at most, holds it beside the other fields
MAX_ENGINE_WAIT_S = 86_400
MAX_CONNECTION_AGE_S = 2_000_000  # gRPC counts milliseconds in 32 bits
_OTLP_HEADERS = tuple(f"OTEL_EXPORTER_OTLP_{part}HEADERS" for part in ("", "TRACES_", "METRICS_"))
_SECRETS = (AUTH_TOKEN_VARIABLE, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", *_OTLP_HEADERS)
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/,]+|\*")


def environment_without_secrets() -> dict[str, str]:
    """The environment of a child process that needs no credentials."""
    return {name: value for name, value in os.environ.items() if name not in _SECRETS}


def _check_name(name: str) -> None:
    if not (name and name.isprintable()):
        raise ValueError(f"must be printable and not empty, not {name!r}")


def _check_listen(address: str) -> None:
    check_address(address, can_be_shm=False, lowest_port=0)


def _check_http(address: str) -> None:
    if is_unix(address):
        raise ValueError(f"must be HOST:PORT, not {address}")
    check_address(address, can_be_shm=False, lowest_port=0)


def _check_otlp_endpoint(url: str) -> None:
    parts = urlsplit(url)
    is_whole = parts.hostname and parts.port != 0  # raises ValueError for a port that is none
    if parts.scheme not in ("http", "https") or not is_whole or parts.query or parts.fragment:
        raise ValueError(f"must be http://HOST:PORT or https://HOST:PORT, not {url}")


def names_in(names: str | None) -> list[str]:
    """The names of a setting that separates them by commas."""
    return [] if names is None else [name.strip() for name in names.split(",")]


def _check_hosts(hosts: str) -> None:
    for host in names_in(hosts):
        if not _HOST.fullmatch(host):
            raise ValueError(f"must be names or addresses of hosts without a port, separated by commas, not {host!r}")


def _check_origins(origins: str) -> None:
    for origin in names_in(origins):
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"must be origins such as https://chat.example.org, separated by commas, or *, not {origin!r}"
            )


def named_models(models: str | None) -> list[tuple[str, str]]:
    """The models of --also-serve, each with the name that it is given; empty: its own."""
    entries = (each if "=" in each else f"={each}" for each in names_in(models))
    return [(name, model) for name, _, model in (each.partition("=") for each in entries)]


def named_loras(loras: str | None) -> list[tuple[str, str]]:
    """The adapters of --lora: their names, with absolute paths."""
    return [(name, os.path.abspath(path)) for name, _, path in (each.partition("=") for each in names_in(loras))]


def _check_loras(loras: str) -> None:
    found = [each.partition("=") for each in names_in(loras)]
    if not (loras.isprintable() and all(0 < len(name) <= MAX_ADAPTER_NAME and path for name, _, path in found)):
        raise ValueError(f"must be NAME=PATH, separated by commas, not {loras!r}")
    if any(len(path) > MAX_ADAPTER_PATH for _, path in named_loras(loras)):
        raise ValueError(f"has a path of more than {MAX_ADAPTER_PATH} characters")
    if len({name for name, _, _ in found}) < len(found):
        raise ValueError(f"has a name twice: {loras!r}")


def _check_models(models: str) -> None:
    parts = [part for each in names_in(models) for part in each.split("=", 1)]
    if not (models.isprintable() and all(parts)):
        raise ValueError(f"must be MODEL or NAME=MODEL, separated by commas, not {models!r}")


def _check_engine(engine: str) -> None:
    if engine == SPAWN:
        return
    if engine.startswith(FILE_PREFIX):
        if engine == FILE_PREFIX:
            raise ValueError(f"{engine!r} has no path")
    elif engine.startswith(DNS_PREFIX):
        name = engine.removeprefix(DNS_PREFIX)
        if is_unix(name) or ":" not in name:
            raise ValueError(f"{engine!r} is not {DNS_PREFIX}NAME:PORT")
        check_address(name, can_be_shm=False, lowest_port=1)
    else:
        check_distinct(named_address(each, at) for at, each in enumerate(engine.split(",")))


@dataclass(frozen=True)
class RouterSettings(CommonSettings):
    """Settings of the router, and those of both processes."""

    served_model_name: str | None = setting(
        None, "Name that clients call the model by.", check=_check_name, shown_default="its own, or its folder's"
    )
    also_serve: str | None = setting(
        None,
        "More models that engines of --engine have, separated by commas: each as for --model, with the name that "
        "clients call it by before it if it is not its own: NAME=MODEL. Requests that name no model get --model.",
        check=_check_models, is_private=True,
    )  # fmt: skip
    lora: str | None = setting(
        None,
        "LoRA adapters of --model, separated by commas: NAME=PATH. The path is a folder of PEFT or a GGUF file, which "
        "every engine must find there. A request names one as its model.",
        check=_check_loras, is_private=True,
    )  # fmt: skip
    lora_dir: str | None = setting(
        None,
        "Folder from which LoRA adapters can be loaded while the server runs, by the right admin. Every engine must "
        "find it at the same path.",
        is_private=True,
    )  # fmt: skip
    tool_format: ToolFormatName = setting(
        "auto",
        "How the model writes tool calls. auto finds it in the chat template; none leaves calls in the text.",
    )
    reasoning_format: ReasoningFormatName = setting(
        "auto",
        "How the model marks its reasoning. auto finds it in the chat template; none leaves reasoning in the text.",
    )
    listen: str = setting(
        "127.0.0.1:50051",
        "Address for clients to connect to: HOST:PORT (port 0 takes a free one) or unix:PATH.",
        check=_check_listen, is_private=True,
    )  # fmt: skip
    http: str | None = setting(
        None,
        "Address for HTTP clients: HOST:PORT (port 0 takes a free one). Without it the server speaks gRPC alone.",
        check=_check_http, is_private=True,
    )  # fmt: skip
    metrics_tenants: bool = setting(
        True, "List tenants by name at /metrics, at most 64 at once. Every name makes series that Prometheus keeps."
    )
    engine: str = setting(
        SPAWN,
        "Where the engine runs. 'spawn' starts it here. Otherwise the addresses of running engines, separated by "
        "commas: shm:PATH, unix:PATH or HOST:PORT, each with a name before it if it has one: NAME=ADDRESS. Or "
        "dns:NAME:PORT for all addresses of a name, or file:PATH for a JSON file that is read again when it changes.",
        check=_check_engine, is_private=True,
    )  # fmt: skip
    choose: ChoiceName = setting(
        "auto",
        "Which of several engines gets a request. load: the one with the fewest sequences. hash: one that follows from "
        "the prompt's first 256 tokens, while its load is near the mean. prefix: the one that will have the first "
        "token soonest, or one that has the prompt cached and is not much later. auto: prefix where all engines report "
        "what they have cached, else load.",
    )
    mixed_engines: bool = setting(
        False,
        "Let engines serve side by side that have the same weights in different precisions or sizes of blocks. A "
        "request's answer then depends on which one it gets.",
    )
    channel: Literal["auto", "shm", "grpc"] = setting(
        "auto", "How to reach a spawned engine. auto takes shared memory on Linux, else gRPC."
    )
    workers: int = setting(
        1,
        "Router processes that share the port and the limits, at most four for each core of the machine.",
        unit="processes", at_least=1, check=check_cores,
    )  # fmt: skip

    failover: bool = setting(
        True,
        "Continue a stream that has begun on another engine when its own is lost, if both have the same weights in the "
        "same precision. A request that has not begun goes to another engine either way.",
    )
    mixed_failover: bool = setting(
        False,
        "With --mixed-engines, continue such a stream in another precision if no engine with its own is ready. Its "
        "tokens may then be others than those that the lost engine would have computed.",
    )
    failover_wait_s: float = setting(
        0.0,
        "Seconds that a request whose engine was lost waits for one that can take it, if none is ready.",
        unit="seconds", at_least=0,
    )  # fmt: skip

    engine_wait_s: float = setting(
        0.0,
        "Seconds that a new request waits while no engine is ready. It counts in --max-requests. The router is healthy "
        "without an engine then. 0: such requests are refused at once.",
        unit="seconds", at_least=0, at_most=MAX_ENGINE_WAIT_S,
    )  # fmt: skip

    max_connection_age_s: float = setting(
        60,
        "Seconds after which a gRPC connection takes no new calls, so that load balancers spread them anew and "
        "replaced routers can end. Its own calls go on to their end.",
        unit="seconds", at_least=1, at_most=MAX_CONNECTION_AGE_S,
    )  # fmt: skip

    max_requests: int = setting(
        1024,
        "Most requests admitted at once. Others are refused.",
        panel=LIMITS, unit="requests", at_least=1, at_most=MAX_UINT32,
    )  # fmt: skip
    max_queued_tokens: int | None = setting(
        None,
        "Most tokens of all admitted requests: prompts and max_tokens together. An answer without max_tokens counts as "
        "long as such answers usually become, and longer once it is.",
        panel=LIMITS, unit="tokens", at_least=1, at_most=MAX_QUEUED_TOKENS,
        shown_default="eight times what the KV caches hold",
    )  # fmt: skip
    max_text_bytes: int = setting(
        1 << 20,
        "Longest text of a prompt, in bytes of UTF-8.",
        panel=LIMITS, unit="bytes", at_least=1, at_most=MAX_TEXT_BYTES,
    )  # fmt: skip
    default_max_tokens: int | None = setting(
        None,
        "Most tokens to generate for a request that sets no max_tokens. Fewer if the context leaves fewer.",
        panel=LIMITS, unit="tokens", at_least=1, at_most=MAX_UINT32, shown_default="what the context leaves",
    )  # fmt: skip
    sampling_defaults: Literal["model", "none"] = setting(
        "model",
        "Where sampling parameters come from that a request leaves out. model: what the model's authors recommend, or "
        "llama.cpp's defaults if they recommend no temperature. none: the most likely token is taken.",
        panel=LIMITS,
    )  # fmt: skip
    stall_timeout_s: float = setting(
        30.0,
        "Seconds that a client may read nothing, or take to send its request, before its call is ended.",
        panel=LIMITS, unit="seconds", at_least=SHORTEST_TIMEOUT_S,
    )  # fmt: skip

    resume_s: float = setting(
        120.0,
        "Seconds that a resumable stream is kept after its call has ended, in 64 MiB at most. 0: none is resumable.",
        panel=LIMITS, unit="seconds", at_least=0,
    )  # fmt: skip

    reflection: bool | None = setting(
        None,
        "Describe the services to clients that have no proto files, such as grpcurl.",
        panel=EXPOSURE, shown_default="on at a loopback address or a Unix socket",
    )  # fmt: skip
    auth_token_file: str | None = setting(
        None,
        "File with one token that every call must carry. Without it and --tenants-file, $PAGODA_AUTH_TOKEN counts if "
        "it is set.",
        panel=EXPOSURE, is_private=True,
    )  # fmt: skip
    tenants_file: str | None = setting(
        None,
        "TOML file of tenants: the hashes of their tokens, their rights and quotas. It is read again when it changes. "
        "Takes the place of --auth-token-file.",
        panel=EXPOSURE, is_private=True,
    )  # fmt: skip
    quotas_file: str | None = setting(
        None,
        "File, made if there is none, in which servers on this host count together what tenants use of their quotas. "
        "The workers of one server do so without it. Needs --tenants-file.",
        panel=EXPOSURE, is_private=True,
    )  # fmt: skip
    quota_hosts: int = setting(
        1,
        "Hosts with servers that tenants use at once. Each host gets an equal part of every quota, so that all of them "
        "together keep it. Needs --tenants-file.",
        panel=EXPOSURE, unit="hosts", at_least=1, at_most=MAX_UINT32,
    )  # fmt: skip
    tls_cert: str | None = setting(
        None, "PEM file with the server's certificate. Needs --tls-key.", panel=EXPOSURE, is_private=True
    )
    tls_key: str | None = setting(
        None, "PEM file with the certificate's private key. Needs --tls-cert.", panel=EXPOSURE, is_private=True
    )
    channel_tls_name: str | None = setting(
        None,
        "Name that every engine's certificate must bear, for engines whose addresses are not names that last. Needs "
        "--channel-tls-cert.",
        panel=EXPOSURE, check=_check_name, is_private=True, shown_default="the host of the engine's address",
    )  # fmt: skip
    http_allowed_hosts: str | None = setting(
        None,
        "Names, separated by commas, by which HTTP requests may call this server, besides localhost, IP addresses and "
        "the host of --http. Where others can reach --http and TLS or tokens guard it, none is refused without this.",
        panel=EXPOSURE, check=_check_hosts, is_private=True,
    )  # fmt: skip
    http_allowed_origins: str | None = setting(
        None,
        "Origins, separated by commas, whose pages may send HTTP requests from a browser besides this server's own; "
        "* allows every page.",
        panel=EXPOSURE, check=_check_origins, is_private=True,
    )  # fmt: skip
    allow_insecure: bool = setting(
        False, "Listen at an address that other hosts can reach without TLS or a token.", panel=EXPOSURE
    )
    exit_with_parent: bool = setting(
        False, "Exit when standard input ends, as it does when the process that holds its other end dies."
    )

    log_requests: bool = setting(
        True,
        "Log a line for each request when it ends: its tokens, times and status, never its text. Refused ones are "
        "counted in a line a second.",
        panel=TELEMETRY,
    )  # fmt: skip
    otlp_endpoint: str | None = setting(
        None,
        "Send traces and metrics to this OpenTelemetry collector by OTLP over HTTP, such as http://127.0.0.1:4318. "
        "Needs the extra `tracing`. The standard OTEL_* variables count too.",
        panel=TELEMETRY, check=_check_otlp_endpoint, is_private=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channel_tls_name is not None and self.channel_tls_cert is None:
            raise SettingError("--channel-tls-name needs --channel-tls-cert")
        if self.mixed_failover and not self.mixed_engines:
            raise SettingError("--mixed-failover needs --mixed-engines")
        if self.quota_hosts > 1 and not self.tenants_file:
            raise SettingError("--quota-hosts needs --tenants-file, which says who has which quotas")
        if self.quotas_file and not self.tenants_file:
            raise SettingError("--quotas-file needs --tenants-file, which says who has which quotas")


@dataclass(frozen=True)
class ServeConfig(RouterSettings, EngineSettings):
    """Settings of `pagoda serve`: the router's, and those of the engine that it spawns."""

    @property
    def has_one_engine(self) -> bool:
        """Whether there is one engine, and never another one."""
        return not self.engine.startswith((FILE_PREFIX, DNS_PREFIX)) and "," not in self.engine

    @property
    def spawns_engine(self) -> bool:
        return self.engine == SPAWN

    @property
    def has_reflection(self) -> bool:
        return is_local(self.listen) if self.reflection is None else self.reflection

    def check_engine_is_ours(self) -> None:
        """Raise SettingError for settings without effect: a spawned engine's if there is none, and the reverse."""
        if self.engine == SPAWN:
            if self.also_serve is not None:
                raise SettingError("--also-serve needs --engine: an engine that is spawned here has --model alone")
            if self.guards_of_channel:
                options = ", ".join(self.guards_of_channel)
                raise SettingError(f"{options}: only for engines at HOST:PORT; a spawned one has a private address")
            return
        common = {declared.name for declared in fields(CommonSettings)}
        names = [declared.name for declared in fields(EngineSettings) if declared.name not in common]
        defaults = {declared.name: declared.default for declared in fields(self)}
        if given := [name for name in ("channel", *names) if getattr(self, name) != defaults[name]]:
            flags = ", ".join(map(flag, given))
            raise SettingError(f"{flags}: only for a spawned engine; set it on the engine at {self.engine} itself")

    def engine_arguments(self, folder: Path, listen: str) -> list[str]:
        """The command line of an engine that serves the model in `folder` with these settings."""
        return [*replace(self, model=str(folder)).arguments(EngineSettings), f"--listen={listen}"]
