"""A runner for a device that works while the host prepares the next step."""

from engine.device.runner import DeviceRunner

__all__ = ["DeviceRunner"]
