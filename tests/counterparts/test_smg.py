"""The SGLang model gateway `smg` in front of two servers, with its cache-aware routing on."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagoda.v1 import control_pb2_grpc, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.counterparts.environments import python_with
from tests.counterparts.shared_prefixes import (
    SMALL_CACHE,
    complete,
    hits,
    hits_of_the_router,
    prompts_with_shared_prefixes,
)
from tests.counterparts.test_protocols import SMG
from tests.end_to_end.asking import ask, engine_load, request
from tests.servers import Server, running_server

pytestmark = pytest.mark.counterpart
SYNTHETIC = ("--model", "synthetic", "--step-ms", "2")
GREEDY = {"temperature": 0, "ignore_eos": True}
START_S = 60.0


class Gateway:
    def __init__(self, port: int, log: Path, model: str) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self.log = log
        self._model = model

    def post(self, path: str, **body: Any) -> str:
        request = urllib.request.Request(
            f"{self.base}{path}",
            json.dumps(GREEDY | {"model": self._model} | body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            content: bytes = response.read()
        return content.decode()

    def complete(self, prompt: str, max_tokens: int = 8) -> Any:
        return json.loads(self.post("/v1/completions", prompt=prompt, max_tokens=max_tokens))

    def workers(self) -> list[Any]:
        with urllib.request.urlopen(f"{self.base}/workers", timeout=60) as response:
            found: list[Any] = json.load(response)["workers"]
        return found

    def is_ready(self, count: int) -> bool:
        try:
            return len(self.workers()) == count and bool(self.complete("ready?", 1))
        except OSError:  # an HTTP status is one too
            return False


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


@contextlib.contextmanager
def running_gateway(log: Path, *servers: Server, model: str = "synthetic") -> Iterator[Gateway]:
    """A gateway that knows the servers' addresses alone: it asks them for the model and its tokenizer."""
    port = free_port()
    command = [python_with(*SMG).parent / "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    options = ["--policy", "cache_aware", "--prometheus-port", str(free_port()), "--health-check-interval-secs", "1"]
    workers = ["--worker-urls", *(f"grpc://{server.address}" for server in servers)]
    with (
        log.open("w") as output,
        subprocess.Popen([*command, *options, *workers], stdout=output, stderr=output) as process,
    ):
        try:
            gateway, deadline = Gateway(port, log, model), time.monotonic() + START_S
            while not gateway.is_ready(len(servers)):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.2)
            yield gateway
        finally:
            process.kill()


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    with running_server(*SYNTHETIC) as first, running_server(*SYNTHETIC) as second:
        yield first, second


@pytest.fixture(scope="module")
def gateway(servers: tuple[Server, Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running_gateway(tmp_path_factory.mktemp("smg") / "log", *servers) as gateway:
        yield gateway


def text_of(prompt: str, count: int) -> str:
    ids = expected_tokens(prompt.encode(), count, 258)
    return bytes(id for id in ids if id < 256).decode(errors="replace")


def loads(servers: tuple[Server, ...]) -> list[tuple[int, int]]:
    """Prompt tokens, and cached ones among them, of each server."""
    found = []
    for server in servers:
        with grpc.insecure_channel(server.address) as channel:
            load = engine_load(control_pb2_grpc.ControlStub(channel))
        found.append((load.prompt_tokens, load.cached_tokens))
    return found


def answers_of_both(gateway: Gateway, servers: tuple[Server, ...], prompts: Iterator[str]) -> dict[str, str]:
    """The answers to prompts that no server has cached, as many as it takes until each server has computed some.

    The gateway sends such a prompt to the server with the fewest open requests, and to the first if all have as many.
    A busy machine may compute one after the other, however many are sent at once.
    """
    before, answers = loads(servers), dict[str, str]()
    deadline = time.monotonic() + 120
    with ThreadPoolExecutor(12) as clients:
        while not all(after[0] - was[0] > 100 for was, after in zip(before, loads(servers), strict=True)):
            assert time.monotonic() < deadline, "one server gets nothing"
            for prompt, answer in [(each, clients.submit(gateway.complete, each, 32)) for each in islice(prompts, 12)]:
                answers[prompt] = answer.result()["choices"][0]["text"]
    return answers


def test_a_completion_is_the_model_s(gateway: Gateway) -> None:
    answer = gateway.complete("a completion", 24)
    (choice,) = answer["choices"]
    # The gateway leaves out half a character at the end.
    assert choice["text"].rstrip("\ufffd") == text_of("a completion", 24).rstrip("\ufffd")
    assert choice["finish_reason"] == "length"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (12, 24)


def test_a_chat_streams(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": "a chat that streams"}]
    asked = {"messages": messages, "max_tokens": 24}
    whole = json.loads(gateway.post("/v1/chat/completions", **asked))["choices"][0]["message"]["content"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = gateway.post("/v1/chat/completions", **asked, **options)
    *events, done = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert done == "[DONE]"
    *chunks, last = map(json.loads, events)
    pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert len(list(filter(None, pieces))) > 5
    assert "".join(pieces) == whole
    assert last["usage"]["completion_tokens"] == 24
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the first answer left its prompt"


def test_several_choices_and_logprobs(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": "choices"}]
    asked = {"messages": messages, "max_tokens": 4, "n": 2, "logprobs": True, "top_logprobs": 2}
    choices = json.loads(gateway.post("/v1/chat/completions", **asked))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [len(token["top_logprobs"]) for token in choices[1]["logprobs"]["content"]] == [2] * 4


def test_what_the_server_refuses_is_refused_by_the_gateway(gateway: Gateway) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        gateway.post("/v1/completions", prompt="x", max_tokens=100_000)
    assert caught.value.code == 400
    assert "sampling_params.max_tokens" in caught.value.read().decode()


def test_a_conversation_stays_with_the_server_that_has_its_prefix(
    gateway: Gateway, servers: tuple[Server, Server]
) -> None:
    before = loads(servers)

    def take_turn(turn: int, user: int) -> None:
        # Their first blocks differ: the gateway goes by one block of four tokens, too.
        prompt = f"Nr {user} begins, and then goes on." + "".join(f" Turn {each} follows." for each in range(turn))
        cached = gateway.complete(prompt, 4)["usage"]["prompt_tokens_details"]["cached_tokens"]
        least = 0 if turn == 0 else len(prompt) - len(" Turn 0 follows.") - 2 * 4  # whole blocks of 4 tokens
        assert cached >= least, f"user {user} was sent away from its prefix in turn {turn}"

    for turn in range(4):
        with ThreadPoolExecutor(12) as users:  # at once: an idle gateway may send everything new to one server
            list(users.map(partial(take_turn, turn), range(12)))
        time.sleep(0.5)  # until the gateway knows
    both = [(after[0] - was[0], after[1] - was[1]) for was, after in zip(before, loads(servers), strict=True)]
    assert all(prompt_tokens > 0 for prompt_tokens, _ in both), "one server got nothing"
    assert all(cached / prompt_tokens > 0.5 for prompt_tokens, cached in both)


def test_the_gateway_knows_what_servers_have_cached_that_it_has_never_sent_there(
    gateway: Gateway, servers: tuple[Server, Server]
) -> None:
    """Prompts that other clients have sent: of these, the gateway learns from SubscribeKvEvents alone."""
    prompts = [f"A prompt of another client, number {at}, that is long enough." for at in range(12)]
    for at, prompt in enumerate(prompts):
        with grpc.insecure_channel(servers[at % 2].address) as channel:
            ask(inference_pb2_grpc.InferenceStub(channel), request(prompt, max_tokens=1))
    time.sleep(2)  # until the gateway knows
    for prompt in prompts:
        cached = gateway.complete(prompt, 1)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= len(prompt) - 2 * 4, "it was sent to the other server"


def test_the_router_finds_as_many_cached_tokens_and_balances(tmp_path: Path) -> None:
    with (
        running_server(*SMALL_CACHE) as first,
        running_server(*SMALL_CACHE) as second,
        running_gateway(tmp_path / "log", first, second) as gateway,
    ):
        theirs = hits(lambda prompt: complete(gateway.base, prompt), prompts_with_shared_prefixes())
    ours, (fewest, most) = hits_of_the_router(prompts_with_shared_prefixes())
    assert ours > 0.79, "0.81 is all that can be"
    assert ours > theirs - 0.03, "one prefix computed twice is 0.2 points, and a slow machine computes several so"
    assert most < 3 * fewest  # where the first prompts meet is chance, and engines that are nearly idle need no balance


def test_the_gateway_goes_on_with_the_other_server(tmp_path: Path) -> None:
    with (
        running_server(*SYNTHETIC) as first,
        running_server(*SYNTHETIC) as second,
        running_gateway(tmp_path / "log", first, second) as gateway,
    ):
        prompts = (f"{at:04} is a conversation that is long enough for a block or two" for at in count())
        before = answers_of_both(gateway, (first, second), prompts)
        first.process.kill()
        assert {prompt: gateway.complete(prompt, 32)["choices"][0]["text"] for prompt in before} == before
        deadline = time.monotonic() + 120
        while sum(worker["is_healthy"] for worker in gateway.workers()) > 1:
            assert time.monotonic() < deadline, "the gateway does not notice"
            time.sleep(0.2)
        assert loads((second,))[0][0] > 200
