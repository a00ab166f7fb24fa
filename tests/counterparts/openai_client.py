"""Run by test_openai.py with the `openai` package of PyPI: checks what that client makes of a server's answers.

Arguments: the server's URL, its token, the requests that it admits at once, and `checks`, `programs` or `abort`.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any, Literal

import openai
import pydantic

URL, TOKEN, MAX_REQUESTS = sys.argv[1], sys.argv[2], int(sys.argv[3])
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=TOKEN, max_retries=0, timeout=60)
LONG = {"model": "synthetic", "prompt": "x", "max_tokens": 20_000, "stream": True, "extra_body": {"ignore_eos": True}}


def models() -> None:
    assert [model.id for model in client.models.list()] == ["synthetic"]
    assert client.models.retrieve("synthetic").owned_by == "pagoda"


def chat() -> None:
    answer = client.chat.completions.create(
        model="synthetic", messages=MESSAGES, max_completion_tokens=12, n=2, temperature=0, logprobs=True,
        top_logprobs=2, seed=1, extra_body={"ignore_eos": True},
    )  # fmt: skip
    first, second = answer.choices
    assert (first.index, second.index, first.finish_reason) == (0, 1, "length")
    assert (first.message.role, first.message.tool_calls) == ("assistant", None)
    assert len(first.message.content) > 2
    assert len(first.logprobs.content) == 12
    assert all(len(token.top_logprobs) <= 2 and token.bytes for token in first.logprobs.content)
    raw = b"".join(bytes(token.bytes) for token in first.logprobs.content)
    assert raw.decode(errors="replace") == first.message.content
    usage = answer.usage
    assert (usage.completion_tokens, usage.total_tokens) == (24, usage.prompt_tokens + 24)
    assert usage.prompt_tokens_details.cached_tokens >= 0


def streamed_chat() -> None:
    options = {"model": "synthetic", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0]
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == whole.finish_reason
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens > 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    several = options | {"n": 2, "temperature": 1, "seed": 3, "logprobs": True, "top_logprobs": 2}
    answers = client.chat.completions.create(**several, extra_body={"ignore_eos": True}).choices
    with client.chat.completions.stream(**several, extra_body={"ignore_eos": True}) as stream:
        list(stream)
        for one, other in zip(stream.current_completion_snapshot.choices, answers, strict=True):
            assert one.message.content == other.message.content
            assert one.logprobs.content == other.logprobs.content
            assert len(one.logprobs.content) == 12


def completions() -> None:
    options = {"model": "synthetic", "prompt": "Hello", "max_tokens": 20, "temperature": 0}
    answer = client.completions.create(**options, logprobs=3, n=2, extra_body={"ignore_eos": True}).choices[0]
    told = answer.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 20
    assert all(token in top for token, top in zip(told.tokens, told.top_logprobs, strict=True))
    ends = "".join(token for token in told.tokens if not token.startswith("bytes:"))[:1]
    stopped = client.completions.create(**options, stop=[ends, "\n\n"], extra_body={"ignore_eos": True}).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == answer.text[: answer.text.index(ends)]
    stream = client.completions.create(**options, stream=True, extra_body={"ignore_eos": True})
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.text


def refused(
    kind: type[openai.APIStatusError], asker: openai.OpenAI = client, **changes: object
) -> openai.APIStatusError:
    try:
        asker.chat.completions.create(**{"model": "synthetic", "messages": MESSAGES, "max_tokens": 2, **changes})
    except kind as error:
        return error
    raise AssertionError(f"not refused: {changes}")


def errors() -> None:
    error = refused(openai.BadRequestError, temperature=101)
    assert (error.param, error.status_code) == ("temperature", 400)
    assert "is 101, must be in [0, 100]" in error.message
    assert refused(openai.BadRequestError, extra_body={"tempersture": 1}).param == "tempersture"
    error = refused(openai.BadRequestError, tools=[{"type": "web_search"}])
    assert (error.param, error.code) == ("tools[0].type", "unsupported_parameter")
    assert refused(openai.BadRequestError, response_format={"type": "xml"}).param == "response_format.type"
    assert refused(openai.NotFoundError, model="other").code == "model_not_found"
    assert refused(openai.AuthenticationError, client.with_options(api_key="wrong")).code == "invalid_api_key"


def overload() -> None:
    streams = [client.completions.create(**LONG) for _ in range(MAX_REQUESTS)]
    error = refused(openai.RateLimitError)
    assert error.code == "queue_full"
    assert int(error.response.headers["retry-after"]) >= 1
    for stream in streams:
        stream.close()
    patient = client.with_options(max_retries=5)
    assert patient.completions.create(model="synthetic", prompt="x", max_tokens=1).choices


# -- what programs ask for, of the default model ----------------------------------------------------------------------

GREEDY = {"model": "smollm2-135m-instruct", "temperature": 0}
ASK = [{"role": "user", "content": "Make up a person with a name and an age, as JSON."}]
ASK_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}}


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


class Weather(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    city: str = pydantic.Field(max_length=20)
    unit: Literal["C", "F"]


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("weather", CITY), tool("now", {})]


def formats() -> None:
    parsed = client.chat.completions.parse(messages=ASK, response_format=Person, max_tokens=100, **GREEDY).choices[0]
    assert parsed.finish_reason == "stop"
    assert isinstance(parsed.message.parsed, Person)
    with client.chat.completions.stream(messages=ASK, response_format=Person, max_tokens=100, **GREEDY) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed.message.parsed
    any_object = {"type": "json_object"}
    answer = client.chat.completions.create(messages=ASK, response_format=any_object, max_tokens=200, **GREEDY)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    person = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema(), "strict": True}}
    text = client.completions.create(
        prompt="A person:", extra_body={"response_format": person}, max_tokens=100, **GREEDY
    )
    assert Person.model_validate_json(text.choices[0].text)


def tool_calls() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        options = {"messages": ASK_WEATHER, "tools": TOOLS, "tool_choice": choice, "max_tokens": 300, **GREEDY}
        whole = client.chat.completions.create(**options).choices[0]
        assert whole.message.tool_calls
        if whole.finish_reason == "tool_calls":  # a limit may cut an answer of many calls inside a marker
            assert whole.message.content is None
        if choice is named:
            (call,) = whole.message.tool_calls
            arguments = json.loads(call.function.arguments)
            assert (call.function.name, call.type, whole.finish_reason) == ("weather", "function", "tool_calls")
            assert (set(arguments), arguments["unit"] in "CF") == ({"city", "unit"}, True)
        told: dict[int, list[str]] = {}
        for chunk in client.chat.completions.create(**options, stream=True):
            for part in chunk.choices[0].delta.tool_calls or []:
                if part.id:
                    assert part.function.name
                    told[part.index] = [part.function.name, ""]
                told[part.index][1] += part.function.arguments or ""
        assert chunk.choices[0].finish_reason == whole.finish_reason
        assert list(told.values()) == [
            [each.function.name, each.function.arguments] for each in whole.message.tool_calls
        ]
    typed = {"messages": ASK_WEATHER, "tools": [openai.pydantic_function_tool(Weather)], "max_tokens": 300, **GREEDY}
    typed["tool_choice"] = {"type": "function", "function": {"name": "Weather"}}  # one call: many may meet the limit
    parsed = client.chat.completions.parse(**typed).choices[0].message
    assert isinstance(parsed.tool_calls[0].function.parsed_arguments, Weather)
    with client.chat.completions.stream(**typed) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert [event.parsed_arguments for event in done] == [
            call.function.parsed_arguments for call in parsed.tool_calls
        ]
        assert stream.get_final_completion().choices[0].message.tool_calls[0].function.name == "Weather"
    call = whole.message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    messages = [*ASK_WEATHER, whole.message, result]
    assert client.chat.completions.create(messages=messages, tools=TOOLS, max_tokens=5, **GREEDY).choices
    free = client.chat.completions.create(messages=ASK_WEATHER, tools=TOOLS, tool_choice="none", max_tokens=9, **GREEDY)
    assert free.choices[0].message.tool_calls is None


def reasoning() -> None:
    messages = []
    for number, word in ((1, "two"), (2, "four"), (4, "eight")):  # the model does as it has done before
        thought = f"<think>{number} and {number} is {word}.</think>{2 * number}"
        messages.append({"role": "user", "content": f"{number}+{number}?"})
        messages.append({"role": "assistant", "content": thought})
    options = {"messages": [*messages, {"role": "user", "content": "3+3?"}], "max_tokens": 60, **GREEDY}
    answer = client.chat.completions.create(**options)
    message = answer.choices[0].message
    assert message.reasoning_content
    assert message.content
    assert "think>" not in message.reasoning_content + message.content
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**options, stream=True)]
    reasoned = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert (reasoned, "".join(delta.content or "" for delta in deltas)) == (message.reasoning_content, message.content)


def responses() -> None:
    options = {"input": ASK_WEATHER, "max_output_tokens": 60, **GREEDY}
    whole = client.responses.create(**options)
    assert whole.output_text
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = list(client.responses.create(**options, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert (text, final.output_text, final.status) == (whole.output_text, whole.output_text, whole.status)
    weather = TOOLS[0]["function"]
    tools = {"tools": [{"type": "function", "strict": True, **weather}], "parallel_tool_calls": False}
    (call,) = client.responses.create(**options, **tools, tool_choice={"type": "function", "name": "weather"}).output
    assert (call.type, call.name, [*json.loads(call.arguments)]) == ("function_call", "weather", ["city", "unit"])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    more = [*ASK_WEATHER, call.model_dump(exclude_none=True), result]
    assert client.responses.create(**options | tools | {"input": more, "tool_choice": "none"}).output_text
    person = client.responses.parse(input=ASK, text_format=Person, max_output_tokens=100, **GREEDY).output_parsed
    assert isinstance(person, Person)
    with client.responses.stream(input=ASK, text_format=Person, max_output_tokens=100, **GREEDY) as stream:
        assert stream.get_final_response().output_parsed == person


def embeddings() -> None:
    model = GREEDY["model"]
    texts = ["a text", "another one"]
    first, second = client.embeddings.create(model=model, input=texts).data  # in base64, unless a format is named
    assert (first.index, second.index, len(first.embedding)) == (0, 1, 576)
    assert math.isclose(math.hypot(*first.embedding), 1, rel_tol=1e-5)
    told = client.embeddings.create(model=model, input="a text", encoding_format="float")
    assert all(math.isclose(a, b, abs_tol=1e-2) for a, b in zip(told.data[0].embedding, first.embedding, strict=True))
    assert told.usage.prompt_tokens == told.usage.total_tokens > 0
    cut = client.embeddings.create(model=model, input=texts, dimensions=4).data[0].embedding  # in base64 as well
    length = math.hypot(*first.embedding[:4])
    assert all(math.isclose(a, b / length, abs_tol=1e-5) for a, b in zip(cut, first.embedding[:4], strict=True))
    mean = client.embeddings.create(model=model, input=[[1, 2], [3]], dimensions=4, extra_body={"pooling": "mean"})
    assert [len(each.embedding) for each in mean.data] == [4, 4]
    wrong = None
    try:
        client.embeddings.create(model=model, input=["a", "b", "c", ""])
    except openai.BadRequestError as error:
        wrong = error.param
    assert wrong == "input[3]"


def echo() -> None:
    options = {"prompt": "The sky is", "echo": True, "logprobs": 2, **GREEDY}
    prompt = client.completions.create(max_tokens=0, **options).choices[0]
    assert prompt.text == "The sky is"
    assert "".join(prompt.logprobs.tokens) == prompt.text
    assert prompt.logprobs.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in prompt.logprobs.token_logprobs[1:])
    longer = client.completions.create(max_tokens=3, **options).choices[0]
    assert longer.text.startswith(prompt.text)
    assert longer.logprobs.tokens[: len(prompt.logprobs.tokens)] == prompt.logprobs.tokens
    assert len(longer.logprobs.tokens) == len(prompt.logprobs.tokens) + 3


def abort() -> None:
    stream = client.completions.create(**LONG)
    next(iter(stream))
    print("streaming", flush=True)
    sys.stdin.readline()
    stream.close()
    print("closed", flush=True)
    sys.stdin.readline()


if sys.argv[4] == "abort":
    abort()
else:
    programs = (formats, tool_calls, reasoning, responses, embeddings, echo)
    checks = (models, chat, streamed_chat, completions, errors, overload)
    for check in programs if sys.argv[4] == "programs" else checks:
        check()
        print(check.__name__, flush=True)
