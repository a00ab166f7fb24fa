"""What a server says about its start, on standard output and to a service manager: where it is, and that it serves."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from ...runtime.logs import print_line
from ...runtime.service_manager import READY, notify
from ...settings import ServeConfig
from ...settings.router import AUTH_TOKEN_VARIABLE


class Announcer:
    """Announces a server twice: when its ports are bound, and when its first engine is ready.

    The first line ends with the gRPC address, so that a program that gave port 0 can read it. With JSON logs, both are
    JSON lines of the same shape. A service manager learns of one of the two: a server whose engines others start has
    started once its ports are bound, because those come and go.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._began = time.monotonic()
        self._address = self._url = ""
        self._is_ready = False

    def starts(self, address: str, url: str = "") -> None:
        """
        address  of gRPC
        url      of HTTP; empty: there is none
        """
        self._address, self._url = address, url
        self._print(f"starting on {f'{url} and ' if url else ''}{address}", {"http": url, "grpc": address})
        if not self._config.spawns_engine:
            notify(READY)

    def is_ready(self) -> None:
        """Announce that requests are served; only the first call does."""
        if self._is_ready or not self._address:
            return
        self._is_ready = True
        name, seconds = self._config.served_model_name, time.monotonic() - self._began
        message = f"serving {name} after {seconds:.1f} s"
        if self._config.log_format == "text":
            message += "".join(f"\n  {title:6} {text}" for title, text in self._to_try())
        self._print(message, {"http": self._url, "grpc": self._address})
        if self._config.spawns_engine:
            notify(READY)

    def _to_try(self) -> list[tuple[str, str]]:
        config = self._config
        has_tokens = config.auth_token_file or config.tenants_file or os.environ.get(AUTH_TOKEN_VARIABLE)
        token = f"{AUTH_TOKEN_VARIABLE}=… " if has_tokens else ""
        found = [("HTTP", self._url)] if self._url else []
        authority = " --tls" if config.tls_cert else ""
        address = callable_address(self._address)
        found += [("gRPC", self._address), ("try", f'{token}pagoda generate --address {address}{authority} "Hello!"')]
        if self._url and not (has_tokens or config.tls_cert):
            body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
            found.append(("or", f"curl {self._url}/v1/chat/completions -d '{body}'"))
        return found

    def _print(self, message: str, fields: Mapping[str, str]) -> None:
        given = {name: value for name, value in fields.items() if value}
        print_line(self._config, "pagoda.router", message, given)


def callable_address(address: str) -> str:
    """The address at which this host can call a server that listens at `address`, which may be that of every host."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host) + f":{port}"
