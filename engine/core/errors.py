"""What can go wrong in the engine, as far as a caller tells it apart."""


class EngineError(Exception):
    """Base of the engine's own errors."""


class ConfigError(EngineError):
    """A setting, model or file that cannot work: reported once at start, never retried."""


class NotEnoughMemory(ConfigError):
    """These settings do not fit into the device's memory; the message names those that help."""


class OutOfMemory(EngineError):
    """A step did not fit into the device's memory; the message names the settings that help."""
