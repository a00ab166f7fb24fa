"""The log of real servers: every line is one event, tells no content, and waits for no reader."""

from __future__ import annotations

import fcntl
import http.client
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_server.router.errors import (
    InvalidArgument,
    NotFound,
    PagodaError,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from pagoda_server.router.request.record import Record
from pagoda_server.router.telemetry.logs import RequestLog, reason_of, trace_id_of
from pagoda_server.runtime.logs import JsonFormatter, LineWriter, TextFormatter
from tests.end_to_end.asking import Answer, request
from tests.end_to_end.test_bad_input import BAD
from tests.servers import ROOT, Server, running_server

CANARY = "canary-7f3a"
TOKEN = "token-of-a-canary"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = ("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
Request = inference_pb2.GenerateRequest
QUIET_S = 2.5  # after which no second runs in which refused calls are only counted


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN)
    return file


@pytest.fixture(scope="module")
def server(token_file: Path) -> Iterator[Server]:
    arguments = (
        "--model", "synthetic", "--step-ms", "1", "--http", "127.0.0.1:0", "--max-requests", "2",
        "--log-format", "json", "--log-level", "debug", "--auth-token-file", str(token_file),
    )  # fmt: skip
    with running_server(*arguments) as server:
        yield server


@pytest.fixture
def stub(server: Server) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def generate(stub: inference_pb2_grpc.InferenceStub, message: Request, *metadata: tuple[str, str]) -> Any:
    return stub.Generate(message, metadata=[("authorization", f"Bearer {TOKEN}"), *metadata], timeout=60)


def lines(server: Server) -> list[dict[str, Any]]:
    """Every line of the log: each of them is an object."""
    return [json.loads(line) for line in server.log.read_text().splitlines()]


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def line_of(server: Server, **fields: object) -> dict[str, Any]:
    """The line of a request with these fields. It is written soon after the client has its answer."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for line in lines(server):
            if line["logger"] == "pagoda.requests" and fields.items() <= line.items():
                return line
        time.sleep(0.02)
    raise AssertionError(f"no line with {fields}:\n{server.tail()}")


def test_a_request_is_one_line_with_its_names_tokens_times_and_end(
    server: Server, stub: inference_pb2_grpc.InferenceStub
) -> None:
    message = request("hello", 7)
    message.request_id = "whole"
    list(generate(stub, message, PARENT, ("x-pagoda-tenant", "acme")))
    line = line_of(server, request_id="whole")
    assert re.fullmatch(TIME, line.pop("time"))
    times = {name: line.pop(name) for name in list(line) if name.endswith("_s")}
    assert line == {
        "level": "info",
        "logger": "pagoda.requests",
        "message": "request",
        "method": "pagoda.v1.Inference/Generate",
        "request_id": "whole",
        "trace_id": TRACE,
        "tenant": "acme",
        "code": "OK",
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "output_tokens": 7,
        "finish_reasons": ["LENGTH"],
        "preemptions": 0,
    }
    assert set(times) == {"queue_s", "prefill_s", "decode_s", "preempted_s", "ttft_s", "total_s"}
    assert 0 < times["prefill_s"] < times["ttft_s"] < times["total_s"] < 60
    assert times["decode_s"] > 0.005, "six steps of a millisecond"


def test_embed_and_score_are_lines_of_their_own(server: Server, stub: inference_pb2_grpc.InferenceStub) -> None:
    metadata = [("authorization", f"Bearer {TOKEN}")]
    inputs = [inference_pb2.EmbedInput(text="hello")]
    ends = [inference_pb2.Continuation(text="lo")]
    stub.Embed(inference_pb2.EmbedRequest(request_id="read", inputs=inputs), metadata=metadata, timeout=60)
    message = inference_pb2.ScoreRequest(request_id="scored", prompt="hel", continuations=ends)
    stub.Score(message, metadata=metadata, timeout=60)
    for method, request_id in (("Embed", "read"), ("Score", "scored")):
        line = line_of(server, request_id=request_id)
        assert (line["method"], line["code"]) == (f"pagoda.v1.Inference/{method}", "OK")
        assert (line["prompt_tokens"], line["output_tokens"]) == (5, 0)
        assert 0 < line["prefill_s"] < line["total_s"] < 60
        assert "ttft_s" not in line


def test_a_cancelled_request_is_a_line_with_the_tokens_so_far(
    server: Server, stub: inference_pb2_grpc.InferenceStub
) -> None:
    message = request("hello", 5000)
    message.request_id = "cancelled"
    call = generate(stub, message)
    next(call)
    call.cancel()
    line = line_of(server, request_id="cancelled")
    assert line["code"] == "CANCELLED"
    assert 1 <= line["output_tokens"] < 5000
    assert "decode_s" not in line, "the engine has not told"


def post(server: Server, path: str, body: str, **headers: str) -> int:
    """The status of an HTTP request."""
    connection = http.client.HTTPConnection(server.http.removeprefix("http://"), timeout=60)
    connection.request("POST", path, body, {"authorization": f"Bearer {TOKEN}", **headers})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def test_a_request_by_http_is_a_line_too(server: Server) -> None:
    body = json.dumps({"model": "synthetic", "prompt": CANARY, "max_tokens": 3})
    names = {PARENT[0]: PARENT[1], "x-request-id": "by-http"}
    assert post(server, "/v1/completions", body, **names) == 200
    line = line_of(server, trace_id=TRACE, method="POST /v1/completions")
    assert (line["code"], line["prompt_tokens"], line["request_id"]) == ("OK", len(CANARY), "by-http")
    for wrong in (
        f'{{"{CANARY}": 1}}',
        f'{{"prompt": ["{CANARY}", {{}}]}}',
        f"{{{CANARY}",
        json.dumps({"model": CANARY, "prompt": CANARY}),
        json.dumps({"model": "synthetic", "prompt": "x", "temperature": CANARY}),
    ):
        assert post(server, "/v1/completions", wrong) >= 400
        assert post(server, "/v1/chat/completions", wrong) >= 400
    assert post(server, "/v1/completions", body, authorization=f"Bearer {CANARY}") == 401
    wait_for(lambda: any("UNAUTHENTICATED" in line.get("refused", ()) for line in lines(server)))
    assert CANARY not in server.log.read_text()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method", ["vllm.grpc.engine.VllmEngine/Generate", "inference.GRPCInferenceService/ModelInfer"]
)
def test_a_call_of_another_protocol_is_named_by_its_own_method(server: Server, method: str) -> None:
    time.sleep(QUIET_S)
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_stream(f"/{method}")
        with pytest.raises(grpc.RpcError):
            list(call(b"", metadata=[("authorization", f"Bearer {TOKEN}")], timeout=60))
    line_of(server, method=method, code="INVALID_ARGUMENT")


@pytest.mark.thorough
def test_calls_for_which_there_is_no_place_are_counted(server: Server, stub: inference_pb2_grpc.InferenceStub) -> None:
    running = [generate(stub, request("hello", 30_000)) for _ in range(2)]
    for call in running:
        next(call)
    time.sleep(QUIET_S)
    assert post(server, "/v1/completions", json.dumps({"model": "synthetic", "prompt": "x"})) == 429
    for _ in range(3):
        with pytest.raises(grpc.RpcError):
            list(generate(stub, Request(prompt="x")))
    for call in running:
        call.cancel()
    line_of(server, method="POST /v1/completions", code="RESOURCE_EXHAUSTED", reason="QUEUE_FULL")
    line_of(server, message="requests refused", count=3, refused={"RESOURCE_EXHAUSTED QUEUE_FULL": 3})


def test_every_line_of_both_processes_is_an_object(server: Server) -> None:
    told = lines(server)
    assert {"pagoda.router", "pagoda.engine"} <= {line["logger"] for line in told}
    for line in told:
        assert line.keys() >= {"time", "level", "logger", "message"}
        assert re.fullmatch(TIME, line["time"])


def with_canary(fields: dict[str, Any]) -> Request:
    """A bad request whose texts hold the canary."""
    chat = {"messages": [{"role": "ROLE_USER", "content": CANARY}]}
    if "chat" in fields:
        return Request(chat=fields["chat"] if "messages" not in fields["chat"] else {**chat, **fields["chat"]})
    has_input = fields.keys() & {"prompt", "message", "token_ids"}
    return Request(**({} if has_input else {"prompt": CANARY}) | fields)


def test_no_text_no_token_and_no_authorization_is_logged_on_any_path(
    server: Server, stub: inference_pb2_grpc.InferenceStub
) -> None:
    stop = {"stopping": {"stop": [CANARY] * 4, "max_tokens": 20}}
    calls = [with_canary(fields) for _, fields, _ in BAD]
    for more in (
        {"model": CANARY},
        {"guided": {"regex": f"({CANARY}"}},
        {"guided": {"json_schema": CANARY}},
        {"guided": {"choice": {"options": [CANARY]}}, "stopping": {"max_tokens": 2}},
        {"lora_name": CANARY},
        {"request_id": f"{CANARY}\n"},
        {"chat": {"messages": [{"role": "ROLE_USER", "content": CANARY}], "template_kwargs": {"messages": CANARY}}},
        {"chat": {"messages": [{"role": "ROLE_TOOL", "content": CANARY, "tool_call_id": CANARY}]}},
        {
            "chat": {
                "messages": [{"role": "ROLE_USER", "content": "x", "name": CANARY}],
                "tool_choice": {"tool": CANARY},
            }
        },
        {"cache": {"salt": CANARY * 20}},
        {"stopping": {"stop": [CANARY * 100]}},
        {"prompt": CANARY * 100_000},
    ):
        calls.append(with_canary(more))  # noqa: PERF401 (the list above is long)
    before, refused = len(lines(server)), 1
    for message in calls:
        try:
            list(generate(stub, message))
        except grpc.RpcError:
            refused += 1
    assert refused >= len(BAD)
    message = Request(prompt=CANARY, request_id="told", **stop)  # type: ignore[arg-type]
    text = "".join(response.tokens.text for response in generate(stub, message))
    line_of(server, request_id="told")
    for metadata in (
        [("authorization", f"Bearer {CANARY}")],
        [("authorization", f"Basic {CANARY}")],
        [("authorization", f"Bearer {TOKEN}"), ("x-pagoda-tenant", f"{CANARY} ?")],
        [("authorization", f"Bearer {TOKEN}"), ("traceparent", f"00-{CANARY}"), ("tracestate", CANARY)],
    ):
        try:
            list(stub.Generate(Request(prompt="x"), metadata=metadata, timeout=60))
        except grpc.RpcError:
            refused += 1
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/pagoda.v1.Inference/Generate")
        with pytest.raises(grpc.RpcError):
            call(b"\x1a\xff" + CANARY.encode(), metadata=[("authorization", f"Bearer {TOKEN}")], timeout=60)

    def told() -> int:
        failed = [line for line in lines(server)[before:] if line.get("code") != "OK"]
        return sum(line.get("count", 1) for line in failed if line["logger"] == "pagoda.requests")

    wait_for(lambda: told() >= refused)  # each of these errors is counted, in a line a second
    log = server.log.read_text()
    assert CANARY not in log
    assert TOKEN not in log
    assert len(text) >= 5
    assert text not in log
    assert json.dumps(text)[1:-1] not in log


@pytest.mark.thorough
def test_refused_calls_cost_a_line_a_second(server: Server, stub: inference_pb2_grpc.InferenceStub) -> None:
    time.sleep(QUIET_S)
    before, started = len(lines(server)), time.monotonic()
    for _ in range(100):
        with pytest.raises(grpc.RpcError):
            list(stub.Generate(Request(prompt="x"), timeout=60))  # without a token

    def told_since() -> list[dict[str, Any]]:
        return [line for line in lines(server)[before:] if line["logger"] == "pagoda.requests"]

    wait_for(lambda: sum(line.get("count", 1) for line in told_since()) >= 100)
    told = told_since()
    assert len(told) <= time.monotonic() - started + 2
    assert "prompt_tokens" not in told[0]
    assert (told[0]["code"], told[0]["method"]) == ("UNAUTHENTICATED", "pagoda.v1.Inference/Generate")
    assert sum(line.get("count", 1) for line in told) == 100
    assert {kind for line in told[1:] for kind in line["refused"]} == {"UNAUTHENTICATED"}


def test_no_value_from_outside_begins_a_line(server: Server, stub: inference_pb2_grpc.InferenceStub) -> None:
    message = request("hello", 1)
    message.request_id = 'x" code=OK \\n {"level": "error"} é 漢'
    list(generate(stub, message, ("x-pagoda-tenant", "a:b@c")))
    line = line_of(server, request_id=message.request_id)
    assert (line["tenant"], line["level"]) == ("a:b@c", "info")
    for record, shown in ((_record("a\nb\r\x1b[31m\u2028\u202e%s", "\udcff"), 1), (_record("%s", "x\x85y\x0bz"), 1)):
        for formatter in (TextFormatter(), JsonFormatter()):
            assert len(formatter.format(record).encode().decode().splitlines()) == shown
            assert "\x1b" not in formatter.format(record)
    text = TextFormatter().format(_record("request", id='a b"\n', tenant="acme", refused={"A": 2, "B": 1}))
    assert text.endswith(' request id="a b\\"\\n" tenant=acme refused="A: 2, B: 1"')


def _record(message: str, *arguments: object, **fields: object) -> logging.LogRecord:
    return logging.getLogger("outside").makeRecord(
        "outside", logging.INFO, __file__, 1, message, arguments, None, extra={"fields": fields}
    )


def test_an_exception_belongs_to_its_line() -> None:
    try:
        raise ValueError("one\n2026-01-01T00:00:00.000Z pagoda.router INFO two")
    except ValueError:
        record = logging.getLogger("x").makeRecord("x", logging.ERROR, __file__, 1, "it fails", (), sys.exc_info())
    first, *rest = TextFormatter().format(record).splitlines()
    assert re.fullmatch(rf"{TIME} x ERROR it fails", first)
    assert all(line.startswith("    ") for line in rest), "nothing in it looks like a line of its own"
    (line,) = JsonFormatter().format(record).splitlines()
    content = json.loads(line)
    assert (content["level"], content["message"]) == ("error", "it fails")
    assert content["exception"].startswith("Traceback")


@pytest.mark.parametrize("module", ["engine", "cli"])
def test_a_start_that_fails_is_an_object_too(module: str, tmp_path: Path) -> None:
    command = ["engine"] if module == "engine" else ["cli", "serve"]
    result = subprocess.run(
        [sys.executable, "-m", f"pagoda_server.{command[0]}", *command[1:], "--log-format", "json", "--model",
         str(tmp_path / "nothing.gguf")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    told = [json.loads(line) for line in result.stderr.splitlines()]
    assert told[-1]["level"] == "error"
    assert told[-1]["message"].startswith("error: ")


def test_tracing_without_its_packages_is_one_line_with_the_command() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None  # as where the extra is not installed
from pagoda_server.cli.__main__ import main
sys.argv = ["pagoda", "serve", "--model", "synthetic", "--otlp-endpoint", "http://127.0.0.1:4318"]
main()
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    told = "error: --otlp-endpoint needs more packages: pip install 'pagoda-server[tracing]'\n"
    assert (result.returncode, result.stderr) == (2, told)


# -- a log that nothing reads --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_full_pipe_stops_no_token_and_no_shutdown(tmp_path: Path) -> None:
    """Standard error is a pipe of 4 KiB, full after a dozen requests."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(
        [sys.executable, "-m", "pagoda_server.cli", "serve", "--model", "synthetic", "--listen", "127.0.0.1:0"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=writer, text=True,
    )  # fmt: skip
    os.close(writer)
    try:
        assert process.stdout is not None
        server = Server(process, process.stdout.readline().split()[-1], tmp_path / "log")
        server.wait_ready()
        with grpc.insecure_channel(server.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for _ in range(100):
                assert len(Answer(list(stub.Generate(request("hello", 3), timeout=60))).ids()) == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        with os.fdopen(reader) as log:
            told = log.read().splitlines()
    finally:
        process.kill()
        process.wait()
    assert all(re.match(rf"{TIME} pagoda\.\w+ [A-Z]+ ", line) for line in told[:-1]), "only the last may be cut"
    assert 5 <= sum(" request method=" in line for line in told) < 100


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    handler = LineWriter(writer, TextFormatter(), most_bytes=8192)
    for number in range(1000):
        handler.handle(_record("line %d", number))
    told, numbers, dropped = b"", list[int](), 0
    while len(numbers) + dropped < 1000:
        assert select.select([reader], [], [], 10)[0], f"{len(numbers)} lines, {dropped} dropped"
        told += os.read(reader, size)
        messages = [line.split(b" ", 3)[3] for line in told.splitlines()]
        numbers = [int(message[5:]) for message in messages if message.startswith(b"line ")]
        dropped = sum(int(message.split()[0]) for message in messages if b"were dropped" in message)
    assert numbers == sorted(set(numbers)), "in order, and none is cut"
    assert dropped > 0
    assert len(numbers) + dropped == 1000
    handler.handle(_record("the reader is back"))
    handler.flush()
    assert os.read(reader, size).endswith(b"the reader is back\n")


# -- what a line may hold ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, ""),
        (InvalidArgument("chat.messages[3].role", f"is {CANARY}"), "chat.messages[].role"),
        (InvalidArgument("sampling.logit_bias[4711]", "is 1000"), "sampling.logit_bias[]"),
        (InvalidArgument(f"a name with {CANARY}", "is unknown"), "a field"),
        (InvalidArgument("x" * 81, "is unknown"), "a field"),
        (Unimplemented("lora_name"), "lora_name"),
        (NotFound(f"model: {CANARY} is not served here"), ""),
        (Unavailable("the server is draining"), "the server is draining"),
        (QuotaExceeded("max_requests", 3, CANARY), "QUOTA_EXCEEDED"),
        (Unauthenticated(), ""),
        (PagodaError(CANARY), ""),
        (ValueError(CANARY), "ValueError"),
    ],
)
def test_a_reason_is_the_servers_own_word(error: Exception | None, reason: str) -> None:
    assert reason_of(error) == reason


@pytest.mark.parametrize(
    ("values", "trace"),
    [
        ([f"00-{TRACE}-b7ad6b7169203331-01"], TRACE),
        ([f"00-{TRACE}-b7ad6b7169203331-00"], TRACE),
        ([f"01-{TRACE}-b7ad6b7169203331-01-more"], TRACE),
        ([], ""),
        ([f"00-{TRACE}-b7ad6b7169203331-01"] * 2, ""),
        ([b"\x00"], ""),
        ([f"00-{TRACE}-b7ad6b7169203331-01-more"], ""),
        ([f"ff-{TRACE}-b7ad6b7169203331-01"], ""),
        ([f"00-{TRACE.upper()}-b7ad6b7169203331-01"], ""),
        ([f"00-{'0' * 32}-b7ad6b7169203331-01"], ""),
        ([f"00-{TRACE}-{'0' * 16}-01"], ""),
        ([f"00-{TRACE}-b7ad6b7169203331-01\n"], ""),
        ([TRACE], ""),
    ],
)
def test_a_malformed_parent_is_none(values: list[str | bytes], trace: str) -> None:
    assert trace_id_of([("traceparent", value) for value in values]) == trace


def test_a_line_that_standard_output_does_not_take_ends_no_process() -> None:
    program = (
        "from pagoda_server.runtime.logs import print_line; from pagoda_server.settings import ServeConfig; "
        "[print_line(ServeConfig(), 'x', line, {}) for line in ('starting', 'serving')]"
    )
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (ended.returncode, ended.stderr) == (0, "cannot write to standard output: No space left on device\n")


async def test_calls_that_are_cancelled_before_an_engine_has_them_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = RequestLog()
    for _ in range(1000):
        log.ended(Record("Generate", "", (), "pagoda.v1.Inference/Generate", code=grpc.StatusCode.CANCELLED))
    log.close()
    first, rest = caplog.records
    assert vars(first)["fields"]["code"] == "CANCELLED"
    assert vars(rest)["fields"] == {"count": 999, "refused": {"CANCELLED": 999}}


async def test_a_flood_of_kinds_stays_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = RequestLog()
    for number in range(1000):
        log.refused("/pagoda.v1.Inference/Generate", InvalidArgument(f"field_{number}", "is wrong"))
    log.close()
    first, rest = caplog.records
    assert vars(first)["fields"]["reason"] == "field_0"
    kinds = vars(rest)["fields"]["refused"]
    assert len(kinds) == 17
    assert sum(kinds.values()) == vars(rest)["fields"]["count"] == 999
