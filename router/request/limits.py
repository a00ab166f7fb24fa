"""What a request may ask for: fixed when the engine says hello. Of several engines each can hold it."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_server.settings import RouterSettings


@dataclass(frozen=True, slots=True)
class Limits:
    """
    max_model_len      tokens of prompt + output
    vocab_size         rows of the model's embedding: ids are below it
    kv_token_capacity  tokens that the engine's whole KV cache holds
    max_text_bytes     UTF-8 bytes of a text, or of a chat's messages together; what the template makes of them may have
                       8 MiB, whatever this is (ChatTemplate)
    max_n              sequences from one prompt
    max_request_id     characters
    """

    max_model_len: int
    vocab_size: int
    kv_token_capacity: int
    max_text_bytes: int = RouterSettings.max_text_bytes
    max_messages: int = 4096
    max_n: int = 64
    max_beams: int = 16
    max_logprobs: int = 20
    max_stop: int = 16
    max_stop_bytes: int = 256
    max_stop_ids: int = 64
    max_logit_bias: int = 1024
    max_request_id: int = 128
    max_salt_bytes: int = 128
    max_priority: int = 1000
    default_max_tokens: int = RouterSettings.default_max_tokens
