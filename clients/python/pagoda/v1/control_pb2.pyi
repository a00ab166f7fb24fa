from pagoda.v1 import inference_pb2 as _inference_pb2
from pagoda.v1 import trace_pb2 as _trace_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_STARTING: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_UNAVAILABLE: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_LOADING: _ClassVar[EngineState]
    ENGINE_STATE_READY: _ClassVar[EngineState]
    ENGINE_STATE_UNAVAILABLE: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
    ENGINE_STATE_REFUSED: _ClassVar[EngineState]

class Capability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPABILITY_UNSPECIFIED: _ClassVar[Capability]
    CAPABILITY_GENERATE: _ClassVar[Capability]
    CAPABILITY_CHAT: _ClassVar[Capability]
    CAPABILITY_TOOLS: _ClassVar[Capability]
    CAPABILITY_EMBED: _ClassVar[Capability]
    CAPABILITY_SCORE: _ClassVar[Capability]
    CAPABILITY_GUIDED: _ClassVar[Capability]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_STARTING: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_UNAVAILABLE: ServerState
SERVER_STATE_DRAINING: ServerState
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_LOADING: EngineState
ENGINE_STATE_READY: EngineState
ENGINE_STATE_UNAVAILABLE: EngineState
ENGINE_STATE_DRAINING: EngineState
ENGINE_STATE_REFUSED: EngineState
CAPABILITY_UNSPECIFIED: Capability
CAPABILITY_GENERATE: Capability
CAPABILITY_CHAT: Capability
CAPABILITY_TOOLS: Capability
CAPABILITY_EMBED: Capability
CAPABILITY_SCORE: Capability
CAPABILITY_GUIDED: Capability

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "model", "state", "engines", "limits", "uptime_s", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    state: ServerState
    engines: _containers.RepeatedCompositeFieldContainer[EngineStatus]
    limits: Limits
    uptime_s: float
    settings: _containers.ScalarMap[str, str]
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[ServerState, str]] = ..., engines: _Optional[_Iterable[_Union[EngineStatus, _Mapping]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., uptime_s: _Optional[float] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("engine", "state", "restarts", "info", "name", "refused", "model")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    engine: int
    state: EngineState
    restarts: int
    info: EngineInfo
    name: str
    refused: str
    model: str
    def __init__(self, engine: _Optional[int] = ..., state: _Optional[_Union[EngineState, str]] = ..., restarts: _Optional[int] = ..., info: _Optional[_Union[EngineInfo, _Mapping]] = ..., name: _Optional[str] = ..., refused: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("epoch", "model", "architecture", "device", "dtype", "kernel_backend", "vocab_size", "max_model_len", "max_num_seqs", "token_budget", "kv_cache", "weight_bytes", "tokenizer_sha256", "settings", "hidden_size", "weights_fingerprint", "precision", "protocol_version")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KERNEL_BACKEND_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    model: str
    architecture: str
    device: str
    dtype: str
    kernel_backend: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    kv_cache: KvCacheInfo
    weight_bytes: int
    tokenizer_sha256: str
    settings: _containers.ScalarMap[str, str]
    hidden_size: int
    weights_fingerprint: str
    precision: Precision
    protocol_version: int
    def __init__(self, epoch: _Optional[int] = ..., model: _Optional[str] = ..., architecture: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., kernel_backend: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., token_budget: _Optional[int] = ..., kv_cache: _Optional[_Union[KvCacheInfo, _Mapping]] = ..., weight_bytes: _Optional[int] = ..., tokenizer_sha256: _Optional[str] = ..., settings: _Optional[_Mapping[str, str]] = ..., hidden_size: _Optional[int] = ..., weights_fingerprint: _Optional[str] = ..., precision: _Optional[_Union[Precision, _Mapping]] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Precision(_message.Message):
    __slots__ = ("weights", "dtype", "kv_cache", "is_deterministic")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    IS_DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    weights: str
    dtype: str
    kv_cache: str
    is_deterministic: bool
    def __init__(self, weights: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_cache: _Optional[str] = ..., is_deterministic: bool = ...) -> None: ...

class KvCacheInfo(_message.Message):
    __slots__ = ("block_size", "num_blocks", "bytes_per_token", "bytes_per_block", "total_bytes", "token_capacity")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    num_blocks: int
    bytes_per_token: int
    bytes_per_block: int
    total_bytes: int
    token_capacity: int
    def __init__(self, block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., bytes_per_token: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., total_bytes: _Optional[int] = ..., token_capacity: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_requests", "max_queued_tokens", "max_message_bytes", "max_text_bytes", "max_n", "max_logprobs", "max_stop_strings", "max_tools", "max_messages", "max_fields")
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_N_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOOLS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELDS_FIELD_NUMBER: _ClassVar[int]
    max_requests: int
    max_queued_tokens: int
    max_message_bytes: int
    max_text_bytes: int
    max_n: int
    max_logprobs: int
    max_stop_strings: int
    max_tools: int
    max_messages: int
    max_fields: int
    def __init__(self, max_requests: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_text_bytes: _Optional[int] = ..., max_n: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., max_tools: _Optional[int] = ..., max_messages: _Optional[int] = ..., max_fields: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "architecture", "vocab_size", "max_model_len", "eos_token_ids", "capabilities", "template_kwargs", "recommended_sampling", "tool_format", "reasoning_format", "hidden_size", "ready", "adapters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    RECOMMENDED_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOOL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FORMAT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    capabilities: _containers.RepeatedScalarFieldContainer[Capability]
    template_kwargs: _containers.RepeatedScalarFieldContainer[str]
    recommended_sampling: _inference_pb2.Sampling
    tool_format: str
    reasoning_format: str
    hidden_size: int
    ready: bool
    adapters: _containers.RepeatedCompositeFieldContainer[LoraAdapter]
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., capabilities: _Optional[_Iterable[_Union[Capability, str]]] = ..., template_kwargs: _Optional[_Iterable[str]] = ..., recommended_sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ..., tool_format: _Optional[str] = ..., reasoning_format: _Optional[str] = ..., hidden_size: _Optional[int] = ..., ready: bool = ..., adapters: _Optional[_Iterable[_Union[LoraAdapter, _Mapping]]] = ...) -> None: ...

class LoraAdapter(_message.Message):
    __slots__ = ("name", "model", "identity", "rank", "num_bytes", "pinned", "engines", "ready", "fault")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    identity: str
    rank: int
    num_bytes: int
    pinned: bool
    engines: _containers.RepeatedScalarFieldContainer[str]
    ready: bool
    fault: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., identity: _Optional[str] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ..., pinned: bool = ..., engines: _Optional[_Iterable[str]] = ..., ready: bool = ..., fault: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("requests", "reserved_tokens", "engines", "tenants", "num_tenants")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TENANTS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    reserved_tokens: int
    engines: _containers.RepeatedCompositeFieldContainer[EngineLoad]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantLoad]
    num_tenants: int
    def __init__(self, requests: _Optional[int] = ..., reserved_tokens: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[EngineLoad, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantLoad, _Mapping]]] = ..., num_tenants: _Optional[int] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("engine", "waiting", "running", "blocks_total", "blocks_free", "blocks_evictable", "blocks_referenced", "kv_slots", "kv_slots_unused", "kv_waste", "host_blocks_total", "host_blocks_used", "step_sequences", "step_tokens", "step_time_s", "steps", "prompt_tokens", "cached_tokens", "prefix_hit_rate", "output_tokens", "preemptions", "preempted_tokens", "recomputed_tokens", "dropped_tokens", "saved_tokens", "loaded_tokens", "drafts", "drafted_tokens", "accepted_tokens", "forced_tokens", "name", "host_blocks_cached", "host_cached_tokens", "uncomputed_tokens", "prefill_tokens_per_s", "stored_blocks", "stored_read_tokens", "stored_failed_blocks", "fetched_tokens", "unfetched_blocks", "lent_tokens")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REFERENCED_FIELD_NUMBER: _ClassVar[int]
    KV_SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_SLOTS_UNUSED_FIELD_NUMBER: _ClassVar[int]
    KV_WASTE_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORED_READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_FAILED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNFETCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    engine: int
    waiting: int
    running: int
    blocks_total: int
    blocks_free: int
    blocks_evictable: int
    blocks_referenced: int
    kv_slots: int
    kv_slots_unused: int
    kv_waste: float
    host_blocks_total: int
    host_blocks_used: int
    step_sequences: int
    step_tokens: int
    step_time_s: float
    steps: int
    prompt_tokens: int
    cached_tokens: int
    prefix_hit_rate: float
    output_tokens: int
    preemptions: int
    preempted_tokens: int
    recomputed_tokens: int
    dropped_tokens: int
    saved_tokens: int
    loaded_tokens: int
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
    forced_tokens: int
    name: str
    host_blocks_cached: int
    host_cached_tokens: int
    uncomputed_tokens: int
    prefill_tokens_per_s: float
    stored_blocks: int
    stored_read_tokens: int
    stored_failed_blocks: int
    fetched_tokens: int
    unfetched_blocks: int
    lent_tokens: int
    def __init__(self, engine: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_evictable: _Optional[int] = ..., blocks_referenced: _Optional[int] = ..., kv_slots: _Optional[int] = ..., kv_slots_unused: _Optional[int] = ..., kv_waste: _Optional[float] = ..., host_blocks_total: _Optional[int] = ..., host_blocks_used: _Optional[int] = ..., step_sequences: _Optional[int] = ..., step_tokens: _Optional[int] = ..., step_time_s: _Optional[float] = ..., steps: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., prefix_hit_rate: _Optional[float] = ..., output_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., preempted_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., dropped_tokens: _Optional[int] = ..., saved_tokens: _Optional[int] = ..., loaded_tokens: _Optional[int] = ..., drafts: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., forced_tokens: _Optional[int] = ..., name: _Optional[str] = ..., host_blocks_cached: _Optional[int] = ..., host_cached_tokens: _Optional[int] = ..., uncomputed_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., stored_blocks: _Optional[int] = ..., stored_read_tokens: _Optional[int] = ..., stored_failed_blocks: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., unfetched_blocks: _Optional[int] = ..., lent_tokens: _Optional[int] = ...) -> None: ...

class TenantLoad(_message.Message):
    __slots__ = ("name", "waiting", "running", "service", "recent_service", "share")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    RECENT_SERVICE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    name: str
    waiting: int
    running: int
    service: int
    recent_service: int
    share: float
    def __init__(self, name: _Optional[str] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., service: _Optional[int] = ..., recent_service: _Optional[int] = ..., share: _Optional[float] = ...) -> None: ...
