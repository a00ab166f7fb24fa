"""Every setting of the router and the engine, declared once.

`EngineConfig` and `ServeConfig` configure the two processes. Their fields carry help, unit, range and panel; the
command lines, the arguments of a spawned engine, the checks, GetServerInfo's `settings` and docs/settings.md are made
from them. settings/sampling.py declares the sampling parameters of a request, and settings/request.py the limits
of its other fields.
"""

from .engine import EngineConfig, EngineSettings
from .router import RouterSettings, ServeConfig
from .setting import EXIT_CONFIG, EXIT_FAILURE, SettingError, Settings

__all__ = [
    "EXIT_CONFIG",
    "EXIT_FAILURE",
    "EngineConfig",
    "EngineSettings",
    "RouterSettings",
    "ServeConfig",
    "SettingError",
    "Settings",
]
