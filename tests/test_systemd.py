"""The units of deploy/systemd, as far as they can be checked without a systemd that runs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

import pytest

from pagoda_server.runtime.service_manager import REPORTS
from pagoda_server.settings import EngineConfig, ServeConfig

UNITS = Path(__file__).parent.parent / "deploy" / "systemd"
NAMES = ("pagoda.service", "pagoda-engine@.service")
EXPOSURE = 30  # tenths of the points that systemd gives at most: it calls fewer than 50 "OK"


def section(name: str) -> dict[str, str]:
    """The settings of [Service]; of one that is given several times, the last."""
    parser = RawConfigParser(strict=False, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment]  # names keep their capitals
    parser.read(UNITS / name)
    return dict(parser["Service"])


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units in a folder, with the programs of this environment."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for name in NAMES:
        text = (UNITS / name).read_text()
        assert "/opt/pagoda/bin/" in text
        (tmp_path / name).write_text(text.replace("/opt/pagoda/bin/", f"{sys.prefix}/bin/"))
    return tmp_path


def test_systemd_finds_nothing_wrong(installed: Path) -> None:
    units = [installed / "pagoda.service", installed / "pagoda-engine@.service"]
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )
    ours = [line for line in result.stderr.splitlines() if "pagoda" in line]
    assert (result.returncode, ours) == (0, [])


@pytest.mark.parametrize("name", NAMES)
def test_systemd_calls_the_exposure_low(installed: Path, name: str) -> None:
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", installed / name]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in result.stderr:
        pytest.skip("this systemd is older than 250")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr


@pytest.mark.parametrize(("name", "config"), [(NAMES[0], ServeConfig), (NAMES[1], EngineConfig)])
def test_a_unit_waits_longer_than_running_requests_may_take(name: str, config: type[ServeConfig]) -> None:
    assert float(section(name)["TimeoutStopSec"]) >= config().grace_s + 5


@pytest.mark.parametrize(("name", "config"), [(NAMES[0], ServeConfig), (NAMES[1], EngineConfig)])
def test_a_unit_has_more_patience_than_a_step_that_is_no_hang(name: str, config: type[ServeConfig]) -> None:
    """A report may come so late: the pause between two, and the longest step."""
    service = section(name)
    watchdog_s = float(service["WatchdogSec"])
    assert watchdog_s / REPORTS + config().hang_timeout_s < watchdog_s
    assert service["Type"] == "notify"
    assert service["Restart"] == "on-failure", "which a silent service is, too"


def test_both_units_are_of_one_user_who_exists_and_meet_in_one_folder() -> None:
    server, engine = (section(name) for name in NAMES)
    assert (UNITS / "pagoda-sysusers.conf").read_text().split()[:2] == ["u", server["User"]]
    for shared in ("User", "Group", "RuntimeDirectory", "CacheDirectory", "Environment", "SystemCallFilter"):
        assert server[shared] == engine[shared]
    assert server["RuntimeDirectoryPreserve"] == engine["RuntimeDirectoryPreserve"] == "yes", "of the one that goes on"
    assert f"unix:/run/{engine['RuntimeDirectory']}/%i.sock" in shlex.split(engine["ExecStart"])
    assert f"PAGODA_CACHE=/var/cache/{server['CacheDirectory']}" in server["Environment"].split()


@pytest.mark.parametrize(
    ("name", "command"), [(NAMES[0], ("pagoda_server.cli", "serve")), (NAMES[1], ("pagoda_server.engine",))]
)
def test_the_options_of_the_commands_exist(name: str, command: tuple[str, ...]) -> None:
    options = re.findall(r"--[a-z-]+", section(name)["ExecStart"])
    shown = subprocess.run(
        [sys.executable, "-m", *command, "--help"],
        env={"COLUMNS": "200", "TERM": "dumb", "PATH": ""}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert options
    assert [option for option in options if option not in shown] == []
