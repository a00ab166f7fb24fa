"""Who may import whom: the rules that keep the two processes apart and the core free of tensors."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"protos", "channel", "router", "engine", "kernels", "checkpoints", "clients", "bench", "tests"}
SCHEDULING = {
    "scheduler", "schedules", "policies", "pacing", "step_time_model", "least_time", "likely_time", "running_quantile",
    "deadlines", "victims", "blocks", "block_copies", "block_heads", "block_tables", "eviction", "free_blocks",
    "prefix_cache", "shared_prompts", "host_blocks", "host_copy_times", "beam_search", "beams", "sequence",
    "step_output", "tenants",
}  # fmt: skip


def imports_of(path: Path) -> set[str]:
    """Full names of all modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def packages_of(package: str) -> set[str]:
    """Top-level names that a package's files import, itself excepted."""
    files = list((ROOT / package).rglob("*.py"))
    assert files
    return {name.split(".")[0] for path in files for name in imports_of(path)} - {package}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("channel", set()),
        ("router", {"protos", "channel", "checkpoints"}),
        ("engine", {"protos", "channel", "checkpoints", "kernels"}),
        ("kernels", set()),
        ("checkpoints", set()),
        ("clients", {"protos", "channel", "checkpoints", "router"}),  # router: `pagoda serve` starts it
    ],
)
def test_a_package_imports_only_what_its_place_allows(package: str, allowed: set[str]) -> None:
    assert packages_of(package) & PACKAGES <= allowed


@pytest.mark.parametrize("package", ["channel", "router", "checkpoints", "clients"])
def test_the_text_side_never_imports_torch(package: str) -> None:
    assert not packages_of(package) & {"torch", "transformers"}


@pytest.mark.parametrize("module", sorted(SCHEDULING))
def test_the_scheduler_needs_the_standard_library_alone(module: str) -> None:
    path = ROOT / "engine" / module
    files = list(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    names = {name for file in files for name in imports_of(file)}
    assert {name.split(".")[0] for name in names} - {"engine"} <= sys.stdlib_module_names
    ours = {name for name in names if name.startswith("engine.")}
    assert {name.split(".")[1] for name in ours} <= SCHEDULING


def test_nothing_unpickles() -> None:
    for package in ("channel", "router", "engine", "kernels", "checkpoints", "clients"):
        assert not packages_of(package) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def test_a_running_router_has_loaded_no_torch() -> None:
    check = "import router.main, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False).returncode == 0
