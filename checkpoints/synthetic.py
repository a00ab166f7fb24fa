"""The synthetic model, for tests and load experiments: a byte-level tokenizer and no weights.

Token ids 0 to 255 are the bytes themselves, so that prompts and answers can be computed by hand.
"""

from __future__ import annotations

from pathlib import Path

from .cache import Cache
from .folder import write_json
from .progress import Progress

NAME = "synthetic"
FAMILY = "synthetic"
MAX_POSITION_EMBEDDINGS = 32_768
START, END = "<|im_start|>", "<|im_end|>"
END_ID = 257  # behind the bytes and START
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def obtain_synthetic_model(cache: Cache, progress: Progress) -> Path:
    return cache.obtain(NAME, lambda work, draft: _write(draft), progress)


def _write(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # only now: other models need none

    vocab = {letter: byte for byte, letter in enumerate(letters_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (START, END)])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    vocab_size = tokenizer.get_vocab_size()
    config = {"model_type": FAMILY, "vocab_size": vocab_size, "max_position_embeddings": MAX_POSITION_EMBEDDINGS}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": [END_ID], "do_sample": False})
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def letters_of_bytes() -> list[str]:
    """The letter that stands for each byte in byte-level BPE (Radford et al., 2019).

    Printable bytes keep their Latin-1 letter; the others take the letters from U+0100 on, in order.
    """
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in prints]
    letter = {byte: chr(byte) for byte in prints} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [letter[byte] for byte in range(256)]
