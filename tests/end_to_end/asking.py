"""Requests and answers, in fewer words than the stubs need."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.v1 import inference_pb2, inference_pb2_grpc


def request(
    text: str, max_tokens: int, *, stop: list[str] | None = None, sampling: dict[str, float] | None = None
) -> inference_pb2.GenerateRequest:
    """Text to be continued; end-of-sequence ignored, as the synthetic model meets it by chance."""
    return inference_pb2.GenerateRequest(
        text=text,
        raw=True,
        sampling=inference_pb2.Sampling(**(sampling or {})),  # type: ignore[arg-type]
        stopping=inference_pb2.Stopping(max_tokens=max_tokens, stop=stop, ignore_eos=True),
    )


def chat(content: str, max_tokens: int) -> inference_pb2.GenerateRequest:
    message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, content=content)
    return inference_pb2.GenerateRequest(
        chat=inference_pb2.Chat(messages=[message]), stopping=inference_pb2.Stopping(max_tokens=max_tokens)
    )


@dataclass
class Answer:
    responses: list[inference_pb2.GenerateResponse]

    def tokens(self, index: int = 0) -> list[inference_pb2.Token]:
        return [
            token
            for response in self.responses
            if response.HasField("tokens") and response.tokens.index == index
            for token in response.tokens.tokens
        ]

    def ids(self, index: int = 0) -> list[int]:
        return [token.id for token in self.tokens(index)]

    def text(self, index: int = 0) -> str:
        return "".join(response.tokens.text for response in self.responses if response.tokens.index == index)

    def finished(self, index: int = 0) -> inference_pb2.Finished:
        (finished,) = [
            response.finished
            for response in self.responses
            if response.HasField("finished") and response.finished.index == index
        ]
        return finished


def ask(
    inference: inference_pb2_grpc.InferenceStub, message: inference_pb2.GenerateRequest, timeout_s: float = 300.0
) -> Answer:
    return Answer(list(inference.Generate(message, timeout=timeout_s)))
