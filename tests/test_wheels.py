"""Both distributions as a user gets them: built, installed beside other packages, used from outside the tree."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parent.parent
KERNELS = "kernels==0.17.2"  # Hugging Face's
KERNELS_FILE = "pagoda_server/kernels/_native.abi3.so"  # ours
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

# The kernels are compiled once, which takes minutes where the cores are shared.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT | environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout.strip()


def build(hook: str, project: Path, out: Path, **environment: str) -> Path:
    """Call a hook of PEP 517 as pip and build do, in this environment, so that no index is needed."""
    script = f"from setuptools import build_meta; print('built ' + build_meta.{hook}({str(out)!r}))"
    return out / run(sys.executable, "-c", script, cwd=project, **environment).rpartition("built ")[2]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that git has or would add; links stay links."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def wheels(checkout: Path) -> dict[str, Path]:
    """Each distribution's wheel, as `make wheels` builds it from the checkout with this environment."""
    installed = [f"--old-file={sys.prefix}/{mark}" for mark in (".can-serve", ".can-develop")]
    command = ["make", "wheels", f"VENV={sys.prefix}", *installed]
    result = subprocess.run(
        command, cwd=checkout, env=ENVIRONMENT | {"MAKEFLAGS": ""}, capture_output=True, text=True, check=False
    )
    if "No matching distribution" in result.stderr:
        pytest.skip(f"no package index in reach: {result.stderr.splitlines()[-1]}")
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    out = checkout / "build" / "wheels"
    for path in out.glob("*.tar.gz"):
        with tarfile.open(path) as sdist:
            assert all(member.isfile() or member.isdir() for member in sdist), "an sdist holds files, no links"
    (client,), (server,) = out.glob("pagoda_client-*.whl"), out.glob("pagoda_server-*.whl")
    return {"client": client, "server": server}


def contents(wheel: Path) -> set[str]:
    files = (each.filename for each in zipfile.ZipFile(wheel).infolist() if not each.is_dir())
    return {name for name in files if ".dist-info/" not in name}


def metadata(wheel: Path) -> dict[str, list[str]]:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    message = Parser().parsestr(archive.read(name).decode())
    return {key: message.get_all(key, []) for key in ("Version", "Requires-Dist", "License-File")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the tree."""
    return tmp_path_factory.mktemp("elsewhere")


def environment(path: Path, *packages: str | Path, base: str | Path = sys.executable) -> Path:
    """The interpreter of a fresh environment with these packages; skips the test if no index is in reach.

    Nothing is compiled. `base` is the interpreter that it is made of.
    """
    run(base, "-m", "venv", path, cwd=path)
    python = path / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--retries=1", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", *map(str, packages)]
    result = subprocess.run(command, cwd=path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if "No matching distribution" in result.stderr:
        pytest.skip(f"no package index in reach: {result.stderr.splitlines()[-1]}")
    assert result.returncode == 0, result.stderr
    return python


@pytest.fixture(scope="module")
def server_python(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both wheels beside Hugging Face's `kernels`; dependencies, torch and transformers come from this environment."""
    python = environment(tmp_path_factory.mktemp("server"), "--no-deps", wheels["client"], wheels["server"], KERNELS)
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=python.parent))
    # Last in sys.path. Its own .pth files, as an editable installation has them, are not read.
    (site_packages / "development.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture(scope="module")
def address(server_python: Path, folder: Path) -> Iterator[str]:
    """The address of `pagoda serve`, run from the wheels."""
    command = [server_python.parent / "pagoda", "serve", "--model", "synthetic", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("starting on ")
            yield line.split()[-1]
        finally:
            process.terminate()


def interpreter(version: str) -> Path:
    """A CPython of this version, on the path or of pyenv. Skips the test if there is none."""
    name = f"python{version}"
    found = [Path(folder, name) for folder in os.get_exec_path()]
    found += sorted(
        Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob(f"versions/{version}.*/bin/{name}")
    )
    for path in found:
        asked = [path, "-c", "import ssl, venv, ensurepip, platform; print(platform.python_implementation())"]
        # A shim of pyenv is a program that does not run where its version is not chosen.
        if path.is_file() and subprocess.run(asked, capture_output=True, check=False).stdout == b"CPython\n":
            return path
    pytest.skip(f"no {name} is installed")


COMPUTE = """
import importlib.util, sys
import numpy as np
spec = importlib.util.spec_from_file_location("_native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
logits = np.random.default_rng(1).normal(size=(3, 70)).astype(np.float32)
rows, masks, tokens = np.arange(3), np.full((3, 3), 2**32 - 1, np.uint32), np.zeros(3, np.int64)
masks[:, 1] = 0
native.argmax(0, *(each.ctypes.data for each in (logits, rows, masks, tokens)), 3, 70)
logits[:, 32:64] = -np.inf
print((tokens == logits.argmax(axis=1)).all())
"""

CALL = """
import sys
from pagoda import Client
with Client(sys.argv[1], retries=100) as client:  # the engine takes a while to start
    print(sum(len(chunk.tokens) for chunk in client.generate(token_ids=[5, 6, 7], max_tokens=4)))
"""


def test_each_wheel_claims_one_import_name(wheels: dict[str, Path]) -> None:
    assert {name.partition("/")[0] for name in contents(wheels["client"])} == {"pagoda"}
    assert {name.partition("/")[0] for name in contents(wheels["server"])} == {"pagoda_server"}


def test_the_server_carries_the_files_of_its_page(wheels: dict[str, Path]) -> None:
    assets = {f"pagoda_server/router/http/assets/{path.name}" for path in (ROOT / "router/http/assets").iterdir()}
    assert assets <= contents(wheels["server"])


def test_the_client_is_typed_and_needs_three_packages(wheels: dict[str, Path]) -> None:
    names = contents(wheels["client"])
    assert "pagoda/py.typed" in names
    assert {name + "i" for name in names if name.endswith("_pb2.py")} == {
        name for name in names if name.endswith(".pyi")
    }
    needs = [
        requirement.partition("<")[0].partition(">")[0] for requirement in metadata(wheels["client"])["Requires-Dist"]
    ]
    assert needs == ["grpcio", "protobuf", "googleapis-common-protos"]


def test_the_server_pins_the_client_of_its_own_version(wheels: dict[str, Path]) -> None:
    (version,) = metadata(wheels["client"])["Version"]
    assert metadata(wheels["server"])["Version"] == [version]
    assert f"pagoda-client=={version}" in metadata(wheels["server"])["Requires-Dist"]


def test_both_carry_their_licence(wheels: dict[str, Path]) -> None:
    assert all(metadata(wheel)["License-File"] == ["LICENSE"] for wheel in wheels.values())


def test_a_wheel_without_a_compiler_lacks_only_the_compiled_module(
    wheels: dict[str, Path], checkout: Path, tmp_path: Path
) -> None:
    plain = build("build_wheel", checkout, tmp_path, CC="false", CXX="false")
    assert contents(wheels["server"]) - contents(plain) == {KERNELS_FILE}
    assert contents(plain) <= contents(wheels["server"])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="glibc's symbols have other versions there")
def test_the_kernels_fit_every_later_python_and_every_system_that_torch_runs_on(wheels: dict[str, Path]) -> None:
    _, _, _, tags = parse_wheel_filename(wheels["server"].name)
    assert {(tag.interpreter, tag.abi) for tag in tags} == {("cp311", "abi3")}
    versions = [re.fullmatch(r"manylinux_2_(\d+)_x86_64", tag.platform) for tag in tags]
    assert min(int(version[1]) for version in versions if version) <= 28, "torch's wheels have manylinux_2_28"


def test_the_kernels_have_every_instruction_set_of_the_architecture(wheels: dict[str, Path]) -> None:
    sets = {"x86_64": ("amx", "avx512", "avxvnni", "avx2"), "aarch64": ("neon-i8mm", "neon")}[platform.machine()]
    compiled = zipfile.ZipFile(wheels["server"]).read(KERNELS_FILE)
    assert [name for name in (*sets, "generic") if f"{name}\0".encode() not in compiled] == []


def test_the_server_lives_beside_kernels_and_transformers(server_python: Path, folder: Path) -> None:
    script = """
import importlib.metadata, kernels, transformers, pagoda, pagoda_server.engine, pagoda_server.kernels as ours
from transformers import LlamaForCausalLM
assert "kernels" in importlib.metadata.packages_distributions()["kernels"]
assert kernels.get_kernel and not hasattr(kernels, "load_backend")
assert ours.has_native() and ours.load_backend("native")
print(*(module.__file__ for module in (kernels, pagoda, pagoda_server)))
"""
    places = run(server_python, "-c", script, cwd=folder).splitlines()[-1].split()
    assert all(Path(place).is_relative_to(server_python.parent.parent) for place in places)


def test_the_command_tells_its_version(server_python: Path, wheels: dict[str, Path], folder: Path) -> None:
    (version,) = metadata(wheels["server"])["Version"]
    assert run(server_python.parent / "pagoda", "--version", cwd=folder) == f"pagoda {version}"


def test_the_command_and_the_client_call_an_installed_server(server_python: Path, address: str, folder: Path) -> None:
    assert run(server_python, "-c", CALL, address, cwd=folder) == "4"
    assert run(server_python.parent / "pagoda", "status", "--address", address, cwd=folder)


def test_the_client_alone_calls_a_server(
    wheels: dict[str, Path], address: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    python = environment(tmp_path_factory.mktemp("client"), wheels["client"])
    assert run(python, "-c", CALL, address, cwd=folder) == "4"
    absent = "import importlib.util as u; print([n for n in ('torch', 'numpy', 'pagoda_server') if u.find_spec(n)])"
    assert run(python, "-c", absent, cwd=folder) == "[]"


@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_the_same_wheel_computes_and_serves_on_a_newer_python(
    version: str, wheels: dict[str, Path], tmp_path: Path
) -> None:
    """Without torch: what is ours, and the packages that the router needs."""
    python = environment(tmp_path, wheels["client"], wheels["server"], base=interpreter(version))
    (kernels,) = tmp_path.glob(f"lib/python{version}/site-packages/{KERNELS_FILE}")
    assert run(python, "-c", COMPUTE, kernels, cwd=tmp_path) == "True"
    socket = f"unix:{tmp_path}/engine.sock"
    engine = [python, "-m", "pagoda_server.engine", "--model", "synthetic", "--listen", socket]
    router = [python.parent / "pagoda", "serve", "--model", "synthetic", "--engine", socket, "--listen", "127.0.0.1:0"]
    with (
        subprocess.Popen(engine, cwd=tmp_path, env=ENVIRONMENT) as serving,
        subprocess.Popen(router, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("starting on ")
            assert run(python, "-c", CALL, line.split()[-1], cwd=tmp_path) == "4"
        finally:
            process.terminate()
            serving.terminate()
