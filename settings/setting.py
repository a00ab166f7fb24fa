"""A setting: a field of a frozen dataclass that carries its help, unit, range and panel."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

Value = TypeVar("Value")

GENERAL = "Options"
LIMITS = "Limits"
EXPOSURE = "Exposure"
TELEMETRY = "Telemetry"
ENGINE_MODEL = "Engine: model"
ENGINE_KV_CACHE = "Engine: KV cache"
ENGINE_SCHEDULING = "Engine: scheduling"
DEVICE_NAMES = {"cpu": "a CPU", "cuda": "a GPU"}  # by torch's device type
PANELS = (
    GENERAL,
    LIMITS,
    EXPOSURE,
    TELEMETRY,
    ENGINE_MODEL,
    ENGINE_KV_CACHE,
    ENGINE_SCHEDULING,
)  # in --help's order

EXIT_FAILURE = 1  # exit code of a process that could work after a restart
EXIT_CONFIG = 2  # exit code of both processes for a setting that cannot work: a restart would not help
MAX_UINT32 = (1 << 32) - 1  # the largest count that the protocol carries
MOST_A_CORE = 4  # threads or processes: more of them would only wait for each other


class SettingError(Exception):
    """A setting has an invalid value. The message names the flag, the value and the limit."""


@dataclass(frozen=True, slots=True)
class About:
    """What a setting's declaration says besides its type and default.

    help           what the setting does, in one or two sentences
    panel          heading under which --help and docs/settings.md list it
    unit           unit of a number; --help shows it in place of the type
    at_least       smallest value
    above          bound that the value must exceed
    at_most        largest value; a number without one must still be finite
    check          raises ValueError, whose message follows the flag; not called for None
    shown_default  what happens by default, if the value None does not say it
    on_device      default by device type, where the value is None; `Settings.number_on` resolves it
    is_private     whether GetServerInfo leaves it out: a secret, a path or an address
    """

    help: str
    panel: str = GENERAL
    unit: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    check: Callable[[Any], object] | None = None
    shown_default: str = ""
    on_device: Mapping[str, int] | None = None
    is_private: bool = False

    @property
    def range(self) -> str:
        """The allowed numbers in words; empty if all are allowed."""
        match self.above, self.at_least, self.at_most:
            case None, None, None:
                return ""
            case None, lowest, None:
                return f"at least {lowest}"
            case None, lowest, highest:
                return f"from {lowest} to {highest}"
            case below, _, None:
                return f"above {below}"
            case below, _, highest:
                return f"above {below}, at most {highest}"

    def check_value(self, flag: str, value: Any) -> None:
        """Raise SettingError if the setting cannot have this value."""
        if value is None:
            return
        if isinstance(value, (int, float)) and not self._is_in_range(value):
            finite = "" if self.at_most is not None or isinstance(value, int) else " and finite"
            raise SettingError(f"{flag} must be {self.range}{finite}, not {value}")
        if self.check is not None:
            try:
                self.check(value)
            except ValueError as error:
                raise SettingError(f"{flag} {error}") from None

    def _is_in_range(self, value: float) -> bool:
        """Whether the value is allowed; NaN never is."""
        lowest = -math.inf if self.at_least is None else self.at_least
        highest = math.inf if self.at_most is None else self.at_most
        return lowest <= value <= highest and value != math.inf and (self.above is None or value > self.above)


def setting(
    default: Value,
    help: str,
    *,
    panel: str = GENERAL,
    unit: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    check: Callable[[Any], object] | None = None,
    shown_default: str = "",
    on_device: Mapping[str, int] | None = None,
    is_private: bool = False,
) -> Value:
    """Declare a setting as a field of a `Settings` class; `About` describes the arguments."""
    if on_device is not None:
        shown_default = ", ".join(f"{number} on {DEVICE_NAMES[device]}" for device, number in on_device.items())
    about = About(help, panel, unit, at_least, above, at_most, check, shown_default, on_device, is_private)
    return field(default=default, metadata={"about": about})


def about(declared: Field[Any]) -> About:
    """The declaration of a setting."""
    described: About = declared.metadata["about"]
    return described


SHORTEST_TIMEOUT_S = 0.1  # a timeout is checked several times before it expires


def check_cores(count: int) -> None:
    """Raise ValueError for more threads or processes than this machine has use for."""
    cores = os.cpu_count() or 1
    if count > (most := MOST_A_CORE * cores):
        raise ValueError(f"must be at most {most}, {MOST_A_CORE} for each core of this machine, not {count}")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Settings:
    """Base of the classes that declare settings. Raises SettingError for a value that a setting cannot have."""

    def __post_init__(self) -> None:
        for declared in fields(self):
            about(declared).check_value(flag(declared.name), getattr(self, declared.name))

    def number_on(self, device_type: str, name: str) -> int:
        """The value of a setting or, if it is None, its default on a device of this type."""
        value: int | None = getattr(self, name)
        if value is not None:
            return value
        defaults = about(self.__dataclass_fields__[name]).on_device
        assert defaults is not None, f"{name} has no default by device"
        return defaults[device_type]

    def arguments(self, declared_by: type[Settings]) -> list[str]:
        """The command line that gives the settings in `declared_by` to another process."""
        arguments = []
        for declared in fields(declared_by):
            match getattr(self, declared.name):
                case None:
                    pass
                case bool(is_on):
                    arguments.append(flag(declared.name) if is_on else flag(f"no_{declared.name}"))
                case value:
                    arguments.append(f"{flag(declared.name)}={value}")
        return arguments

    def reported(self, declared_by: type[Settings], **effective: object) -> dict[str, str]:
        """The public settings in `declared_by` as text, by name. Unset ones are left out.

        effective  values that replace None or "auto"
        """
        values = {declared.name: getattr(self, declared.name) for declared in fields(declared_by)} | effective
        return {
            declared.name: _as_text(values[declared.name])
            for declared in fields(declared_by)
            if not about(declared).is_private and values[declared.name] is not None
        }


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
