"""`pagoda chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda_server.cli.terminal import (
    DEFAULT_ADDRESS,
    Address,
    MaxTokens,
    Tenant,
    Tls,
    TlsCa,
    Token,
    connect,
    errors_reported,
    print_ending,
    print_error,
    with_sampling_options,
)

if TYPE_CHECKING:
    from rich.console import Console

    from pagoda.aio import AsyncClient
    from pagoda.chunk import FinishReason
    from pagoda.conversation import ChatMessage
    from pagoda.request import GenerateOptions

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@with_sampling_options
def chat(
    sampling: GenerateOptions,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    max_tokens: MaxTokens = None,
    tenant: Tenant = None,
    address: Address = DEFAULT_ADDRESS,
    token: Token = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
) -> None:
    """Hold a conversation in the terminal."""
    from rich.console import Console

    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    options: GenerateOptions = {
        **sampling,
        "max_tokens": max_tokens,
    }
    console = Console()
    connection = partial(connect, address, token, tls, tls_ca, tenant=tenant)

    async def model_name() -> str:
        async with connection() as client:
            return (await client.models())[0].name

    with errors_reported(address):
        console.print(f"[bold]{asyncio.run(model_name())}[/] at {address}. {HELP}.", highlight=False)
        Conversation(connection, console, system, options).run()


class Conversation:
    """A conversation with the user, sent in full with each question."""

    def __init__(
        self, connect: Callable[[], AsyncClient], console: Console, system: str | None, options: GenerateOptions
    ) -> None:
        self._connect = connect
        self._console = console
        self._options = options
        self._beginning: list[ChatMessage] = [] if system is None else [{"role": "system", "content": system}]
        self._turns = list(self._beginning)

    def run(self) -> None:
        """Ask and answer until the user leaves."""
        while True:
            try:
                text = self._console.input("[bold cyan]you ›[/] ").strip()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print(f"\n[dim]{HELP}[/]", highlight=False)
                continue
            match text:
                case "":
                    pass
                case "/exit" | "/quit":
                    return
                case "/reset":
                    self._turns = list(self._beginning)
                    self._console.print("[dim]forgotten[/]")
                case _ if text.startswith("/"):
                    self._console.print(f"[dim]{HELP}[/]", highlight=False)
                case _:
                    self._ask(text)

    def _ask(self, text: str) -> None:
        """Stream the answer. A stopped answer stays in the conversation; a failed question does not."""
        from pagoda.errors import PagodaError

        question: ChatMessage = {"role": "user", "content": text}
        answer: list[str] = []
        self._console.print("[bold green]model ›[/] ", end="")
        try:
            reason = asyncio.run(self._stream([*self._turns, question], answer))
            self._console.print()
            print_ending(reason)
        except KeyboardInterrupt:
            self._console.print(" [dim](stopped)[/]")
        except PagodaError as error:
            self._console.print()
            print_error(str(error))
            return
        self._turns += [question, {"role": "assistant", "content": "".join(answer)}]

    async def _stream(self, conversation: list[ChatMessage], answer: list[str]) -> FinishReason | None:
        reason = None
        async with self._connect() as client:
            async for chunk in client.chat(conversation, **self._options):
                answer.append(chunk.text)
                reason = chunk.finish_reason or reason
                self._console.out(chunk.text, end="", highlight=False)
        return reason
