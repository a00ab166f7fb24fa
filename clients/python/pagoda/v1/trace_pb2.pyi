from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HoldReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOLD_REASON_UNSPECIFIED: _ClassVar[HoldReason]
    HOLD_REASON_NO_PLACE: _ClassVar[HoldReason]
    HOLD_REASON_NO_BLOCKS: _ClassVar[HoldReason]
    HOLD_REASON_NO_BUDGET: _ClassVar[HoldReason]
    HOLD_REASON_LATE: _ClassVar[HoldReason]
    HOLD_REASON_TOKEN_PENDING: _ClassVar[HoldReason]
    HOLD_REASON_NO_ADAPTER: _ClassVar[HoldReason]

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
HOLD_REASON_UNSPECIFIED: HoldReason
HOLD_REASON_NO_PLACE: HoldReason
HOLD_REASON_NO_BLOCKS: HoldReason
HOLD_REASON_NO_BUDGET: HoldReason
HOLD_REASON_LATE: HoldReason
HOLD_REASON_TOKEN_PENDING: HoldReason
HOLD_REASON_NO_ADAPTER: HoldReason
MOVE_KIND_UNSPECIFIED: MoveKind
MOVE_KIND_WAITS: MoveKind
MOVE_KIND_STARTED: MoveKind
MOVE_KIND_PREEMPTED: MoveKind
MOVE_KIND_FINISHED: MoveKind
MOVE_KIND_ABORTED: MoveKind
MOVE_KIND_EXPIRED: MoveKind
MOVE_KIND_REJECTED: MoveKind
MOVE_KIND_FAILED: MoveKind

class GetStepTraceRequest(_message.Message):
    __slots__ = ("last_s",)
    LAST_S_FIELD_NUMBER: _ClassVar[int]
    last_s: float
    def __init__(self, last_s: _Optional[float] = ...) -> None: ...

class StepTracePart(_message.Message):
    __slots__ = ("engine", "taken_at_s", "token_budget", "max_num_seqs", "blocks_total", "steps", "moves", "is_partial", "name")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_AT_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    IS_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    engine: int
    taken_at_s: float
    token_budget: int
    max_num_seqs: int
    blocks_total: int
    steps: _containers.RepeatedCompositeFieldContainer[TracedStep]
    moves: _containers.RepeatedCompositeFieldContainer[TracedMove]
    is_partial: bool
    name: str
    def __init__(self, engine: _Optional[int] = ..., taken_at_s: _Optional[float] = ..., token_budget: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., blocks_total: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[TracedStep, _Mapping]]] = ..., moves: _Optional[_Iterable[_Union[TracedMove, _Mapping]]] = ..., is_partial: bool = ..., name: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("at_s", "kind", "sequence", "request_id", "arrived_s", "prompt_tokens", "tokens", "computed_tokens", "tenant")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    kind: MoveKind
    sequence: int
    request_id: str
    arrived_s: float
    prompt_tokens: int
    tokens: int
    computed_tokens: int
    tenant: str
    def __init__(self, at_s: _Optional[float] = ..., kind: _Optional[_Union[MoveKind, str]] = ..., sequence: _Optional[int] = ..., request_id: _Optional[str] = ..., arrived_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...
