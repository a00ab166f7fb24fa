"""Which module may import which: rules that keep the processes apart and the core free of tensors."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {path.name for path in (ROOT / "src" / "pagoda_server").iterdir() if path.is_symlink()}
PACKAGES = {
    "pagoda_server": ROOT / "src" / "pagoda_server",
    "pagoda": ROOT / "clients/python/pagoda",
    "bench": ROOT / "bench",
}
PUBLIC_IN_SPITE_OF_ITS_NAME = {"_fields"}  # an attribute of every NamedTuple
SCHEDULING = ["core", "kv", "drafting", "scheduling", "timing"]  # rooms of the engine
WRITERS = {  # of each part of a sequence that changes after it is made
    "seq.tokens": {"scheduling.scheduler"},
    "seq.state": {"scheduling.scheduler"},
    "seq.max_len": {"scheduling.scheduler"},
    "seq.num_unsent": {"scheduling.scheduler"},
    "seq.num_pending": {"scheduling.scheduler"},
    "seq.is_drafted": {"scheduling.scheduler"},
    "seq.num_computed": {"scheduling.scheduler"},
    "seq.adapter_slot": {"scheduling.scheduler"},
    "seq.pooled": {"scheduling.scheduler"},
    "seq.blocks": {"kv.block_tables"},
    "table.num_committed": {"kv.block_tables"},
    "table.num_published": {"kv.prefix_cache"},
    "table.quota": {"kv.windows"},
    "table.strides": {"kv.cached_strides"},
}


@cache
def parsed(path: Path) -> ast.Module:
    """A file of the server, with its relative imports written as absolute ones, or any other file as it stands."""
    tree = ast.parse(path.read_text())
    package = ("pagoda_server", *path.resolve().relative_to(ROOT).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            outer = package[: len(package) - node.level + 1]
            node.module, node.level = ".".join((*outer, *filter(None, [node.module]))), 0
    return tree


@cache
def imports_of(path: Path) -> set[str]:
    """Full names of all modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
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
    ours = {part[1] for part in parts if part[0] == "pagoda_server" and len(part) > 1} & ROOMS
    return (ours | {"pagoda"} & {part[0] for part in parts}) - {room}


def packages_of(room: str) -> set[str]:
    return {name.split(".")[0] for name in imports_of_room(room)}


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("channel", set()),
        ("settings", {"channel"}),
        ("grammars", {"settings"}),
        ("runtime", {"settings"}),
        ("router", {"pagoda", "settings", "grammars", "runtime", "channel", "checkpoints"}),
        ("engine", {"pagoda", "settings", "grammars", "runtime", "channel", "checkpoints", "kernels"}),
        ("kernels", set()),
        ("checkpoints", set()),
        ("fleet", {"pagoda", "settings", "runtime", "channel", "router"}),  # router: it sees engines as routers do
        # `pagoda serve` starts a router, and `pagoda fleet` a fleet.
        ("cli", {"pagoda", "settings", "runtime", "channel", "checkpoints", "router", "fleet"}),
    ],
)
def test_a_room_imports_only_what_its_place_allows(room: str, allowed: set[str]) -> None:
    assert rooms_of(room) <= allowed


def test_the_client_imports_nothing_of_the_server() -> None:
    names = {name for path in (ROOT / "clients" / "python").rglob("*.py") for name in imports_of(path)}
    assert "pagoda_server" not in {name.split(".")[0] for name in names}


@pytest.mark.parametrize(
    "room", ["settings", "grammars", "runtime", "channel", "router", "checkpoints", "fleet", "cli"]
)
def test_the_text_side_never_imports_torch(room: str) -> None:
    assert not packages_of(room) & {"torch", "transformers"}


@pytest.mark.parametrize("room", SCHEDULING)
def test_the_scheduler_needs_the_standard_library_alone(room: str) -> None:
    names = imports_of_room(f"engine/{room}")
    assert {name.split(".")[0] for name in names} - {"pagoda_server"} <= sys.stdlib_module_names
    ours = [name.split(".") for name in names if name.startswith("pagoda_server.")]
    assert {part[2] for part in ours if part[1] == "engine"} <= set(SCHEDULING)
    assert {part[1] for part in ours} <= {"engine", "settings", "channel"}
    assert {part[2] for part in ours if part[1] == "channel"} <= {"strides"}


def test_imports_inside_the_server_are_relative() -> None:
    absolute = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room in ROOMS - {"cli"}
        for path in folder(room).rglob("*.py")
        if "_pb2" not in path.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pagoda_server")
    ]
    assert not absolute, "\n".join(absolute)


def test_a_wheel_has_every_header_of_the_kernels() -> None:
    """Without one, an installation compiles nothing, and serves without its kernels."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    headers = {str(path.relative_to(ROOT)) for path in (ROOT / "kernels" / "native").glob("*.h")}
    assert set(extension["depends"]) == headers


def test_nothing_unpickles() -> None:
    for room in ROOMS:
        assert not packages_of(room) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


@pytest.mark.parametrize(
    ("process", "not_loaded"),
    [
        ("router.process.main", {"pagoda_server.router.process.router"}),  # which loads while the engine does
        ("router.process.router", {"torch", "transformers", "numpy", "starlette", "uvicorn", "prometheus_client"}),
        ("engine.serving.main", {"torch", "transformers", "numpy", "grpc"}),
    ],
)
def test_a_process_loads_only_what_it_always_needs(process: str, not_loaded: set[str]) -> None:
    check = f"import pagoda_server.{process}, sys; print(*{not_loaded} & sys.modules.keys())"
    told = subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, capture_output=True, text=True)
    assert told.stdout == "\n"


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the project by its name, except the generated stubs."""
    found = {}
    for package, root in PACKAGES.items():
        for folder, _, files in os.walk(root, followlinks=True):  # the server's rooms are links
            for path in (Path(folder) / file for file in files if file.endswith(".py") and "_pb2" not in file):
                parts = (package, *path.relative_to(root).with_suffix("").parts)
                found[".".join(parts).removesuffix(".__init__")] = parsed(path.resolve())
    return found


def arrows_from(tree: ast.Module, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    """The project's modules that a module imports: at the top, within functions, and for type checking."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in modules else node.module


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = modules()
    try:
        TopologicalSorter({name: set(arrows_from(tree, found)) for name, tree in found.items()}).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def private_names(tree: ast.Module) -> set[str]:
    """Names with a leading underscore that a file defines: functions, classes, variables and attributes of `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_no_file_reaches_into_what_is_private_to_another() -> None:
    found = modules()
    private = {name: private_names(tree) for name, tree in found.items()}
    ours = set().union(*private.values()) - PUBLIC_IN_SPITE_OF_ITS_NAME
    reached = []
    for name, tree in found.items():
        others = ours - private[name]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in others and not is_self(node.value):
                reached.append(f"{name}:{node.lineno} {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom):
                reached += [f"{name}:{node.lineno} {alias.name}" for alias in node.names if alias.name in ours]
    assert not reached, "\n" + "\n".join(reached)


def written(tree: ast.Module) -> Iterator[str]:
    """Attributes of variables that a file assigns to or appends to, without the path that leads to the variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield ".".join(ast.unparse(node).split(".")[-2:])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            yield ".".join(ast.unparse(node.func.value).split(".")[-2:])


def test_each_part_of_a_sequence_has_one_writer() -> None:
    engine = "pagoda_server.engine."
    found: dict[str, set[str]] = {}
    for name, tree in modules().items():
        if name.startswith(engine) and name != f"{engine}core.sequence":
            for target in written(tree):
                if target.split(".")[0] in ("seq", "request", "account", "blocks", "table"):
                    found.setdefault(target, set()).add(name.removeprefix(engine))
    assert found == WRITERS


def test_the_engine_has_at_most_a_dozen_rooms() -> None:
    rooms = {path.parent for path in folder("engine").rglob("*.py")} - {folder("engine")}
    assert len(rooms) <= 12, sorted(str(room.relative_to(ROOT)) for room in rooms)
