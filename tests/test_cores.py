"""The cores that a process may use: its affinity, and what control groups leave of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda_server.runtime import cores
from pagoda_server.runtime.cores import usable_cores


@pytest.fixture(autouse=True)
def _eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def usable(tmp_path: Path, group: str = "0::/", **limits: str) -> int:
    """The cores where the process is in this group; limits: what cpu.max says of `root`, `pod` and `pod/engine`."""
    folders = {"root": ".", "pod": "pod", "engine": "pod/engine"}
    (tmp_path / "pod" / "engine").mkdir(parents=True)
    for name, content in limits.items():
        (tmp_path / folders[name] / "cpu.max").write_text(content)
    (tmp_path / "cgroup").write_text(f"12:cpuset:/elsewhere\n{group}\n")
    return usable_cores(tmp_path / "cgroup", tmp_path)


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({}, 8),
        ({"root": "max 100000"}, 8),
        ({"root": "200000 100000"}, 2),
        ({"root": "150000 100000"}, 2),
        ({"root": "1000 100000"}, 1),
        ({"root": "6400000 100000"}, 8),
        ({"root": "nonsense"}, 8),
        ({"root": "1 0"}, 8),
        ({"root": "-1 100000"}, 1),
    ],
)
def test_a_containers_limit_counts(tmp_path: Path, limits: dict[str, str], count: int) -> None:
    assert usable(tmp_path, **limits) == count


def test_the_least_limit_of_all_groups_around_a_process_counts(tmp_path: Path) -> None:
    assert usable(tmp_path, "0::/pod/engine", pod="300000 100000", engine="500000 100000") == 3


def test_a_machine_without_such_groups_has_the_cores_of_the_affinity(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "no file", tmp_path) == 8
    assert usable(tmp_path, "4:cpu:/pod", pod="100000 100000") == 8, "cgroup v1 says it elsewhere"


def test_a_system_without_affinity_counts_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cores.os, "sched_getaffinity")
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 6)
    assert usable_cores(tmp_path / "no file", tmp_path) == 6
