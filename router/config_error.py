"""The error of a start that cannot work, apart from errors.py: what runs before the engine starts loads no gRPC."""

from __future__ import annotations


class ConfigError(Exception):
    """A setting, model or file that cannot work. Reported once at start, never retried."""
