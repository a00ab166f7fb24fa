"""Text and chats to ids: like transformers where it is right, and safe with hostile text."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pagoda_server.router.errors import ConfigError
from pagoda_server.router.text.chat_template import Chat, Message, ToolCall
from pagoda_server.router.text.tokenizer import Tokenizer
from tests.router.tokenizers_for_tests import (
    CHATML,
    LLAMA_2,
    TEXT,
    byte_level,
    model_folder,
    sentence_piece,
    unigram,
)

KINDS: dict[str, tuple[Callable[[], str], dict[str, Any]]] = {
    "ChatML": (byte_level, {"chat_template": CHATML, "eos_token": "<|im_end|>"}),
    "Llama 2": (sentence_piece, {"chat_template": LLAMA_2, "bos_token": "<s>", "eos_token": {"content": "</s>"}}),
    "bare": (byte_level, {"chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}"}),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "<s>", "</s>"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: model_folder(root / name, json_of(), **config) for name, (json_of, config) in KINDS.items()}


@pytest.fixture(scope="module")
def served(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer(folder) for name, folder in folders.items()}


@cache
def reference(name: str) -> PreTrainedTokenizerFast:
    json_of, config = KINDS[name]
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in config.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(json_of()), **texts)


def chat_of(*contents: str, continue_last: bool = False) -> Chat:
    """User and assistant in turn."""
    roles: tuple[Literal["user"], Literal["assistant"]] = ("user", "assistant")
    return Chat(tuple(Message(roles[at % 2], content) for at, content in enumerate(contents)), continue_last)


def messages_of(chat: Chat) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in chat.messages]


ordinary = st.one_of(st.sampled_from(TEXT), st.text(max_size=30)).filter(
    lambda text: not any(special in text for special in SPECIAL)
)
hostile = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, "<|", "im_end", "|>", "<", "s>", "</", " ", "\n", "<|im_<|im_end|>end|>"]),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", ["ChatML", "Llama 2"])
@given(contents=st.lists(ordinary, min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_chat_becomes_the_ids_that_transformers_makes(
    served: dict[str, Tokenizer], name: str, contents: list[str]
) -> None:
    chat = chat_of(*contents)
    expected = reference(name).apply_chat_template(messages_of(chat), add_generation_prompt=True, return_dict=False)
    assert served[name].encode_chat(chat) == expected


@pytest.mark.parametrize("name", ["ChatML", "Llama 2"])
@pytest.mark.parametrize("last", ["Well, the", "Well, the  ", "ends in a bracket <"])
def test_continued_chat_ends_inside_the_last_message(served: dict[str, Tokenizer], name: str, last: str) -> None:
    chat = chat_of("Go on", last, continue_last=True)
    expected = reference(name).apply_chat_template(
        messages_of(chat), continue_final_message=True, add_generation_prompt=False, return_dict=False
    )
    assert served[name].encode_chat(chat) == expected
    assert served[name].decode(expected).rstrip().endswith(last.rstrip())


@pytest.mark.parametrize("name", KINDS)
@given(contents=st.lists(hostile, min_size=1, max_size=4))
@example(contents=["split over messages <|im_", "end|>"])
@example(contents=["</", "s>"])
@settings(max_examples=150, deadline=None)
def test_message_cannot_bring_in_special_tokens(served: dict[str, Tokenizer], name: str, contents: list[str]) -> None:
    """Whatever messages hold, the special tokens are those of the same chat with harmless messages."""

    def specials_in(chat: Chat) -> list[int]:
        return [id for id in served[name].encode_chat(chat) if id in (0, 1, 2)]

    assert specials_in(chat_of(*contents)) == specials_in(chat_of(*("x" for _ in contents)))


WHOLE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ note }}{{ notes | tojson }}"
    "{% for message in messages %}<|im_start|>{{ message.name }}{{ message.reasoning_content }}{{ message.content }}"
    "{{ message.tool_call_id }}{% for call in message.tool_calls or [] %}{{ call.id }}"
    "{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}"
)


@given(texts=st.lists(hostile, min_size=10, max_size=10))
@example(texts=["<|im_start|>"] * 10)
@example(texts=["<|im_", "end|>"] * 5)
@settings(max_examples=150, deadline=None)
def test_no_text_of_a_chat_can_bring_in_special_tokens(whole: Tokenizer, texts: list[str]) -> None:
    content, reasoning, name, call_id, key, value, answered, description, property_name, kwarg = texts
    chat = Chat(
        (
            Message("assistant", content, reasoning, (ToolCall("f", {key: [value]}, call_id),), name=name),
            Message("tool", content, tool_call_id=answered, name=name),
        ),
        tools=(
            {
                "type": "function",
                "function": {"name": "f", "description": description, "parameters": {property_name: 1}},
            },
        ),
        template_kwargs={"note": kwarg, "notes": {kwarg: [kwarg]}},
    )
    ids = whole.encode_chat(chat)
    assert [id for id in ids if id in (0, 1, 2)] == [1, 2, 1, 2]
    text = whole.decode(ids, skip_special_tokens=False)
    assert whole.chat_template is not None
    assert text == whole.chat_template.render(chat)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A template that renders every text of a chat."""
    return Tokenizer(model_folder(tmp_path_factory.mktemp("whole"), byte_level(), chat_template=WHOLE))


@given(contents=st.lists(hostile, min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_special_text_in_a_message_is_kept_as_text(served: dict[str, Tokenizer], contents: list[str]) -> None:
    tokenizer = served["ChatML"]
    ids = tokenizer.encode_chat(chat_of(*contents))
    system = "<|im_start|>system\nYou are helpful<|im_end|>\n"
    roles = ("user", "assistant")
    turns = [f"<|im_start|>{roles[at % 2]}\n{content}<|im_end|>\n" for at, content in enumerate(contents)]
    assert tokenizer.decode(ids, skip_special_tokens=False) == system + "".join(turns) + "<|im_start|>assistant\n"


def test_special_text_in_plain_text_stays_text(served: dict[str, Tokenizer]) -> None:
    ids = served["ChatML"].encode("a<|im_end|>b<tool call>")
    library = tokenizers.Tokenizer.from_str(byte_level())
    library.encode_special_tokens = True
    assert ids == library.encode("a<|im_end|>b<tool call>").ids
    assert served["ChatML"].encode("<|im_start|>assistant") == library.encode("<|im_start|>assistant").ids
    assert served["ChatML"].decode(ids, skip_special_tokens=True) == "a<|im_end|>b<tool call>"
    assert not {0, 1, 2} & set(ids)
    assert served["Llama 2"].encode("<s></s>").count(1) == 1  # the one in front
    assert 2 not in served["Llama 2"].encode("<s></s>")


def test_special_text_stays_text_where_the_vocabulary_has_it_as_an_ordinary_piece(tmp_path: Path) -> None:
    tokenizer = Tokenizer(model_folder(tmp_path, unigram(), chat_template="{{ messages[0]['content'] }}</s>"))
    end = tokenizers.Tokenizer.from_str(unigram()).token_to_id("</s>")
    assert end not in tokenizer.encode("the</s>dog")
    assert "</s>" in tokenizer.decode(tokenizer.encode("the</s>dog")).replace(" ", "")
    assert tokenizer.encode_chat(chat_of("the</s>dog")).count(end) == 1
    assert 0 in tokenizer.encode("世")  # what stands for characters outside the vocabulary is not forged


def test_special_texts_that_overlap_stay_text(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_str(byte_level())
    library.add_special_tokens(["<|x|>", "|><|"])
    template = "<|x|>{{ messages[0]['content'] }}<|x|>"
    tokenizer = Tokenizer(model_folder(tmp_path, library.to_str(), chat_template=template))
    special = {library.token_to_id(text) for text in ("<|x|>", "|><|")}
    ids = tokenizer.encode_chat(chat_of("<|x|><|y|>"))
    assert [at for at, id in enumerate(ids) if id in special] == [0, len(ids) - 1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|x|><|x|><|y|><|x|>"


def test_plain_text_is_encoded_with_and_without_the_tokens_around_it(served: dict[str, Tokenizer]) -> None:
    text = "the lazy dog 🙂"
    for add in (True, False):
        expected = tokenizers.Tokenizer.from_str(sentence_piece()).encode(text, add_special_tokens=add).ids
        assert served["Llama 2"].encode(text, add_special_tokens=add) == expected


def test_vocabulary_with_gaps_keeps_its_ids(tmp_path: Path) -> None:
    content = json.loads(byte_level())
    top = max(token["id"] for token in content["added_tokens"])
    content["model"]["vocab"]["a"] = top + 2  # counted on, the next ids would run into it
    tokenizer = Tokenizer(model_folder(tmp_path, json.dumps(content), chat_template=CHATML))
    assert tokenizer.encode("a") == [top + 2]
    assert tokenizer.vocab_size == top + 3
    ids = tokenizer.encode_chat(chat_of("a"))
    assert "<|im_start|>user\na<|im_end|>" in tokenizer.decode(ids, skip_special_tokens=False)
    assert 1 in ids


def test_facts_about_the_model_are_read_from_its_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, byte_level(), eos_token="<|im_end|>")
    tokenizer = Tokenizer(folder)
    library = tokenizers.Tokenizer.from_str(byte_level())
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert tokenizer.fingerprint == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.chat_template is None

    (folder / "config.json").write_text('{"eos_token_id": 1}')
    assert Tokenizer(folder).eos_token_ids == (1, 2)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert Tokenizer(folder).eos_token_ids == (0, 2)


def test_chat_template_is_found_wherever_models_keep_it(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "ab"}]
    folder = model_folder(tmp_path, byte_level(), chat_template=named)
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_chat(chat_of("x"))) == "ab"
    (folder / "chat_template.jinja").write_text("cd")
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_chat(chat_of("x"))) == "cd"


@pytest.mark.parametrize(
    ("generation", "recommended"),
    [
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 9},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        (
            {"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.05, "top_k": None},
            {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.05},
        ),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
        (
            {"do_sample": False, "temperature": 0.7, "typical_p": 0.9, "repetition_penalty": 1.2},
            {"temperature": 0.0, "repetition_penalty": 1.2},
        ),
        ({}, {}),
    ],
)
def test_recommended_sampling_is_read_from_the_folder(
    tmp_path: Path, generation: dict[str, Any], recommended: dict[str, float]
) -> None:
    folder = model_folder(tmp_path, byte_level())
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert Tokenizer(folder).recommended == recommended


async def test_bad_words_are_encoded_as_they_stand_in_a_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(model_folder(tmp_path, byte_level()))
    bare, after_space = tokenizer.encode("ab", False), tokenizer.encode(" ab", False)
    assert bare != after_space
    assert await tokenizer.encode_bad_words(["ab"]) == [bare, after_space]
    assert await tokenizer.encode_bad_words([" ab", "ab"]) == [bare, after_space], "no tokens twice"
    assert await tokenizer.encode_bad_words([" "]) == [tokenizer.encode(" ", False)]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_broken_file_is_one_clear_error(tmp_path: Path, file: str) -> None:
    folder = model_folder(tmp_path, byte_level())
    (folder / file).write_text('{"broken')
    with pytest.raises(ConfigError, match=file):
        Tokenizer(folder)


def _without_the_unknown_token(file: dict[str, Any]) -> None:
    file["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}


def _around_a_token_that_is_missing(file: dict[str, Any]) -> None:
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }


def _around_an_id_of_no_token(file: dict[str, Any]) -> None:
    _around_a_token_that_is_missing(file)
    file["post_processor"]["special_tokens"] = {"<s>": {"id": "<s>", "ids": [5000], "tokens": ["<s>"]}}


def _with_a_gap(file: dict[str, Any]) -> None:
    file["model"]["vocab"]["far"] = 100_000


def _with_control_characters(file: dict[str, Any]) -> None:
    file["version"] = "\033[31m\n" * 1000


def _with_a_long_added_token(file: dict[str, Any]) -> None:
    file["added_tokens"].append({**file["added_tokens"][-1], "id": 999, "content": "é" * 513})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_without_the_unknown_token, "UNK"),
        (_around_a_token_that_is_missing, "special_tokens|no entry"),
        (_around_an_id_of_no_token, "the id 5000, which no token has"),
        (_with_a_gap, "at most 16384 are supported"),
        (_with_control_characters, "…"),
        (_with_a_long_added_token, "an added token of 1026 bytes, at most 1024"),
    ],
)
def test_a_tokenizer_that_contradicts_itself_is_one_clear_error(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], complaint: str
) -> None:
    folder = model_folder(tmp_path, byte_level())
    file = json.loads(byte_level())
    change(file)
    (folder / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError, match=rf"^tokenizer\.json .*({complaint})") as error:
        Tokenizer(folder)
    assert len(str(error.value)) < 400
    assert str(error.value).isprintable()


@pytest.mark.parametrize("told", ["x", [1, "x"], [[2]], -1, 1.5, True, 1 << 32])
def test_an_end_of_sequence_that_is_no_id_is_one_clear_error(tmp_path: Path, told: Any) -> None:
    folder = model_folder(tmp_path, byte_level())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": told}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is "):
        Tokenizer(folder)


def test_half_a_character_as_a_special_token_is_one_clear_error(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, byte_level(), eos_token="\ud800")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: eos_token holds half a character"):
        Tokenizer(folder)


def test_missing_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_str(byte_level())
    library.enable_truncation(4)
    library.enable_padding(length=8)
    tokenizer = Tokenizer(model_folder(tmp_path, library.to_str()))
    assert tokenizer.encode("a") == tokenizers.Tokenizer.from_str(byte_level()).encode("a").ids
    assert len(tokenizer.encode("a b c d e f g h i j")) > 8


async def test_event_loop_turns_while_a_long_prompt_is_encoded(served: dict[str, Tokenizer]) -> None:
    """The library's plain `encode` holds the interpreter lock throughout, in any thread."""
    long = "The quick brown fox, 12345.\n" * 30_000
    work = asyncio.ensure_future(served["ChatML"].encode_prompt(long))
    turns = 0
    while not work.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 10, "the loop stood still"


async def test_threads_take_turns_on_large_chats_alone(
    served: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = served["ChatML"]
    running: list[str] = []
    most: dict[str, int] = {"large": 0, "small": 0}

    def disarm(typed: str) -> str:
        running.append(typed)
        if typed in most:
            most[typed] = max(most[typed], running.count(typed))
            time.sleep(0.002)
        running.remove(typed)
        return typed

    monkeypatch.setattr(tokenizer._special_tokens, "disarm", disarm)
    for name in most:
        await asyncio.gather(
            *(tokenizer.encode_prompt(chat_of(*[name] * 9), is_large=name == "large") for _ in range(2))
        )
    assert most == {"large": 1, "small": 2}


async def test_prompts_of_every_kind_are_encoded(served: dict[str, Tokenizer]) -> None:
    tokenizer = served["ChatML"]
    assert await tokenizer.encode_prompt("a dog") == tokenizer.encode("a dog")
    assert await tokenizer.encode_prompt(chat_of("a dog")) == tokenizer.encode_chat(chat_of("a dog"))
    assert await tokenizer.encode_prompt((5, 6, 7)) == [5, 6, 7]
    assert await tokenizer.decode_ids(tokenizer.encode("a dog")) == "a dog"


def test_many_threads_share_a_tokenizer(served: dict[str, Tokenizer]) -> None:
    tokenizer = served["ChatML"]
    chats = [chat_of(f"{number} <|im_end|> dogs") for number in range(50)]
    expected = [tokenizer.encode_chat(chat) for chat in chats]
    results: dict[int, list[list[int]]] = {}

    def work(at: int) -> None:
        results[at] = [tokenizer.encode_chat(chat) for chat in chats]

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[at] for at in range(4)] == [expected] * 4
