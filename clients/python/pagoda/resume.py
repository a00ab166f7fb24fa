"""Go on with a stream that broke: what has arrived of it, what to call next, and what of the answer is new."""

from __future__ import annotations

import uuid
from collections import Counter

from pagoda.connection import Attempts
from pagoda.errors import NotFound, PagodaError, Unimplemented
from pagoda.v1 import inference_pb2


class Resumption:
    """One resumable stream over several calls: Generate first, then Resume with the tokens that have arrived.

    Attempts are counted anew each time that the stream goes on. Nothing here waits or calls: both clients do so in
    their own way.

    request  resumable; it gets a request id if it has none
    """

    def __init__(self, request: inference_pb2.GenerateRequest, attempts: Attempts) -> None:
        request.request_id = request.request_id or uuid.uuid4().hex
        self.resumes = False  # whether the next call is Resume
        self._request = request
        self._attempts = attempts
        self._break: PagodaError | None = None  # what broke the stream
        self._received: list[int] = []
        self._has_begun = False
        self._has_prompt = False
        self._num_late: Counter[int] = Counter()  # by sequence: messages without tokens, which only its end adds
        self._num_late_now: Counter[int] = Counter()  # those of this call, which has all of them again
        self._finished: set[int] = set()
        self._is_complete = False

    def request(self) -> inference_pb2.GenerateRequest | inference_pb2.ResumeRequest:
        """The request of the next call."""
        if not self.resumes:
            return self._request
        return inference_pb2.ResumeRequest(request_id=self._request.request_id, received=self._received)

    def takes(self, response: inference_pb2.GenerateResponse) -> bool:
        """Whether a message has anything that has not arrived before; what has arrived before is removed."""
        self._has_begun = True
        if is_new := self._is_new(response):
            self._attempts.renew()
        self._is_complete = response.HasField("usage")
        if not is_new and self._is_complete:
            response.ClearField("finished")
        return is_new or self._is_complete

    def _is_new(self, response: inference_pb2.GenerateResponse) -> bool:
        match response.WhichOneof("event"):
            case "prompt":
                had_prompt, self._has_prompt = self._has_prompt, True
                return not had_prompt
            case "tokens":
                tokens = response.tokens
                if tokens.tokens:
                    self._received += [0] * (tokens.index + 1 - len(self._received))
                    self._received[tokens.index] += len(tokens.tokens)
                    return True
                self._num_late_now[tokens.index] += 1
                is_late = self._num_late_now[tokens.index] > self._num_late[tokens.index]
                self._num_late[tokens.index] += is_late
                return is_late
            case "finished":
                was_finished = response.finished.index in self._finished
                self._finished.add(response.finished.index)
                return not was_finished
        return True

    def delay_after(self, error: PagodaError) -> float | None:
        """Seconds to wait before the next call; None: the stream is complete. Raises an error if there must be none."""
        if self._is_complete:
            return None
        if self.resumes and isinstance(error, NotFound | Unimplemented):
            if self._has_begun and self._break is not None:
                raise self._break from error
            self.resumes = False  # the server does not know of the stream: nothing is lost, it begins
            return 0.0
        delay_s = self._attempts.delay_after(error, has_begun=False)
        self._break, self.resumes = error, True
        self._num_late_now.clear()
        return delay_s
