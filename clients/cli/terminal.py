"""What the commands share: options, the connection, how errors look, and figures."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from pagoda_server.cli import INTERRUPTED
from pagoda_server.settings.sampling import PARAMETERS, UNRECOMMENDED

if TYPE_CHECKING:
    from pagoda.aio import AsyncClient
    from pagoda.chunk import FinishReason

# -- options and errors ------------------------------------------------------------------------------------------------


Address = Annotated[str, typer.Option(envvar="PAGODA_ADDRESS", help="HOST:PORT or unix:PATH of the server.")]
Token = Annotated[
    str | None, typer.Option(envvar="PAGODA_AUTH_TOKEN", show_envvar=True, help="Bearer token of the server.")
]
Tenant = Annotated[str | None, typer.Option(envvar="PAGODA_TENANT", help="Tenant of the call.", show_default=False)]
Tls = Annotated[bool, typer.Option("--tls", help="Use TLS with the system's authorities.")]
TlsCa = Annotated[
    Path | None,
    typer.Option(help="Use TLS with the authorities in this PEM file.", exists=True, dir_okay=False, readable=True),
]
Timeout = Annotated[float | None, typer.Option(help="Deadline in seconds.", show_default=False)]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Most tokens to generate.", show_default="what the context leaves"),
]

DEFAULT_ADDRESS = "127.0.0.1:50051"
ENDINGS = {
    "length": "reached max_tokens or the end of the context",
    "cancelled": "cancelled by the server",
}


def connect(
    address: str,
    token: str | None,
    tls: bool,
    tls_ca: Path | None,
    timeout_s: float | None = None,
    tenant: str | None = None,
    retries: int = 3,
) -> AsyncClient:
    """A client for the running event loop.

    The commands use asyncio because Ctrl-C then cancels a task. In the blocking client, a KeyboardInterrupt during the
    start of a call can leave the call without the thread that would end it, and closing then waits forever.
    """
    from pagoda.aio import AsyncClient

    return AsyncClient(address, token=token, tenant=tenant, tls=tls_ca or tls, timeout_s=timeout_s, retries=retries)


def print_error(message: str) -> None:
    typer.secho(f"error: {' '.join(message.split())}", fg="red", err=True)


def print_ending(reason: FinishReason | None) -> None:
    """Print one line to standard error if the answer did not end by itself."""
    if reason != "stop":
        typer.secho(f"[stopped: {ENDINGS.get(str(reason), 'no reason given')}]", dim=True, err=True)


@contextmanager
def errors_reported(address: str = "") -> Iterator[None]:
    """Turn an expected error into one red line and exit code 1, and Ctrl-C into exit code 130."""
    from pagoda.errors import PagodaError, Unavailable
    from pagoda_server.checkpoints import CheckpointError

    try:
        yield
    except (PagodaError, CheckpointError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise  # the reader has closed the pipe: typer exits quietly
        print_error(f"{address} is unavailable: {error}" if isinstance(error, Unavailable) else str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


# -- sampling options --------------------------------------------------------------------------------------------------


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's argument `sampling` with an option for each sampling parameter and one for the seed.

    The command receives the given options by name as `sampling`.
    """
    options = {}
    for each in PARAMETERS:
        default = UNRECOMMENDED.get(each.name, each.default)
        options[each.name] = _option(each.help, f"the model's, or {default:g}", int if each.is_integer else float)
    options["seed"] = _option("The same seed gives the same answer.", False, int)

    @wraps(command)
    def sampled(**given: Any) -> None:
        values = {name: given.pop(name) for name in options}
        command(**given, sampling={name: value for name, value in values.items() if value is not None})

    types = get_type_hints(command, localns={"GenerateOptions": dict}, include_extras=True)  # imported only for mypy
    own = [each for each in inspect.signature(command).parameters.values() if each.name != "sampling"]
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in options]
    sampled.__annotations__ = {each.name: types[each.name] for each in own} | options
    sampled.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(annotation=sampled.__annotations__[each.name]) for each in (*own, *added)]
    )
    return sampled


def _option(help: str, shown_default: str | bool, kind: type) -> Any:
    return Annotated[kind | None, typer.Option(help=help, show_default=shown_default, rich_help_panel="Sampling")]


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StreamMeter:
    """Counts a stream's tokens as they arrive; the clock starts when the meter is created."""

    clock: Callable[[], float] = time.monotonic
    num_tokens: int = 0
    start: float = field(init=False)
    first: float | None = None
    last: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.last = self.clock()

    def add(self, num_tokens: int) -> None:
        if num_tokens:
            self.last = self.clock()
            self.first = self.last if self.first is None else self.first
            self.num_tokens += num_tokens

    @property
    def ttft_s(self) -> float | None:
        return None if self.first is None else self.first - self.start

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of the tokens after the first message; None before there are any."""
        if self.first is None or self.last <= self.first:
            return None
        return (self.num_tokens - 1) / (self.last - self.first)

    def __str__(self) -> str:
        if self.ttft_s is None:
            return "no tokens"
        rate = "" if self.tokens_per_s is None else f" · {self.tokens_per_s:.1f} tokens/s"
        return f"{self.num_tokens} tokens · TTFT {1e3 * self.ttft_s:.0f} ms{rate}"
