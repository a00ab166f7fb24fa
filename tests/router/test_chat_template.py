"""The chat template's dialect, and what it cannot do."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from pagoda_server.router.errors import ConfigError, InvalidArgument
from pagoda_server.router.text import chat_template
from pagoda_server.router.text.chat_template import Chat, ChatTemplate, Message, ToolCall

HELLO = Chat((Message("user", "Hello"),))


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "NUM_PROCESSES", 1)  # each does the same, and each test starts some


def render(source: str, chat: Chat = HELLO, **variables: str) -> str:
    return ChatTemplate(source, variables).render(chat)


def test_template_sees_messages_and_variables() -> None:
    source = "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message['content'] }};{% endfor %}"
    chat = Chat((Message("system", "Be brief"), Message("user", "Hello")))
    assert render(source, chat, bos_token="<s>") == "<s>system: Be brief;user: Hello;"


def test_blocks_leave_no_white_space() -> None:
    assert render("{% if true %}\n    {% if true %}\na\n    {% endif %}\n{% endif %}\n") == "a\n"


def test_what_templates_rely_on_is_there() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}a{{ messages[0].content }}{% endgeneration %}b") == "aHellob"
    assert render("{{ strftime_now('%Y') }}") in (str(datetime.now().year), str(datetime.now().year - 1))
    assert render("{{ tools is none }} {{ documents is none }} {{ undefined_name }}") == "True True "
    assert render("{% set ns = namespace(found=1) %}{% set ns.found = 2 %}{{ ns.found }}") == "2"


def test_generation_prompt_opens_the_answer_unless_the_last_message_goes_on() -> None:
    source = (
        "{% for message in messages %}[{{ message.content }}]{% endfor %}{% if add_generation_prompt %}[{% endif %}"
    )
    chat = (Message("user", "Hello"), Message("assistant", "Hi, I"))
    assert render(source, Chat(chat)) == "[Hello][Hi, I]["
    assert render(source, Chat(chat, continue_last=True)) == "[Hello][Hi, I"


def test_space_at_the_end_of_a_continued_message_is_as_the_template_leaves_it() -> None:
    chat = Chat((Message("user", "Hello"), Message("assistant", "Hi, ")), continue_last=True)
    assert render("{% for message in messages %}[{{ message.content }}]{% endfor %}", chat) == "[Hello][Hi, "
    assert render("{% for message in messages %}[{{ message.content | trim }}]{% endfor %}", chat) == "[Hello][Hi,"


def test_template_that_drops_the_last_message_cannot_continue_it() -> None:
    chat = Chat((Message("user", "Hello"), Message("assistant", "Hi")), continue_last=True)
    with pytest.raises(InvalidArgument) as refused:
        render("{{ messages[0].content }}", chat)
    assert refused.value.field == "chat.continue_last"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('secret ' + messages[0].content) }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_failing_or_escaping_template_is_an_invalid_chat_without_internals(source: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        render(source)
    assert refused.value.message == "chat: the model's chat template does not accept this conversation"


def test_template_sees_no_globals_of_the_program() -> None:
    assert render("{{ raise_exception.__globals__ }}{{ ''.__class__ }}{{ self.__init__ }}") == ""


def test_size_of_the_text_is_bounded() -> None:
    source = "{% for i in range(300) %}{{ messages[0].content }}{% endfor %}{{ raise_exception('it went on') }}"
    template = ChatTemplate(source, max_bytes=1000)
    with pytest.raises(InvalidArgument, match="1000 bytes") as refused:
        template.render(HELLO)
    assert refused.value.field == "chat"


def test_a_closed_template_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = processes_started(monkeypatch)
    template = ChatTemplate("{{ messages[0].content }}")
    template.close()
    assert started[0].returncode == -signal.SIGKILL, "it is waited for: an upgrade would leave a zombie otherwise"
    with pytest.raises(InvalidArgument):
        template.render(HELLO)
    assert len(started) == 1


def test_a_template_that_is_closed_while_a_process_starts_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    started = processes_started(monkeypatch, on_second_start=lambda: template.close())
    template = ChatTemplate("{{ messages[0].content }}")
    started[0].kill()
    started[0].wait(timeout=30)
    with pytest.raises(InvalidArgument):
        template.render(HELLO)
    assert [process.wait(timeout=30) for process in started] == [-signal.SIGKILL] * 2


def processes_started(
    monkeypatch: pytest.MonkeyPatch, on_second_start: Callable[[], None] = lambda: None
) -> list[subprocess.Popen[bytes]]:
    """The processes that are started from now on."""
    start, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def noting(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        if len(started) == 2:
            on_second_start()
        return started[-1]

    monkeypatch.setattr(chat_template.subprocess, "Popen", noting)
    return started


def test_messages_are_never_run_as_templates() -> None:
    chat = Chat((Message("user", "{{ 7 * 7 }}{% raw %}"),))
    assert render("{{ messages[0].content }}", chat) == "{{ 7 * 7 }}{% raw %}"


def test_broken_template_is_reported_at_start() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% for %}")


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
# In the manner of Qwen's templates.
TOOLS = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}[{{ message.role }}
{%- if message.reasoning_content is string %}({{ message.reasoning_content }}){% endif %}:{{ message.content }}
{%- if message.tool_calls %}{% for call in message.tool_calls %}
{%- if call.function %}{% set call = call.function %}{% endif %}
{{- call.name }}{{ call.arguments | tojson }}{% endfor %}{% endif %}
{%- if message.tool_call_id is defined %}#{{ message.tool_call_id }}{% endif %}]{% endfor %}
{%- if add_generation_prompt %}[assistant{% if enable_thinking is defined and enable_thinking is false %}()
{%- endif %}:{% endif %}"""


def test_tools_calls_and_thoughts_reach_the_template_as_hugging_face_has_them() -> None:
    chat = Chat(
        (
            Message("user", "2+3?"),
            Message("assistant", "", "I add.", (ToolCall("add", {"a": 2, "b": 3}, "call-1"),)),
            Message("tool", "5", tool_call_id="call-1", name="add"),
        ),
        tools=(TOOL,),
    )
    assert render(TOOLS, chat) == (
        '<tools>{"type": "function", "function": {"name": "add", "description": "Adds.", '
        '"parameters": {"type": "object"}}}</tools>[user:2+3?][assistant(I add.):add{"a": 2, "b": 3}]'
        "[tool:5#call-1][assistant:"
    )
    hidden = Chat(chat.messages)
    assert render(TOOLS, hidden).startswith("[user:2+3?]")


def test_the_same_chat_becomes_what_transformers_makes_of_it() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "", "reasoning_content": "I add.",
         "tool_calls": [{"type": "function", "id": "c", "function": {"name": "add", "arguments": {"b": 1, "a": "é"}}}]},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
    ]  # fmt: skip
    (expected,), _ = render_jinja_template(
        [conversation], tools=[TOOL], chat_template=TOOLS, add_generation_prompt=True, enable_thinking=False
    )
    calls = (ToolCall("add", {"b": 1, "a": "é"}, "c"),)
    chat = Chat(
        (Message("user", "2+3?"), Message("assistant", "", "I add.", calls), Message("tool", "5", tool_call_id="c")),
        tools=(TOOL,),
        template_kwargs={"enable_thinking": False},
    )
    assert render(TOOLS, chat) == expected


def test_template_kwargs_are_variables_of_the_template() -> None:
    assert (
        render(TOOLS, Chat(HELLO.messages, template_kwargs={"enable_thinking": False})) == "[user:Hello][assistant():"
    )
    assert render(TOOLS, Chat(HELLO.messages, template_kwargs={"enable_thinking": True})) == "[user:Hello][assistant:"
    assert render("{{ documents | tojson }}", Chat(HELLO.messages, template_kwargs={"documents": [1]})) == "[1]"
    assert render("x", Chat(HELLO.messages, template_kwargs={"unknown_to_it": 1})) == "x"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "range"]
)
def test_a_variable_that_the_server_sets_cannot_be_set_by_a_client(name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        render("x", Chat(HELLO.messages, template_kwargs={name: 1}), bos_token="<s>")
    assert refused.value.field == f"chat.template_kwargs.{name}"


def test_a_template_tells_what_it_reads() -> None:
    template = ChatTemplate(TOOLS, {"bos_token": "<s>"})
    assert (template.reads_tools, template.kwargs) == (True, ("enable_thinking",))
    plain = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ range(3) }}", {"bos_token": ""}
    )
    assert (plain.reads_tools, plain.kwargs) == (False, ())


def test_a_chat_changes_every_text_that_its_client_wrote_and_no_other() -> None:
    chat = Chat(
        (Message("assistant", "a", "b", (ToolCall("c", {"d": ["e", 1, None, True]}, "f"),), name="g"),
         Message("tool", "h", tool_call_id="i")),
        tools=({"type": "j"},),
        template_kwargs={"kept": {"k": "l"}},
    )  # fmt: skip
    assert chat.with_texts(str.upper) == Chat(
        (Message("assistant", "A", "B", (ToolCall("C", {"D": ["E", 1, None, True]}, "F"),), name="G"),
         Message("tool", "H", tool_call_id="I")),
        tools=({"TYPE": "J"},),
        template_kwargs={"kept": {"K": "L"}},
    )  # fmt: skip
