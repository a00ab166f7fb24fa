"""`pagoda generate`: one answer, streamed to standard output."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda_server.cli.terminal import (
    DEFAULT_ADDRESS,
    Address,
    MaxTokens,
    StreamMeter,
    Tenant,
    Timeout,
    Tls,
    TlsCa,
    Token,
    connect,
    errors_reported,
    print_ending,
    with_sampling_options,
)

if TYPE_CHECKING:
    from pagoda.chunk import Chunk, FinishReason
    from pagoda.request import GenerateOptions


@with_sampling_options
def generate(
    sampling: GenerateOptions,
    prompt: Annotated[str, typer.Argument(help="The text, or - to read it from standard input.")],
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it stands, without the model's chat template.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="Name of the model, where the server has several, or of a LoRA adapter.")
    ] = "",
    system: Annotated[str | None, typer.Option(help="System message, for a model that chats.")] = None,
    max_tokens: MaxTokens = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer. May be repeated.")] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option(help="Text that the answer must not hold. May be repeated.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with the JSON schema that the answer matches.", show_default=False)
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole answer matches.", show_default=False)
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="File with the answer's grammar, in Lark or GBNF.", show_default=False)
    ] = None,
    resumable: Annotated[
        bool, typer.Option("--resumable", help="Go on after the engine or the connection broke.")
    ] = False,
    priority: Annotated[int, typer.Option(help="Higher runs earlier.")] = 0,
    ttft_ms: Annotated[float | None, typer.Option(help="Target for the first token.", show_default=False)] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Target for each token after it.", show_default=False)] = None,
    tenant: Tenant = None,
    timeout: Timeout = None,
    address: Address = DEFAULT_ADDRESS,
    token: Token = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
) -> None:
    """Stream one answer to standard output, and its figures to standard error."""
    if system is not None and raw:
        raise typer.BadParameter("cannot be combined with --raw", param_hint="--system")
    text = read_standard_input() if prompt == "-" else prompt
    options: GenerateOptions = {
        **sampling,
        "model": model or None,
        "max_tokens": max_tokens,
        "stop": stop,
        "bad_words": bad_word,
        "json_schema": read_file(json_schema, "--json-schema"),
        "regex": regex,
        "grammar": read_file(grammar, "--grammar"),
        "resumable": resumable,
        "priority": priority,
        "ttft_s": None if ttft_ms is None else ttft_ms / 1e3,
        "tpot_s": None if tpot_ms is None else tpot_ms / 1e3,
    }

    async def answer() -> tuple[StreamMeter, FinishReason | None]:
        async with connect(address, token, tls, tls_ca, timeout, tenant) as client:
            if raw:
                chunks = client.generate(prompt=text, **options)
            elif system is None:
                chunks = client.generate(text, **options)
            else:
                conversation = [{"role": "system", "content": system}, {"role": "user", "content": text}]
                chunks = client.chat(conversation, **options)
            return await write_stream(chunks)

    with errors_reported(address):
        meter, reason = asyncio.run(answer())
    print_ending(reason)
    typer.secho(str(meter), dim=True, err=True)


def read_file(path: Path | None, option: str) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint=option) from None


def read_standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise typer.BadParameter(
            f"standard input is not {error.encoding}: byte {byte:#x}", param_hint="PROMPT"
        ) from None


async def write_stream(chunks: AsyncIterator[Chunk]) -> tuple[StreamMeter, FinishReason | None]:
    """Write each delta as it arrives: text to standard output, reasoning to standard error.

    Ends the line even if the answer breaks off.
    """
    meter, reason, has_text, is_thinking = StreamMeter(), None, False, False
    try:
        async for chunk in chunks:
            meter.add(len(chunk.tokens))
            reason = chunk.finish_reason or reason
            has_text = has_text or bool(chunk.text)
            if is_thinking and not chunk.reasoning and (chunk.text or chunk.finish_reason):
                typer.echo(err=True)
                is_thinking = False
            if chunk.reasoning:
                typer.secho(chunk.reasoning, dim=True, err=True, nl=False)
                is_thinking = True
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    except BaseException:
        if has_text:
            print(flush=True)
        raise
    print()
    return meter, reason
