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
    has_chat_template  whether the model takes a message or a chat
    max_text_bytes     UTF-8 bytes of a text, or of a chat's texts together; what the template makes of them may have
                       8 MiB, whatever this is (ChatTemplate)
    max_parts          of a message's content
    max_tools          that a chat offers, or a message calls
    max_json_bytes     of a chat's tools and tool calls together: JSON is parsed on the event loop
    max_json_depth     levels of objects and lists
    max_kwargs_values  of a chat's template_kwargs, those inside others included; max_kwargs_depth: their levels
    max_n              sequences from one input
    max_request_id     characters
    """

    max_model_len: int
    vocab_size: int
    kv_token_capacity: int
    has_chat_template: bool = True
    max_text_bytes: int = RouterSettings.max_text_bytes
    max_messages: int = 4096
    max_parts: int = 256
    max_tools: int = 128
    max_json_bytes: int = 256 << 10
    max_json_depth: int = 32
    max_kwargs_values: int = 1024
    max_kwargs_depth: int = 16
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
