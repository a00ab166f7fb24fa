"""systemd starts the units of deploy/systemd, as they are, and restarts what hangs. Needs root, systemd and cgroup2.

It is the first process of namespaces of its own, with no units but ours, in a part of the hierarchy of control groups
that ends with it. The units' `/opt/pagoda` is this environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.counterparts.environments import program
from tests.servers import ROOT
from tests.test_systemd import NAMES, UNITS

pytestmark = [pytest.mark.counterpart, pytest.mark.timeout(300)]

SYSTEMD = Path("/lib/systemd/systemd")
WATCHDOG_S = 8  # in place of the units' own, which is longer than a test should last
SETTINGS = {
    "pagoda.toml": 'model = "synthetic"\nengine = "a=unix:/run/pagoda/a.sock"\n',
    "engine-a.toml": 'model = "synthetic"\n',
}
DROP_IN = f"""
[Service]
WatchdogSec={WATCHDOG_S}
StandardOutput=append:/mnt/log
StandardError=append:/mnt/log
"""
# What the units' dependencies name, and no more of an operating system.
TARGETS = ("sysinit", "basic", "shutdown", "network-online", "multi-user")
# $0 is a folder with units, settings and a log, $1 the prefix of Python, $2 the repository, $3 Python's packages.
MACHINE = """
set -e
mount --bind "$0" /mnt
mount -t tmpfs tmpfs /opt && mkdir -p /opt/python /opt/source /opt/packages /opt/pagoda/bin
mount --bind "$1" /opt/python && mount --bind "$2" /opt/source && mount --bind "$3" /opt/packages
cat >/opt/pagoda/bin/python <<'END'
#!/bin/sh
export PYTHONPATH=/opt/source/src:/opt/source/clients/python:/opt/packages LD_LIBRARY_PATH=/opt/python/lib
exec /opt/python/bin/python3 "$@"
END
cat >/opt/pagoda/bin/pagoda <<'END'
#!/bin/sh
exec /opt/pagoda/bin/python -m pagoda_server.cli "$@"
END
chmod 755 /opt/pagoda/bin/*
for each in /run /var/cache /var/tmp; do mount -t tmpfs tmpfs $each; done
mkdir /run/upper /run/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work /etc
cp -r /mnt/settings /etc/pagoda
systemd-sysusers /mnt/pagoda-sysusers.conf
umount -R /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys
mount --bind /mnt/console /dev/console
export container=pagoda SYSTEMD_UNIT_PATH=/mnt/units
exec /lib/systemd/systemd --system --unit=multi-user.target
"""


class Machine:
    """A systemd that runs, and what is run beside it."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self.log = folder / "log"

    def tried(self, *command: str) -> subprocess.CompletedProcess[str]:
        pid = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().strip() or "none"
        inside = [program("nsenter"), f"--target={pid}", "--mount", "--pid", "--net"]
        return subprocess.run([*inside, *command], capture_output=True, text=True, check=False, timeout=120)

    def run(self, *command: str) -> str:
        done = self.tried(*command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}\n{self.tail()}"
        return done.stdout.strip()

    def shows(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", "--value", f"--property={name}", unit)

    def tail(self) -> str:
        return self.log.read_text()[-4000:]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    program("unshare"), program("systemctl"), program("systemd-sysusers")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    groups = next((Path(point) for _, point, kind, *_ in mounts if kind == "cgroup2"), None)
    if os.geteuid() != 0 or not SYSTEMD.exists() or groups is None:
        pytest.skip("needs root, systemd and a hierarchy of cgroup2")
    tmp_path.chmod(0o755)
    for name, text in SETTINGS.items():
        (tmp_path / "settings").mkdir(exist_ok=True)
        (tmp_path / "settings" / name).write_text(text)
    units = tmp_path / "units"
    for name in NAMES:
        (units / f"{name}.d").mkdir(parents=True)
        (units / f"{name}.d" / "test.conf").write_text(DROP_IN)
        shutil.copy(UNITS / name, units)
    for target in TARGETS:
        (units / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    shutil.copy(UNITS / "pagoda-sysusers.conf", tmp_path)
    for name in ("log", "console"):
        (tmp_path / name).touch()
    group = groups / f"pagoda-test-{os.getpid()}"
    group.mkdir()
    enters = f"echo $$ >{group}/cgroup.procs && exec unshare -m -p -C -i -u -n --fork --kill-child --mount-proc sh -c"
    given = [tmp_path, sys.base_prefix, ROOT, sysconfig.get_path("purelib")]
    process = subprocess.Popen(["sh", "-c", f'{enters} "$@"', "sh", MACHINE, *given], stdin=subprocess.DEVNULL)
    try:
        yield Machine(process, tmp_path)
    finally:
        process.kill()
        process.wait()
        until(lambda: not (group / "cgroup.events").read_text().startswith("populated 1"), 30)
        for each in sorted(group.rglob("*/"), reverse=True):
            each.rmdir()
        group.rmdir()


def until(is_so: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.2)


def test_systemd_starts_both_units_and_restarts_what_hangs(machine: Machine) -> None:
    ask = ("/opt/pagoda/bin/pagoda", "generate", "--max-tokens=3", "Hello")
    units = ("pagoda-engine@a.service", "pagoda.service")
    until(lambda: machine.tried("systemctl", "show").returncode == 0, 30)
    machine.run("systemctl", "start", *units)
    for number, unit in enumerate(units, start=1):
        machine.run(*ask)
        pid = machine.shows(unit, "MainPID")
        assert machine.run("stat", "--format=%U", f"/proc/{pid}") == "pagoda"
        machine.run("kill", "-STOP", pid)
        until(lambda unit=unit: machine.shows(unit, "NRestarts") == "1", 3 * WATCHDOG_S)
        until(lambda unit=unit: machine.shows(unit, "ActiveState") == "active", 60)
        assert machine.shows(unit, "MainPID") != pid
        assert machine.log.read_text().count("Fatal Python error: Aborted") == number, (
            "the stacks of its threads follow"
        )
    until(lambda: machine.tried(*ask).returncode == 0, 30)
    machine.run("systemctl", "stop", *units)
    assert [machine.shows(unit, "Result") for unit in units] == ["success", "success"]
