"""A runner for a GPU, which works while the host prepares the next step. Public face: DeviceRunner."""

from .runner import DeviceRunner

__all__ = ["DeviceRunner"]
