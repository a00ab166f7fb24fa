"""How many cores this process may use, which in a container are often fewer than the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

GROUP_FILE = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def usable_cores(group_file: Path = GROUP_FILE, groups: Path = GROUPS) -> int:
    """Return the cores that the process's affinity allows, or fewer if a control group limits its processor time.

    A limit of 1.5 cores counts as two. Only cgroup v2 has such files; with v1 the affinity alone counts.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [_limit(folder / "cpu.max") for folder in _own_groups(group_file, groups)]
    return max(1, min([cores, *(math.ceil(limit) for limit in limits if limit < cores)]))


def _own_groups(group_file: Path, groups: Path) -> list[Path]:
    """Return the folder of the process's control group and those of the groups around it."""
    try:
        lines = group_file.read_text().splitlines()
    except OSError:
        return []
    names = [Path(line.removeprefix("0::").lstrip("/")) for line in lines if line.startswith("0::")]
    return [groups / each for name in names for each in (name, *name.parents)]


def _limit(file: Path) -> float:
    """Return the cores of processor time that a group may use; infinity: it has no limit, or no such file."""
    try:
        quota, period = file.read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
