"""Run by test_openai.py with the `openai` package of PyPI: checks what that client makes of a server's answers.

Arguments: the server's URL, its token, the requests that it admits at once, and `checks` or `abort`.
"""

from __future__ import annotations

import sys

import openai

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
    tool = {"type": "function", "function": {"name": "f"}}
    error = refused(openai.BadRequestError, tools=[tool])
    assert (error.param, error.code) == ("tools", "unsupported_parameter")
    assert refused(openai.BadRequestError, response_format={"type": "json_object"}).param == "response_format"
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
    for check in (models, chat, streamed_chat, completions, errors, overload):
        check()
        print(check.__name__, flush=True)
