"""`python -m bench.micro.fetch`: TTFT of a prompt whose blocks come from another engine, beside one that is computed.

Two engines of one host, over a Unix socket. Each turn has new prompts: one that the first engine has cached and the
second one fetches, and one that the second one computes, in turns.
"""

from __future__ import annotations

import queue
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import grpc
import typer

from bench.processes import kill_tree
from pagoda.engine.v1 import engine_pb2, engine_pb2_grpc
from pagoda.v1 import inference_pb2

START_S = 120.0
VOCAB_SIZE = 40_000  # ids below it are drawn


class Session:
    """A router's end of the channel to one engine."""

    def __init__(self, address: str) -> None:
        self._sent: queue.SimpleQueue[engine_pb2.RouterMessage] = queue.SimpleQueue()
        self._numbers = iter(range(1 << 30))
        channel = grpc.insecure_channel(address, options=[("grpc.max_reconnect_backoff_ms", 100)])
        grpc.channel_ready_future(channel).result(START_S)
        self._messages = engine_pb2_grpc.EngineStub(channel).Connect(iter(self._sent.get, None))
        self.hello = next(self._messages)

    def ask(self, prompt: list[int], lender: engine_pb2.Lender | None = None) -> tuple[float, int, int]:
        """Return the seconds to the first token, the token, and how many tokens of the prompt were cached."""
        number = next(self._numbers)
        submit = engine_pb2.Submit(
            first_sequence=number, prompt=prompt, max_tokens=1, lender=lender,
            sampling=inference_pb2.Sampling(n=1, temperature=0),
        )  # fmt: skip
        started = time.monotonic()
        self._sent.put(engine_pb2.RouterMessage(submit=submit))
        token, seconds = -1, 0.0
        for message in self._messages:
            if number in message.step.sequences:
                token, seconds = message.step.tokens[0], time.monotonic() - started
            for ended in message.step.ended:
                if ended.sequence == number:
                    return seconds, token, ended.cached_tokens
        raise RuntimeError("the engine has closed the channel")


@contextmanager
def engine(address: str, options: list[str]) -> Iterator[Session]:
    command = [sys.executable, "-m", "pagoda_server.engine", "--listen", address, *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not Path(address.removeprefix("unix:")).exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the engine does not start")
            time.sleep(0.05)
        yield Session(address)
    finally:
        kill_tree(process.pid)


def main(
    tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 2048,
    turns: Annotated[int, typer.Option(help="Prompts of each kind.")] = 7,
    options: Annotated[str, typer.Option(help="The engines' options.")] = "--host-kv-gb 0.5",
) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        first, second = f"unix:{folder}/first", f"unix:{folder}/second"
        there, here = (stack.enter_context(engine(each, options.split())) for each in (first, second))
        if not there.hello.block_layout or there.hello.block_layout != here.hello.block_layout:
            raise SystemExit("these engines lend each other nothing")
        draw = random.Random(0)
        computed, fetched, warm = list[float](), list[float](), list[float]()
        lender = engine_pb2.Lender(address=first, num_tokens=tokens)
        for turn in range(turns + 1):
            cold, lent = ([draw.randrange(VOCAB_SIZE) for _ in range(tokens)] for _ in range(2))
            _, expected, _ = there.ask(lent)
            computed_s, _, _ = here.ask(cold)
            fetched_s, token, num_cached = here.ask(lent, lender)
            warm_s, again, _ = here.ask(lent)
            if not token == again == expected:
                raise SystemExit(f"the tokens differ: {token}, {again}, {expected}")
            if turn:  # the first one warms up both
                computed.append(computed_s)
                fetched.append(fetched_s)
                warm.append(warm_s)
                print(
                    f"computed {computed_s:.3f} s, fetched {fetched_s:.3f} s ({num_cached} tokens), warm {warm_s:.3f} s"
                )
        ratios = [one / other for one, other in zip(computed, fetched, strict=True)]
        print(f"computed ÷ fetched: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print(f"medians: computed {statistics.median(computed):.3f} s, fetched {statistics.median(fetched):.3f} s, "
              f"warm {statistics.median(warm):.3f} s")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
