"""Every setting of the router and the engine, declared once.

`EngineConfig` and `ServeConfig` are what the two processes are told. Their fields carry help, unit, range and panel.
The command lines, the arguments of a spawned engine, the checks, GetServerInfo's `settings` and docs/settings.md are
made from them. What a request may set of sampling is declared in settings/sampling.py.
"""

from pagoda_server.settings.engine import EngineConfig, EngineSettings
from pagoda_server.settings.router import RouterSettings, ServeConfig
from pagoda_server.settings.setting import EXIT_CONFIG, SettingError

__all__ = ["EXIT_CONFIG", "EngineConfig", "EngineSettings", "RouterSettings", "ServeConfig", "SettingError"]
