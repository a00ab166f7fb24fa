"""Streams that survive: engines that are really killed, and connections that are really cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from safetensors.numpy import save_file

from pagoda import AsyncClient, Chunk, Client, Unavailable
from pagoda.v1 import admin_pb2, admin_pb2_grpc, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.checkpoints import resolve
from pagoda_server.router.request.resuming import MAX_STREAMS
from tests.end_to_end.asking import Answer, ask
from tests.end_to_end.test_faults import wait_idle
from tests.servers import Server, running_server

VOCAB_SIZE, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 258, 64, 96, 2, 4, 2
MAX_TOKENS = 300
Stub = inference_pb2_grpc.InferenceStub


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in float32 with random weights and the synthetic model's tokenizer, whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    random = np.random.default_rng(0)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {"model.embed_tokens": (VOCAB_SIZE, HIDDEN), "lm_head": (VOCAB_SIZE, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
        }.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{name}"] = shape
    tensors = {f"{name}.weight": random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = ["model.norm", *(f"model.layers.{layer}.{name}_layernorm" for layer in range(LAYERS)
                             for name in ("input", "post_attention"))]  # fmt: skip
    tensors |= {f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(resolve("synthetic") / name, folder)
    return folder


FORMATS = [
    ("--dtype", "float32"),
    pytest.param(("--dtype", "bfloat16", "--deterministic"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=FORMATS, ids=" ".join)
def server(model: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server whose engine the tests kill; it is ready again after each test."""
    with running_server("--model", str(model), "--quantization", "none", *request.param) as server:
        yield server


@pytest.fixture
def inference(server: Server) -> Iterator[Stub]:
    with grpc.insecure_channel(server.address) as channel:
        yield Stub(channel)


def asked(prompt: str = "tell me", **sampling: float) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt=prompt,
        sampling=inference_pb2.Sampling(**sampling),  # type: ignore[arg-type]
        stopping=inference_pb2.Stopping(max_tokens=MAX_TOKENS, ignore_eos=True),
    )


def resumable(request: inference_pb2.GenerateRequest, request_id: str) -> inference_pb2.GenerateRequest:
    kept = inference_pb2.GenerateRequest(request_id=request_id, resumable=True)
    kept.MergeFrom(request)
    return kept


@dataclass
class Case:
    """A request, and its answer where nothing disturbs it."""

    request: inference_pb2.GenerateRequest
    answer: Answer

    @property
    def n(self) -> int:
        return self.request.sampling.n or 1


@pytest.fixture(scope="module")
def cases(server: Server) -> dict[str, Case]:
    """Requests of every kind. Stop strings and stop ids are taken from the middle of what they end."""
    greedy, seeded = asked(), asked(temperature=1.0, seed=7, top_k=100)
    penalties = asked(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)
    logprobs = asked("odds", temperature=0.8, seed=8)
    logprobs.output.logprobs = 3
    logprobs.output.token_bytes = logprobs.output.prompt = True
    stopped = asked("stop", temperature=1.0, seed=9)
    siblings = asked("three", temperature=1.0, seed=(1 << 64) - 1, n=3)
    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(6) as pool:
        inference = Stub(channel)
        whole = pool.submit(ask, inference, stopped)
        drawn = ask(inference, siblings)
        stopped.stopping.stop.extend(["never" * 9, first_late(whole.result().text(), 2)])
        siblings.stopping.stop_token_ids.append(rare_elsewhere(drawn.ids(1)[10:40], drawn.ids(0), drawn.ids(2)))
        siblings.stopping.min_tokens = 10
        requests = {
            "greedy": greedy, "seeded": seeded, "penalties": penalties, "logprobs": logprobs, "stopped": stopped,
            "siblings": siblings,
        }  # fmt: skip
        answers = pool.map(lambda request: ask(inference, request), requests.values())
        return {name: Case(request, answer) for (name, request), answer in zip(requests.items(), answers, strict=True)}


def rare_elsewhere(ids: list[int], *others: list[int]) -> int:
    """The id that the others have last, or not at all."""
    return max(ids, key=lambda id: min(other.index(id) if id in other else MAX_TOKENS for other in others))


def first_late(text: str, length: int) -> str:
    """A part of the text that occurs for the first time after two thirds of it."""
    start = len(text) * 2 // 3
    return next(part for at in range(start, len(text)) if text.find(part := text[at : at + length]) == at)


@dataclass
class Broken:
    """What arrived of a call, and the error that ended it."""

    responses: list[inference_pb2.GenerateResponse]
    error: grpc.RpcError

    def counts(self, n: int) -> list[int]:
        got = Answer(self.responses)
        return [len(got.ids(index)) for index in range(n)]


def read_until(call: grpc.Call, count: int, reached: threading.Barrier) -> Broken:
    """Read a call until it breaks, and meet the others at the barrier after `count` tokens."""
    responses, has_met = [], False
    try:
        for response in call:
            responses.append(response)
            if not has_met and len(Answer(responses).ids()) >= count:
                has_met = True
                reached.wait(60)
    except grpc.RpcError as error:
        return Broken(responses, error)
    raise AssertionError("it was not broken")


def resume(inference: Stub, request_id: str, received: Sequence[int]) -> list[inference_pb2.GenerateResponse]:
    request = inference_pb2.ResumeRequest(request_id=request_id, received=received)
    return list(inference.Resume(request, timeout=60))


def check_same(one: Answer, other: Answer, n: int) -> None:
    for index in range(n):
        assert one.ids(index) == other.ids(index)
        assert one.text(index) == other.text(index)
        assert one.finished(index) == other.finished(index)
        for token, expected in zip(one.tokens(index), other.tokens(index), strict=True):
            assert token.bytes == expected.bytes
            assert token.logprob == pytest.approx(expected.logprob, abs=1e-3)
            assert [top.id for top in token.top] == [top.id for top in expected.top]
    usage, expected_usage = one.responses[-1].usage, other.responses[-1].usage
    assert usage.prompt_tokens == expected_usage.prompt_tokens
    assert usage.completion_tokens == expected_usage.completion_tokens


def check_chunks(chunks: Sequence[Chunk], case: Case) -> None:
    """The chunks of a stream that broke on the way say everything once."""
    for index in range(case.n):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [id for chunk in own for id in chunk.tokens] == case.answer.ids(index)
        assert "".join(chunk.text for chunk in own) == case.answer.text(index)
        assert [bool(chunk.finish_reason) for chunk in own] == [False] * (len(own) - 1) + [True]
        assert len([each for chunk in own for each in chunk.logprobs]) in (0, len(case.answer.ids(index)))
    assert sum(chunk.prompt_ids is not None for chunk in chunks) == case.request.output.prompt
    assert [chunk for chunk in chunks if chunk.usage] == [chunks[-1]]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == case.answer.responses[-1].usage.completion_tokens


# What the Python client is asked for, to get the answers of two cases.
SIBLINGS = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 1.0, "n": 3, "min_tokens": 10}
LOGPROBS = {
    "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": 8, "logprobs": 3, "token_bytes": True,
    "prompt_ids": True,
}  # fmt: skip


def siblings_options(case: Case) -> dict[str, object]:
    return SIBLINGS | {"seed": (1 << 64) - 1, "stop_token_ids": list(case.request.stopping.stop_token_ids)}


def meeting(chunks: Iterable[Chunk], count: int, reached: threading.Barrier) -> list[Chunk]:
    """All chunks of a stream; after `count` of them it meets others at the barrier."""
    read = []
    for chunk in chunks:
        read.append(chunk)
        if len(read) == count:
            reached.wait(60)
    return read


def by_client(server: Server, case: Case, reached: threading.Barrier) -> list[Chunk]:
    with Client(server.address, retries=8) as client:
        options = siblings_options(case)
        return meeting(client.generate(prompt="three", resumable=True, **options), 30, reached)  # type: ignore[arg-type]


def by_async_client(server: Server, reached: threading.Barrier) -> list[Chunk]:
    async def read() -> list[Chunk]:
        async with AsyncClient(server.address, retries=8) as client:
            chunks = []
            async for chunk in client.generate(prompt="odds", resumable=True, **LOGPROBS):  # type: ignore[arg-type]
                chunks.append(chunk)
                if len(chunks) == 12:
                    reached.wait(60)
            return chunks

    return asyncio.run(read())


def processor_s(process: psutil.Process) -> float:
    """Processor time of all threads. That of psutil has a resolution of 10 ms."""
    total = 0
    for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended
            total += int(path.read_text().split()[0])
    return total / 1e9


@contextlib.contextmanager
def slowed(engine: psutil.Process) -> Iterator[None]:
    """Let the engine have a processor for a twentieth of the time, so that no stream ends before each has begun.

    On a busy machine an engine that may run for so long may get nothing of it, and then it answers nobody for seconds.
    """
    over = threading.Event()

    def brake() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not over.is_set():
                used_s, began = processor_s(engine), time.monotonic()
                while not over.wait(0.001) and processor_s(engine) < used_s + 0.002 and time.monotonic() < began + 0.1:
                    pass
                engine.suspend()
                over.wait(max(0.005, began + 0.042 - time.monotonic()))
                engine.resume()

    braking = threading.Thread(target=brake)
    braking.start()
    try:
        yield
    finally:
        over.set()
        braking.join()


@pytest.mark.thorough
def test_streams_of_a_killed_engine_go_on_as_if_nothing_had_happened(
    server: Server, inference: Stub, cases: dict[str, Case]
) -> None:
    engine, reached = server.engine(), threading.Barrier(len(cases) + 3)
    with slowed(engine), ThreadPoolExecutor(len(cases) + 2) as pool:
        reads = {
            name: pool.submit(read_until, inference.Generate(resumable(case.request, name)), 9 + 5 * at, reached)
            for at, (name, case) in enumerate(cases.items())
        }
        clients = {
            "siblings": pool.submit(by_client, server, cases["siblings"], reached),
            "logprobs": pool.submit(by_async_client, server, reached),
        }
        reached.wait(60)
        engine.kill()
        broken = {name: read.result() for name, read in reads.items()}
        for name, read in clients.items():
            check_chunks(read.result(), cases[name])
    for name, before in broken.items():
        case = cases[name]
        details = rpc_status.from_call(before.error).details
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert any(detail.Unpack(info) for detail in details)
        assert any(detail.Unpack(retry) for detail in details)
        assert (info.reason, info.metadata["request_id"]) == ("RESUMABLE", name)
        assert 0 < retry.retry_delay.ToTimedelta().total_seconds() <= 30
        rest = resume(inference, name, before.counts(case.n))
        if case.request.output.prompt:
            assert rest.pop(0).prompt == before.responses[0].prompt
        ended = {response.finished.index for response in rest if response.HasField("finished")}
        assert ended == set(range(case.n)), "every end comes again"
        known = [response for response in before.responses if not response.HasField("finished")]
        goes_on = [count < len(case.answer.ids(index)) for index, count in enumerate(before.counts(case.n))]
        assert any(goes_on[1:] or goes_on), "a sibling that is not the first one goes on"
        check_same(Answer([*known, *rest]), case.answer, case.n)


@pytest.mark.parametrize("name", ["logprobs", "stopped", "siblings"])
def test_a_stream_that_is_complete_is_sent_again_from_any_offset(
    inference: Stub, cases: dict[str, Case], name: str
) -> None:
    case, request_id = cases[name], f"whole {name}"
    ask(inference, resumable(case.request, request_id))
    lengths = [len(case.answer.ids(index)) for index in range(case.n)]
    check_same(Answer(resume(inference, request_id, [])), case.answer, case.n)
    for received in ([length // 2 for length in lengths], [length - 1 for length in lengths], lengths):
        again = Answer(resume(inference, request_id, received))
        for index, count in enumerate(received):
            assert again.ids(index) == case.answer.ids(index)[count:]
            assert case.answer.text(index).endswith(again.text(index))
            assert again.finished(index) == case.answer.finished(index)
        assert again.responses[-1].usage.completion_tokens == sum(lengths)
    assert not any(again.text(index) for index in range(case.n))


class Wire:
    """Forwards connections to a server, and can cut them or let them hang."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Cut all connections; later ones work."""
        while self._ends:
            self._ends.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._ends += (client, server)
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    wire = Wire(server.address)
    yield wire
    wire.close()


def test_the_client_goes_on_over_a_connection_that_is_cut_again_and_again(wire: Wire, cases: dict[str, Case]) -> None:
    with Client(wire.address) as client:
        chunks = []
        for chunk in client.generate(prompt="three", resumable=True, **siblings_options(cases["siblings"])):  # type: ignore[arg-type]
            chunks.append(chunk)
            if len(chunks) % 60 == 40:
                wire.cut()
        check_chunks(chunks, cases["siblings"])


def test_a_stream_that_is_not_resumable_ends_with_its_connection(wire: Wire) -> None:
    with Client(wire.address) as client:
        stream = client.generate(prompt="tell me", max_tokens=MAX_TOKENS, ignore_eos=True)
        next(stream)
        wire.cut()
        with pytest.raises(Unavailable):
            list(stream)


def test_a_stream_is_taken_over_before_the_server_has_noticed_that_its_client_is_gone(
    server: Server, inference: Stub, cases: dict[str, Case]
) -> None:
    with grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) as other:
        first = Stub(other).Generate(resumable(cases["greedy"].request, "taken"))
        seen = [next(first) for _ in range(5)]
        rest = resume(inference, "taken", [len(Answer(seen).ids())])
        check_same(Answer([*seen, *rest]), cases["greedy"].answer, 1)
        with pytest.raises(grpc.RpcError) as caught:
            list(first)
        assert code_of(caught) is grpc.StatusCode.ABORTED


def code_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    code: grpc.StatusCode = error.value.code()
    return code


def refusal(inference: Stub, request_id: str, received: Sequence[int] = (), tenant: str = "") -> grpc.StatusCode:
    """The status of a Resume call that is refused."""
    request = inference_pb2.ResumeRequest(request_id=request_id, received=received)
    metadata = [("x-pagoda-tenant", tenant)] if tenant else None
    with pytest.raises(grpc.RpcError) as caught:
        list(inference.Resume(request, timeout=60, metadata=metadata))
    return code_of(caught)


def test_only_what_was_sent_and_kept_is_sent_again(inference: Stub) -> None:
    short = asked("short", n=2)
    short.stopping.max_tokens = 5
    ask(inference, short)
    ask(inference, resumable(short, "kept"))
    assert refusal(inference, "kept", [5, 6]) is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal(inference, "kept", [5, 5, 0]) is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal(inference, "kept", [1] * 100_000) is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal(inference, "") is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal(inference, "unknown") is grpc.StatusCode.NOT_FOUND
    assert refusal(inference, "kept", tenant="another") is grpc.StatusCode.NOT_FOUND
    assert len(Answer(resume(inference, "kept", [5])).ids(1)) == 5


def test_an_aborted_stream_stays_aborted_and_its_last_text_comes_again(server: Server, inference: Stub) -> None:
    endless = asked("open", temperature=1.0)
    endless.stopping.max_tokens = 900
    endless.stopping.stop.append("\x00" * 200)  # the last text is held back for it
    endless.sampling.logit_bias[0] = 100
    with grpc.insecure_channel(server.address) as channel:
        grpc.channel_ready_future(channel).result(60)
        call = inference.Generate(resumable(endless, "aborted"))
        seen = [next(call) for _ in range(3)]
        admin_pb2_grpc.AdminStub(channel).Abort(admin_pb2.AbortRequest(request_id="aborted"))
        seen += call
    whole = Answer(seen)
    assert whole.finished().reason == inference_pb2.FINISH_REASON_CANCELLED
    last_text = [response.tokens for response in seen if response.HasField("tokens") and not response.tokens.tokens]
    *rest, end = resume(inference, "aborted", [len(whole.ids())])
    assert [response.tokens for response in rest] == last_text, "unless the last tokens came with it"
    assert end.finished == whole.finished()
    check_same(Answer(resume(inference, "aborted", [])), whole, 1)


def test_a_stream_whose_client_has_gone_occupies_nothing(server: Server, wire: Wire) -> None:
    endless = asked("gone")
    endless.stopping.max_tokens = 900
    with grpc.insecure_channel(wire.address) as channel, grpc.insecure_channel(server.address) as direct:
        next(Stub(channel).Generate(resumable(endless, "gone")))
        wire.cut()
        assert wait_idle(control_pb2_grpc.ControlStub(direct)).blocks_referenced == 0


@pytest.mark.slow
def test_a_stream_is_kept_for_as_long_as_the_server_is_told_to() -> None:
    request = inference_pb2.GenerateRequest(prompt="x", stopping=inference_pb2.Stopping(max_tokens=5, ignore_eos=True))
    for keep_s in ("0", "1"):
        with (
            running_server("--model", "synthetic", "--resume-s", keep_s) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            inference = Stub(channel)
            if keep_s == "0":
                with pytest.raises(grpc.RpcError) as caught:
                    ask(inference, resumable(request, "x"))
                assert code_of(caught) is grpc.StatusCode.UNIMPLEMENTED
                continue
            ask(inference, resumable(request, "x"))
            assert len(Answer(resume(inference, "x", [])).ids()) == 5
            time.sleep(1.2)
            assert refusal(inference, "x") is grpc.StatusCode.NOT_FOUND


@pytest.mark.slow
def test_the_streams_that_ended_first_make_room_for_others() -> None:
    request = inference_pb2.GenerateRequest(prompt="x", stopping=inference_pb2.Stopping(max_tokens=2, ignore_eos=True))
    with (
        running_server("--model", "synthetic") as server,
        grpc.insecure_channel(server.address) as channel,
        ThreadPoolExecutor(8) as pool,
    ):
        inference = Stub(channel)
        ask(inference, resumable(request, "first"))
        list(pool.map(lambda at: ask(inference, resumable(request, str(at))), range(MAX_STREAMS - 1)))
        assert len(Answer(resume(inference, "first", [])).ids()) == 2
        ask(inference, resumable(request, "one more"))
        assert refusal(inference, "0") is grpc.StatusCode.NOT_FOUND
        assert len(Answer(resume(inference, "first", [])).ids()) == 2, "it has been resumed since"
