from pagoda.v1 import control_pb2 as _control_pb2
from pagoda.v1 import inference_pb2 as _inference_pb2
from pagoda.v1 import trace_pb2 as _trace_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class AdapterFault(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_FAULT_UNSPECIFIED: _ClassVar[AdapterFault]
    ADAPTER_FAULT_NOT_FOUND: _ClassVar[AdapterFault]
    ADAPTER_FAULT_INVALID: _ClassVar[AdapterFault]
    ADAPTER_FAULT_FULL: _ClassVar[AdapterFault]
    ADAPTER_FAULT_CHANGED: _ClassVar[AdapterFault]
    ADAPTER_FAULT_FAILED: _ClassVar[AdapterFault]
    ADAPTER_FAULT_TAKEN: _ClassVar[AdapterFault]

class EndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_REASON_UNSPECIFIED: _ClassVar[EndReason]
    END_REASON_STOP: _ClassVar[EndReason]
    END_REASON_LENGTH: _ClassVar[EndReason]
    END_REASON_ABORTED: _ClassVar[EndReason]
    END_REASON_DEADLINE: _ClassVar[EndReason]
    END_REASON_REJECTED: _ClassVar[EndReason]
    END_REASON_FAILED: _ClassVar[EndReason]
    END_REASON_OVERLOADED: _ClassVar[EndReason]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ADAPTER_FAULT_UNSPECIFIED: AdapterFault
ADAPTER_FAULT_NOT_FOUND: AdapterFault
ADAPTER_FAULT_INVALID: AdapterFault
ADAPTER_FAULT_FULL: AdapterFault
ADAPTER_FAULT_CHANGED: AdapterFault
ADAPTER_FAULT_FAILED: AdapterFault
ADAPTER_FAULT_TAKEN: AdapterFault
END_REASON_UNSPECIFIED: EndReason
END_REASON_STOP: EndReason
END_REASON_LENGTH: EndReason
END_REASON_ABORTED: EndReason
END_REASON_DEADLINE: EndReason
END_REASON_REJECTED: EndReason
END_REASON_FAILED: EndReason
END_REASON_OVERLOADED: EndReason

class FetchRequest(_message.Message):
    __slots__ = ("layout", "addresses")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    layout: bytes
    addresses: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, layout: _Optional[bytes] = ..., addresses: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FetchedBlock(_message.Message):
    __slots__ = ("content", "crc32")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    crc32: int
    def __init__(self, content: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("submit", "abort", "flush_cache", "take_trace", "ping", "follow_cache", "follow_blocks", "load_adapter", "unload_adapter", "follow_adapters")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FLUSH_CACHE_FIELD_NUMBER: _ClassVar[int]
    TAKE_TRACE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_CACHE_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    abort: Abort
    flush_cache: FlushCache
    take_trace: TakeTrace
    ping: Ping
    follow_cache: FollowCache
    follow_blocks: FollowBlocks
    load_adapter: LoadAdapter
    unload_adapter: UnloadAdapter
    follow_adapters: FollowAdapters
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., flush_cache: _Optional[_Union[FlushCache, _Mapping]] = ..., take_trace: _Optional[_Union[TakeTrace, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., follow_cache: _Optional[_Union[FollowCache, _Mapping]] = ..., follow_blocks: _Optional[_Union[FollowBlocks, _Mapping]] = ..., load_adapter: _Optional[_Union[LoadAdapter, _Mapping]] = ..., unload_adapter: _Optional[_Union[UnloadAdapter, _Mapping]] = ..., follow_adapters: _Optional[_Union[FollowAdapters, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("first_sequence", "prompt", "sampling", "max_tokens", "min_tokens", "stop_token_ids", "logprobs", "cache", "priority", "timeout_s", "tenant", "slo", "request_id", "outputs", "age_s", "guided", "bad_words", "max_draft_tokens", "readout", "lender", "adapter")
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    GUIDED_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READOUT_FIELD_NUMBER: _ClassVar[int]
    LENDER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    first_sequence: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.Sampling
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    cache: _inference_pb2.Cache
    priority: int
    timeout_s: float
    tenant: str
    slo: _inference_pb2.Slo
    request_id: str
    outputs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenIds]
    age_s: float
    guided: _inference_pb2.Guided
    bad_words: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenIds]
    max_draft_tokens: int
    readout: Readout
    lender: Lender
    adapter: bytes
    def __init__(self, first_sequence: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., cache: _Optional[_Union[_inference_pb2.Cache, _Mapping]] = ..., priority: _Optional[int] = ..., timeout_s: _Optional[float] = ..., tenant: _Optional[str] = ..., slo: _Optional[_Union[_inference_pb2.Slo, _Mapping]] = ..., request_id: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ..., age_s: _Optional[float] = ..., guided: _Optional[_Union[_inference_pb2.Guided, _Mapping]] = ..., bad_words: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ..., max_draft_tokens: _Optional[int] = ..., readout: _Optional[_Union[Readout, _Mapping]] = ..., lender: _Optional[_Union[Lender, _Mapping]] = ..., adapter: _Optional[bytes] = ...) -> None: ...

class Lender(_message.Message):
    __slots__ = ("address", "num_tokens")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    address: str
    num_tokens: int
    def __init__(self, address: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Readout(_message.Message):
    __slots__ = ("logprobs_from", "num_top", "pooling")
    LOGPROBS_FROM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    logprobs_from: int
    num_top: int
    pooling: _inference_pb2.Pooling
    def __init__(self, logprobs_from: _Optional[int] = ..., num_top: _Optional[int] = ..., pooling: _Optional[_Union[_inference_pb2.Pooling, str]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequences: _Optional[_Iterable[int]] = ...) -> None: ...

class FlushCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TakeTrace(_message.Message):
    __slots__ = ("number", "last_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAST_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    last_s: float
    def __init__(self, number: _Optional[int] = ..., last_s: _Optional[float] = ...) -> None: ...

class FollowCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FollowBlocks(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadAdapter(_message.Message):
    __slots__ = ("number", "name", "path", "is_pinned", "identity", "keeps_other")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    KEEPS_OTHER_FIELD_NUMBER: _ClassVar[int]
    number: int
    name: str
    path: str
    is_pinned: bool
    identity: bytes
    keeps_other: bool
    def __init__(self, number: _Optional[int] = ..., name: _Optional[str] = ..., path: _Optional[str] = ..., is_pinned: bool = ..., identity: _Optional[bytes] = ..., keeps_other: bool = ...) -> None: ...

class UnloadAdapter(_message.Message):
    __slots__ = ("number", "name")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    number: int
    name: str
    def __init__(self, number: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class FollowAdapters(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ping(_message.Message):
    __slots__ = ("takes_goodbye",)
    TAKES_GOODBYE_FIELD_NUMBER: _ClassVar[int]
    takes_goodbye: bool
    def __init__(self, takes_goodbye: bool = ...) -> None: ...

class EngineMessage(_message.Message):
    __slots__ = ("epoch", "hello", "step", "cache_flushed", "trace", "pong", "goodbye", "cache_snapshot", "cache_delta", "cached_blocks", "adapter_answer", "adapters", "answers_pings", "follows_cache", "follows_blocks", "block_layout", "adapter_limits", "role")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CACHE_FLUSHED_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CACHE_DELTA_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ANSWER_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_PINGS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_CACHE_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LIMITS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    hello: _control_pb2.EngineInfo
    step: StepOutput
    cache_flushed: CacheFlushed
    trace: Trace
    pong: Pong
    goodbye: Goodbye
    cache_snapshot: CacheSnapshot
    cache_delta: CacheDelta
    cached_blocks: CachedBlocks
    adapter_answer: AdapterAnswer
    adapters: Adapters
    answers_pings: bool
    follows_cache: bool
    follows_blocks: bool
    block_layout: bytes
    adapter_limits: AdapterLimits
    role: Role
    def __init__(self, epoch: _Optional[int] = ..., hello: _Optional[_Union[_control_pb2.EngineInfo, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ..., cache_flushed: _Optional[_Union[CacheFlushed, _Mapping]] = ..., trace: _Optional[_Union[Trace, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., cache_snapshot: _Optional[_Union[CacheSnapshot, _Mapping]] = ..., cache_delta: _Optional[_Union[CacheDelta, _Mapping]] = ..., cached_blocks: _Optional[_Union[CachedBlocks, _Mapping]] = ..., adapter_answer: _Optional[_Union[AdapterAnswer, _Mapping]] = ..., adapters: _Optional[_Union[Adapters, _Mapping]] = ..., answers_pings: bool = ..., follows_cache: bool = ..., follows_blocks: bool = ..., block_layout: _Optional[bytes] = ..., adapter_limits: _Optional[_Union[AdapterLimits, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class AdapterLimits(_message.Message):
    __slots__ = ("max_adapters", "max_loaded", "max_rank")
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOADED_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    max_adapters: int
    max_loaded: int
    max_rank: int
    def __init__(self, max_adapters: _Optional[int] = ..., max_loaded: _Optional[int] = ..., max_rank: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "identity", "rank", "num_bytes", "is_pinned", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    identity: bytes
    rank: int
    num_bytes: int
    is_pinned: bool
    path: str
    def __init__(self, name: _Optional[str] = ..., identity: _Optional[bytes] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ..., is_pinned: bool = ..., path: _Optional[str] = ...) -> None: ...

class AdapterAnswer(_message.Message):
    __slots__ = ("number", "adapter", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    adapter: Adapter
    error: AdapterError
    def __init__(self, number: _Optional[int] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., error: _Optional[_Union[AdapterError, _Mapping]] = ...) -> None: ...

class AdapterError(_message.Message):
    __slots__ = ("fault", "detail")
    FAULT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    fault: AdapterFault
    detail: str
    def __init__(self, fault: _Optional[_Union[AdapterFault, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Adapters(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, held: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class CacheSnapshot(_message.Message):
    __slots__ = ("number", "keys", "is_first", "is_last")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    IS_FIRST_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    number: int
    keys: _containers.RepeatedScalarFieldContainer[int]
    is_first: bool
    is_last: bool
    def __init__(self, number: _Optional[int] = ..., keys: _Optional[_Iterable[int]] = ..., is_first: bool = ..., is_last: bool = ...) -> None: ...

class CacheDelta(_message.Message):
    __slots__ = ("number", "stored", "removed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    number: int
    stored: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., stored: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ...) -> None: ...

class CachedBlocks(_message.Message):
    __slots__ = ("stored", "removed", "is_first")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    IS_FIRST_FIELD_NUMBER: _ClassVar[int]
    stored: _containers.RepeatedCompositeFieldContainer[CachedBlock]
    removed: _containers.RepeatedScalarFieldContainer[int]
    is_first: bool
    def __init__(self, stored: _Optional[_Iterable[_Union[CachedBlock, _Mapping]]] = ..., removed: _Optional[_Iterable[int]] = ..., is_first: bool = ...) -> None: ...

class CachedBlock(_message.Message):
    __slots__ = ("hash", "parent", "tokens")
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    hash: int
    parent: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hash: _Optional[int] = ..., parent: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("sequences", "tokens", "logprobs", "ended", "load", "tenants", "started", "readings")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    READINGS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    ended: _containers.RepeatedCompositeFieldContainer[Ended]
    load: _control_pb2.EngineLoad
    tenants: Tenants
    started: _containers.RepeatedScalarFieldContainer[int]
    readings: _containers.RepeatedCompositeFieldContainer[Reading]
    def __init__(self, sequences: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[Ended, _Mapping]]] = ..., load: _Optional[_Union[_control_pb2.EngineLoad, _Mapping]] = ..., tenants: _Optional[_Union[Tenants, _Mapping]] = ..., started: _Optional[_Iterable[int]] = ..., readings: _Optional[_Iterable[_Union[Reading, _Mapping]]] = ...) -> None: ...

class Reading(_message.Message):
    __slots__ = ("sequence", "start", "logprobs", "embedding")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    start: int
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    embedding: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sequence: _Optional[int] = ..., start: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., embedding: _Optional[_Iterable[float]] = ...) -> None: ...

class Tenants(_message.Message):
    __slots__ = ("listed", "count", "recent_service")
    LISTED_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    RECENT_SERVICE_FIELD_NUMBER: _ClassVar[int]
    listed: _containers.RepeatedCompositeFieldContainer[_control_pb2.TenantLoad]
    count: int
    recent_service: int
    def __init__(self, listed: _Optional[_Iterable[_Union[_control_pb2.TenantLoad, _Mapping]]] = ..., count: _Optional[int] = ..., recent_service: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("at", "logprob", "top_ids", "top_logprobs")
    AT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    at: int
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, at: _Optional[int] = ..., logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("sequence", "reason", "matched", "cached_tokens", "preemptions", "recomputed_tokens", "queue_s", "prefill_s", "decode_s", "detail", "preempted_tokens", "preempted_s", "saved_tokens", "loaded_tokens", "drafted_tokens", "accepted_tokens", "forced_tokens", "matched_grammar", "field", "adapter_s", "pulled_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_S_FIELD_NUMBER: _ClassVar[int]
    SAVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_S_FIELD_NUMBER: _ClassVar[int]
    PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    reason: EndReason
    matched: int
    cached_tokens: int
    preemptions: int
    recomputed_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    detail: str
    preempted_tokens: int
    preempted_s: float
    saved_tokens: int
    loaded_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    forced_tokens: int
    matched_grammar: bool
    field: str
    adapter_s: float
    pulled_tokens: int
    def __init__(self, sequence: _Optional[int] = ..., reason: _Optional[_Union[EndReason, str]] = ..., matched: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., detail: _Optional[str] = ..., preempted_tokens: _Optional[int] = ..., preempted_s: _Optional[float] = ..., saved_tokens: _Optional[int] = ..., loaded_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., forced_tokens: _Optional[int] = ..., matched_grammar: bool = ..., field: _Optional[str] = ..., adapter_s: _Optional[float] = ..., pulled_tokens: _Optional[int] = ...) -> None: ...

class CacheFlushed(_message.Message):
    __slots__ = ("freed_blocks",)
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    freed_blocks: int
    def __init__(self, freed_blocks: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Trace(_message.Message):
    __slots__ = ("number", "part", "is_last")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    number: int
    part: _trace_pb2.StepTracePart
    is_last: bool
    def __init__(self, number: _Optional[int] = ..., part: _Optional[_Union[_trace_pb2.StepTracePart, _Mapping]] = ..., is_last: bool = ...) -> None: ...
