"""Short forms of requests and answers."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.v1 import chat_pb2, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc


def request(
    text: str, max_tokens: int, *, stop: list[str] | None = None, sampling: dict[str, float] | None = None
) -> inference_pb2.GenerateRequest:
    """A request to continue a text, greedily without `sampling`.

    It ignores end-of-sequence, which the synthetic model emits by chance.
    """
    return inference_pb2.GenerateRequest(
        prompt=text,
        sampling=inference_pb2.Sampling(**({"temperature": 0} if sampling is None else sampling)),  # type: ignore[arg-type]
        stopping=inference_pb2.Stopping(max_tokens=max_tokens, stop=stop, ignore_eos=True),
    )


def chat(content: str, max_tokens: int) -> inference_pb2.GenerateRequest:
    """A request to answer a message, greedily."""
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=content)
    return inference_pb2.GenerateRequest(
        chat=chat_pb2.Chat(messages=[message]),
        sampling=inference_pb2.Sampling(temperature=0),
        stopping=inference_pb2.Stopping(max_tokens=max_tokens),
    )


def engine_load(control: control_pb2_grpc.ControlStub) -> control_pb2.EngineLoad:
    """The load of the only engine."""
    (load,) = control.GetLoad(control_pb2.GetLoadRequest()).engines
    return load


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

    def prompt_ids(self) -> list[int]:
        """Ids in the prompt event, which comes first if requested."""
        return [token.id for token in self.responses[0].prompt.tokens]

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
