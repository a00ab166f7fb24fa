"""llama.cpp's `llama-server` over HTTP: continuous batching over fixed slots."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import socket
import subprocess
import time
import urllib.request

from bench import BenchError
from bench.peers.peer import Arrivals, OnTokens, PeerRun, PeerSettings
from bench.peers.registry import find_program
from bench.workloads import Request, Workload

START_TIMEOUT_S = 60.0
POLL_S = 0.05
MAX_SLOTS = 32  # with the default model on two cores it was faster with 32 slots than with 16 or 64
SLOT_MULTIPLE = 256  # it rounds a slot's context up to a multiple of this


class Peer:
    def __init__(self, settings: PeerSettings) -> None:
        program = find_program("llama-server")
        assert program is not None, "the registry has found it"
        slots = min(settings.count, settings.max_num_seqs, MAX_SLOTS)
        slot_len = -(-settings.longest // SLOT_MULTIPLE) * SLOT_MULTIPLE
        self._port = free_port()
        self._caches = settings.prefix_caching
        command = [program, "--model", settings.gguf, "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--threads", str(settings.threads), "--threads-batch", str(settings.threads)]
        # One context per slot: a shared one is slower, because every sequence then attends over all of it.
        command += ["--parallel", str(slots), "--ctx-size", str(slots * slot_len), "--no-kv-unified"]
        self._adapters = list(settings.adapters)
        if self._adapters:  # each request says which it wants
            command += ["--lora-init-without-apply", "--lora", ",".join(settings.adapters.values())]
        command += ["--cache-ram", "0", "--metrics", "--log-verbosity", "2"]
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        atexit.register(self._server.kill)
        self.pid = self._server.pid
        self._wait_ready()
        self.versions = {"llama.cpp": _version(program), "weights": os.path.basename(settings.gguf)}

    def run(self, workload: Workload, on_tokens: OnTokens) -> PeerRun:
        before = self._steps()
        arrivals = Arrivals(workload.requests, on_tokens)

        async def run_all() -> None:
            await asyncio.gather(
                *(self._generate(index, request, arrivals) for index, request in enumerate(workload.requests))
            )

        asyncio.run(run_all())
        return PeerRun(arrivals.times(), self._steps() - before)

    async def _generate(self, at: int, request: Request, arrivals: Arrivals) -> None:
        await asyncio.sleep(request.arrival_s - arrivals.now())
        body = json.dumps(
            {
                "prompt": request.prompt,
                "n_predict": request.output_len,
                "ignore_eos": True,
                "temperature": 0.0,
                "stream": True,
                "cache_prompt": self._caches,
                "lora": [
                    {"id": number, "scale": float(name == request.adapter)}
                    for number, name in enumerate(self._adapters)
                ],
            }
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = (
            f"POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        count = 0
        async for line in reader:  # one line per server-sent event
            if line.startswith(b"data: "):
                # The server's own count: a token that ends inside a character is sent with the token that completes it.
                count, before = json.loads(line[6:])["tokens_predicted"], count
                arrivals.add(at, count - before)
        writer.close()
        if count != request.output_len:
            raise BenchError(f"llama-server generated {count} tokens where {request.output_len} were requested")

    def _steps(self) -> int:
        """Return the number of llama_decode calls; the server makes one per batch."""
        for line in self._get("/metrics").splitlines():
            if line.startswith("llamacpp:n_decode_total "):
                return int(float(line.split()[1]))
        raise BenchError("llama-server reports no number of steps")

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._server.poll() is None and time.monotonic() < deadline:
            try:
                self._get("/health")
                return
            except OSError:
                time.sleep(POLL_S)
        raise BenchError("llama-server did not become ready")

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=5) as response:
            text: str = response.read().decode()
            return text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _version(program: str) -> str:
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    line = (answer.stderr + answer.stdout).strip().splitlines()[0]
    return line.removeprefix("version:").strip()
