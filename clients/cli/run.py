"""`pagoda run`: a chat with a model, or one answer, on a server that lives as long as the command if none serves it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda_server.cli.chat import converse
from pagoda_server.cli.generate import read_standard_input, write_stream
from pagoda_server.cli.models import AcceptTerms, Name, settle_terms
from pagoda_server.cli.progress import shown_progress
from pagoda_server.cli.terminal import (
    DEFAULT_ADDRESS,
    Address,
    MaxTokens,
    Token,
    connect,
    errors_reported,
    print_ending,
    print_error,
    with_sampling_options,
)

if TYPE_CHECKING:
    from pagoda.chunk import FinishReason
    from pagoda.request import GenerateOptions

PROBE_TIMEOUT_S = 2.0


@with_sampling_options
def run(
    sampling: GenerateOptions,
    name: Name,
    prompt: Annotated[
        str | None, typer.Argument(help="A question, or - to read it from standard input. Without one, a chat.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    max_tokens: MaxTokens = None,
    accept_terms: AcceptTerms = None,
    address: Address = DEFAULT_ADDRESS,
    token: Token = None,
) -> None:
    """Chat with a model, or answer one question. A model that is not here is pulled first.

    A server at --address that serves the model answers. Otherwise one is started, and ends with this command.
    """
    options: GenerateOptions = {**sampling, "max_tokens": max_tokens}
    text = read_standard_input() if prompt == "-" else prompt
    # SIGTERM and a closed terminal unwind the server's block; by default they would leave the server behind.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    with errors_reported(address), _server_of(name, address, token, accept_terms) as found:
        if text is None:
            converse(partial(connect, found, token, False, None), found, system, options)
        else:
            print_ending(asyncio.run(_answer(found, token, system, text, options)))


@contextmanager
def _server_of(name: str, address: str, token: str | None, accept_terms: str | None) -> Iterator[str]:
    """The address of a server of this model: the one at `address`, or one that lives as long as the block."""
    from rich.console import Console

    from pagoda_server.checkpoints import find_model
    from pagoda_server.cli.server_process import ServerError, ServerProcess, wait_shown

    if asyncio.run(_served(address, token)) == name:
        yield address
        return
    with shown_progress() as progress:
        settle_terms(name, accept_terms)
        model = find_model(name, progress)
    server = ServerProcess(["--model", str(model.folder), "--served-model-name", model.name])
    try:
        with server:
            wait_shown(server, model.name, Console(stderr=True, highlight=False))
            yield server.address
            server.stop()
    except ServerError as error:
        print_error(str(error))
        for line in server.log:
            typer.secho(f"  {line}", dim=True, err=True)
        raise typer.Exit(1) from None


async def _served(address: str, token: str | None) -> str | None:
    """The name of the model that a server at this address serves; None if there is no server, or it does not say."""
    from pagoda.errors import PagodaError

    try:
        async with connect(address, token, False, None, timeout_s=PROBE_TIMEOUT_S, retries=0) as client:
            return (await client.models())[0].name
    except (PagodaError, IndexError):
        return None


async def _answer(
    address: str, token: str | None, system: str | None, text: str, options: GenerateOptions
) -> FinishReason | None:
    """Write the answer to a question; a model without a chat template continues the text instead."""
    from pagoda.errors import InvalidArgument

    async with connect(address, token, False, None) as client:
        turns = [{"role": "user", "content": text}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        try:
            return (await write_stream(client.chat(turns, **options)))[1]
        except InvalidArgument as error:
            if "no chat template" not in str(error) or system is not None:
                raise
        return (await write_stream(client.generate(prompt=text, **options)))[1]
