"""Run by test_anthropic.py with the `anthropic` package of PyPI: checks what that client makes of a server's answers.

Arguments: the server's URL and its token.
"""

from __future__ import annotations

import sys
from typing import Any

import anthropic

URL, TOKEN = sys.argv[1:]
client = anthropic.Anthropic(base_url=URL, api_key=TOKEN, max_retries=0, timeout=60)
ASK: dict[str, Any] = {
    "model": "smollm2-135m-instruct", "max_tokens": 100, "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
}  # fmt: skip
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "The weather in a city", "input_schema": CITY}


def messages() -> None:
    message = client.messages.create(**ASK)
    (block,) = message.content
    assert (message.role, block.type) == ("assistant", "text")
    assert block.text
    counted = client.messages.count_tokens(model=ASK["model"], messages=ASK["messages"])
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == block.text
    assert final.stop_reason == message.stop_reason
    assert final.usage.output_tokens == message.usage.output_tokens
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == counted.input_tokens


def tools() -> None:
    asked = ASK | {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}}
    message = client.messages.create(**asked)
    (use,) = message.content
    assert (message.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "weather")
    assert isinstance(use.input["city"], str)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message().content
    assert [(each.name, each.input) for each in streamed] == [(use.name, use.input)]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "12 degrees"}
    more = [*ASK["messages"], {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**(ASK | {"tools": [WEATHER], "messages": more})).content


def errors() -> None:
    for kind, changes in {
        anthropic.NotFoundError: {"model": "other"},
        anthropic.BadRequestError: {"max_tokens": 10**7},
        anthropic.AuthenticationError: {"extra_headers": {"x-api-key": "wrong"}},
    }.items():
        try:
            client.messages.create(**(ASK | changes))
        except kind:
            continue
        raise AssertionError(f"not refused: {changes}")


for check in (messages, tools, errors):
    check()
    print(check.__name__, flush=True)
