"""Text and token ids: `Tokenizer` (with the chat template), `Detokenizer` and `StopMatcher`."""
