"""The programs of docs/clients.md: each that can run here prints the answer, and stops on an error with its field."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from pagoda import Client
from tests.counterparts.compilers import ROOT, cpp_program, go_environment
from tests.counterparts.environments import program
from tests.servers import running_server

pytestmark = pytest.mark.counterpart

PAGE = (ROOT / "docs" / "clients.md").read_text()
FOUND = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = dict(reversed(FOUND))  # the first one of each language
ADDRESS, QUESTION = "127.0.0.1:50051", "Why is the sky blue?"
NOT_RUN = ["csharp", "java", "rust"]

Command = Callable[[Path, str], "tuple[list[str | Path], dict[str, str]]"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server("--model", "synthetic", "--step-ms", "1") as server:
        yield server.address


def python(folder: Path, text: str) -> tuple[list[str | Path], dict[str, str]]:
    (folder / "program.py").write_text(text)
    return [sys.executable, folder / "program.py"], {}


@cache
def typescript_client(folder: Path) -> Path:
    """Build a copy of the client: another worker may test it where it is, and build it there."""
    client, npm = folder / "typescript", program("npm")
    shutil.copytree(ROOT / "clients" / "typescript", client, ignore=shutil.ignore_patterns("node_modules", "dist"))
    subprocess.run([npm, "ci", "--silent", "--ignore-scripts", "--no-fund", "--no-audit"], cwd=client, check=True)
    subprocess.run([npm, "run", "--silent", "build"], cwd=client, check=True)
    return client


def typescript(folder: Path, text: str) -> tuple[list[str | Path], dict[str, str]]:
    """The program has no types of its own, so Node runs it as it is."""
    node, client = program("node"), typescript_client(folder.parent)
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "pagoda-client").symlink_to(client)
    (folder / "program.mjs").write_text(text)
    return [node, folder / "program.mjs"], {}


def go(folder: Path, text: str) -> tuple[list[str | Path], dict[str, str]]:
    (folder / "program.go").write_text(text)
    return ["go", "run", folder / "program.go"], go_environment()


def cpp(folder: Path, text: str) -> tuple[list[str | Path], dict[str, str]]:
    (folder / "program.cpp").write_text(text)
    return [cpp_program(folder / "program.cpp")], {}


RUN: dict[str, Command] = {"python": python, "ts": typescript, "go": go, "cpp": cpp}


def ran(language: str, folder: Path, *changes: tuple[str, str]) -> subprocess.CompletedProcess[bytes]:
    text = PROGRAMS[language]
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    command, variables = RUN[language](folder, text)
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, timeout=300)


@pytest.mark.parametrize("language", RUN)
def test_a_program_prints_the_answer(language: str, address: str, tmp_path: Path) -> None:
    with Client(address) as client:
        answer = "".join(chunk.text for chunk in client.generate(QUESTION))
    done = ran(language, tmp_path, (ADDRESS, address))
    assert (done.returncode, done.stdout.decode()) == (0, answer), done.stderr.decode()
    assert len(answer) > 20


@pytest.mark.parametrize("language", RUN)
def test_a_program_stops_on_an_error_with_its_field(language: str, address: str, tmp_path: Path) -> None:
    done = ran(language, tmp_path, (ADDRESS, address), (QUESTION, ""))
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"(field: message)" in done.stderr


def test_the_second_program_in_python_gets_objects(tmp_path: Path) -> None:
    _, text = (text for language, text in FOUND if language == "python")
    with running_server("--tool-format", "hermes") as server:
        command, _ = python(tmp_path, text.replace(ADDRESS, server.address))
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    name, call = done.stdout.splitlines()
    assert name
    assert re.fullmatch(r"weather \{'city': '.+'\}", call)


def test_grpcurl_prints_the_answer_and_an_error_with_its_field(address: str) -> None:
    text = PROGRAMS["sh"].replace(ADDRESS, address).split("\ngrpcurl ")[0]
    command = [str(Path(sys.executable).parent / "grpcurl"), *shlex.split(text)[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert '"completion_tokens"' in done.stdout
    command = [part.replace(QUESTION, "") for part in command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert '"field":"message"' in done.stderr


def test_the_program_in_cpp_is_that_of_its_folder() -> None:
    assert PROGRAMS["cpp"] == (ROOT / "clients" / "cpp" / "stream.cpp").read_text()


def test_the_page_says_which_programs_were_not_run() -> None:
    assert sorted(PROGRAMS.keys() - RUN.keys() - {"sh"}) == NOT_RUN
    sections = {language: PAGE.split(f"```{language}\n")[0].rsplit("\n## ", 1)[1] for language in PROGRAMS}
    assert sorted(language for language, text in sections.items() if "was not run" in text) == NOT_RUN
