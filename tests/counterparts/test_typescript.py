"""The TypeScript client, in Node: its types, its generated code, and its tests against servers that they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.counterparts.environments import program

pytestmark = pytest.mark.counterpart

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients" / "typescript"
GENERATOR_NEEDS = 20  # protoc-gen-es, which users of the client do not run


def run(*command: str) -> None:
    """Run a command in the client's folder; it must succeed."""
    path = os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)])  # buf is there
    environment = {**os.environ, "PATH": path, "PAGODA_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=CLIENT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


@pytest.fixture(scope="module")
def npm() -> str:
    """npm, with the client's dependencies installed as its lock file says."""
    npm = program("npm")
    run(npm, "ci", "--ignore-scripts", "--no-fund", "--no-audit")
    return npm


def test_types_fit(npm: str) -> None:
    run(npm, "run", "check")


def test_the_client_behaves_and_gives_what_the_vectors_say(npm: str) -> None:
    run(npm, "test")


def test_generated_code_is_fresh(npm: str, tmp_path: Path) -> None:
    version = subprocess.check_output([program("node"), "--version"], text=True)
    if int(version.removeprefix("v").split(".")[0]) < GENERATOR_NEEDS:
        pytest.skip(f"the generator needs Node {GENERATOR_NEEDS}")
    run(npm, "run", "generate", "--", "--output", str(tmp_path))
    folders = {"committed": CLIENT / "src" / "gen", "generated": tmp_path / "src" / "gen"}
    files = {
        name: {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.ts")}
        for name, folder in folders.items()
    }
    assert files["generated"] == files["committed"], "stale: npm run generate"


def test_the_package_has_what_its_users_import(npm: str, tmp_path: Path) -> None:
    run(npm, "run", "build")
    run(npm, "pack", "--ignore-scripts", "--pack-destination", str(tmp_path))
    (package,) = tmp_path.glob("*.tgz")
    user = tmp_path / "user"
    user.mkdir()
    (user / "package.json").write_text('{"type": "module"}')
    subprocess.run([npm, "install", "--silent", "--no-fund", "--no-audit", package], cwd=user, check=True)
    assert not (user / "node_modules" / "typescript").exists()
    program_text = "import { Pagoda } from 'pagoda-client'; import { Inference } from 'pagoda-client/protos'; "
    told = subprocess.check_output(
        [program("node"), "--input-type=module", "-e", program_text + "console.log(Pagoda.name, Inference.typeName)"],
        cwd=user,
        text=True,
    )
    assert told == "Pagoda pagoda.v1.Inference\n"
    assert (user / "node_modules" / "pagoda-client" / "LICENSE").exists()
