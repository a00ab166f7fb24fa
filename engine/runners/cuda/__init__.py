"""A runner for a device that works while the host prepares the next step."""

from pagoda_server.engine.runners.cuda.runner import DeviceRunner

__all__ = ["DeviceRunner"]
