"""Bodies of the OpenAI API as requests of the protocol, and what is refused by which name."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import json_format

from pagoda.v1 import inference_pb2
from pagoda_server.router.errors import InvalidArgument, Unimplemented
from pagoda_server.router.http.openai.requests import MAX_WHOLE_LOGPROBS, Asked, own_name, translated
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.json_body import json_object
from pagoda_server.router.request.validation import validate_generate

LIMITS = Limits(max_model_len=4096, vocab_size=1000, kv_token_capacity=1 << 20)
MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> tuple[inference_pb2.GenerateRequest, Asked]:
    asked = Asked(is_chat=True)
    return translated(json.dumps({"messages": MESSAGES} | fields).encode(), LIMITS, asked), asked


def completion(**fields: Any) -> tuple[inference_pb2.GenerateRequest, Asked]:
    asked = Asked(is_chat=False)
    return translated(json.dumps({"prompt": "Hi"} | fields).encode(), LIMITS, asked), asked


def test_every_field_that_is_supported_arrives() -> None:
    request, asked = chat(
        model="m", temperature=0.5, top_p=0.9, n=2, stop=["a", "b"], seed=-1, max_completion_tokens=7, stream=True,
        stream_options={"include_usage": True}, frequency_penalty=0.25, presence_penalty=-0.5, logit_bias={"5": -100},
        logprobs=True, top_logprobs=3, top_k=4, min_p=0.125, top_n_sigma=1.5, repetition_penalty=1.5, min_tokens=2,
        typical_p=1, no_repeat_ngram_size=3, bad_words=["x"],
        ignore_eos=True, stop_token_ids=[9], allowed_token_ids=[1, 2], include_stop_in_output=True, special_tokens=True,
        priority=-3, cache_salt="s", chat_template_kwargs={"enable_thinking": False, "depth": [1, {"a": None}]},
    )  # fmt: skip
    assert json_format.MessageToDict(request, preserving_proto_field_name=True) == {
        "model": "m",
        "chat": {
            "messages": [{"role": "ROLE_USER", "content": "Hi"}],
            "template_kwargs": {"enable_thinking": False, "depth": [1.0, {"a": None}]},
        },
        "sampling": {
            "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": str((1 << 64) - 1), "frequency_penalty": 0.25,
            "presence_penalty": -0.5, "logit_bias": {"5": -100.0}, "top_k": 4, "min_p": 0.125, "top_n_sigma": 1.5,
            "repetition_penalty": 1.5, "allowed_token_ids": [1, 2], "no_repeat_ngram_size": 3,
            "bad_words": ["x"],
        },
        "stopping": {
            "max_tokens": 7, "min_tokens": 2, "stop": ["a", "b"], "stop_token_ids": [9], "ignore_eos": True,
            "include_stop_in_output": True,
        },
        "output": {"special_tokens": True, "token_bytes": True, "logprobs": 3},
        "cache": {"salt": "s"},
        "priority": -3,
    }  # fmt: skip
    assert (asked.is_stream, asked.has_usage, asked.logprobs, asked.n) == (True, True, 3, 2)


def test_defaults_are_those_of_the_api() -> None:
    request, asked = completion()
    assert (request.prompt, request.stopping.max_tokens) == ("Hi", 16)
    assert not request.sampling.HasField("temperature"), "it is the same on every protocol"
    assert (asked.is_stream, asked.has_usage, asked.logprobs, asked.n) == (False, False, None, 1)
    request, _ = chat()
    assert not request.stopping.HasField("max_tokens")
    assert not request.sampling.HasField("seed")


def test_a_field_that_is_not_given_has_what_the_model_recommends() -> None:
    limits = replace(LIMITS, recommended=inference_pb2.Sampling(temperature=0.5, top_k=20))

    def resolved(**fields: Any) -> inference_pb2.Sampling:
        request = translated(json.dumps({"prompt": "Hi"} | fields).encode(), limits, Asked(is_chat=False))
        return validate_generate(request, limits).sampling

    assert (resolved().temperature, resolved().top_k) == (0.5, 20)
    assert (resolved(temperature=0).temperature, resolved(top_k=0).top_k) == (0, 0)


def test_null_is_the_same_as_no_field() -> None:
    absent = {"stop": None, "temperature": None, "tools": None, "logprobs": None, "stream_options": None, "what": None}
    assert chat(**absent)[0] == chat()[0]


def test_fields_that_change_no_answer_are_ignored() -> None:
    ignored = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True,
        "reasoning_effort": "minimal", "verbosity": "low",
        "response_format": {"type": "text"}, "modalities": ["text"], "tools": [], "best_of": 1, "echo": False,
    }  # fmt: skip
    assert chat(**ignored)[0] == chat()[0]


def test_messages_of_every_role_and_form() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request, _ = chat(
        messages=[
            {"role": "developer", "content": "d"},
            {"role": "system", "content": "s", "name": "n"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
            {"role": "tool", "content": "t", "tool_call_id": "c"},
        ]
    )
    assert json_format.MessageToDict(request.chat, preserving_proto_field_name=True)["messages"] == [
        {"role": "ROLE_SYSTEM", "content": "d"},
        {"role": "ROLE_SYSTEM", "content": "s", "name": "n"},
        {"role": "ROLE_USER", "parts": [{"text": "a"}, {"text": "b"}]},
        {"role": "ROLE_ASSISTANT", "tool_calls": [{"id": "c", "name": "f", "arguments": "{}"}]},
        {"role": "ROLE_TOOL", "content": "t", "tool_call_id": "c"},
    ]


def test_a_list_of_prompts_and_n_are_limited_together() -> None:
    _, asked = completion(prompt=["a"] * 16, n=4)
    assert (len(asked.prompts), asked.n) == (16, 4)
    with pytest.raises(InvalidArgument, match=r"^prompt: holds 17 prompts, times n = 4; at most 64"):
        completion(prompt=["a"] * 17, n=4)
    with pytest.raises(InvalidArgument, match="stream: must be true"):
        completion(prompt=["a"] * 64, logprobs=4, max_tokens=MAX_WHOLE_LOGPROBS // 64)


def test_at_most_one_call_is_asked_for_by_parallel_tool_calls() -> None:
    assert chat(parallel_tool_calls=False)[0].chat.tool_choice.at_most_one
    with pytest.raises(InvalidArgument, match="parallel_tool_calls: must be true or false"):
        chat(parallel_tool_calls="no")


@pytest.mark.parametrize(("prompt", "ids"), [([1, 2], [1, 2]), ([[3]], [3]), (["Hi"], None), ("Hi", None)])
def test_a_prompt_is_a_text_or_token_ids(prompt: Any, ids: list[int] | None) -> None:
    request, _ = completion(prompt=prompt)
    assert (list(request.token_ids.ids) if ids else request.prompt) == (ids or "Hi")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"functions": [{}]}, "functions"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"suffix": "x"}, "suffix"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(Unimplemented) as refused:
        chat(**fields)
    assert refused.value.field == name


WEATHER = {
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"b": {}, "a": {}}},
}


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, {}),
        ("auto", {"mode": "TOOL_CHOICE_MODE_AUTO"}),
        ("none", {"mode": "TOOL_CHOICE_MODE_NONE"}),
        ("required", {"mode": "TOOL_CHOICE_MODE_REQUIRED"}),
        ({"type": "function", "function": {"name": "weather"}}, {"tool": "weather"}),
    ],
)
def test_tools_and_the_choice_between_them(choice: Any, wanted: dict[str, str]) -> None:
    request, _ = chat(tools=[{"type": "function", "function": WEATHER | {"strict": True}}], tool_choice=choice)
    told = json_format.MessageToDict(request.chat, preserving_proto_field_name=True)
    parameters = '{"type": "object", "properties": {"b": {}, "a": {}}}'  # in the client's order
    assert told["tools"] == [{"name": "weather", "description": "Tells it.", "parameters": parameters}]
    assert told.get("tool_choice", {}) == wanted


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"b": 1, "a": "é"}}}},
            {"json_schema": '{"b": 1, "a": "é"}'},
        ),
        ({"structured_outputs": {"json": '{"a": 1}'}}, {"json_schema": '{"a": 1}'}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"grammar": "start: A"}}, {"ebnf_grammar": "start: A"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": {"options": ["yes", "no"]}}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
        # These reach the check of the protocol's own field, which refuses them.
        ({"structured_outputs": {"regex": ""}}, {"regex": ""}),
        ({"structured_outputs": {"json_object": False}}, {"json_object": False}),
    ],
)
def test_formats_of_the_answer(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    for request, _ in (chat(**fields), completion(**fields)):
        told = json_format.MessageToDict(request, preserving_proto_field_name=True)
        assert told.get("guided", {}) == wanted


def test_a_completion_repeats_its_prompt_with_the_log_probabilities_of_both() -> None:
    request, asked = completion(echo=True, logprobs=2, max_tokens=0)
    assert (asked.is_echo, asked.prompts, asked.drops_output) == (True, ["Hi"], True)
    assert (request.output.prompt, request.output.prompt_logprobs, request.output.logprobs) == (True, 2, 2)
    assert request.stopping.max_tokens == 1
    request, asked = completion(echo=True)
    assert (request.output.prompt, request.output.HasField("prompt_logprobs"), asked.drops_output) == (
        True,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"n": 0}, "n: is 0, must be from 1 to 64"),
        ({"reasoning_effort": "huge"}, "reasoning_effort: must be one of none, minimal"),
        ({"verbosity": 3}, "verbosity: must be a string"),
        ({"tempersture": 1}, "tempersture: is not a field that this server knows"),
        ({"guided_regex": "a"}, "guided_regex: is not a field that this server knows"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: must be an object"),
        (
            {"tools": [{"type": "function", "function": {"parameters": "{}"}}]},
            "tools[0].function.parameters: must be an",
        ),
        ({"tool_choice": "always"}, "tool_choice: must be one of none, auto, required, or name a function"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type: must be function"),
        ({"response_format": {"type": "xml"}}, "response_format.type: must be text, json_object or json_schema"),
        ({"response_format": {}}, "response_format.type: is missing"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: must be an object"),
        ({"structured_outputs": {}}, "structured_outputs: must hold one format"),
        ({"structured_outputs": {"regex": None}}, "structured_outputs: must hold one format"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs: must hold one format"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice: must be a list of strings"),
        ({"x\n" + "y" * 100: 1}, "x\\n" + "y" * 61 + ": is not a field that this server knows"),
        ({"temperature": "1"}, "temperature: must be a number"),
        ({"temperature": True}, "temperature: must be a number"),
        ({"top_k": 1.5}, "top_k: must be a whole number"),
        ({"top_k": -1}, "top_k: is -1, must be from 0 to 4294967295"),
        ({"max_tokens": 10**4000}, "max_tokens: is 1000000000…0000000000 (4001 digits), must be from 0 to 4294967295"),
        ({"temperature": 1e300}, "temperature: is 1e+300, must be in [0, 100]"),
        ({"temperature": 10**400}, "temperature: is 1000000000…0000000000 (401 digits), must be in [0, 100]"),
        ({"logit_bias": {"5": -3e38}}, "logit_bias[5]: is -3e+38, must be in [-100, 100]"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens: is the older name of max_completion_tokens, "),
        ({"stream": 1}, "stream: must be true or false"),
        ({"timings": 1}, "timings: must be true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options: needs stream to be true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x: is not a field"),
        ({"stop": [1]}, "stop[0]: must be a string"),
        ({"stop": 1}, "stop: must be a string or a list of strings"),
        ({"stop": ["a"] * 17}, "stop: has more than 16 entries"),
        ({"bad_words": "a"}, "bad_words: must be a list"),
        ({"bad_words": ["a", 1]}, "bad_words[1]: must be a string"),
        ({"logit_bias": {"a": 1}}, "logit_bias[a]: must be a token id"),
        ({"logit_bias": {"5": "1"}}, "logit_bias[5]: must be a number"),
        ({"logit_bias": {"99999999999": 1}}, "logit_bias[99999999999]: must be a token id"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]: must be a whole number"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]: is -1"),
        ({"top_logprobs": 2}, "top_logprobs: needs logprobs to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: is 21, must be from 0 to 20"),
        ({"chat_template_kwargs": {"a": 10**400}}, "chat_template_kwargs: holds a value that is out of range"),
        ({"messages": []}, "messages: is missing or empty"),
        ({"messages": "Hi"}, "messages: must be a list"),
        ({"messages": ["Hi"]}, "messages[0]: must be an object"),
        ({"messages": [{}] * 5000}, "messages: has more than 4096 entries"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role: must be one of system, developer, user"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content: must be a string or a list of parts"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type: is missing"),
        ({"messages": [{"role": "user", "content": "", "x": 1}]}, "messages[0].x: is not a field"),
        ({"prompt": "Hi"}, "prompt: is not a field that this server knows"),
        ({"user": "\ud800", "cache_salt": "\ud800"}, "body: holds half of a surrogate pair"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        chat(**fields)
    assert refused.value.message.startswith(told)
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (None, "prompt: is missing"),
        (["a"] * 65, "prompt: has more than 64 entries"),
        ([[1], [2, True]], "prompt[1][1]: must be a whole number"),
        (["a", 1], "prompt[1]: must be a string or a list of token ids"),
        ([[1], [1] * 4096], "prompt[1]: has more than 4095 entries"),
        ([1, True], "prompt[1]: must be a whole number"),
        ([1] * 4096, "prompt: has more than 4095 entries"),
        ({}, "prompt: must be a string, a list of token ids, or a list of these"),
    ],
)
def test_a_wrong_prompt_is_refused(prompt: Any, told: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        completion(prompt=prompt)
    assert refused.value.message.startswith(told)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 5000}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop_token_ids": [1000]}, "stop_token_ids[0]"),
        ({"logit_bias": {"1000": 1}}, "logit_bias[1000]"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
        ({"continue_last": True}, "continue_last"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": ""}}},
            "response_format.json_schema.schema",
        ),
        ({"messages": [{"role": "user", "content": "", "reasoning": "r"}]}, "messages[0].reasoning"),
        ({"messages": [{"role": "user", "content": "", "reasoning_content": "r"}]}, "messages[0].reasoning_content"),
        ({"messages": [{"role": "user", "content": "", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "", "arguments": ""}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_validation_refuses_has_the_clients_own_name(fields: dict[str, Any], name: str) -> None:
    request, asked = chat(**fields)
    with pytest.raises(InvalidArgument) as refused:
        validate_generate(request, LIMITS)
    assert own_name(refused.value.field, asked) == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("token_ids.ids[3]", "prompt[3]"),
        ("output.logprobs", "logprobs"),
        ("input", "prompt"),
        ("chat.template_kwargs.tools", "chat_template_kwargs.tools"),
        ("lora_name", "model"),
        ("request", "body"),
        ("request_id", "x-request-id"),
    ],
)
def test_names_of_completions(path: str, name: str) -> None:
    assert own_name(path, Asked(is_chat=False)) == name


def test_an_answer_of_too_many_log_probabilities_must_be_a_stream() -> None:
    most = MAX_WHOLE_LOGPROBS // 16
    chat(logprobs=True, top_logprobs=15, max_tokens=most)
    chat(logprobs=True, top_logprobs=15, max_tokens=most + 1, stream=True)
    with pytest.raises(InvalidArgument, match="stream: must be true"):
        chat(logprobs=True, top_logprobs=15, max_tokens=most + 1)
    chat(logprobs=True, top_logprobs=15)  # how long it becomes is not known yet


def test_a_model_without_a_template_takes_no_chat() -> None:
    limits = Limits(max_model_len=4096, vocab_size=1000, kv_token_capacity=1 << 20, has_chat_template=False)
    with pytest.raises(InvalidArgument, match=r"messages: .* has no chat template; use /v1/completions"):
        translated(json.dumps({"messages": MESSAGES}).encode(), limits, Asked(is_chat=True))


# -- hostile bodies ---------------------------------------------------------------------------------------------------

MANY = 400_000


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "body: is not JSON"),
        (b"{", "body: is not JSON"),
        (b"[]", "body: is not a JSON object"),
        (b"null", "body: is not a JSON object"),
        (b'{"a": \xff}', "body: is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "body: is not UTF-8"),
        (b'{"temperature": NaN}', "body: is not JSON"),
        (b'{"temperature": Infinity}', "body: is not JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "body: is not JSON"),
        (b'{"n": 1, "n": 2}', "n: is given twice"),
        (b'{"a": {"b\\n": 1, "b\\n": 2}}', "b\\n: is given twice"),
        (b"[" * MANY, "body: is nested too deep"),
        (b'{"a":' * MANY, "body: is nested too deep"),
        (b"[" * 2000 + b"]" * 2000, "body: is nested too deep"),
        (b'{"a": [' + b"{}," * MANY + b"{}]}", "body: has too many values"),
        (b'{"a": [' + b"0," * MANY + b"0]}", "body: has too many values"),
        (b'{"a": {' + b",".join(b'"%d":0' % at for at in range(MANY)) + b"}}", "body: has too many values"),
    ],
)
def test_a_body_that_is_no_request_is_refused_soon_and_with_a_fixed_text(body: bytes, told: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidArgument) as refused:
        json_object(body, LIMITS)
    assert refused.value.message == told
    assert time.thread_time() - began < 2


def test_a_text_full_of_commas_is_a_text() -> None:
    text = ",[{:" * 250_000
    assert json_object(json.dumps({"prompt": text}).encode(), LIMITS) == {"prompt": text}


def test_many_token_ids_pass() -> None:
    limits = Limits(max_model_len=1 << 17, vocab_size=1 << 17, kv_token_capacity=1 << 20)
    ids = list(range(100_000))
    asked = Asked(is_chat=False)
    assert list(translated(json.dumps({"prompt": ids}).encode(), limits, asked).token_ids.ids) == ids
