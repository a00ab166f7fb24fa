"""The chat template's dialect, and what it cannot do."""

from __future__ import annotations

from datetime import datetime

import pytest

from pagoda_server.router.errors import ConfigError, InvalidArgument
from pagoda_server.router.text.chat_template import Chat, ChatTemplate, Message

HELLO = Chat((Message("user", "Hello"),))


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


def test_messages_are_never_run_as_templates() -> None:
    chat = Chat((Message("user", "{{ 7 * 7 }}{% raw %}"),))
    assert render("{{ messages[0].content }}", chat) == "{{ 7 * 7 }}{% raw %}"


def test_broken_template_is_reported_at_start() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% for %}")
