"""Checks what an engine says before anything of it is kept, as engine/serving/codec.py checks what routers say."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2

from ...settings.request import MAX_LOGPROBS, TENANT_NAME
from .held_adapters import check_adapter, check_adapters, check_limits
from .refusals import InvalidMessage

MAX_TEXT, MAX_DETAIL = 1024, 1 << 16  # letters of a field, and of what ends a sequence
MAX_SETTINGS = 256
MAX_LAYOUT = 64  # bytes
MAX_SETTING = 1 << 16  # letters of a value: weights of tenants may be many
MAX_COUNT = 1 << 24  # sequences and tenants of an engine, ids of a vocabulary: far more than any has
MAX_TENANTS = 64  # listed
MAX_TRACE_BYTES = 256 << 20
MAX_UNENDED = 1 << 16  # sequences that this router has aborted and the engine has not ended
IDLE_MESSAGES, IDLE_S = 3000, 1.0  # messages without output that an engine may send in so many seconds

_TEXTS = (
    "model",
    "architecture",
    "device",
    "dtype",
    "kernel_backend",
    "tokenizer_sha256",
    "weights_fingerprint",
)
_TIMES = ("queue_s", "prefill_s", "decode_s", "preempted_s", "adapter_s")
_SEQUENCES = ("waiting", "running", "step_sequences")
_doubles = [each.name for each in control_pb2.EngineLoad.DESCRIPTOR.fields if each.type == each.TYPE_DOUBLE]


@dataclass(slots=True)
class _Open:
    """What an engine may still send of a sequence.

    tokens      of output
    prompt_len  0: nothing is to be read from the prompt
    read        log-probabilities of the prompt that have come since it has last started
    is_wanted   the router has not aborted it
    """

    tokens: int
    prompt_len: int
    num_top: int
    read: int = 0
    is_wanted: bool = True


class Checks:
    """What an engine may say on one connection. Every method raises InvalidMessage, which names the field."""

    def __init__(self) -> None:
        self._hello: control_pb2.EngineInfo | None = None
        self._open: dict[int, _Open] = {}
        self._num_aborted = 0
        self._traces: dict[int, int] = {}  # number → bytes that have come
        self._pings = self._flushes = 0  # that are not answered
        self._follows_blocks = False
        self._adapter_limits: engine_pb2.AdapterLimits | None = None
        self._adapters: set[int] = set()  # numbers of loads and unloads that are not answered
        self._idle: tuple[float, int] = (-math.inf, 0)  # when the counting began, messages since

    @property
    def has_greeted(self) -> bool:
        return self._hello is not None

    # -- what the router sends --------------------------------------------------------------------------------------

    def sends(self, message: engine_pb2.RouterMessage) -> None:
        """Note what the engine may answer."""
        match message.WhichOneof("message"):
            case "submit":
                self._submits(message.submit)
            case "ping":
                self._pings += 1
            case "flush_cache":
                self._flushes += 1
            case "take_trace":
                self._traces[message.take_trace.number] = 0
            case "follow_blocks":
                self._follows_blocks = True
            case "load_adapter":
                self._adapters.add(message.load_adapter.number)
            case "unload_adapter":
                self._adapters.add(message.unload_adapter.number)

    def _submits(self, submit: engine_pb2.Submit) -> None:
        prompt_len = len(submit.prompt) if submit.HasField("readout") else 0
        for index in range(submit.sampling.n):
            existing = len(submit.outputs[index].ids) if submit.outputs else 0
            sequence = _Open(submit.max_tokens - existing, prompt_len, submit.readout.num_top)
            self._open[submit.first_sequence + index] = sequence

    def forgets(self, numbers: Iterable[int]) -> None:
        """Note that the router wants no more of these sequences, which the engine still has to end."""
        for number in numbers:
            if (sequence := self._open.get(number)) is not None and sequence.is_wanted:
                sequence.is_wanted = False
                self._num_aborted += 1

    # -- what the engine sends --------------------------------------------------------------------------------------

    def check(self, message: engine_pb2.EngineMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "hello":
            _check(self._hello is None, "second hello")
            _check_hello(message.hello)
            _check(len(message.block_layout) <= MAX_LAYOUT, "block_layout")
            if message.HasField("adapter_limits"):
                check_limits(message.adapter_limits)
                self._adapter_limits = message.adapter_limits
            self._hello = message.hello
        _check(self._hello is not None, "message before its hello")
        assert self._hello is not None, "it has been checked"
        _check(message.epoch == self._hello.epoch, "epoch")
        match kind:
            case "step":
                self._check_step(message.step, self._hello)
            case "pong":
                _check(self._pings > 0, "pong without a ping")
                self._pings -= 1
            case "cache_flushed":
                _check(self._flushes > 0, "cache_flushed without a flush")
                self._flushes -= 1
            case "trace":
                self._check_trace(message.trace)
            case "cached_blocks":
                self._check_blocks(message.cached_blocks, self._hello)
            case "adapter_answer":
                self._check_answer(message.adapter_answer)
            case "adapters":
                self._count_idle()
                _check(self._adapter_limits is not None, "adapters: nobody asked for them")
                assert self._adapter_limits is not None
                check_adapters(message.adapters, self._adapter_limits)
            case "hello":
                pass
            case _:  # unknown here: an engine of a later version may send it unasked
                self._count_idle()

    def _check_step(self, step: engine_pb2.StepOutput, hello: control_pb2.EngineInfo) -> None:
        _check(len(step.sequences) == len(step.tokens), "step.tokens: as many as step.sequences")
        if step.tokens:
            _check(max(step.tokens) < hello.vocab_size, "step.tokens: id beyond the vocabulary")
        elif not step.ended and not step.readings:
            self._count_idle()
        _check_load(step.load)
        if step.HasField("tenants"):
            _check_tenants(step.tenants)
        for number in step.started:
            self._of(number, "started").read = 0
        for reading in step.readings:
            self._check_reading(reading, hello)
        for number in step.sequences:
            sequence = self._of(number, "sequences")
            sequence.tokens -= 1
            _check(sequence.tokens >= 0, "step.tokens: more than max_tokens of a sequence")
        if step.logprobs:
            _check(len(step.logprobs) <= len(step.tokens), "step.logprobs: more than tokens")
            _check(len({entry.at for entry in step.logprobs}) == len(step.logprobs), "step.logprobs.at: twice the same")
            for entry in step.logprobs:
                _check(entry.at < len(step.tokens), "step.logprobs.at")
                _check_logprobs(entry, MAX_LOGPROBS, hello.vocab_size)
        for ended in step.ended:
            self._check_ended(ended)

    def _of(self, number: int, field: str) -> _Open:
        """A sequence that runs."""
        if (sequence := self._open.get(number)) is None:
            raise InvalidMessage(f"step.{field}: a sequence that it does not have, or has ended")
        return sequence

    def _check_reading(self, reading: engine_pb2.Reading, hello: control_pb2.EngineInfo) -> None:
        sequence = self._of(reading.sequence, "readings")
        num_read = len(reading.logprobs)
        _check(sequence.prompt_len > 0, "step.readings: nobody asked for them")
        _check(not num_read or reading.start + num_read <= sequence.prompt_len, "step.readings: beyond the prompt")
        _check(len(reading.embedding) in (0, hello.hidden_size), "step.readings.embedding: length")
        sequence.read += max(num_read, 1)
        _check(sequence.read <= 2 * sequence.prompt_len, "step.readings: more than the prompt has")
        _check(all(map(math.isfinite, reading.embedding)), "step.readings.embedding: not finite")
        for entry in reading.logprobs:
            _check_logprobs(entry, sequence.num_top, hello.vocab_size)

    def _check_ended(self, ended: engine_pb2.Ended) -> None:
        sequence = self._of(ended.sequence, "ended")
        _check(len(ended.detail) <= MAX_DETAIL and len(ended.field) <= MAX_TEXT, "step.ended.detail: length")
        _check(all(0 <= getattr(ended, name) < math.inf for name in _TIMES), "step.ended: times")
        del self._open[ended.sequence]
        self._num_aborted -= not sequence.is_wanted

    def _check_trace(self, trace: engine_pb2.Trace) -> None:
        _check(trace.number in self._traces, "trace: nobody asked for it, or it has ended")
        self._traces[trace.number] += trace.ByteSize() + 64  # an empty part takes memory, too
        _check(self._traces[trace.number] <= MAX_TRACE_BYTES, "trace: too long")
        if trace.is_last:
            del self._traces[trace.number]

    def _check_answer(self, answer: engine_pb2.AdapterAnswer) -> None:
        _check(answer.number in self._adapters, "adapter_answer: nobody asked for it, or it has come")
        self._adapters.discard(answer.number)
        match answer.WhichOneof("result"):
            case "adapter":
                check_adapter(answer.adapter)
            case "error":
                _check(len(answer.error.detail) <= MAX_DETAIL, "adapter_answer.error.detail: length")
            case _:
                _check(False, "adapter_answer: neither adapter nor error")

    def _check_blocks(self, blocks: engine_pb2.CachedBlocks, hello: control_pb2.EngineInfo) -> None:
        _check(self._follows_blocks, "cached_blocks: nobody asked for them")
        self._count_idle()
        for each in blocks.stored:
            _check(len(each.tokens) == hello.kv_cache.block_size, "cached_blocks.stored.tokens: length")
            _check(max(each.tokens, default=0) < hello.vocab_size, "cached_blocks.stored.tokens: beyond the vocabulary")

    def _count_idle(self) -> None:
        """Count a message that brings no output: what an engine makes of requests is bounded by them."""
        began, count = self._idle
        now = time.monotonic()
        self._idle = (now, 1) if now > began + IDLE_S else (began, count + 1)
        _check(self._idle[1] <= IDLE_MESSAGES, "flood of messages")
        _check(self._num_aborted <= MAX_UNENDED, "step: it does not end what was aborted")


def _check(is_valid: bool, field: str) -> None:
    if not is_valid:
        raise InvalidMessage(field)


def _is_text(text: str, most: int = MAX_TEXT) -> bool:
    return len(text) <= most and text.isprintable()


def _check_hello(info: control_pb2.EngineInfo) -> None:
    for name in _TEXTS:
        _check(_is_text(getattr(info, name)), f"hello.{name}")
    for name in ("weights", "dtype", "kv_cache"):
        _check(_is_text(getattr(info.precision, name)), f"hello.precision.{name}")
    _check(len(info.settings) <= MAX_SETTINGS, "hello.settings: too many")
    for key, value in info.settings.items():
        _check(_is_text(key) and _is_text(value, MAX_SETTING), "hello.settings")
    _check(0 < info.vocab_size <= MAX_COUNT, "hello.vocab_size")
    _check(0 < info.max_model_len < 1 << 31, "hello.max_model_len")
    _check(info.hidden_size <= MAX_COUNT, "hello.hidden_size")
    _check(0 < info.kv_cache.token_capacity < 1 << 48, "hello.kv_cache.token_capacity")


def _check_load(load: control_pb2.EngineLoad) -> None:
    for name in _SEQUENCES:
        _check(getattr(load, name) <= MAX_COUNT, f"step.load.{name}")
    for name in _doubles:
        _check(0 <= getattr(load, name) < math.inf, f"step.load.{name}")


def _check_tenants(tenants: engine_pb2.Tenants) -> None:
    _check(len(tenants.listed) <= MAX_TENANTS, "step.tenants.listed: too many")
    _check(tenants.count <= MAX_COUNT, "step.tenants.count")
    for each in tenants.listed:
        _check(not each.name or TENANT_NAME.fullmatch(each.name) is not None, "step.tenants.listed.name")
        _check(0 <= each.share < math.inf, "step.tenants.listed.share")


def _check_logprobs(entry: engine_pb2.Logprobs, num_top: int, vocab_size: int) -> None:
    _check(len(entry.top_ids) == len(entry.top_logprobs) <= num_top, "logprobs.top_ids: length")
    _check(max(entry.top_ids, default=0) < vocab_size, "logprobs.top_ids: beyond the vocabulary")
    is_number = not math.isnan(entry.logprob) and not any(map(math.isnan, entry.top_logprobs))
    _check(is_number, "logprobs: not a number")
