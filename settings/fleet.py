"""The settings of `pagoda fleet`: where its engines run, how many there are, and those that each engine gets."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ..channel.address import check_address, is_unix
from .engine import CommonSettings, EngineSettings
from .router import ServeConfig
from .setting import SettingError, setting
from .sources import read_settings

LOCAL = "local"
MAX_ROUTERS = 256
ENGINE_WAIT_S = 300.0  # --engine-wait-s of the routers of a fleet that may have no engine, unless their file says more
MAX_ENGINES = 1024  # as many as a router's file of members may name
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_OF_CHANNEL = ("channel_tls_cert", "channel_tls_key", "channel_tls_ca", "channel_tls_name", "channel_token_file")
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
        return found

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


def _check_namespace(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"must be 1 to 63 letters, digits or ._-, not {name!r}")


def _check_metrics(address: str) -> None:
    if is_unix(address):
        raise ValueError(f"must be HOST:PORT, not {address}")
    check_address(address, can_be_shm=False, lowest_port=0)


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
        "1",
        "How many engines: a number, or MIN..MAX, between which their load decides. With 0..MAX there is none until a "
        "request waits at a router, and none again once the last one has been idle.",
        check=Bounds.of,
    )  # fmt: skip
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
    scale_to_zero_s: float = setting(
        600.0, "Seconds in which the last engine of 0..MAX must compute nothing before it ends.",
        unit="seconds", at_least=0,
    )  # fmt: skip
    routers: int = setting(
        0, "Routers that Ray places beside the engines; each uses all of them.",
        unit="routers", at_least=0, at_most=MAX_ROUTERS,
    )  # fmt: skip
    router_config: str | None = setting(
        None,
        "TOML file of the routers' settings, as for `pagoda serve --config`. Files that it names must be at the same "
        "paths on every machine.",
        is_private=True,
    )  # fmt: skip
    router_port: int = setting(
        0, "Port at which each router listens, at its machine's address. 0: a free one.", at_least=0, at_most=65535,
        unit="port",
    )  # fmt: skip
    router_cpus: float = setting(1.0, "CPUs that Ray keeps for each router.", unit="CPUs", at_least=0, at_most=4096)
    metrics: str | None = setting(
        None, "Address at which the driver shows its own metrics to Prometheus: HOST:PORT.",
        check=_check_metrics, is_private=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guards_of_channel:
            raise SettingError(f"{self.guards_of_channel[0]}: a fleet makes its own certificates and token in --folder")
        self._router_settings()

    def _router_settings(self) -> dict[str, object]:
        """What --router-config has. Raises SettingError."""
        if self.router_config is None:
            return {}
        settings = read_settings(Path(self.router_config), ServeConfig)
        if decided := sorted({"engine", "listen", "exit_with_parent", *_OF_CHANNEL} & settings.keys()):
            raise SettingError(f"--router-config: {decided[0]}: the fleet decides that itself")
        ServeConfig(**settings)  # type: ignore[arg-type]  # it checks them
        return settings

    @property
    def router_options(self) -> list[str]:
        """What routers of this fleet need besides the channel's options."""
        may_be_none = self.bounds.least == 0 and "engine_wait_s" not in self._router_settings()
        return [f"--engine-wait-s={ENGINE_WAIT_S}"] if may_be_none else []

    def router_arguments(self) -> list[str]:
        """The command line of each router, without its address, its engines and what guards the channel."""
        return [*replace(self, model=_absolute(self.model)).arguments(CommonSettings), *self.router_options]

    def router_files(self) -> dict[str, bytes]:
        """The files that this host has for each router, by option. Raises OSError."""
        return {} if self.router_config is None else {"--config": Path(self.router_config).read_bytes()}

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
