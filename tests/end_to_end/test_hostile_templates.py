"""Chat templates that take too much: a real router refuses the conversation, or the model, and serves on."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from pagoda import Client, InvalidArgument, Overloaded, PagodaError, Unavailable
from pagoda_server.checkpoints import resolve
from tests.servers import ROOT, Server, running_server

pytestmark = pytest.mark.thorough

MANY = "range(99999)"
LOOP = f"{{% for i in {MANY} %}}{{% for j in {MANY} %}}{{% endfor %}}{{% endfor %}}"
# What a message makes the template do.
RUNAWAY = {
    "loop": (LOOP, "takes more than 1 s"),
    "center": ("{{ messages[0].content.center(2 * 10**9) | length }}", "takes more than 512 MB"),
    "list": (f"{{% set all = namespace(s='x' * 9999) %}}{{% for i in {MANY} %}}{{% set all.s = all.s + all.s %}}"
             "{% endfor %}", "takes more than (512 MB|1 s)"),
    "power": ("{{ 9 ** (9 ** (8 + messages | length)) }}", "takes more than 1 s"),
    "regress": (f"{{% macro m() %}}{{% for i in {MANY} %}}{{{{ m() }}}}{{% endfor %}}{{% endmacro %}}{{{{ m() }}}}",
                "does not accept this conversation"),
}  # fmt: skip
TEMPLATE = "".join(
    f"{{% if messages[0].content == '{word}' %}}{does}{{% endif %}}" for word, (does, _) in RUNAWAY.items()
)


def model_with(template: str, folder: Path) -> Path:
    shutil.copytree(resolve("synthetic"), folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = model_with(TEMPLATE + "{{ messages[0].content }}", tmp_path_factory.mktemp("models") / "hostile")
    with running_server("--model", str(folder)) as server:
        yield server


def template_processes(server: Server) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.ZombieProcess):  # a killed one, which is replaced when it is needed
            if "pagoda_server.router.text.template_process" in child.cmdline():
                found.append(child)
    return found


def wait_until_busy(server: Server) -> None:
    """Until a template has computed for a tenth of a second."""

    def used_s() -> float:
        found = 0.0
        for process in template_processes(server):
            with contextlib.suppress(psutil.NoSuchProcess):
                found = max(found, process.cpu_times().user)
        return found

    before, deadline = used_s(), time.monotonic() + 60
    while used_s() < before + 0.1:
        before = min(before, used_s())  # one that is replaced starts over
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("word", RUNAWAY)
def test_a_conversation_that_makes_the_template_run_away_is_refused_by_name(server: Server, word: str) -> None:
    with Client(server.address) as client:
        started = time.monotonic()
        with pytest.raises(InvalidArgument, match=f"^chat: the model's chat template {RUNAWAY[word][1]}"):
            client.tokenize(message=word)
        assert time.monotonic() - started < 60  # a second of CPU time, on a busy machine too
        assert client.tokenize(message="fine") == list(b"fine")
        assert psutil.Process(server.process.pid).memory_info().rss < 400e6


def test_others_are_served_while_templates_run_away(server: Server) -> None:
    def runs_away(_: int) -> str:
        with Client(server.address) as client, pytest.raises(InvalidArgument) as refused:
            client.tokenize(message="loop")
        return str(refused.value)

    with ThreadPoolExecutor(6) as threads, Client(server.address) as client:
        assert client.tokenize(message="fine") == list(b"fine")
        hostile = [threads.submit(runs_away, at) for at in range(6)]
        wait_until_busy(server)
        for _ in range(20):
            assert client.tokenize(prompt="text") == list(b"text")
        assert not all(each.done() for each in hostile), "text waited for the templates"
        assert client.tokenize(message="fine") == list(b"fine")
        assert all("takes more than 1 s" in each.result() for each in hostile)
    assert len(template_processes(server)) <= 2


def test_a_template_process_that_was_killed_is_replaced_and_refuses_no_conversation(server: Server) -> None:
    with Client(server.address) as client:
        assert client.tokenize(message="fine") == list(b"fine")
        before = psutil.Process(server.process.pid).num_fds()
        for _ in range(2):
            for process in template_processes(server):
                process.kill()
            for _ in range(4):
                assert client.tokenize(message="fine") == list(b"fine")
        assert psutil.Process(server.process.pid).num_fds() == before


def test_a_conversation_is_refused_with_a_delay_while_no_process_can_be_started(server: Server) -> None:
    router = psutil.Process(server.process.pid)
    with Client(server.address) as client:
        assert client.tokenize(message="fine") == list(b"fine")
        limits = router.rlimit(psutil.RLIMIT_NOFILE)
        router.rlimit(psutil.RLIMIT_NOFILE, (1, limits[1]))
        try:
            for process in template_processes(server):
                process.kill()
            for _ in range(3):
                with pytest.raises(Overloaded, match="the server lacks the resources to render a chat") as refused:
                    client.tokenize(message="fine")
                assert refused.value.retry_after_s == 1.0
        finally:
            router.rlimit(psutil.RLIMIT_NOFILE, limits)
        assert client.tokenize(message="fine") == list(b"fine")
    assert "Traceback" not in server.log.read_text()


def test_a_template_process_knows_no_secret_and_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_AUTH_TOKEN", "hidden-one")
    monkeypatch.setenv("HF_TOKEN", "hidden-two")
    with running_server("--model", str(model_with("x", tmp_path / "model")), ready=False) as server:
        deadline = time.monotonic() + 60
        while not server.engines() and time.monotonic() < deadline:
            time.sleep(0.02)
        children = psutil.Process(server.process.pid).children()
        assert len(children) == 2
        for child in children:
            assert not [value for value in child.environ().values() if value.startswith("hidden-")], child.cmdline()
        for process in template_processes(server):
            assert sorted(os.listdir(f"/proc/{process.pid}/fd")) == ["0", "1", "2"]


def test_a_second_template_process_starts_when_it_is_needed_and_both_end_with_their_router(tmp_path: Path) -> None:
    folder = model_with(LOOP, tmp_path / "model")
    with running_server("--model", str(folder)) as server:
        assert len(template_processes(server)) == 1
        asking = [threading.Thread(target=ask_in_vain, args=(server,)) for _ in range(2)]
        for each in asking:
            each.start()
        wait_until_busy(server)
        deadline = time.monotonic() + 60
        while len(processes := template_processes(server)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.process.kill()
        for each in asking:
            each.join()
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive


def test_sigterm_ends_a_router_whose_template_runs_away(tmp_path: Path) -> None:
    with (
        running_server("--model", str(model_with(LOOP, tmp_path / "model")), "--grace-s", "0") as server,
        ThreadPoolExecutor(8) as threads,
    ):
        asking = [threads.submit(ask_in_vain, server) for _ in range(8)]
        wait_until_busy(server)
        assert server.stop() == 0
        assert any(isinstance(each.result(), Unavailable) for each in asking), "it waited for all templates"


def ask_in_vain(server: Server) -> PagodaError:
    with Client(server.address, retries=0) as client, pytest.raises(PagodaError) as caught:
        client.tokenize(message="loop")
    return caught.value


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 9 ** (9 ** 9) }}", "it takes more than 1 s"),
        ("{{ 'a' * 10**8 | center(3 * 10**8) | length }}" * 9, "it takes more than"),
        ("{{ " + "(" * 100_000 + " }}", "RecursionError"),
        ("{{ " + "-" * 3_000 + "1 }}", ""),
        ("x" * (5 << 20), "chat_template.jinja"),
    ],
)
def test_a_template_that_takes_too_much_to_compile_is_one_line_and_exit_code_2(
    template: str, reason: str, tmp_path: Path
) -> None:
    folder = model_with(template, tmp_path / "model")
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "pagoda_server.cli", "serve", "--listen", "127.0.0.1:0", "--model", str(folder)],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (2, "")
    *logged, error = result.stderr.splitlines()
    assert all(" INFO " in line for line in logged), "the engine has started already, and ends with the router"
    assert error.startswith("error: ")
    assert reason in error
    assert time.monotonic() - started < 60
