"""`pagoda chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    from pagoda.answer import Answer, ToolCall
    from pagoda.chunk import Chunk
    from pagoda.conversation import ChatMessage
    from pagoda.request import GenerateOptions

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@with_sampling_options
def chat(
    sampling: GenerateOptions,
    model: Annotated[str, typer.Option(help="Name of the model, where the server has several.")] = "",
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON list of tools that the model may call, as in OpenAI's API. You type what each call returns.",
            show_default=False,
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    tenant: Tenant = None,
    address: Address = DEFAULT_ADDRESS,
    token: Token = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
) -> None:
    """Hold a conversation in the terminal."""
    offered = None if tools is None else _read_tools(tools)
    options: GenerateOptions = {**sampling, "model": model or None, "max_tokens": max_tokens, "tools": offered}
    with errors_reported(address):
        converse(partial(connect, address, token, tls, tls_ca, tenant=tenant), address, system, options)


def converse(connection: Callable[[], AsyncClient], address: str, system: str | None, options: GenerateOptions) -> None:
    """Hold a conversation with the model of the server at this address, until the user leaves."""
    from rich.console import Console

    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    console = Console()

    async def model_name() -> str:
        async with connection() as client:
            return options.get("model") or (await client.models())[0].name

    console.print(f"[bold]{asyncio.run(model_name())}[/] at {address}. {HELP}.", highlight=False)
    Conversation(connection, console, system, options).run()


def _read_tools(path: Path) -> list[dict[str, Any]]:
    try:
        tools = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint="--tools") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise typer.BadParameter(f"must be a JSON list of objects, not {path}", param_hint="--tools")
    return tools


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
        from pagoda.answer import answer_of
        from pagoda.errors import PagodaError

        turns: list[ChatMessage] = [{"role": "user", "content": text}]
        while True:
            chunks: list[Chunk] = []
            self._console.print("[bold green]model ›[/] ", end="")
            try:
                asyncio.run(self._stream([*self._turns, *turns], chunks))
                self._console.print()
                answer = answer_of(chunks)
            except KeyboardInterrupt:
                self._console.print(" [dim](stopped)[/]")
                answer = answer_of(chunks)
            except PagodaError as error:
                self._console.print()
                print_error(str(error))
                return
            if answer.finish_reason == "tool_calls":
                try:
                    turns += self._results(answer)
                except (EOFError, KeyboardInterrupt):
                    self._console.print("\n[dim]the question is forgotten[/]")
                    return
                continue
            if answer.finish_reason is not None:
                print_ending(answer.finish_reason)
            self._turns += [*turns, {"role": "assistant", "content": answer.text}]
            return

    def _results(self, answer: Answer) -> list[ChatMessage]:
        """The messages that follow an answer with calls: itself, and what the user types for each call."""
        calls = [call for call in answer.tool_calls if _is_complete(call)]
        said = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls]
        message: ChatMessage = {"role": "assistant", "content": answer.text, "tool_calls": said}
        turns = [{**message, "reasoning": answer.reasoning} if answer.reasoning else message]
        for call in calls:
            self._console.out(f"{call.name}({call.arguments})", style="yellow", highlight=False)
            result = self._console.input("[bold yellow]result ›[/] ")
            turns.append({"role": "tool", "content": result, "tool_call_id": call.id, "name": call.name})
        return turns

    async def _stream(self, conversation: list[ChatMessage], chunks: list[Chunk]) -> None:
        """Show an answer as it comes: the reasoning dimmed, calls not yet."""
        is_thinking = False
        async with self._connect() as client:
            async for chunk in client.chat(conversation, **self._options):
                chunks.append(chunk)
                if is_thinking and chunk.text:
                    self._console.print("\n")
                is_thinking = (is_thinking or bool(chunk.reasoning)) and not chunk.text
                self._console.out(chunk.reasoning, end="", style="dim", highlight=False)
                self._console.out(chunk.text, end="", highlight=False)


def _is_complete(call: ToolCall) -> bool:
    try:
        return isinstance(call.parsed, dict)
    except ValueError:
        return False
