"""Pages for operators name no option that the server and its commands do not have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from pagoda_server.cli.__main__ import app as pagoda
from pagoda_server.settings import EngineConfig
from pagoda_server.settings.command_line import command

ROOT = Path(__file__).parent.parent
OTHER_PROGRAM = re.compile(r"^\s*(docker|pip|make|grpcurl)\b|python -m (bench|kernels)|`make ")
FLAG = re.compile(r"(?<![\w#-])--[a-z][a-z-]*[a-z]")


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
