"""A table of bad inputs: each is refused with its field's name before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable

import grpc
import pytest
from google.protobuf import any_pb2
from google.protobuf.json_format import ParseDict
from google.rpc import error_details_pb2, status_pb2

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import chat_pb2, inference_pb2
from pagoda.v1.inference_pb2 import DetokenizeRequest, GenerateRequest, TokenizeRequest
from pagoda_server.router.answers.lark import Calls
from pagoda_server.router.errors import (
    INTERNAL_MESSAGE,
    Internal,
    InvalidArgument,
    PagodaError,
    ResourceExhausted,
    Status,
    Unavailable,
    Unimplemented,
    to_status,
)
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.sampling import default_sampling
from pagoda_server.router.request.validation import (
    GenerateParams,
    check_prompt,
    to_submit,
    validate_detokenize,
    validate_generate,
    validate_tokenize,
)
from pagoda_server.router.text.chat_template import Chat, Message
from pagoda_server.settings.request import MAX_CHOICES, MAX_GRAMMAR_BYTES

LIMITS = Limits(max_model_len=2048, vocab_size=1000, kv_token_capacity=8192)


def params_of(limits: Limits = LIMITS, **fields: object) -> GenerateParams:
    fields = fields if fields.keys() & {"prompt", "message", "token_ids", "chat"} else {"prompt": "Hello", **fields}
    return validate_generate(ParseDict(fields, GenerateRequest()), limits)


def user(content: str = "Hello") -> dict[str, str]:
    return {"role": "ROLE_USER", "content": content}


def test_what_the_model_recommends_holds_where_a_request_is_silent() -> None:
    recommended = inference_pb2.Sampling(temperature=0.7, top_k=20, repetition_penalty=1.1)
    limits = dataclasses.replace(LIMITS, recommended=recommended)
    silent = params_of(limits).sampling
    assert (silent.temperature, silent.top_k) == (recommended.temperature, 20)
    assert (silent.repetition_penalty, silent.top_p) == (recommended.repetition_penalty, 1)
    explicit = params_of(limits, sampling={"temperature": 0, "top_k": 0, "repetition_penalty": 1}).sampling
    assert (explicit.temperature, explicit.top_k, explicit.repetition_penalty) == (0, 0, 1)


def test_a_model_without_a_recommended_temperature_is_drawn_as_llama_cpp_draws_it() -> None:
    alone = default_sampling({})
    assert alone == inference_pb2.Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    assert default_sampling({"temperature": "hot"}) == alone, (
        "a recommendation that no request may set counts for nothing"
    )
    assert default_sampling({"temperature": 0.2, "top_p": 0.9}) == inference_pb2.Sampling(temperature=0.2, top_p=0.9)
    assert default_sampling({"temperature": 0.0}) == inference_pb2.Sampling(temperature=0)
    penalised = default_sampling({"repetition_penalty": 1.5})
    assert (penalised.temperature, penalised.top_k, penalised.repetition_penalty) == (alone.temperature, 40, 1.5)


def test_typical_p_is_refused_and_never_sent_to_an_engine() -> None:
    assert not params_of(LIMITS, sampling={"typical_p": 1}).sampling.HasField("typical_p")
    for value in (0.5, 0, 1.5, "NaN"):
        with pytest.raises(Unimplemented, match=r"sampling\.typical_p"):
            params_of(LIMITS, sampling={"typical_p": value})


def test_the_engine_gets_the_tokens_of_bad_words_and_not_their_text() -> None:
    params = params_of(sampling={"bad_words": ["secret"]})
    assert params.bad_words == ("secret",)
    submit = to_submit(params, [1], 5, (), bad_words=[[3, 4], [5]])
    assert [list(word.ids) for word in submit.bad_words] == [[3, 4], [5]]
    assert b"secret" not in submit.SerializeToString()


def test_smallest_request_gets_every_default() -> None:
    params = params_of(prompt="Hello")
    assert params.prompt == "Hello"
    assert (params.max_tokens, params.min_tokens, params.stop, params.stop_token_ids) == (None, 0, (), ())
    assert (params.has_text, params.logprobs, params.has_prompt, params.keeps_special_tokens) == (
        True,
        None,
        False,
        False,
    )
    assert (params.n, params.priority, params.ignore_eos, params.cache_salt, params.bypasses_cache) == (
        1,
        0,
        False,
        "",
        False,
    )
    sampling = params.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 0, 1, 0)
    assert sampling.top_n_sigma == 0
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)
    assert all(
        sampling.HasField(field.name)
        for field in sampling.DESCRIPTOR.fields
        if field.has_presence and field.name not in ("beam_search", "typical_p")
    )


def test_a_limit_of_drafts_reaches_the_engine_and_zero_is_one() -> None:
    for most in (0, 16):
        assert to_submit(params_of(max_draft_tokens=most), [1], 5, []).max_draft_tokens == most
    assert not to_submit(params_of(), [1], 5, []).HasField("max_draft_tokens")


def test_made_up_seeds_and_request_ids_differ() -> None:
    assert len({params_of().sampling.seed for _ in range(100)}) == 100
    assert len({params_of().request_id for _ in range(100)}) == 100


def test_what_the_client_sets_is_kept() -> None:
    sampling = {
        "temperature": 1e-10,
        "topK": 3,
        "topP": 0.5,
        "minP": 0.25,
        "seed": 0,
        "n": 64,
        "logitBias": {"7": -100},
    }
    params = params_of(
        request_id="my request",
        sampling=sampling,
        stopping={
            "maxTokens": 9,
            "minTokens": 9,
            "stop": ["\n", "END"],
            "stopTokenIds": [999],
            "ignoreEos": True,
            "includeStopInOutput": True,
        },
        output={"text": True, "logprobs": 0, "prompt": True, "specialTokens": True, "tokenBytes": True},
        cache={"salt": "s" * 128, "bypass": True},
        priority=-1000,
    )
    assert params.request_id == "my request"
    assert params.sampling.temperature == pytest.approx(1e-10)
    assert (params.sampling.top_k, params.sampling.seed, params.n, dict(params.sampling.logit_bias)) == (
        3,
        0,
        64,
        {7: -100},
    )
    assert (params.max_tokens, params.min_tokens, params.stop) == (9, 9, ("\n", "END"))
    assert (params.stop_token_ids, params.ignore_eos, params.logprobs) == ((999,), True, 0)
    assert (params.has_prompt, params.keeps_special_tokens) == (True, True)
    assert (params.has_token_bytes, params.includes_stop) == (True, True)
    assert (params.cache_salt, params.bypasses_cache, params.priority) == ("s" * 128, True, -1000)


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert params_of(sampling={"topK": 2**32 - 1}).sampling.top_k == 0


def test_each_input_becomes_a_prompt() -> None:
    assert params_of(prompt="Hello").prompt == "Hello"
    assert params_of(message="Hello").prompt == Chat((Message("user", "Hello"),))
    assert params_of(token_ids={"ids": [0, 999]}).prompt == (0, 999)
    messages = [{"role": "ROLE_SYSTEM", "content": ""}, user(), {"role": "ROLE_ASSISTANT", "content": "Hi"}]
    assert params_of(chat={"messages": messages, "continueLast": True}).prompt == Chat(
        (Message("system", ""), Message("user", "Hello"), Message("assistant", "Hi")), continue_last=True
    )


BAD = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": "é" * (1 << 19) + "a"}),
    ("message", {"message": ""}),
    ("message", {"message": "é" * (1 << 19) + "a"}),
    ("token_ids.ids", {"token_ids": {}}),
    ("token_ids.ids[1]", {"token_ids": {"ids": [5, 1000, 2000]}}),
    ("token_ids.ids", {"token_ids": {"ids": [1] * 2048}}),
    ("chat.messages", {"chat": {}}),
    ("chat.messages[1].role", {"chat": {"messages": [user(), {"content": "x"}]}}),
    ("chat.messages[0].role", {"chat": {"messages": [{"role": 17, "content": "x"}]}}),
    ("chat.messages[2].content", {"chat": {"messages": [user("a" * (1 << 19))] * 2 + [user("a")]}}),
    ("chat.messages", {"chat": {"messages": [user()] * 4097}}),
    ("chat.continue_last", {"chat": {"messages": [user()], "continueLast": True}}),
    ("request_id", {"request_id": "a" * 129}),
    ("request_id", {"request_id": "a\nb"}),
    ("request_id", {"request_id": "a\x00"}),
    *[
        (f"sampling.{field}", {"sampling": {field: value}})
        for field, values in {
            "temperature": (-0.1, 100.1, "NaN", "Infinity"),
            "top_p": (0, 1.1, "NaN", "-Infinity"),
            "min_p": (-0.1, 1.1, "NaN"),
            "top_n_sigma": (-1, 100.1, "NaN"),
            "repetition_penalty": (0, -1, 10.1, "NaN", "Infinity"),
            "presence_penalty": (-10.1, 10.1, "NaN"),
            "frequency_penalty": (-10.1, 10.1, "NaN"),
            "no_repeat_ngram_size": (65,),
            "n": (0, 65, 10**6),
        }.items()
        for value in values
    ],
    ("sampling.logit_bias[1000]", {"sampling": {"logit_bias": {"1000": 1}}}),
    ("sampling.logit_bias[3]", {"sampling": {"logit_bias": {"3": 100.1}}}),
    ("sampling.logit_bias[3]", {"sampling": {"logit_bias": {"3": "NaN"}}}),
    ("sampling.bad_words[1]", {"sampling": {"bad_words": ["a", ""]}}),
    ("sampling.bad_words[0]", {"sampling": {"bad_words": ["a" * 257]}}),
    ("sampling.bad_words", {"sampling": {"bad_words": ["a"] * 65}}),
    ("sampling.beam_search", {"sampling": {"beam_search": {"width": 2}}}),
    ("sampling.allowed_token_ids[1]", {"sampling": {"allowed_token_ids": [999, 1000]}}),
    ("sampling.allowed_token_ids", {"sampling": {"allowed_token_ids": [1] * 1001}}),
    ("sampling.logit_bias", {"sampling": {"logit_bias": {str(id): 1 for id in range(1025)}}}),
    ("stopping.max_tokens", {"stopping": {"max_tokens": 0}}),
    ("stopping.max_tokens", {"stopping": {"max_tokens": 2048}}),
    ("stopping.min_tokens", {"stopping": {"max_tokens": 5, "min_tokens": 6}}),
    ("stopping.min_tokens", {"stopping": {"min_tokens": 2048}}),
    ("stopping.stop[1]", {"stopping": {"stop": ["a", ""]}}),
    ("stopping.stop[0]", {"stopping": {"stop": ["é" * 128 + "a"]}}),
    ("stopping.stop", {"stopping": {"stop": ["a"] * 17}}),
    ("stopping.stop", {"stopping": {"stop": ["a"]}, "output": {"text": False}}),
    ("stopping.stop_token_ids[0]", {"stopping": {"stop_token_ids": [1000]}}),
    ("stopping.stop_token_ids", {"stopping": {"stop_token_ids": [1] * 65}}),
    ("output.logprobs", {"output": {"logprobs": 21}}),
    ("cache.salt", {"cache": {"salt": "é" * 64 + "a"}}),
    ("priority", {"priority": 1001}),
    ("max_draft_tokens", {"max_draft_tokens": 17}),
    ("slo.ttft_s", {"slo": {"ttft_s": 0}}),
    ("slo.ttft_s", {"slo": {"ttft_s": "NaN"}}),
    ("slo.tpot_s", {"slo": {"tpot_s": 4e3}}),
    ("priority", {"priority": -1001}),
    ("guided", {"guided": {}}),
    ("guided.json_schema", {"guided": {"json_schema": ""}}),
    ("guided.json_schema", {"guided": {"json_schema": f'{{"const": "{"x" * MAX_GRAMMAR_BYTES}"}}'}}),
    ("guided.regex", {"guided": {"regex": ""}}),
    ("guided.choice.options", {"guided": {"choice": {}}}),
    ("guided.choice.options", {"guided": {"choice": {"options": [""]}}}),
    ("guided.choice.options", {"guided": {"choice": {"options": ["a"] * (MAX_CHOICES + 1)}}}),
    ("guided.json_object", {"guided": {"json_object": False}}),
]


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: str(value)[:60])
def test_bad_field_is_refused_by_name(field: str, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        params_of(**fields)
    assert refused.value.field == field


def test_a_field_that_is_not_supported_yet_is_unimplemented_and_named() -> None:
    field = "sampling.typical_p"
    with pytest.raises(Unimplemented) as refused:
        params_of(sampling={"typical_p": 0.5})
    status, (detail,) = details_of(refused.value)
    bad_request = error_details_pb2.BadRequest()
    assert detail.Unpack(bad_request)
    assert status.code == grpc.StatusCode.UNIMPLEMENTED
    assert bad_request.field_violations[0].field == field
    assert status.details.startswith(f"{field}: ")


def test_prompt_logprobs_imply_the_prompt_and_reach_the_engine() -> None:
    params = params_of(output={"prompt_logprobs": 3})
    assert params.has_prompt
    submit = to_submit(params, [1, 2], 5, ())
    assert submit.readout == engine_pb2.Readout(logprobs_from=1, num_top=3)
    assert not to_submit(params_of(output={"prompt": True}), [1, 2], 5, ()).HasField("readout")


@pytest.mark.parametrize("choice", [{"mode": "TOOL_CHOICE_MODE_REQUIRED"}, {"tool": "f"}])
def test_a_call_can_be_required_where_it_can_be_enforced(choice: dict[str, str]) -> None:
    chat = {"messages": [user()], "tools": [{"name": "f"}, {"name": "g"}], "tool_choice": choice}
    params = params_of(chat=chat)
    assert params.calls_due == Calls(params.tools[:1] if "tool" in choice else params.tools, "mode" in choice)
    with pytest.raises(InvalidArgument) as refused:
        params_of(dataclasses.replace(LIMITS, has_tool_format=False), chat=chat)
    assert refused.value.field == f"chat.tool_choice.{next(iter(choice))}"
    assert params_of(chat=chat | {"tool_choice": {}}).calls_due is None


@pytest.mark.parametrize("given", [{"message": "Hi"}, {"chat": {"messages": [user()]}}])
def test_a_model_without_a_chat_template_takes_a_prompt_alone(given: dict[str, object]) -> None:
    limits = dataclasses.replace(LIMITS, has_chat_template=False)
    assert params_of(limits, prompt="Hi").prompt == "Hi"
    with pytest.raises(InvalidArgument, match="has no chat template; send prompt") as refused:
        params_of(limits, **given)
    assert [refused.value.field] == list(given)


def test_request_without_input_is_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        validate_generate(GenerateRequest(), LIMITS)
    assert refused.value.field == "input"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling": {"temperature": 101}}, "sampling.temperature: is 101, must be in [0, 100]"),
        ({"sampling": {"topP": 1.0000001}}, "sampling.top_p: is 1.0000001, must be in (0, 1]"),
        ({"sampling": {"minP": 1.1}}, "sampling.min_p: is 1.1, must be in [0, 1]"),
        ({"sampling": {"temperature": "NaN"}}, "sampling.temperature: is nan, must be in [0, 100]"),
        ({"slo": {"ttftS": 3600.0001}}, "slo.ttft_s: is 3600.0001, must be in (0, 3600]"),
        ({"token_ids": {"ids": [1] * 3000}}, "token_ids.ids: has more than 2047 entries, the limit"),
    ],
)
def test_refusal_tells_the_value_and_the_limit(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{re.escape(message)}$"):
        params_of(**fields)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: GenerateRequest(prompt="x", stopping={"stop": ["a"] * 10**6}),
        lambda: GenerateRequest(prompt="x", stopping={"stop_token_ids": [1] * 10**6}),
        lambda: GenerateRequest(token_ids={"ids": [1] * 10**6}),
        lambda: GenerateRequest(prompt="x", sampling={"n": 2**32 - 1}),
    ],
)
def test_huge_request_is_refused_at_once(request_of: Callable[[], GenerateRequest]) -> None:
    request = request_of()
    start = time.thread_time()
    for _ in range(10**6):
        pass
    million_s = time.thread_time() - start
    start = time.thread_time()
    with pytest.raises(InvalidArgument):
        validate_generate(request, LIMITS)
    assert time.thread_time() - start < million_s / 2, "it looked at all of them"


def slo_by(*metadata: tuple[str, str | bytes], **slo: float) -> inference_pb2.Slo:
    return validate_generate(GenerateRequest(prompt="x", slo=slo), LIMITS, metadata).slo


def test_headers_are_the_targets_that_a_request_does_not_set() -> None:
    ttft, tpot = ("x-llm-d-slo-ttft-ms", "250"), ("x-llm-d-slo-tpot-ms", "12.5")
    assert slo_by(("user-agent", "x")) == inference_pb2.Slo()
    assert slo_by(ttft, tpot) == inference_pb2.Slo(ttft_s=0.25, tpot_s=0.0125)
    assert slo_by(ttft, tpot, tpot_s=1.0) == inference_pb2.Slo(ttft_s=0.25, tpot_s=1.0)


@pytest.mark.parametrize("key", ["x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["", "0", "0.0", "-1", "nan", "inf", "1e3", "3600000.1", "9" * 400, "１", b"1"])
def test_a_header_that_is_no_target_is_named(key: str, value: str | bytes) -> None:
    with pytest.raises(InvalidArgument, match=f"^{key}: ") as caught:
        slo_by((key, value), ttft_s=1.0, tpot_s=1.0)
    assert len(caught.value.message) < 100
    assert slo_by((key, "3600000")).ByteSize()


def test_unknown_fields_do_not_reach_the_engine() -> None:
    unknown = GenerateRequest(request_id="x" * 100_000).SerializeToString()
    bytes_of_sampling = unknown.replace(b"\x0a", b"\xfa\x07", 1)  # the same bytes as field 127
    request = GenerateRequest(prompt="x", sampling=inference_pb2.Sampling.FromString(bytes_of_sampling))
    assert request.ByteSize() > 100_000
    submit = to_submit(validate_generate(request, LIMITS), [1], 5, ())
    assert submit.ByteSize() < 200


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "resolved"),
    [(1, None, 2047), (2000, None, 48), (2047, None, 1), (2000, 48, 48), (1, 3, 3)],
)
def test_output_is_as_long_as_asked_for_or_as_the_context_leaves(
    prompt_len: int, max_tokens: int | None, resolved: int
) -> None:
    params = dataclasses.replace(params_of(), max_tokens=max_tokens)
    assert check_prompt(params, prompt_len, LIMITS) == resolved
    capped = dataclasses.replace(LIMITS, default_max_tokens=100)
    assert check_prompt(params, prompt_len, capped) == (resolved if max_tokens else min(resolved, 100))
    small = dataclasses.replace(LIMITS, kv_token_capacity=2048 - 100)
    if prompt_len == 1 and max_tokens is None:
        assert check_prompt(params, prompt_len, small) == resolved - 100


@pytest.mark.parametrize(
    ("field", "given", "prompt_len", "max_tokens"),
    [
        ("prompt", {"prompt": "Hello"}, 0, None),
        ("prompt", {"prompt": "Hello"}, 2048, None),
        ("message", {"message": "Hello"}, 2048, None),
        ("chat", {"chat": {"messages": [user()]}}, 5000, 1),
        ("token_ids.ids", {"token_ids": {"ids": [1] * 2047}}, 2048, 1),
        ("stopping.max_tokens", {"prompt": "Hello"}, 2000, 49),
    ],
)
def test_prompt_that_does_not_fit_is_refused(
    field: str, given: dict[str, object], prompt_len: int, max_tokens: int | None
) -> None:
    params = dataclasses.replace(params_of(**given), max_tokens=max_tokens)
    with pytest.raises(InvalidArgument) as refused:
        check_prompt(params, prompt_len, LIMITS)
    assert refused.value.field == field


def test_request_for_more_than_the_whole_cache_is_refused() -> None:
    limits = dataclasses.replace(LIMITS, kv_token_capacity=100)
    assert check_prompt(params_of(), 90, limits) == 10
    with pytest.raises(InvalidArgument, match="the KV cache holds 100"):
        check_prompt(params_of(), 100, limits)
    with pytest.raises(InvalidArgument, match="leaving 10"):
        check_prompt(params_of(stopping={"maxTokens": 11}), 90, limits)


def test_min_tokens_that_the_context_does_not_leave_is_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_prompt(params_of(stopping={"minTokens": 50}), 2000, LIMITS)
    assert refused.value.field == "stopping.min_tokens"


def test_submission_carries_everything_to_the_engine() -> None:
    params = params_of(
        sampling={"seed": 2**64 - 1, "n": 3, "logitBias": {"7": 1}, "allowedTokenIds": [7, 0]},
        stopping={"minTokens": 2, "stopTokenIds": [9, 2]},
        output={"logprobs": 0},
        cache={"salt": "mine"},
        priority=5,
    )
    submit = to_submit(params, [1, 2, 3], max_tokens=20, eos_token_ids=[2, 0], timeout_s=1.5)
    assert list(submit.prompt) == [1, 2, 3]
    assert (submit.sampling.seed, submit.sampling.n, dict(submit.sampling.logit_bias)) == (2**64 - 1, 3, {7: 1})
    assert list(submit.sampling.allowed_token_ids) == [7, 0]
    assert (submit.max_tokens, submit.min_tokens, submit.priority, submit.timeout_s) == (20, 2, 5, 1.5)
    assert list(submit.stop_token_ids) == [0, 2, 9]
    assert submit.HasField("logprobs")
    assert submit.logprobs == 0
    assert (submit.cache.salt, submit.cache.bypass) == ("mine", False)


def test_ignored_eos_is_no_stop_id_and_unset_fields_stay_unset() -> None:
    params = params_of(stopping={"ignoreEos": True, "stopTokenIds": [9]})
    submit = to_submit(params, [1], max_tokens=1, eos_token_ids=[2])
    assert list(submit.stop_token_ids) == [9]
    assert not submit.HasField("logprobs")
    assert not submit.HasField("timeout_s")


def test_tokenize_request_is_checked() -> None:
    params = validate_tokenize(TokenizeRequest(prompt=""), LIMITS)
    assert (params.prompt, params.add_special_tokens) == ("", True)
    bare = TokenizeRequest(prompt="x", add_special_tokens=False)
    assert not validate_tokenize(bare, LIMITS).add_special_tokens
    said = validate_tokenize(TokenizeRequest(message="Hi"), LIMITS)
    assert said.prompt == Chat((Message("user", "Hi"),))
    for field, request in {
        "input": TokenizeRequest(),
        "prompt": TokenizeRequest(prompt="a" * ((1 << 20) + 1)),
        "chat.messages": TokenizeRequest(chat=chat_pb2.Chat()),
        "add_special_tokens": TokenizeRequest(message="Hi", add_special_tokens=False),
    }.items():
        with pytest.raises(InvalidArgument) as refused:
            validate_tokenize(request, LIMITS)
        assert refused.value.field == field


def test_detokenize_request_is_checked() -> None:
    assert validate_detokenize(DetokenizeRequest(token_ids=[1, 2]), LIMITS) == (1, 2)
    assert validate_detokenize(DetokenizeRequest(), LIMITS) == ()
    for field, ids in {"token_ids[1]": [1, 1000], "token_ids": [1] * 2049}.items():
        with pytest.raises(InvalidArgument) as refused:
            validate_detokenize(DetokenizeRequest(token_ids=ids), LIMITS)
        assert refused.value.field == field


def details_of(error: Exception) -> tuple[Status, list[any_pb2.Any]]:
    status = to_status(error)
    key, value = status.trailing_metadata[0]
    assert key == "grpc-status-details-bin"
    assert isinstance(value, bytes)
    carried = status_pb2.Status.FromString(value)
    assert (carried.code, carried.message) == (status.code.value[0], status.details)
    return status, list(carried.details)


def test_status_names_the_bad_field() -> None:
    status, (detail,) = details_of(InvalidArgument("stopping.stop[3]", "is empty"))
    assert (status.code, status.details) == (grpc.StatusCode.INVALID_ARGUMENT, "stopping.stop[3]: is empty")
    bad_request = error_details_pb2.BadRequest()
    assert detail.Unpack(bad_request)
    (violation,) = bad_request.field_violations
    assert (violation.field, violation.description) == ("stopping.stop[3]", "is empty")


def test_status_of_overload_tells_the_delay_and_the_queue_depth() -> None:
    status, details = details_of(ResourceExhausted("the queue is full", retry_after_s=1.25, queue_depth=7))
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert details[0].Unpack(info)
    assert details[1].Unpack(retry)
    assert (info.reason, dict(info.metadata)) == ("QUEUE_FULL", {"queue_depth": "7"})
    assert math.isclose(retry.retry_delay.ToTimedelta().total_seconds(), 1.25)
    assert status.trailing_metadata[1:] == (("grpc-retry-pushback-ms", "1250"),)


def test_unavailable_carries_a_delay_only_when_there_is_one() -> None:
    status, details = details_of(Unavailable("draining"))
    assert (details, len(status.trailing_metadata)) == ([], 1)
    assert len(details_of(Unavailable("restarting", retry_after_s=1))[1]) == 1


@pytest.mark.parametrize("error", [Internal("/secret/path"), ValueError("/secret/path"), PagodaError(INTERNAL_MESSAGE)])
def test_bug_leaves_as_a_fixed_text(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    status, details = details_of(error)
    assert (status.code, status.details, details) == (grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE, [])
    assert ("/secret/path" in caplog.text) == (type(error) is not PagodaError)
