"""`make demo`: a real server on the default model, and eight prompts streamed from it at once.

`python -m pagoda_server.cli.demo MODEL [OPTIONS]` does so with another model and further options of `pagoda serve`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import nullcontext

from rich.console import Console
from rich.text import Text

from pagoda.aio import AsyncClient
from pagoda.errors import PagodaError
from pagoda_server.checkpoints import DEFAULT_MODEL, CheckpointError, resolve
from pagoda_server.cli.demo_server import ServerError, ServerProcess
from pagoda_server.cli.demo_view import Stream, View, view_of
from pagoda_server.cli.progress_bars import shown_progress
from pagoda_server.cli.stream_meter import StreamMeter
from pagoda_server.cli.terminal import INTERRUPTED

MAX_TOKENS = 80
TIMEOUT_S = 300.0
CHATS = [
    "What is the capital of Sweden?",
    "Why is the sky blue? Answer in two sentences.",
    "Write a short poem about the sea.",
    "Give me three tips for learning a language.",
    "What is the difference between a river and a lake?",
]
TEXTS = [
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Photosynthesis is the process by which",
]


def main(model: str = DEFAULT_MODEL, *serve_options: str) -> int:
    """Returns the exit code: 0, or 1 with a message and the server's last log lines on standard error."""
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    # As Ctrl-C, which unwinds through the server's block and asyncio alike; the default would leave the server behind.
    # A script's background job starts with Ctrl-C ignored, and then SIGTERM would be too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    server = ServerProcess(["--model", model, *serve_options])
    try:
        with shown_progress() as progress:
            resolve(model, progress)
        with server:
            _wait_ready(server, model, console)
            streams = asyncio.run(_stream_all(server.address, console))
            server.stop()
    except (ServerError, PagodaError, CheckpointError, OSError) as error:
        errors.print(Text.assemble(("error: ", "red"), str(error)))
        for line in server.log:
            errors.print(f"  {line}", style="dim", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    _report(streams, console)
    return 0


def _wait_ready(server: ServerProcess, model: str, console: Console) -> None:
    start = time.monotonic()
    with console.status("") if console.is_terminal else nullcontext() as spinner:

        def show() -> None:
            if spinner is not None:
                elapsed_s = time.monotonic() - start
                last_line = Text(server.log[-1] if server.log else "", style="dim")
                text = Text.assemble(f"starting the server on {model}, {elapsed_s:.0f} s  ", last_line)
                text.truncate(console.width - 4, overflow="ellipsis")
                spinner.update(text)

        server.wait_ready(show)
    console.print(f"{model}: ready at {server.address} after {time.monotonic() - start:.1f} s\n", markup=False)


async def _stream_all(address: str, console: Console) -> list[Stream]:
    streams = [Stream(prompt, is_chat=True) for prompt in CHATS] + [Stream(prompt, is_chat=False) for prompt in TEXTS]
    async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
        with view_of(streams, console) as view:
            await asyncio.gather(*(_stream(client, stream, view) for stream in streams))
    return streams


async def _stream(client: AsyncClient, stream: Stream, view: View) -> None:
    stream.meter = StreamMeter()
    message, prompt = (stream.prompt, None) if stream.is_chat else (None, stream.prompt)
    async for chunk in client.generate(message, prompt=prompt, max_tokens=MAX_TOKENS):
        stream.meter.add(len(chunk.tokens))
        stream.text += chunk.text
        stream.is_finished = chunk.finish_reason is not None
        view.show(stream, chunk.text)


def _report(streams: list[Stream], console: Console) -> None:
    for stream in streams:
        console.print(stream.title, style="bold", markup=False)
        console.print(stream.text.strip() if stream.is_chat else stream.prompt + stream.text.rstrip(), markup=False)
        console.print(f"{stream.meter}\n", style="dim", markup=False)
    num_tokens = sum(stream.meter.num_tokens for stream in streams)
    wall_s = max(stream.meter.last for stream in streams) - min(stream.meter.start for stream in streams)
    total = f"{num_tokens} tokens in {wall_s:.2f} s, {num_tokens / wall_s:.1f} tokens/s"
    console.print(f"{len(streams)} streams at once: {total}", style="bold")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
