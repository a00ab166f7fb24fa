"""The images, built by buildah, and run as the Helm chart runs them. Needs root, buildah and debootstrap.

Where no registry of images is in reach, the base is made here: Debian's packages, and the Python that runs this. Both
containers share a network of their own, as if they were one pod. Neither limits of resources nor seccomp are applied.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from platform import freedesktop_os_release
from typing import Any

import pytest

from pagoda_server.checkpoints import DEFAULT_MODEL, resolve
from tests.counterparts.environments import HOME, program
from tests.counterparts.test_helm import container_of, pod_of
from tests.servers import ROOT
from tests.test_locks import entries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

OWN_BASE = "PAGODA_TEST_BASE"  # an image to build on, in place of one that is made here
MOST_MB = {"router": 200, "engine": 920}  # beside the base, whose size is not ours
VALUES = "values/cpu.yaml"
NETWORK = "pagoda-images"
TOKEN = "0123456789abcdef" * 2
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
LIBRARIES = "ca-certificates,libbz2-1.0,libffi8,liblzma5,libreadline8,libsqlite3-0,libssl3,libuuid1,zlib1g"


def run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can build and run images here")
    for each in ("buildah", "ip", "unshare"):
        program(each)


@cache
def base() -> str:
    """An image like python:3.…-slim."""
    if given := os.environ.get(OWN_BASE):
        return given
    program("debootstrap")
    root = HOME / "images" / "base"
    shutil.rmtree(root, ignore_errors=True)
    suite = freedesktop_os_release()["VERSION_CODENAME"]
    run("debootstrap", "--variant=minbase", f"--include={LIBRARIES}", suite, root)
    prefix, local = Path(sys.base_prefix), root / "usr" / "local"
    left_out = shutil.ignore_patterns(
        "site-packages", "__pycache__", "test", "tests", "idlelib", "config-*", "ensurepip"
    )
    for folder in (f"lib/{PYTHON}", f"include/{PYTHON}"):
        shutil.copytree(prefix / folder, local / folder, symlinks=True, ignore=left_out, dirs_exist_ok=True)
    shutil.copytree(prefix / f"lib/{PYTHON}/ensurepip", local / f"lib/{PYTHON}/ensurepip")
    for path in (prefix / f"bin/{PYTHON}", *prefix.glob("lib/libpython*.so*")):
        shutil.copy2(path, local / path.relative_to(prefix), follow_symlinks=False)
    (local / "bin" / "python3").symlink_to(PYTHON)
    (local / "bin" / "python").symlink_to(PYTHON)
    run("chroot", root, "ldconfig")
    run("chroot", root, f"/usr/local/bin/{PYTHON}", "-m", "ensurepip", "--default-pip")
    shutil.rmtree(local / f"lib/{PYTHON}/ensurepip")
    for waste in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(root / waste, ignore_errors=True)
    for folder in ("var/cache/apt/archives/partial", "var/lib/apt/lists/partial"):
        (root / folder).mkdir(parents=True)
    name = "localhost/pagoda-base"
    container = run("buildah", "from", "scratch")
    run("buildah", "add", "--quiet", container, root, "/")
    run("buildah", "config", "--cmd", "python3", container)
    run("buildah", "commit", "--quiet", "--rm", container, name)
    return name


def pip_settings() -> list[str]:
    """Options that give a build the index, certificates and files that this host's pip is configured with."""
    listed = run(sys.executable, "-m", "pip", "config", "list")
    found = dict(re.findall(r"^(?:global|:env:)\.(index-url|cert|constraint|find-links)='(.*)'$", listed, re.MULTILINE))
    written = HOME / "images" / "pip.conf"
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in found.items()))
    paths = {value for value in found.values() if Path(value).exists()}
    return [f"--volume={written}:/etc/pip.conf:ro", *(f"--volume={path}:{path}:ro" for path in sorted(paths))]


@cache
def image(target: str) -> str:
    """The name of the image of a target of the Dockerfile."""
    name = f"localhost/pagoda-{target}"
    arguments = [f"--build-arg=BASE={base()}", f"--build-arg=TORCH_INDEX={os.environ.get('TORCH_INDEX', '')}"]
    options = ["--isolation=chroot", "--network=host", "--layers", f"--target={target}", f"--tag={name}"]
    run("buildah", "build", *options, *arguments, *pip_settings(), ROOT)
    return name


def inspected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("buildah", "inspect", "--type=image", name))
    return found["Docker"]["config"]  # type: ignore[no-any-return]


@contextlib.contextmanager
def root_of(name: str) -> Iterator[Path]:
    container = run("buildah", "from", name)
    try:
        yield Path(run("buildah", "mount", container))
    finally:
        run("buildah", "rm", container)


def size_mb(root: Path) -> float:
    return int(run("du", "--summarize", "--block-size=1", root).split()[0]) / 1e6


@pytest.fixture(scope="module")
def network() -> Iterator[str]:
    """A network that has its own loopback device and nothing else."""
    run("ip", "netns", "add", NETWORK)
    try:
        run("ip", "-n", NETWORK, "link", "set", "lo", "up")
        yield NETWORK
    finally:
        run("ip", "netns", "delete", NETWORK)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the volumes of the chart's pods hold, by name."""
    folder = tmp_path_factory.mktemp("volumes")
    shutil.copytree(resolve(DEFAULT_MODEL), folder / "models" / "models" / DEFAULT_MODEL)
    for secret in ("channel", "auth"):
        (folder / secret).mkdir()
        (folder / secret / "token").write_text(TOKEN)
        (folder / secret / "token").chmod(0o440)
        os.chown(folder / secret / "token", 0, 10001)
    (folder / "hosts").write_text("127.0.0.1 localhost here-engine\n")
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o040 if path.name == "token" else 0o044))
    return {path.name: path for path in folder.iterdir()}


# $0 is the root, $1 the folder with what is mounted, by the paths there; then comes the command.
CONTAINER = """
set -e
mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"
mount -t proc proc "$0/proc"
mount --bind /dev "$0/dev"
while read -r kind from to; do
    case $kind in
        tmpfs) mount -t tmpfs tmpfs "$0$to" ;;
        bind) mount --bind "$from" "$0$to" && mount -o remount,ro,bind "$0$to" ;;
    esac
done <"$1"
shift
exec chroot "$0" /usr/bin/setpriv --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""


def command_of(component: str, name: str, root: Path, folder: Path, volumes: dict[str, Path]) -> list[str | Path]:
    """What runs a container as the chart describes it."""
    given, pod, config = container_of(VALUES, component), pod_of(VALUES, component), inspected(name)
    assert given["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    kinds = {each["name"]: each for each in pod["volumes"]}
    mounts = [f"bind {volumes['hosts']} /etc/hosts", "tmpfs none /dev/shm"]
    for each in given["volumeMounts"]:
        (root / each["mountPath"].lstrip("/")).mkdir(parents=True, exist_ok=True)
        if "emptyDir" in kinds[each["name"]] and each["name"] != "models":
            mounts.append(f"tmpfs none {each['mountPath']}")
        else:
            assert each["readOnly"]
            mounts.append(f"bind {volumes[each['name']]} {each['mountPath']}")
    (folder / f"{component}.mounts").write_text("".join(f"{line}\n" for line in mounts))
    user, env = pod["securityContext"], [f"{each['name']}={each['value']}" for each in given["env"] if "value" in each]
    inside = ["ip", "netns", "exec", NETWORK, "unshare", "-m", "-p", "-i", "-u", "--fork", "--kill-child", "sh", "-c"]
    rights = [f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}"]
    command = ["/usr/bin/env", "-i", *config["Env"], *env, *config["Entrypoint"], *given["args"]]
    return [*inside, CONTAINER, root, folder / f"{component}.mounts", *rights, *command]


@contextlib.contextmanager
def running(component: str, folder: Path, volumes: dict[str, Path]) -> Iterator[subprocess.Popen[str]]:
    """A container of the chart, which is killed unless it has ended."""
    name = image(component)
    with root_of(name) as root, (folder / f"{component}.log").open("w") as log:
        command = command_of(component, name, root, folder, volumes)
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)


def until(command: list[str], process: subprocess.Popen[str], log: Path) -> str:
    """What a command prints once it succeeds."""
    end = time.monotonic() + 180
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"NO_PROXY": "*"})
        if done.returncode == 0:
            return done.stdout
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < end, f"{done.stdout}{done.stderr}{log.read_text()[-4000:]}"
        time.sleep(0.5)


@pytest.mark.parametrize("target", ["router", "engine"])
def test_an_image_is_small_lists_what_it_holds_and_has_no_compiler(target: str) -> None:
    with root_of(image(target)) as root, root_of(base()) as below:
        print(f"pagoda-{target}: {size_mb(root):.0f} MB, of which the base has {size_mb(below):.0f}")
        assert size_mb(root) - size_mb(below) <= MOST_MB[target]
        listed = json.loads((root / "usr/local/share/pagoda/sbom.cdx.json").read_text())
        names = {each["name"] for each in listed["components"]}
        versions = {each["name"].lower().replace("_", "-"): each["version"] for each in listed["components"]}
        assert entries("base").items() <= versions.items()
        assert {"pagoda-server", "grpcio", "libc6"} <= names
        assert ("torch" in names) == (target == "engine")
        assert not (root / "usr/bin/g++").exists()
        (kernels,) = root.glob("usr/local/lib/python*/site-packages/pagoda_server/kernels/_native*.so")
        assert kernels.stat().st_size > 1 << 20
    assert inspected(image(target))["User"] == "pagoda"


def test_the_images_serve_as_the_chart_runs_them(network: str, volumes: dict[str, Path], tmp_path: Path) -> None:
    inside = ["ip", "netns", "exec", network]
    client = [*inside, "env", f"PAGODA_AUTH_TOKEN={TOKEN}", sys.executable, "-m", "pagoda_server.cli"]
    with running("engine", tmp_path, volumes) as engine, running("router", tmp_path, volumes) as router:
        until([*client, "health", "--address=127.0.0.1:50053"], engine, tmp_path / "engine.log")
        until([*client, "health", "--address=127.0.0.1:50051"], router, tmp_path / "router.log")
        ask = [*client, "generate", "--address=127.0.0.1:50051", "--temperature=0", "What is the capital of Sweden?"]
        assert "Stockholm" in until(ask, router, tmp_path / "router.log")
        for component, process in (("router", router), ("engine", engine)):
            (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            status = Path(f"/proc/{child}/status").read_text()
            assert re.search(r"^Uid:(\s+10001){4}$", status, re.MULTILINE)
            assert re.search(r"^CapBnd:\s+0+$", status, re.MULTILINE)
            os.kill(int(child), signal.SIGTERM)
            assert process.wait(60) == 0, (tmp_path / f"{component}.log").read_text()[-4000:]
