"""`pagoda chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda_server.cli.sampling_options import with_sampling_options
from pagoda_server.cli.terminal import (
    DEFAULT_ADDRESS,
    Address,
    MaxTokens,
    Tls,
    TlsCa,
    Token,
    connect,
    errors_reported,
    print_ending,
    print_error,
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
    connection = partial(connect, address, token, tls, tls_ca)

    async def model_name() -> str:
        async with connection() as client:
            return (await client.models())[0].name

    with errors_reported(address):
        console.print(f"[bold]{asyncio.run(model_name())}[/] at {address}. {HELP}.", highlight=False)
        Conversation(connection, console, system, options).run()


class Conversation:
    """Turns of user and assistant, all of which go with each question."""

    def __init__(
        self, connect: Callable[[], AsyncClient], console: Console, system: str | None, options: GenerateOptions
    ) -> None:
        self._connect = connect
        self._console = console
        self._options = options
        self._beginning: list[ChatMessage] = [] if system is None else [{"role": "system", "content": system}]
        self._turns = list(self._beginning)

    def run(self) -> None:
        """Until the user leaves."""
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
        """Streams the answer. A stopped one stays in the conversation as far as it came; a failed question does not."""
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
