"""`python -m bench.micro.channel`: what certificates cost on the channel over TCP, beside the same channel without.

Two engines with the synthetic model run side by side, one with certificates. This process holds a channel to each and
asks them in turns, so that whatever else the machine does falls on both. Two figures, as medians of several such pairs:

- the tokens a second of a request with many sequences, while the engine makes steps as fast as it can;
- the way of a step: from the submission of a short request to its token, less the time that the engine held it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import uvloop

from bench.micro.router import running_engine
from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2
from pagoda_server.router.engines.handshake import channel_trust
from pagoda_server.router.engines.transport import EngineLink, transport_to
from pagoda_server.runtime.authority import Authority
from pagoda_server.runtime.channel_trust import ChannelTrust
from pagoda_server.settings import ServeConfig

HOST = "127.0.0.1"
PROMPT_LEN = 8
LONG_TOKENS = 256  # of each sequence when rates are measured
WARM_UPS = 3


def main(
    pairs: Annotated[int, typer.Option(help="Pairs of engines, one after the other: processes differ by chance.")] = 9,
    streams: Annotated[int, typer.Option(help="Sequences in each step.")] = 64,
    turns: Annotated[int, typer.Option(help="Turns of each channel of a pair when rates are measured.")] = 12,
    steps: Annotated[int, typer.Option(help="Turns of each channel of a pair when the way of a step is.")] = 1000,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Authority(Path(folder), days=1).add([HOST])
        found = np.array([_measure_pair(folder, streams, turns, steps) for _ in range(pairs)])
    for at, name in enumerate(("plain", "certificates")):
        print(f"{name:12} {_shown(found[:, 0, at], ',.0f')} tokens/s, {_shown(found[:, 1, at], ',.0f')} µs a step")
    ratios, more_us = found[:, 0, 1] / found[:, 0, 0], found[:, 1, 1] - found[:, 1, 0]
    print(f"certificates beside plain: × {_shown(ratios, '.2f')} tokens/s, {_shown(more_us, '+.0f')} µs a step")


def _shown(figures: np.ndarray, format: str) -> str:
    """The median, the least and the most."""
    return f"{np.median(figures):{format}} ({min(figures):{format}} to {max(figures):{format}})"


def _measure_pair(folder: str, streams: int, turns: int, steps: int) -> list[list[float]]:
    """The medians of tokens a second and of µs a step, each without and with certificates."""
    files = [f"--channel-tls-{kind}={folder}/{HOST}.{end}" for kind, end in (("cert", "pem"), ("key", "key"))]
    files.append(f"--channel-tls-ca={folder}/ca.pem")
    router = ServeConfig(
        channel_tls_cert=f"{folder}/router.pem",
        channel_tls_key=f"{folder}/router.key",
        channel_tls_ca=f"{folder}/ca.pem",
    )
    plain, guarded = _free_ports(2)
    with (
        running_engine(f"{HOST}:{plain}", streams + 1, 0),
        running_engine(f"{HOST}:{guarded}", streams + 1, 0, *files),
    ):
        return uvloop.run(_measure([plain, guarded], channel_trust(router), streams, turns, steps))


async def _measure(ports: list[int], trust: ChannelTrust, streams: int, turns: int, steps: int) -> list[list[float]]:
    async with _link_to(ports[0], None) as plain, _link_to(ports[1], trust) as guarded:
        asked = [_Asked(plain), _Asked(guarded)]
        rates: list[list[float]] = [[], []]
        ways_us: list[list[float]] = [[], []]
        for turn in range(turns + WARM_UPS):
            for at in _in_turn(turn):
                start = time.monotonic()
                await asked[at].ask(streams, LONG_TOKENS)
                rates[at].append(streams * LONG_TOKENS / (time.monotonic() - start))
        for turn in range(steps + WARM_UPS):
            for at in _in_turn(turn):
                start = time.monotonic()
                ended = await asked[at].ask(1, 1)
                ways_us[at].append(1e6 * (time.monotonic() - start - ended.queue_s - ended.prefill_s))
    return [[float(np.median(each[WARM_UPS:])) for each in figures] for figures in (rates, ways_us)]


def _in_turn(turn: int) -> tuple[int, int]:
    """Which channel is asked first; each is so as often as the other."""
    return (1, 0) if turn % 2 else (0, 1)


class _Asked:
    """An engine that is asked one request at a time."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._next = 1

    async def ask(self, sequences: int, max_tokens: int) -> engine_pb2.Ended:
        """Send a request and read to its end; return how its last sequence ended."""
        sampling = inference_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1, n=sequences, seed=1)
        prompt = random.choices(range(256), k=PROMPT_LEN)
        submit = engine_pb2.Submit(first_sequence=self._next, prompt=prompt, sampling=sampling, max_tokens=max_tokens)
        self._next += sequences
        await self._link.write(engine_pb2.RouterMessage(submit=submit))
        while True:
            message = await self._link.read()
            assert message, "the engine closed the link"
            sequences -= len(message.step.ended)
            if not sequences:
                return message.step.ended[-1]


@contextlib.asynccontextmanager
async def _link_to(port: int, trust: ChannelTrust | None) -> AsyncIterator[EngineLink]:
    """A link to an engine that may still start."""
    transport = transport_to(f"{HOST}:{port}", trust)
    while True:
        with contextlib.suppress(OSError):
            link = await transport.connect()
            await link.read()  # hello
            break
        await asyncio.sleep(0.05)
    try:
        yield link
    finally:
        link.close()
        await transport.close()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


if __name__ == "__main__":
    typer.run(main)
