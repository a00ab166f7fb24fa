"""vLLM's engine protocol, token ids in and token ids out: what the SGLang model gateway (`smg`) and llm-d speak."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grpc

from pagoda.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc, inference_pb2

from ... import installed_version
from ...settings.request import MAX_CHOICES
from ..engines.block_events import BlockEvents
from ..errors import InvalidArgument, NotFound, Unimplemented
from ..request.client_call import Context
from ..request.fields import Limits, check_count, check_integer
from ..request.inference import InferenceServicer
from ..request.models import ServedModel
from ..request.output import ClientWriter
from ..request.receiving import from_protobuf
from .kv_events import batches, cleared
from .protocols import smg_common_pb2
from .protocols import vllm_engine_pb2 as vllm
from .translation import REASONS, Translation

SERVICE = "vllm.grpc.engine.VllmEngine"
MAX_ABORTS = 64  # ids in one call of Abort
CHUNK_BYTES = 64 << 10
MAX_NUMBER = 1 << 62  # of a batch that a subscriber knows: those after it must fit, too
_NUMBERS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json",
)  # fmt: skip


def most_entries(limits: Limits) -> Mapping[str, int]:
    """Limits of a request's repeated fields, by full name."""
    return {
        "vllm.grpc.engine.TokenizedInput.input_ids": limits.max_model_len - 1,
        "vllm.grpc.engine.SamplingParams.stop": limits.max_stop,
        "vllm.grpc.engine.SamplingParams.stop_token_ids": limits.max_stop_ids,
        "vllm.grpc.engine.SamplingParams.logit_bias": limits.max_logit_bias,
        "vllm.grpc.engine.ChoiceConstraint.choices": MAX_CHOICES,
        "vllm.grpc.engine.GenerateRequest.extra_mm_inputs": 1,
    }


_GENERATE = from_protobuf(vllm.GenerateRequest, most_entries)


class VllmEngine:
    """The service. What it says of the server is what Control says to the same caller.

    control, admin  which answer for all routers that share the port
    state           the server's
    model           the first one of those that are served, which every request means
    block_events    what its engines have cached
    """

    service = SERVICE
    admitted: Sequence[str] = ("Generate",)

    def __init__(
        self,
        *,
        inference: InferenceServicer,
        control: control_pb2_grpc.ControlServicer,
        admin: admin_pb2_grpc.AdminServicer,
        state: Callable[[], control_pb2.ServerState],
        model: ServedModel,
        block_events: BlockEvents,
        stall_timeout_s: float,
    ) -> None:
        self._inference = inference
        self._control = control
        self._admin = admin
        self._state = state
        self._model = model
        self._block_events = block_events
        self._stall_timeout_s = stall_timeout_s
        self._archive: asyncio.Task[tuple[bytes, str]] | None = None

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        unary = grpc.unary_unary_rpc_method_handler
        return {
            "Generate": grpc.stream_stream_rpc_method_handler(
                self._generate, None, vllm.GenerateResponse.SerializeToString
            ),
            "HealthCheck": unary(
                self._health, vllm.HealthCheckRequest.FromString, vllm.HealthCheckResponse.SerializeToString
            ),
            "Abort": unary(self._abort, vllm.AbortRequest.FromString, vllm.AbortResponse.SerializeToString),
            "GetModelInfo": unary(
                self._model_info, vllm.GetModelInfoRequest.FromString, vllm.GetModelInfoResponse.SerializeToString
            ),
            "GetServerInfo": unary(
                self._server_info, vllm.GetServerInfoRequest.FromString, vllm.GetServerInfoResponse.SerializeToString
            ),
            "GetLoads": unary(self._loads, vllm.GetLoadsRequest.FromString, vllm.GetLoadsResponse.SerializeToString),
            "GetTokenizer": grpc.unary_stream_rpc_method_handler(
                self._tokenizer,
                smg_common_pb2.GetTokenizerRequest.FromString,
                smg_common_pb2.GetTokenizerChunk.SerializeToString,
            ),
            "SubscribeKvEvents": grpc.unary_stream_rpc_method_handler(
                self._kv_events,
                smg_common_pb2.SubscribeKvEventsRequest.FromString,
                smg_common_pb2.KvEventBatch.SerializeToString,
            ),
        }

    async def _generate(self, _: object, context: Context) -> None:
        await _Generation(context).run(self._inference)

    async def _health(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        state = self._state()
        name = control_pb2.ServerState.Name(state).removeprefix("SERVER_STATE_").lower()
        return vllm.HealthCheckResponse(healthy=state == control_pb2.SERVER_STATE_SERVING, message=name)

    async def _abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        check_count(len(request.request_ids), "request_ids", MAX_ABORTS)
        for request_id in request.request_ids:
            try:
                await self._admin.Abort(admin_pb2.AbortRequest(request_id=request_id), context)
            except NotFound:  # it has ended: a gateway aborts what its own client left
                continue
        return vllm.AbortResponse()

    async def _model_info(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        if (why := self._inference.models.refusal()) is not None:  # this protocol has no word for what is not known
            raise why
        model = (await self._control.ListModels(control_pb2.ListModelsRequest(), context)).models[0]
        return vllm.GetModelInfoResponse(
            model_path=model.name,
            is_generation=True,
            max_context_length=model.max_model_len,
            vocab_size=model.vocab_size,
            served_model_name=model.name,
            architectures=[model.architecture] if model.architecture else [],
            eos_token_ids=model.eos_token_ids,
            max_req_input_len=model.max_model_len - 1,
        )

    async def _server_info(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        info = await self._control.GetServerInfo(control_pb2.GetServerInfoRequest(), context)
        load = await self._control.GetLoad(control_pb2.GetLoadRequest(), context)
        engines = [engine.info for engine in info.engines if engine.state == control_pb2.ENGINE_STATE_READY]
        return vllm.GetServerInfoResponse(
            active_requests=load.requests,
            is_paused=info.state != control_pb2.SERVER_STATE_SERVING,
            uptime_seconds=info.uptime_s,
            server_type="pagoda",
            data_parallel_size=1,
            block_size=min((engine.kv_cache.block_size for engine in engines), default=0),
            max_num_seqs=sum(engine.max_num_seqs for engine in engines),
        )

    async def _loads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        info = await self._control.GetServerInfo(control_pb2.GetServerInfoRequest(), context)
        engines = (await self._control.GetLoad(control_pb2.GetLoadRequest(), context)).engines
        caches = [engine.info for engine in info.engines if engine.state == control_pb2.ENGINE_STATE_READY]
        capacity = sum(cache.kv_cache.token_capacity for cache in caches)
        used = sum(engine.kv_slots - engine.kv_slots_unused for engine in engines)
        running, waiting = sum(engine.running for engine in engines), sum(engine.waiting for engine in engines)
        prompt_tokens = sum(engine.prompt_tokens for engine in engines)
        load = vllm.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=used,
            max_total_num_tokens=capacity,
            token_usage=used / capacity if capacity else 0.0,
            cache_hit_rate=sum(engine.cached_tokens for engine in engines) / prompt_tokens if prompt_tokens else 0.0,
            max_running_requests=sum(cache.max_num_seqs for cache in caches),
        )
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return vllm.GetLoadsResponse(timestamp=now, version=installed_version(), dp_rank_count=1, loads=[load])

    async def _tokenizer(self, request: smg_common_pb2.GetTokenizerRequest, context: Context) -> None:
        if self._archive is None:
            self._archive = asyncio.create_task(asyncio.to_thread(_archive_of, self._model.folder))
        archive, sha256 = await asyncio.shield(self._archive)  # a caller that goes must not take it from the others
        last = max(0, len(archive) - 1) // CHUNK_BYTES * CHUNK_BYTES
        async with ClientWriter(context, self._stall_timeout_s) as writer:
            for index in range(0, last + 1, CHUNK_BYTES):
                chunk = smg_common_pb2.GetTokenizerChunk(data=archive[index : index + CHUNK_BYTES])
                if index == last:
                    chunk.sha256 = sha256
                await writer.write(chunk)  # type: ignore[arg-type]  # a call takes its own method's messages

    async def _kv_events(self, request: smg_common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        check_integer(request.start_sequence_number, "start_sequence_number", 0, MAX_NUMBER)
        with self._block_events.subscribe(self._model.name) as subscription:
            number = request.start_sequence_number + 1
            async with ClientWriter(context, self._stall_timeout_s) as writer:
                await writer.write(cleared(number))  # type: ignore[arg-type]  # a call takes its own method's messages
                for channel in self._model.engines.channels:
                    channel.ask_for_blocks()
                while True:
                    change = await subscription.next()
                    for batch in batches(change, number + 1):
                        number = batch.sequence_number
                        await writer.write(batch)  # type: ignore[arg-type]


class _Generation(Translation):
    """A call of Generate."""

    names: ClassVar = {
        "prompt": "text",
        "token_ids.": "tokenized.input_",
        "sampling.": "sampling_params.",
        "stopping.": "sampling_params.",
        "output.logprobs": "sampling_params.logprobs",
        "output.prompt_logprobs": "sampling_params.prompt_logprobs",
        "guided.ebnf_grammar": "sampling_params.grammar",
        "guided.choice.options": "sampling_params.choice.choices",
        "guided.": "sampling_params.",
    }

    def __init__(self, context: Context) -> None:
        super().__init__(context, f"{SERVICE}/Generate")
        self._streams = False
        self._stop_ids: frozenset[int] = frozenset()
        self._prompt_len = 0
        self._input: vllm.InputLogProbs | None = None
        self._num_tokens: dict[int, int] = {}
        self._wholes: dict[int, vllm.GenerateComplete] = {}  # by index
        self._ends: list[inference_pb2.Finished] = []

    def request(self, raw: bytes, limits: Limits) -> inference_pb2.GenerateRequest:
        theirs = _GENERATE(raw, limits)
        ours = request_from(theirs, limits)
        self._streams = theirs.stream
        self._stop_ids = frozenset(theirs.sampling_params.stop_token_ids)
        self._prompt_len = len(theirs.tokenized.input_ids)
        return ours

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        if message.HasField("tokens") and message.tokens.tokens:
            await self._take(message.tokens.index, message.tokens.tokens)
        elif message.HasField("prompt"):
            self._input = self._input or vllm.InputLogProbs()
            _add_input_logprobs(self._input, message.prompt.tokens)
            await asyncio.sleep(0)  # a long prompt comes in parts, between which other streams write
        elif message.HasField("finished"):
            end = inference_pb2.Finished()
            end.CopyFrom(message.finished)
            self._ends.append(end)
        if message.HasField("usage"):
            for end in self._ends:
                await self._context.write(vllm.GenerateResponse(complete=self._complete(end, message.usage)))

    async def _take(self, index: int, tokens: Sequence[inference_pb2.Token]) -> None:
        ids = [token.id for token in tokens]
        is_first = index not in self._num_tokens
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(ids)
        if self._streams:
            chunk = vllm.GenerateStreamChunk(
                token_ids=ids, prompt_tokens=self._prompt_len, completion_tokens=len(ids), index=index
            )
            if tokens[0].HasField("logprob"):
                _add_logprobs(chunk.output_logprobs, tokens)
            if is_first and self._input is not None:
                chunk.input_logprobs.CopyFrom(self._input)
            await self._context.write(vllm.GenerateResponse(chunk=chunk))
        else:
            whole = self._wholes.setdefault(index, vllm.GenerateComplete())
            whole.output_ids.extend(ids)
            if tokens[0].HasField("logprob"):
                _add_logprobs(whole.output_logprobs, tokens)

    def _complete(self, end: inference_pb2.Finished, usage: inference_pb2.Usage) -> vllm.GenerateComplete:
        complete = self._wholes.pop(end.index, None) or vllm.GenerateComplete()
        complete.index = end.index
        complete.finish_reason = REASONS.get(end.reason, "error")
        complete.prompt_tokens = usage.prompt_tokens
        complete.completion_tokens = self._num_tokens.get(end.index, 0)
        complete.cached_tokens = usage.cached_tokens
        if self._input is not None and not self._streams:
            complete.input_logprobs.CopyFrom(self._input)
        if end.HasField("stop_string"):
            complete.matched_stop_str = end.stop_string
        elif end.HasField("stop_token_id") and end.stop_token_id in self._stop_ids:
            complete.matched_token_id = end.stop_token_id
        return complete


_FORMATS = {"json_schema": "json_schema", "regex": "regex", "grammar": "ebnf_grammar", "json_object": "json_object"}


def request_from(theirs: vllm.GenerateRequest, limits: Limits) -> inference_pb2.GenerateRequest:
    """Translate a request. Raises InvalidArgument, Unimplemented, which name vLLM's fields."""
    _check_supported(theirs)
    params = theirs.sampling_params
    sampling = inference_pb2.Sampling(n=params.n or 1)
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    for name in _NUMBERS:
        if value := getattr(params, name):  # the protocol does not distinguish 0 from a field that is not set
            setattr(sampling, name, value)
    if params.HasField("seed"):
        sampling.seed = params.seed % (1 << 64)  # vLLM takes negative ones too
    check_count(len(params.logit_bias), "sampling_params.logit_bias", limits.max_logit_bias)
    for id, bias in params.logit_bias.items():
        check_integer(id, "sampling_params.logit_bias", 0, limits.vocab_size - 1)
        sampling.logit_bias[id] = bias
    check_count(len(params.stop), "sampling_params.stop", limits.max_stop)
    stopping = inference_pb2.Stopping(
        min_tokens=params.min_tokens, stop=params.stop, stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos, max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
    )  # fmt: skip
    # Only stop strings need text.
    output = inference_pb2.Output(text=bool(params.stop), special_tokens=not params.skip_special_tokens)
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            check_integer(getattr(params, name), f"sampling_params.{name}", 0, limits.max_logprobs)
            setattr(output, name, getattr(params, name))
    ours = inference_pb2.GenerateRequest(
        request_id=theirs.request_id, sampling=sampling, stopping=stopping, output=output
    )
    if (constraint := params.WhichOneof("constraint")) == "choice":
        ours.guided.choice.CopyFrom(inference_pb2.Choice(options=params.choice.choices))
    elif constraint is not None:
        setattr(ours.guided, _FORMATS[constraint], getattr(params, constraint))
    match theirs.WhichOneof("input"):
        case "tokenized":
            check_count(len(theirs.tokenized.input_ids), "tokenized.input_ids", limits.max_model_len - 1)
            ours.token_ids.ids.extend(theirs.tokenized.input_ids)
        case "text":
            ours.prompt = theirs.text
        case _:
            raise InvalidArgument("input", "is missing: set one of tokenized, text")
    return ours


def _check_supported(theirs: vllm.GenerateRequest) -> None:
    for name in ("structural_tag", "truncate_prompt_tokens"):
        if theirs.sampling_params.HasField(name):
            raise Unimplemented(f"sampling_params.{name}")
    for name in ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs"):
        if theirs.HasField(name):
            raise Unimplemented(name)
    if theirs.extra_mm_inputs:
        raise Unimplemented("extra_mm_inputs")
    check_integer(theirs.data_parallel_rank, "data_parallel_rank", 0, 0)


def _add_logprobs(to: vllm.OutputLogProbs, tokens: Sequence[inference_pb2.Token]) -> None:
    for token in tokens:
        to.token_logprobs.append(token.logprob)
        to.token_ids.append(token.id)
        if token.top:
            _set_top(to.top_logprobs.add(), token)


def _add_input_logprobs(to: vllm.InputLogProbs, tokens: Sequence[inference_pb2.Token]) -> None:
    has_top = bool(tokens[-1].top)
    for token in tokens:
        to.token_logprobs.add(value=token.logprob if token.HasField("logprob") else None)
        to.token_ids.append(token.id)
        if has_top:  # the first token has none, and an entry all the same: entries are found by position
            _set_top(to.top_logprobs.add(), token)


def _set_top(to: vllm.TopLogProbs, token: inference_pb2.Token) -> None:
    to.values.extend(each.logprob for each in token.top)
    to.token_ids.extend(each.id for each in token.top)


def _archive_of(folder: Path) -> tuple[bytes, str]:
    """The tokenizer's files as a zip archive, the same bytes for the same files, and its SHA-256."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (folder / name for name in _TOKENIZER_FILES):
            if path.is_file():
                archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue(), hashlib.sha256(content.getvalue()).hexdigest()
