import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_LOADING: _ClassVar[EngineState]
    ENGINE_STATE_READY: _ClassVar[EngineState]
    ENGINE_STATE_UNAVAILABLE: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]

class HoldReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOLD_REASON_UNSPECIFIED: _ClassVar[HoldReason]
    HOLD_REASON_NO_PLACE: _ClassVar[HoldReason]
    HOLD_REASON_NO_BLOCKS: _ClassVar[HoldReason]
    HOLD_REASON_NO_BUDGET: _ClassVar[HoldReason]
    HOLD_REASON_NOT_ITS_TURN: _ClassVar[HoldReason]
    HOLD_REASON_TOKEN_PENDING: _ClassVar[HoldReason]

class MoveKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MOVE_KIND_UNSPECIFIED: _ClassVar[MoveKind]
    MOVE_KIND_WAITS: _ClassVar[MoveKind]
    MOVE_KIND_STARTED: _ClassVar[MoveKind]
    MOVE_KIND_PREEMPTED: _ClassVar[MoveKind]
    MOVE_KIND_FINISHED: _ClassVar[MoveKind]
    MOVE_KIND_ABORTED: _ClassVar[MoveKind]
    MOVE_KIND_EXPIRED: _ClassVar[MoveKind]
    MOVE_KIND_REJECTED: _ClassVar[MoveKind]
    MOVE_KIND_FAILED: _ClassVar[MoveKind]
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_LOADING: EngineState
ENGINE_STATE_READY: EngineState
ENGINE_STATE_UNAVAILABLE: EngineState
ENGINE_STATE_DRAINING: EngineState
HOLD_REASON_UNSPECIFIED: HoldReason
HOLD_REASON_NO_PLACE: HoldReason
HOLD_REASON_NO_BLOCKS: HoldReason
HOLD_REASON_NO_BUDGET: HoldReason
HOLD_REASON_NOT_ITS_TURN: HoldReason
HOLD_REASON_TOKEN_PENDING: HoldReason
MOVE_KIND_UNSPECIFIED: MoveKind
MOVE_KIND_WAITS: MoveKind
MOVE_KIND_STARTED: MoveKind
MOVE_KIND_PREEMPTED: MoveKind
MOVE_KIND_FINISHED: MoveKind
MOVE_KIND_ABORTED: MoveKind
MOVE_KIND_EXPIRED: MoveKind
MOVE_KIND_REJECTED: MoveKind
MOVE_KIND_FAILED: MoveKind

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "model", "engine_state", "engine", "limits", "uptime", "engine_restarts", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STATE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    engine_state: EngineState
    engine: EngineInfo
    limits: Limits
    uptime: _duration_pb2.Duration
    engine_restarts: int
    settings: _containers.ScalarMap[str, str]
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., engine_state: _Optional[_Union[EngineState, str]] = ..., engine: _Optional[_Union[EngineInfo, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., engine_restarts: _Optional[int] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("epoch", "model", "architecture", "device", "dtype", "kernel_backend", "vocab_size", "max_model_len", "max_num_seqs", "token_budget", "kv_cache", "weight_bytes", "tokenizer_sha256", "settings")
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
    def __init__(self, epoch: _Optional[int] = ..., model: _Optional[str] = ..., architecture: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., kernel_backend: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., token_budget: _Optional[int] = ..., kv_cache: _Optional[_Union[KvCacheInfo, _Mapping]] = ..., weight_bytes: _Optional[int] = ..., tokenizer_sha256: _Optional[str] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

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
    __slots__ = ("max_requests", "max_queued_tokens", "max_text_bytes", "max_sequences_per_request", "max_logprobs", "max_stop_strings", "max_message_bytes")
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_requests: int
    max_queued_tokens: int
    max_text_bytes: int
    max_sequences_per_request: int
    max_logprobs: int
    max_stop_strings: int
    max_message_bytes: int
    def __init__(self, max_requests: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., max_text_bytes: _Optional[int] = ..., max_sequences_per_request: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., max_message_bytes: _Optional[int] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "architecture", "vocab_size", "max_model_len", "has_chat_template", "eos_token_ids")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    has_chat_template: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., has_chat_template: bool = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("waiting", "running", "blocks_total", "blocks_free", "blocks_evictable", "blocks_referenced", "steps", "preemptions", "prompt_tokens", "cached_tokens", "output_tokens", "step_sequences", "step_tokens", "step_s", "requests", "reserved_tokens", "kv_slots_unused", "preempted_tokens", "recomputed_tokens", "dropped_tokens", "kv_slots", "kv_waste", "prefix_hit_rate", "tenants", "num_tenants", "host_blocks_total", "host_blocks_used", "saved_tokens", "loaded_tokens")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REFERENCED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_SLOTS_UNUSED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_WASTE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TENANTS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    SAVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    blocks_total: int
    blocks_free: int
    blocks_evictable: int
    blocks_referenced: int
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    step_sequences: int
    step_tokens: int
    step_s: float
    requests: int
    reserved_tokens: int
    kv_slots_unused: int
    preempted_tokens: int
    recomputed_tokens: int
    dropped_tokens: int
    kv_slots: int
    kv_waste: float
    prefix_hit_rate: float
    tenants: _containers.RepeatedCompositeFieldContainer[TenantLoad]
    num_tenants: int
    host_blocks_total: int
    host_blocks_used: int
    saved_tokens: int
    loaded_tokens: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_evictable: _Optional[int] = ..., blocks_referenced: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., step_sequences: _Optional[int] = ..., step_tokens: _Optional[int] = ..., step_s: _Optional[float] = ..., requests: _Optional[int] = ..., reserved_tokens: _Optional[int] = ..., kv_slots_unused: _Optional[int] = ..., preempted_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., dropped_tokens: _Optional[int] = ..., kv_slots: _Optional[int] = ..., kv_waste: _Optional[float] = ..., prefix_hit_rate: _Optional[float] = ..., tenants: _Optional[_Iterable[_Union[TenantLoad, _Mapping]]] = ..., num_tenants: _Optional[int] = ..., host_blocks_total: _Optional[int] = ..., host_blocks_used: _Optional[int] = ..., saved_tokens: _Optional[int] = ..., loaded_tokens: _Optional[int] = ...) -> None: ...

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

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("freed_blocks",)
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    freed_blocks: int
    def __init__(self, freed_blocks: _Optional[int] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("last_s",)
    LAST_S_FIELD_NUMBER: _ClassVar[int]
    last_s: float
    def __init__(self, last_s: _Optional[float] = ...) -> None: ...

class TracePart(_message.Message):
    __slots__ = ("engine", "taken_at_s", "token_budget", "max_num_seqs", "blocks_total", "steps", "moves")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_AT_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    engine: int
    taken_at_s: float
    token_budget: int
    max_num_seqs: int
    blocks_total: int
    steps: _containers.RepeatedCompositeFieldContainer[TracedStep]
    moves: _containers.RepeatedCompositeFieldContainer[TracedMove]
    def __init__(self, engine: _Optional[int] = ..., taken_at_s: _Optional[float] = ..., token_budget: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., blocks_total: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[TracedStep, _Mapping]]] = ..., moves: _Optional[_Iterable[_Union[TracedMove, _Mapping]]] = ...) -> None: ...

class TracedStep(_message.Message):
    __slots__ = ("start_s", "end_s", "sequences", "chunk_starts", "chunk_lengths", "idle", "idle_reasons", "waiting", "next_in_line", "hold", "running", "blocks_free", "blocks_evictable")
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_STARTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    IDLE_REASONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    NEXT_IN_LINE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    start_s: float
    end_s: float
    sequences: _containers.RepeatedScalarFieldContainer[int]
    chunk_starts: _containers.RepeatedScalarFieldContainer[int]
    chunk_lengths: _containers.RepeatedScalarFieldContainer[int]
    idle: _containers.RepeatedScalarFieldContainer[int]
    idle_reasons: _containers.RepeatedScalarFieldContainer[HoldReason]
    waiting: int
    next_in_line: int
    hold: HoldReason
    running: int
    blocks_free: int
    blocks_evictable: int
    def __init__(self, start_s: _Optional[float] = ..., end_s: _Optional[float] = ..., sequences: _Optional[_Iterable[int]] = ..., chunk_starts: _Optional[_Iterable[int]] = ..., chunk_lengths: _Optional[_Iterable[int]] = ..., idle: _Optional[_Iterable[int]] = ..., idle_reasons: _Optional[_Iterable[_Union[HoldReason, str]]] = ..., waiting: _Optional[int] = ..., next_in_line: _Optional[int] = ..., hold: _Optional[_Union[HoldReason, str]] = ..., running: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_evictable: _Optional[int] = ...) -> None: ...

class TracedMove(_message.Message):
    __slots__ = ("at_s", "kind", "sequence", "request_id", "arrived_s", "prompt_tokens", "tokens", "computed_tokens")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    kind: MoveKind
    sequence: int
    request_id: str
    arrived_s: float
    prompt_tokens: int
    tokens: int
    computed_tokens: int
    def __init__(self, at_s: _Optional[float] = ..., kind: _Optional[_Union[MoveKind, str]] = ..., sequence: _Optional[int] = ..., request_id: _Optional[str] = ..., arrived_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ...) -> None: ...
