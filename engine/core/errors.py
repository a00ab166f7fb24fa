"""What can go wrong in the engine, as far as a caller can distinguish it."""

_LONGEST_SHOWN = 100


class EngineError(Exception):
    """Base of the engine's own errors."""


class ConfigError(EngineError):
    """A setting, model or file that cannot work: reported once at start, never retried."""


class NotEnoughMemory(ConfigError):
    """These settings do not fit into the device's memory; the message names those that help."""


class OutOfMemory(EngineError):
    """A step did not fit into the device's memory; the message names the settings that help."""


def shown(value: object) -> str:
    """A file's value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
