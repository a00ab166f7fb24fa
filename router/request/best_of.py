"""What a beam search holds back until it has ended."""

from __future__ import annotations

from collections.abc import Iterator

from pagoda.v1 import inference_pb2

TOKENS_PER_MESSAGE = 256  # a client takes 4 MB by default: at 20 logprobs a token some 10,000 tokens


class HeldTokens:
    """What sequences would have streamed, until the search has ended."""

    def __init__(self) -> None:
        self._messages: dict[int, list[inference_pb2.Tokens]] = {}

    def add(self, tokens: inference_pb2.Tokens) -> None:
        """Copies them: the message may be used again."""
        messages = self._messages.setdefault(tokens.index, [])
        if not messages or len(messages[-1].tokens) >= TOKENS_PER_MESSAGE:
            messages.append(inference_pb2.Tokens())
        last = messages[-1]
        text = last.text + tokens.text
        last.MergeFrom(tokens)  # puts tokens one behind the other, but the text in the other's place
        last.text = text

    def take(self, index: int, returned_as: int) -> Iterator[inference_pb2.Tokens]:
        """One sequence's, under the index that its client sees."""
        for tokens in self._messages.pop(index, ()):
            tokens.index = returned_as
            yield tokens
