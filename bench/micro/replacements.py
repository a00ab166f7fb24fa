"""`python -m bench.micro.replacements`: streams that break when a server is replaced ten times under 200 of them.

Each of 200 clients asks for one completion after another over HTTP, each on a connection of its own, and asks again
until it is taken up. A stream is broken if it had a token and ends before its last one. The next replacement comes when
every client has had a token since the one before.

Pagoda's server is replaced by `pagoda upgrade`. `llama-server`, which has no such command, is ended with SIGTERM and
started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import psutil
import typer

from bench import BenchError
from bench.peers.gguf_files import quantized_gguf
from bench.peers.llama_server import free_port
from bench.peers.registry import find_program
from bench.processes import spawned
from pagoda_server.checkpoints import DEFAULT_MODEL, PrintedProgress

PATIENCE_S = 600.0  # until every client has a token, or a server starts
RETRY_S = 0.25


class Clients:
    """
    finished, broken  streams
    untaken           requests that were refused or met no server, which their client has sent again
    """

    def __init__(self, port: int, tokens: int) -> None:
        self.finished = self.broken = self.untaken = 0
        self.is_over = False
        self.streaming: set[int] = set()  # clients that have had a token since this was last emptied
        self._port = port
        self._tokens = tokens

    async def run(self, client: int) -> None:
        while not self.is_over:
            has_token = is_done = False
            writer = None
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(self._request(client))
                async for line in reader:
                    if line.startswith(b"data: {") and (choices := json.loads(line[6:]).get("choices")):
                        has_token = True
                        is_done = choices[0].get("finish_reason") == "length"
                        self.streaming.add(client)
                    if is_done:
                        break
            except OSError:
                pass  # of a server that is away
            finally:
                if writer is not None:
                    writer.close()
            self.finished += is_done
            self.broken += has_token and not is_done
            if not has_token:
                self.untaken += 1
                await asyncio.sleep(RETRY_S)

    def _request(self, client: int) -> bytes:
        asked = {"model": DEFAULT_MODEL, "prompt": f"Client {client} counts: one, two,", "max_tokens": self._tokens}
        body = json.dumps(asked | {"stream": True, "temperature": 0, "ignore_eos": True}).encode()
        head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}"]
        return "\r\n".join([*head, "", ""]).encode() + body


@contextlib.contextmanager
def pagoda(port: int, streams: int, folder: Path) -> Iterator[Callable[[], None]]:
    """Yield what replaces the server and its engine."""
    command = [sys.executable, "-m", "pagoda_server.cli", "serve", "--listen", "127.0.0.1:0"]
    command += ["--http", f"127.0.0.1:{port}", "--max-num-seqs", str(streams), "--max-requests", str(2 * streams)]
    command += ["--grace-s", str(PATIENCE_S), "--max-connection-age-s", "10"]
    with spawned(command, folder / "log") as server:

        def replace() -> None:
            upgrade = [sys.executable, "-m", "pagoda_server.cli", "upgrade", str(server.pid)]
            deadline = time.monotonic() + PATIENCE_S
            while (ended := subprocess.run(upgrade, capture_output=True, text=True, check=False)).returncode:
                # While the last engine still runs streams, another upgrade is refused.
                if time.monotonic() > deadline:
                    raise BenchError(ended.stderr)
                time.sleep(1.0)

        yield replace


@contextlib.contextmanager
def llama_server(port: int, streams: int, folder: Path) -> Iterator[Callable[[], None]]:
    """Yield what replaces the server."""
    program = find_program("llama-server")
    if program is None:
        raise BenchError("llama-server is not there: put it on the PATH, or name it with $LLAMA_SERVER")
    command = [program, "--model", str(quantized_gguf(DEFAULT_MODEL, PrintedProgress())), "--port", str(port)]
    command += ["--threads", str(os.cpu_count()), "--parallel", str(streams), "--ctx-size", str(256 * streams)]
    with contextlib.ExitStack() as all_of_them:

        def start() -> subprocess.Popen[str]:
            return all_of_them.enter_context(spawned(command, folder / "log"))

        server = start()

        def replace() -> None:
            nonlocal server
            server.terminate()
            server.wait(PATIENCE_S)
            server = start()
            wait_listening(server.pid, port)

        yield replace


def wait_listening(pid: int, port: int) -> None:
    """Wait until a process has loaded its model."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        links = psutil.Process(pid).net_connections("tcp")
        if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in links):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                return
        time.sleep(0.1)
    raise BenchError("the server does not start")


async def measure(clients: Clients, replace: Callable[[], None], streams: int, times: int) -> None:
    tasks = [asyncio.create_task(clients.run(client)) for client in range(streams)]
    for at in range(times):
        clients.streaming.clear()
        async with asyncio.timeout(PATIENCE_S):
            while len(clients.streaming) < streams:  # noqa: ASYNC110 (the clients fill it)
                await asyncio.sleep(0.1)
        if at == 0:
            clients.untaken = 0  # the server had not started
        broken, began = clients.broken, time.monotonic()
        await asyncio.to_thread(replace)
        print(f"replaced in {time.monotonic() - began:.1f} s: {clients.broken - broken} streams broken", flush=True)
    clients.is_over = True
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks)


def main(
    system: Annotated[str, typer.Argument(help="pagoda or llama-server")],
    streams: Annotated[int, typer.Option()] = 200,
    times: Annotated[int, typer.Option()] = 10,
    tokens: Annotated[int, typer.Option(help="Of each stream.")] = 32,
) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = pagoda if system == "pagoda" else llama_server
        with started(port, streams, folder) as replace:
            clients = Clients(port, tokens)
            asyncio.run(measure(clients, replace, streams, times))
    print(f"{system}: {clients.broken} broken, {clients.finished} finished; {clients.untaken} requests were sent again")


if __name__ == "__main__":
    typer.run(main)
