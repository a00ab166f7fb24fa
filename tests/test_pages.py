"""Pages name only options, files, tests and headings that exist, and the map of the repository shows every room."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from pagoda_server.cli.app import app as pagoda
from pagoda_server.settings import EngineConfig
from pagoda_server.settings.command_line import command

ROOT = Path(__file__).parent.parent
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
MAPPED = (
    "protos",
    "clients/cli",
    "router",
    "channel",
    "engine",
    "kernels",
    "checkpoints",
    "settings",
    "grammars",
    "runtime",
    "fleet",
    "bench",
)
WRITTEN = ("build/", "kernels/triton/tuned/")  # by compilers, and by tuning on a GPU
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}

OTHER_PROGRAM = re.compile(r"^\s*(docker|pip|make|grpcurl)\b|python -m (bench|kernels)|`make ")
FLAG = re.compile(r"(?<![\w#-])--[a-z][a-z-]*[a-z]")
FILE = re.compile(r"(?<![\w./:@-])(?:[\w*.-]+/)+(?:[\w*-]+\.[a-z]+)?|(?<![\w./:@-])test_\w+\.py")
TEST = re.compile(r"(test_\w+\.py|…)::(test_\w+)")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def options_of(given: Any) -> set[str]:
    """The options of a command and its subcommands."""
    own = {option for parameter in given.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(options_of(each) for each in getattr(given, "commands", {}).values()))


def engine(config: EngineConfig) -> int:
    """Start an engine."""
    raise NotImplementedError


def flags_of(page: str) -> set[str]:
    """Options in lines about Pagoda; lines about other programs and the vLLM column of a table are skipped."""
    lines = (ROOT / page).read_text().replace("| vLLM | Pagoda |", "\0").split("\0")
    text = "\n".join((*lines[:1], *(re.sub(r"^\|[^|]*\|", "", part, flags=re.MULTILINE) for part in lines[1:])))
    return {flag for line in text.splitlines() if not OTHER_PROGRAM.search(line) for flag in FLAG.findall(line)}


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md", "docs/architecture.md", "docs/scheduling.md"])
def test_a_page_names_no_option_that_does_not_exist(page: str) -> None:
    app = typer.Typer()
    app.command()(command(EngineConfig, engine))
    known = {"--help"} | options_of(typer.main.get_command(pagoda)) | options_of(typer.main.get_command(app))
    flags = flags_of(page)
    assert len(flags) > 1
    assert flags <= known


def files_of(text: str) -> Iterator[str]:
    """Files and folders of the repository that a text names, and test files by their names alone."""
    for name in FILE.findall(text):
        if name.startswith("test_"):
            yield f"tests/**/{name}"
        elif name.split("/")[0] in FOLDERS:
            yield name


def pattern(name: str) -> str:
    """A glob for the name: a word in capitals stands for any, as in engine/models/FAMILY.py."""
    return re.sub(r"[A-Z]{2,}", "*", name)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_no_file_that_does_not_exist(page: str) -> None:
    named = [name for name in files_of((ROOT / page).read_text()) if not name.startswith(WRITTEN)]
    assert [name for name in named if not any(ROOT.glob(pattern(name)))] == []


def test_files_are_recognised_in_text() -> None:
    text = "`engine/loop/loop.py` and kernels/OP.py; tests/x/test_y.py::test_z, `test_a.py`, n/a, https://docs/x.py"
    assert list(files_of(text)) == ["engine/loop/loop.py", "kernels/OP.py", "tests/x/test_y.py", "tests/**/test_a.py"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_no_test_that_does_not_exist(page: str) -> None:
    file, missing = "", []
    for named, test in TEST.findall((ROOT / page).read_text()):
        file = file if named == "…" else named  # an ellipsis stands for the file before
        found = "".join(path.read_text() for path in ROOT.glob(f"tests/**/{file}"))
        missing += [] if f"def {test}(" in found else [f"{file}::{test}"]
    assert not missing


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page is called."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_within_the_repository_lead_somewhere(page: str) -> None:
    for target, heading in LINK.findall((ROOT / page).read_text()):
        if not target.startswith("http"):
            at = (ROOT / page).parent / target if target else ROOT / page
            assert at.exists(), target
            assert not heading or heading in anchors(at), f"{target}#{heading}"


def section(title: str) -> str:
    return ARCHITECTURE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def tree() -> list[str]:
    """The paths of the annotated tree: a name a line, indented by two spaces below its folder."""
    paths: list[str] = []
    parents: list[str] = []
    for indent, name in re.findall(r"^    ( *)(\S+)  +\S", section("Where things are"), re.MULTILINE):
        parents[len(indent) // 2 :] = [name]
        paths.append("".join(parents))
    return paths


def test_the_map_names_what_exists() -> None:
    assert len(tree()) > 20
    assert [path for path in tree() if not (ROOT / path).exists()] == []


def test_the_map_shows_every_room() -> None:
    sources = [path for room in MAPPED for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".h", ".proto")]
    rooms = {f"{path.parent.relative_to(ROOT)}/" for path in sources}
    assert rooms - set(tree()) == set()


def test_a_request_is_walked_in_at_most_25_files() -> None:
    table = section("One request, from client to kernel and back")
    files = re.findall(r"^\| \d+ \| `([^`]+)` \|", table, re.MULTILINE)
    assert 15 < len(files) <= 25
    assert all((ROOT / file).is_file() for file in files)
