"""Small tokenizers of the kinds that models use, trained here in milliseconds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. What is the capital of Sweden? Stockholm, of course!",
    "def add(a, b):\n    return a + b  # 1234567890\n\n",
    "Ça va? Grüße aus Köln. Привет, как дела? 你好,世界。 🙂🙃😀 👩‍👩‍👧‍👦 नमस्ते",
    "<html><body class='x'>a < b && c > d | e_f [INST] user assistant system |>start<|</body></html>",
]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@cache
def byte_level() -> str:
    """tokenizer.json of byte-level BPE with ChatML's special tokens and one ordinary added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return tokenizer.to_str()


@cache
def sentence_piece() -> str:
    """tokenizer.json in the manner of Llama 2: BPE over ▁ with byte fallback, a prefix space, <s> in front."""
    alphabet = sorted({char for text in TEXT[:2] for char in text} - {" "} | {"▁"})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("i", "s"), ("▁", "is")]
    pieces += ["".join(merge) for merge in merges]
    model = models.BPE({piece: id for id, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    model.fuse_unk = True
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


@cache
def unigram() -> str:
    """tokenizer.json of a Unigram model, whose vocabulary holds </s> as a piece like any other."""
    characters = sorted({char for text in TEXT[:2] for char in text} - {" "} | set("▁</>"))
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((char, -5.0) for char in characters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer.to_str()


def with_decoder(tokenizer_json: str, decoder: dict[str, Any] | None) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer_json) | {"decoder": decoder}))


def model_folder(folder: Path, tokenizer_json: str, **config: Any) -> Path:
    """Written as a Hugging Face model folder; `config` is tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
