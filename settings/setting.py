"""What a setting is: a field of a frozen dataclass that carries its help, unit, range and panel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

Value = TypeVar("Value")

GENERAL = "Options"
LIMITS = "Limits"
EXPOSURE = "Exposure"
ENGINE_MODEL = "Engine: model"
ENGINE_KV_CACHE = "Engine: KV cache"
ENGINE_SCHEDULING = "Engine: scheduling"
PANELS = (GENERAL, LIMITS, EXPOSURE, ENGINE_MODEL, ENGINE_KV_CACHE, ENGINE_SCHEDULING)  # as help and docs order them

EXIT_CONFIG = 2  # what both processes exit with for a setting that cannot work: no restart mends it
MAX_UINT32 = (1 << 32) - 1  # the widest count that the protocol carries


class SettingError(Exception):
    """A setting has a value that it cannot have. The message names the flag, the value and the limit."""


@dataclass(frozen=True, slots=True)
class About:
    """
    help           one or two sentences: what the setting does
    panel          heading of --help and docs/settings.md that it stands under
    unit           of a number; --help shows it in place of the number's type
    at_least       smallest value
    above          largest value that is too small
    at_most        largest value; a number that has none must still be finite
    check          raises ValueError whose message goes on after the flag; the value None is not checked
    shown_default  what happens by default, where the value None does not tell
    is_private     a secret, a path or an address: GetServerInfo leaves it out
    """

    help: str
    panel: str = GENERAL
    unit: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    check: Callable[[Any], object] | None = None
    shown_default: str = ""
    is_private: bool = False

    @property
    def range(self) -> str:
        """The allowed numbers in words; empty if any is allowed."""
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
        """Raises SettingError."""
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
        """False for nan, too."""
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
    is_private: bool = False,
) -> Value:
    """A field of a `Settings` class; `About` describes the arguments."""
    about = About(help, panel, unit, at_least, above, at_most, check, shown_default, is_private)
    return field(default=default, metadata={"about": about})


def about(declared: Field[Any]) -> About:
    described: About = declared.metadata["about"]
    return described


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Settings:
    """Base of the classes that declare settings. Raises SettingError for a value that a setting cannot have."""

    def __post_init__(self) -> None:
        for declared in fields(self):
            about(declared).check_value(flag(declared.name), getattr(self, declared.name))

    def arguments(self, declared_by: type[Settings]) -> list[str]:
        """The command line that gives these settings to another process, of those that `declared_by` has."""
        arguments = []
        for declared in fields(declared_by):
            match getattr(self, declared.name):
                case None:
                    pass
                case bool(is_on) if is_on or declared.default:
                    arguments.append(flag(declared.name) if is_on else flag(f"no_{declared.name}"))
                case False:
                    pass
                case value:
                    arguments.append(f"{flag(declared.name)}={value}")
        return arguments

    def reported(self, declared_by: type[Settings], **effective: object) -> dict[str, str]:
        """What clients may know, as text by name, of the settings that `declared_by` has. What is unset is left out.

        effective  values that took the place of None or "auto"
        """
        values = {declared.name: getattr(self, declared.name) for declared in fields(declared_by)} | effective
        return {
            declared.name: _as_text(values[declared.name])
            for declared in fields(declared_by)
            if not about(declared).is_private and values[declared.name] is not None
        }


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
