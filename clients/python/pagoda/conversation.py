"""From a conversation in Python's terms to the message that carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagoda.fields import assign, wrong
from pagoda.v1 import inference_pb2

# {"role": "system" | "user" | "assistant" | "tool", "content": "…"}
# Content may also be a list of parts, {"type": "text", "text": "…"}, as OpenAI's clients have it; newlines join them.
ChatMessage = Mapping[str, str | Sequence[Mapping[str, str]]]

_ROLES = {
    "system": inference_pb2.ROLE_SYSTEM,
    "user": inference_pb2.ROLE_USER,
    "assistant": inference_pb2.ROLE_ASSISTANT,
    "tool": inference_pb2.ROLE_TOOL,
}


def chat(messages: str | Sequence[ChatMessage], continue_last: bool = False) -> inference_pb2.Chat:
    """A text is one message of the user. Raises InvalidArgument for what is no conversation of text."""
    conversation: Any = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    rendered = inference_pb2.Chat(continue_last=continue_last)
    if not isinstance(conversation, Sequence):
        raise wrong("chat.messages", f"is {_kind(conversation)}, must be a list of messages or a text")
    for at, message in enumerate(conversation):
        field = f"chat.messages[{at}]"
        if not isinstance(message, Mapping):
            raise wrong(field, f"is {_kind(message)}, must be a dict with role and content")
        for key in ("role", "content"):
            if key not in message:
                raise wrong(f"{field}.{key}", "is missing")
        added = rendered.messages.add(role=_role(message["role"], f"{field}.role"))
        assign(added, "content", _text(message["content"], f"{field}.content"), called=f"{field}.content")
    return rendered


def _role(role: object, field: str) -> inference_pb2.Role:
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(field, f"{role!r} is none of {', '.join(_ROLES)}")
    return _ROLES[role]


def _text(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise wrong(field, f"is {_kind(content)}, must be a text or a list of parts of type 'text'")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        if not isinstance(part, Mapping) or kind != "text":
            raise wrong(f"{field}[{at}]", f"is of type {kind!r}; the only type of part is 'text'")
        if not isinstance(part.get("text"), str):
            raise wrong(f"{field}[{at}].text", f"is {_kind(part.get('text'))}, must be a text")
        texts.append(part["text"])
    return "\n".join(texts)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
