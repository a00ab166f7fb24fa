"""`python -m bench.micro.channel`: what certificates cost on the channel over TCP, beside the same channel without.

Two engines with the synthetic model run side by side, one with certificates, and are asked in turns. Two figures each:

- the tokens a second that a process reads from the channel while the engine makes steps as fast as it can;
- the way of a step: from the submission of a short request to its token, less the time that the engine held it.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.micro.router import run_clients, running_engine, within
from bench.micro.router_clients import ask_channel_alone, read_channel
from pagoda_server.cli.certs import Authority
from pagoda_server.settings import ServeConfig

HOST = "127.0.0.1"
PAUSE_S = 0.002


def main(
    streams: Annotated[int, typer.Option(help="Sequences in each step.")] = 64,
    rounds: Annotated[int, typer.Option(help="Turns of each channel; the medians are printed.")] = 5,
    seconds: Annotated[float, typer.Option(help="Length of each measured window.")] = 3.0,
) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        Authority(Path(folder), days=1).add([HOST])
        guards = ServeConfig(
            channel_tls_cert=f"{folder}/router.pem",
            channel_tls_key=f"{folder}/router.key",
            channel_tls_ca=f"{folder}/ca.pem",
        )
        options = [
            f"--channel-tls-{kind}={folder}/{HOST}.{suffix}" for kind, suffix in (("cert", "pem"), ("key", "key"))
        ]
        plain, guarded = (f"{HOST}:{port}" for port in _free_ports(2))
        stack.enter_context(running_engine(plain, streams + 1, 0))
        stack.enter_context(running_engine(guarded, streams + 1, 0, *options, f"--channel-tls-ca={folder}/ca.pem"))
        for address in (plain, guarded):
            _wait_for(address)
        rates: dict[str, list[float]] = {"plain": [], "certificates": []}
        ways_us: dict[str, list[float]] = {"plain": [], "certificates": []}
        for _ in range(rounds):
            for name, address, given in (("plain", plain, None), ("certificates", guarded, guards)):
                window = run_clients([(partial(read_channel, guards=given), address, streams)], seconds, {})
                tokens, _ = within(window.seen, window.start, window.end)
                rates[name].append(tokens.sum() / (window.end - window.start))
                window = run_clients([(partial(ask_channel_alone, guards=given), address, PAUSE_S)], seconds, {})
                ways_us[name].append(1e3 * float(np.median(window.added_ttft_ms)))
    for name in rates:
        print(f"{name:12} {_shown(rates[name])} tokens/s   way of a step, p50 {_shown(ways_us[name])} µs")
    ratio = np.median(rates["certificates"]) / np.median(rates["plain"])
    more_us = np.median(ways_us["certificates"]) - np.median(ways_us["plain"])
    print(f"certificates ÷ plain: {ratio:.2f} of the tokens/s, {more_us:+.0f} µs for a step")


def _free_ports(count: int) -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        ports = [probe.getsockname()[1] for probe in probes]
    yield from ports


def _wait_for(address: str) -> None:
    """Wait until an engine listens there."""
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((HOST, int(address.split(":")[1]))):
            return
        time.sleep(0.05)


def _shown(figures: list[float]) -> str:
    return f"{np.median(figures):,.0f} ({min(figures):,.0f} to {max(figures):,.0f})"


if __name__ == "__main__":
    typer.run(main)
