"""Who may import whom: the rules that keep the two processes apart and the core free of tensors."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"channel", "router", "engine", "kernels", "checkpoints", "cli"}
SCHEDULING = ["core", "kv", "scheduling", "timing"]  # rooms of the engine


def imports_of(path: Path) -> set[str]:
    """Full names of all modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def folder(room: str) -> Path:
    return (ROOT / "src" / "pagoda_server" / room).resolve()


def imports_of_room(room: str) -> set[str]:
    files = list(folder(room).rglob("*.py"))
    assert files
    return {name for path in files for name in imports_of(path)}


def rooms_of(room: str) -> set[str]:
    """Other rooms of the server that a room's files import; `pagoda` is the client with the protocol's stubs."""
    parts = [name.split(".") for name in imports_of_room(room)]
    ours = {part[1] for part in parts if part[0] == "pagoda_server" and len(part) > 1}
    return (ours | {"pagoda"} & {part[0] for part in parts}) - {room}


def packages_of(room: str) -> set[str]:
    return {name.split(".")[0] for name in imports_of_room(room)}


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("channel", set()),
        ("router", {"pagoda", "channel", "checkpoints"}),
        ("engine", {"pagoda", "channel", "checkpoints", "kernels"}),
        ("kernels", set()),
        ("checkpoints", set()),
        ("cli", {"pagoda", "channel", "checkpoints", "router"}),  # router: `pagoda serve` starts it
    ],
)
def test_a_room_imports_only_what_its_place_allows(room: str, allowed: set[str]) -> None:
    assert rooms_of(room) <= allowed


def test_the_client_imports_nothing_of_the_server() -> None:
    names = {name for path in (ROOT / "clients" / "python").rglob("*.py") for name in imports_of(path)}
    assert "pagoda_server" not in {name.split(".")[0] for name in names}


@pytest.mark.parametrize("room", ["channel", "router", "checkpoints", "cli"])
def test_the_text_side_never_imports_torch(room: str) -> None:
    assert not packages_of(room) & {"torch", "transformers"}


@pytest.mark.parametrize("room", SCHEDULING)
def test_the_scheduler_needs_the_standard_library_alone(room: str) -> None:
    names = imports_of_room(f"engine/{room}")
    assert {name.split(".")[0] for name in names} - {"pagoda_server"} <= sys.stdlib_module_names
    ours = {name for name in names if name.startswith("pagoda_server.")}
    specification = "pagoda_server.channel.sampling"  # imports nothing either
    ours -= {specification, f"{specification}.Sampling"}
    assert {name.split(".")[2] for name in ours} <= set(SCHEDULING)


def test_the_specification_of_sampling_needs_the_standard_library_alone() -> None:
    names = imports_of(folder("channel") / "sampling.py")
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def test_nothing_unpickles() -> None:
    for room in ROOMS:
        assert not packages_of(room) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def test_a_running_router_has_loaded_no_torch() -> None:
    heavy = "{'torch', 'transformers'} & sys.modules.keys()"
    check = f"import pagoda_server.router.process.main, sys; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False).returncode == 0
