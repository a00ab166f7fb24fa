"""The settings of `pagoda fleet`: where its engines run, how many there are, and those that each engine gets."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from .engine import EngineSettings
from .setting import SettingError, setting

LOCAL = "local"
MAX_ENGINES = 1024  # as many as a router's file of members may name
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_BOUNDS = re.compile(r"(\d{1,4})(?:\.\.(\d{1,4}))?")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The fewest and the most engines of a fleet."""

    least: int
    most: int

    @classmethod
    def of(cls, text: str) -> Bounds:
        """Parse N or MIN..MAX. Raises ValueError."""
        match = _BOUNDS.fullmatch(text)
        found = cls(int(match[1]), int(match[2] or match[1])) if match else None
        if found is None or not found.least <= found.most <= MAX_ENGINES:
            raise ValueError(f"must be a number of engines or MIN..MAX, at most {MAX_ENGINES}, not {text!r}")
        if found.most > found.least == 0:
            raise ValueError(f"must have at least one engine, or exactly 0, not {text}: without one there is no load")
        return found

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


def _check_namespace(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"must be 1 to 63 letters, digits or ._-, not {name!r}")


def _check_ray(address: str) -> None:
    if not (address and address.isprintable()) or "://" in address:
        raise ValueError(f"must be local, auto or HOST:PORT of a Ray cluster's head, not {address!r}")


@dataclass(frozen=True)
class FleetConfig(EngineSettings):
    """Settings of `pagoda fleet`: its own, and those that it starts every engine with."""

    ray: str = setting(
        LOCAL,
        "Where the engines run: HOST:PORT of a Ray cluster's head, auto for the cluster of this host, or local, which "
        "starts Ray on this host alone.",
        check=_check_ray, is_private=True,
    )  # fmt: skip
    namespace: str = setting(
        "pagoda", "Name of the fleet in its Ray cluster: fleets of other names are left alone.", check=_check_namespace
    )
    folder: str = setting(
        "pagoda-fleet",
        "Folder of the fleet: engines.json, which routers follow, the channel's certificates and token, and the socket "
        "of the other commands.",
        is_private=True,
    )  # fmt: skip
    engines: str = setting(
        "1", "How many engines: a number, or MIN..MAX, between which their load decides.", check=Bounds.of
    )
    engine_cpus: float = setting(
        1.0,
        "CPUs that Ray keeps for each engine. Without --threads and a GPU an engine computes on as many.",
        unit="CPUs", at_least=0, at_most=4096,
    )  # fmt: skip
    engine_gpus: float = setting(0.0, "GPUs that Ray keeps for each engine.", unit="GPUs", at_least=0, at_most=64)
    engine_memory_gb: float = setting(
        0.0, "Memory that Ray keeps for each engine, in GB. 0: Ray does not count it.",
        unit="GB", at_least=0, at_most=1_000_000,
    )  # fmt: skip
    target_ttft_s: float = setting(
        2.0,
        "Longest time to the first token, as the engines' load predicts it, before another engine is started.",
        unit="seconds", above=0,
    )  # fmt: skip
    scale_up_s: float = setting(
        10.0, "Seconds without a break that the load must ask for another engine.", unit="seconds", at_least=0
    )
    scale_down_s: float = setting(
        300.0, "Seconds without a break that the load must allow one engine fewer.", unit="seconds", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guards_of_channel:
            raise SettingError(f"{self.guards_of_channel[0]}: a fleet makes its own certificates and token in --folder")

    @property
    def bounds(self) -> Bounds:
        return Bounds.of(self.engines)

    def engine_arguments(self) -> list[str]:
        """The command line of each engine, without its address and what guards it.

        Paths of this host are absolute in it: the same file or folder must be there on every host.
        """
        model, draft_model, kv_store = map(_absolute, (self.model, self.draft_model, self.kv_store))
        given = replace(self, model=model, draft_model=draft_model, kv_store=kv_store)
        arguments = given.arguments(EngineSettings)
        if self.threads is None and not self.engine_gpus and self.engine_cpus >= 1:
            arguments.append(f"--threads={int(self.engine_cpus)}")  # not a setting here: this host may have fewer cores
        return arguments


def _absolute(name: str) -> str:
    return str(Path(name).resolve()) if name and Path(name).exists() else name
