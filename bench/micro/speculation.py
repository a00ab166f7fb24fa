"""`python -m bench.micro.speculation`: what speculative decoding gains, against the same server without it.

Two servers run the default model, one with `--speculation off`. They take turns, and the figure is the ratio of their
output tokens per second, through gRPC, pair by pair:

  repeating  one stream that copies sentences out of a text, or rewrites a piece of code
  chat       one stream of open questions, drawn at temperature 0.8
  mixed      64 requests at once, with random prompts of log-normal lengths

One stream must get the same tokens from both. With --picture, the first two are also run with 1 to 64 streams at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.table import Table

from bench import BenchError, driver, plots, workloads
from bench.measure import Spread
from bench.systems import served
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

MAX_TOKENS = 256
LEVELS = (1, 2, 4, 8, 16, 32, 64)
TEXT = Path(__file__).parent.parent / "quality_text.txt"
CODE = """class Cart:
    def __init__(self, owner):
        self.owner = owner
        self.items = []
        self.discount = 0.0

    def add(self, name, price, count=1):
        for item in self.items:
            if item["name"] == name:
                item["count"] += count
                return
        self.items.append({"name": name, "price": price, "count": count})

    def remove(self, name):
        self.items = [item for item in self.items if item["name"] != name]

    def total(self):
        total = 0.0
        for item in self.items:
            total += item["price"] * item["count"]
        return total * (1.0 - self.discount)
"""
QUESTIONS = (
    "What can I do in Stockholm on a rainy day?",
    "Write a short story about a lighthouse keeper.",
    "Explain to a child how vaccines work.",
    "What are the pros and cons of working from home?",
    "Describe a day in ancient Rome.",
    "How do I become better at chess?",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the streams of one run generated, in their order."""

    tokens: list[list[int]]
    seconds: float
    drafted: int
    accepted: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


@dataclass(frozen=True, slots=True)
class Kind:
    messages: tuple[str, ...]
    temperature: float


def kinds() -> dict[str, Kind]:
    text = TEXT.read_text()
    copied = tuple(
        f"Copy out the most important sentences of this text, word for word:\n\n{text[at : at + 2000]}"
        for at in (0, 2500)
    )
    edited = f"Rewrite this Python code with a docstring for every method. Repeat all of the code.\n\n{CODE}"
    return {"repeating": Kind((*copied, edited), 0.0), "chat": Kind(QUESTIONS, 0.8)}


def run(address: str, kind: Kind, streams: int) -> Outcome:
    """Send all messages one after the other; or, with several streams, as many at once as there are streams."""
    return asyncio.run(_run(address, kind, streams))


async def _run(address: str, kind: Kind, streams: int) -> Outcome:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [
            _answer(stub, message, kind.temperature, seed)
            for seed, message in enumerate(kind.messages if streams == 1 else islice(cycle(kind.messages), streams))
        ]
        started = time.perf_counter()
        answers = [await call for call in calls] if streams == 1 else await asyncio.gather(*calls)
        seconds = time.perf_counter() - started
    usages = [usage for _, usage in answers]
    return Outcome(
        [tokens for tokens, _ in answers],
        seconds,
        sum(usage.drafted_tokens for usage in usages),
        sum(usage.accepted_tokens for usage in usages),
    )


async def _answer(
    stub: inference_pb2_grpc.InferenceStub, message: str, temperature: float, seed: int
) -> tuple[list[int], inference_pb2.Usage]:
    request = inference_pb2.GenerateRequest(
        message=message,
        sampling=inference_pb2.Sampling(temperature=temperature, seed=seed),
        stopping=inference_pb2.Stopping(max_tokens=MAX_TOKENS),
        cache=inference_pb2.Cache(bypass=True),
    )
    tokens: list[int] = []
    usage = inference_pb2.Usage()
    async for response in stub.Generate(request):
        tokens += [token.id for token in response.tokens.tokens]
        if response.HasField("usage"):
            usage = response.usage
    return tokens, usage


def _pairs(turns: int, rate: Callable[[str], float], with_it: str, without: str) -> list[tuple[float, float]]:
    """Rates with and without, turn by turn; every other turn in reverse order."""
    pairs = []
    for turn in range(turns):
        first = rate(without if turn % 2 else with_it)
        second = rate(with_it if turn % 2 else without)
        pairs.append((second, first) if turn % 2 else (first, second))
        print(f"turn {turn + 1} of {turns}: {pairs[-1][0] / pairs[-1][1]:.2f}", file=sys.stderr)
    return pairs


def _ratios(pairs: list[tuple[float, float]]) -> Spread:
    return Spread.of([mine / other for mine, other in pairs])


def main(
    turns: Annotated[int, typer.Option(min=1, help="Pairs of runs.")] = 9,
    model: Annotated[str, typer.Option(help="The model to serve; by default, the default model.")] = "",
    picture: Annotated[Path | None, typer.Option(help="Draw the speed-up by the number of streams.")] = None,
    picture_turns: Annotated[int, typer.Option(min=1, help="Pairs of runs for each point of the picture.")] = 3,
    draft_model: Annotated[str, typer.Option(help="The draft model of the server that speculates.")] = "",
) -> None:
    arguments = ["--model", model] if model else []
    table = Table(title="Speculative decoding, with ÷ without")
    for heading in ("", "tokens/s without", "with", "ratio", "accepted of drafted"):
        table.add_column(heading, justify="right")
    with contextlib.ExitStack() as stack:
        drafting = ["--draft-model", draft_model] if draft_model else []
        with_it = stack.enter_context(served([*arguments, *drafting])).address
        without = stack.enter_context(served([*arguments, "--speculation", "off"])).address
        for address in (with_it, without):
            driver.run(address, workloads.single(1000), lambda count: None)
        for name, kind in kinds().items():
            outcomes: dict[str, list[Outcome]] = {with_it: [], without: []}

            def rate(address: str, kind: Kind = kind, seen: dict[str, list[Outcome]] = outcomes) -> float:
                seen[address].append(run(address, kind, 1))
                return seen[address][-1].tokens_per_s

            pairs = _pairs(turns, rate, with_it, without)
            if any(outcome.tokens != outcomes[without][0].tokens for outcome in outcomes[with_it]):
                raise BenchError(f"{name}: drafts have changed a token")
            last = outcomes[with_it][-1]
            _add(table, name, pairs, f"{last.accepted} of {last.drafted}")
        mixed = workloads.mixed(_vocab_size(with_it))
        pairs = _pairs(turns, lambda at: driver.run(at, mixed, lambda count: None).tokens_per_s, with_it, without)
        _add(table, "mixed, 64 streams", pairs, "")
        Console().print(table)
        if picture is not None:
            ratios = {
                name: {
                    level: _ratios(
                        _pairs(
                            picture_turns,
                            lambda at, kind=kind, level=level: run(at, kind, level).tokens_per_s,  # type: ignore[misc]
                            with_it,
                            without,
                        )
                    )
                    for level in LEVELS
                }
                for name, kind in kinds().items()
            }
            plots.speed_up(ratios, "Speculative decoding: output tokens/s with ÷ without", picture)


def _add(table: Table, name: str, pairs: list[tuple[float, float]], drafts: str) -> None:
    of = _ratios(pairs)
    with_it, without = (Spread.of(list(rates)) for rates in zip(*pairs, strict=True))
    ratio = f"{of.median:.2f} ({of.least:.2f}–{of.most:.2f})"
    table.add_row(name, f"{without.median:.1f}", f"{with_it.median:.1f}", ratio, drafts)


def _vocab_size(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        info = control_pb2_grpc.ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest())
    return int(info.engines[0].info.vocab_size)


if __name__ == "__main__":
    typer.run(main)
