"""The names of all metrics: what each of them means, and its labels.

Many series have two names: `pagoda_NAME`, and `vllm:NAME`, which dashboards, autoscalers and endpoint pickers read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pagoda.v1 import control_pb2

from ..request.token_times import TOKEN_BOUNDS, bounds_between


@dataclass(frozen=True, slots=True)
class Family:
    """Series of one name.

    kind      gauge, counter or histogram; a counter's series end in _total
    labels    besides model_name, which all series have: that of the engine if there is one, else of the only model
    bounds    of a histogram's buckets
    prefixes  each gives the series a full name
    field     of an engine's load, which each engine's sample shows; empty: it is made otherwise
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    bounds: Sequence[float]
    prefixes: tuple[str, ...]
    field: str = ""

    @property
    def full_names(self) -> list[str]:
        """The names under which Prometheus finds the series, without a histogram's suffixes."""
        return [f"{prefix}{self.name}{'_total' if self.kind == 'counter' else ''}" for prefix in self.prefixes]


MODEL_LABEL = "model_name"
_LOAD = control_pb2.EngineLoad.DESCRIPTOR.fields_by_name
_OURS, _VLLM, _PROCESS = ("pagoda_",), ("vllm:",), ("process_",)
_BOTH = (*_OURS, *_VLLM)
_DURATIONS = bounds_between(-3, 3, (1, 2, 5))
_COUNTS = bounds_between(0, 6, (1, 2, 5))


def _gauge(name: str, help: str, *labels: str, prefixes: tuple[str, ...] = _OURS) -> Family:
    return Family(name, "gauge", help, labels, (), prefixes)


def _counter(name: str, help: str, *labels: str, prefixes: tuple[str, ...] = _OURS) -> Family:
    return Family(name, "counter", help, labels, (), prefixes)


def _histogram(name: str, help: str, bounds: Sequence[float]) -> Family:
    return Family(name, "histogram", help, ("engine",), bounds, _BOTH)


def _histogram_of_calls(name: str, help: str, bounds: Sequence[float]) -> Family:
    return Family(name, "histogram", help, ("engine", "method"), bounds, _BOTH)


def _engine_gauge(
    name: str, help: str, field: str = "", prefixes: tuple[str, ...] = _OURS, kind: str = "gauge"
) -> Family:
    """A family of each engine's load: of the field of the same name, or of another one."""
    assert (field or name) in _LOAD, f"an engine's load has no {field or name}"
    return Family(name, kind, help, ("engine",), (), prefixes, field or name)


_engine_counter = partial(_engine_gauge, kind="counter")


# What every router knows.
OF_ENGINES = (
    _engine_gauge("num_requests_running", "Sequences that an engine computes.", "running", _BOTH),
    _engine_gauge("num_requests_waiting", "Sequences that wait for an engine.", "waiting", _BOTH),
    _engine_gauge(
        "uncomputed_prompt_tokens", "Prompt tokens that an engine still has to compute.", "uncomputed_tokens"
    ),
    _gauge(
        "predicted_time_to_first_token_seconds", "Time that an engine needs for the prompts that it has.", "engine"
    ),
    _gauge("kv_cache_usage_perc", "Fraction of the KV blocks that sequences use, 0 to 1.", "engine", prefixes=_BOTH),
    _gauge(
        "cache_config_info", "1, with the sizes of the KV cache.", "engine", "block_size", "num_gpu_blocks",
        prefixes=_BOTH,
    ),
    _gauge(
        "lora_requests_info",
        "The time, and the adapters of requests that run, and of those that wait for their first token.",
        "engine", "max_lora", "running_lora_adapters", "waiting_lora_adapters", prefixes=_VLLM,
    ),
    _engine_counter("prompt_tokens", "Tokens of prompts, cached ones included.", "prompt_tokens", _BOTH),
    _engine_counter("generation_tokens", "Tokens generated.", "output_tokens", _BOTH),
    _engine_counter("num_preemptions", "Preemptions of sequences.", "preemptions", _BOTH),
    _engine_counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prompt_tokens", _BOTH),
    _engine_counter("prefix_cache_hits", "Prompt tokens that the prefix cache held.", "cached_tokens", _BOTH),
    _engine_counter("spec_decode_num_drafts", "Steps of a sequence that verified drafts.", "drafts", _BOTH),
    _engine_counter("spec_decode_num_draft_tokens", "Tokens drafted and verified.", "drafted_tokens", _BOTH),
    _engine_counter("spec_decode_num_accepted_tokens", "Drafted tokens that became output.", "accepted_tokens", _BOTH),
    _engine_counter("forced_tokens", "Tokens generated without a step each: a grammar allowed no others."),
    _gauge("engine_up", "Whether the engine is ready.", "engine"),
    _counter("engine_refusals", "Times that the engine answered and was not used, by reason.", "engine", "reason"),
    _counter("engine_restarts", "Restarts of the engine by this server.", "engine"),
    _gauge("kv_blocks", "KV blocks by state: free, evictable or referenced.", "engine", "state"),
    _engine_gauge("kv_waste_ratio", "Fraction of the slots of referenced blocks that hold no token.", "kv_waste"),
    _gauge(
        "host_blocks", "Blocks of host memory: free, used (by preempted sequences) or cached.", "engine", "state"
    ),
    _engine_counter("steps", "Steps of the engine."),
    _engine_gauge("step_seconds", "Duration of the last step.", "step_time_s"),
    _engine_gauge("step_sequences", "Sequences in the last step."),
    _engine_gauge("step_tokens", "Tokens that the last step computed."),
    _engine_counter("preempted_tokens", "Computed tokens that preempted sequences gave up."),
    _engine_counter("recomputed_tokens", "Tokens computed again: preempted ones, and those that other engines had."),
    _engine_counter("host_cached_tokens", "Prompt tokens that host memory held; prefix_cache_hits counts them, too."),
    _engine_gauge("stored_blocks", "Blocks in the file of --kv-store."),
    _engine_counter("stored_read_tokens", "Prompt tokens that were read from the file of --kv-store."),
    _engine_counter("stored_failed_blocks", "Blocks that could not be read from that file or written to it."),
    _engine_counter("fetched_tokens", "Prompt tokens whose keys and values came from other engines."),
    _engine_counter("unfetched_blocks", "Blocks that other engines were asked for and did not send."),
    _engine_counter("lent_tokens", "Tokens whose keys and values went to other engines."),
    _engine_counter("saved_tokens", "Preempted tokens that were copied to host memory."),
    _engine_counter("loaded_tokens", "Preempted tokens that were copied back from host memory."),
    _engine_counter("dropped_tokens", "Tokens computed for sequences that had already ended."),
    _gauge("tenants", "Tenants with sequences now, or served in the last ten seconds."),
    _gauge("tenant_share_ratio", "A tenant's share of the engines in the last ten seconds.", "tenant"),
    _counter("tenant_service", "A tenant's computed prompt tokens, and twice its output tokens.", "engine", "tenant"),
    _gauge("tenant_sequences", "A tenant's sequences by state: running or waiting.", "engine", "tenant", "state"),
    _gauge("server_info", "1, with the server's version.", "version"),
    _gauge("draining", "Whether the server drains: it refuses new calls."),
)  # fmt: skip

# What each router counts at the end of a call.
OF_REQUESTS = (
    _histogram_of_calls("e2e_request_latency_seconds", "From the receipt of a call to its last message.", _DURATIONS),
    _histogram_of_calls(
        "request_queue_time_seconds", "From the engine's receipt of a request to its first step.", _DURATIONS
    ),
    _histogram_of_calls("request_prefill_time_seconds", "From a request's first step to its first token.", _DURATIONS),
    _histogram_of_calls("request_decode_time_seconds", "From a request's first token to its last.", _DURATIONS),
    _histogram_of_calls(
        "request_time_per_output_token_seconds", "A request's mean time between two tokens.", TOKEN_BOUNDS
    ),
    _histogram_of_calls("request_prompt_tokens", "Tokens of a request's prompt.", _COUNTS),
    _histogram_of_calls("request_generation_tokens", "Tokens that a request generated.", _COUNTS),
)

# What else each router counts.
_OF_ROUTERS = (
    _histogram("time_to_first_token_seconds", "From the receipt of a call to its first message.", TOKEN_BOUNDS),
    _histogram("inter_token_latency_seconds", "Between two tokens of a sequence.", TOKEN_BOUNDS),
    _counter("request_success", "Sequences that ended, by reason.", "engine", "finished_reason", prefixes=_BOTH),
    _counter(
        "calls", "Calls that ended, by status and, of an error, its reason.", "method", "code", "reason", MODEL_LABEL
    ),
    _counter("engine_choices", "Requests for which one of several engines was chosen, by reason.", "engine", "reason"),
    _counter(
        "prefix_tokens_predicted", "Prompt tokens that the chosen engines had cached, as far as was known.", "engine"
    ),
    _counter("failovers", "Requests that lost their engine, by what became of them.", "outcome"),
    _counter("migrations", "Streams of an engine that is going to end, by what became of them.", "outcome"),
    _gauge("admitted_requests", "Requests that the routers hold."),
    _gauge("requests_without_engine", "Requests that wait because no engine can take them."),
    _gauge("admitted_requests_limit", "The most requests that the routers admit at once."),
    _gauge("reserved_tokens", "Tokens that admitted requests reserve, for prompts and outputs."),
    _gauge("reserved_tokens_limit", "The most tokens of all admitted requests."),
    Family(
        "event_loop_lag_seconds", "histogram", "How late a router's event loop is, measured ten times a second.",
        ("router",), TOKEN_BOUNDS, _OURS,
    ),
    _counter("cpu_seconds", "User and system time of a router.", "router", prefixes=_PROCESS),
    _gauge("resident_memory_bytes", "Resident memory of a router.", "router", prefixes=_PROCESS),
    _gauge("virtual_memory_bytes", "Virtual memory of a router.", "router", prefixes=_PROCESS),
    _gauge("open_fds", "Open file descriptors of a router.", "router", prefixes=_PROCESS),
    _gauge("max_fds", "The most file descriptors that a router may open.", "router", prefixes=_PROCESS),
    _gauge("start_time_seconds", "When a router started, in seconds since 1970.", "router", prefixes=_PROCESS),
)  # fmt: skip

FAMILIES = (*OF_ENGINES, *OF_REQUESTS, *_OF_ROUTERS)
