"""`python -m bench.micro.speculation`: what speculative decoding gains, against the same server without it.

The figure is a ratio of output tokens per second, through gRPC, pair by pair, on the default model:

  repeating  one stream that copies sentences out of a text, or rewrites a piece of code
  chat       one stream of open questions, drawn at temperature 0.8
  mixed      64 requests at once, with random prompts of log-normal lengths

Two processes of the same server differ by more than what drafts cost. So the first two send each message twice to one
server, with drafts and with `max_draft_tokens` 0, in turns; the tokens must be the same. `mixed` compares with a server
of `--speculation off`. With --picture, the first two are also run with 1 to 64 streams at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import quantiles
from typing import Annotated, TypeVar

import grpc
import typer
from rich.console import Console
from rich.table import Table

from bench import BenchError, driver, plots, workloads
from bench.measure import Spread
from bench.systems import served
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

T = TypeVar("T")

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


def run(address: str, kind: Kind, messages: Iterable[str], seed: int, drafts: bool) -> Outcome:
    """Send messages all at once, each with a seed of its own, from `seed` on."""
    return asyncio.run(_run(address, kind, messages, seed, drafts))


async def _run(address: str, kind: Kind, messages: Iterable[str], seed: int, drafts: bool) -> Outcome:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(_answer(stub, message, kind.temperature, seed + at, drafts) for at, message in enumerate(messages))
        )
        seconds = time.perf_counter() - started
    usages = [usage for _, usage in answers]
    return Outcome(
        [tokens for tokens, _ in answers],
        seconds,
        sum(usage.drafted_tokens for usage in usages),
        sum(usage.accepted_tokens for usage in usages),
    )


async def _answer(
    stub: inference_pb2_grpc.InferenceStub, message: str, temperature: float, seed: int, drafts: bool
) -> tuple[list[int], inference_pb2.Usage]:
    request = inference_pb2.GenerateRequest(
        message=message,
        sampling=inference_pb2.Sampling(temperature=temperature, seed=seed),
        stopping=inference_pb2.Stopping(max_tokens=MAX_TOKENS),
        cache=inference_pb2.Cache(bypass=True),
        max_draft_tokens=None if drafts else 0,
    )
    tokens: list[int] = []
    usage = inference_pb2.Usage()
    async for response in stub.Generate(request):
        tokens += [token.id for token in response.tokens.tokens]
        if response.HasField("usage"):
            usage = response.usage
    return tokens, usage


def one_by_one(address: str, kind: Kind, turns: int) -> tuple[list[tuple[float, float]], int, int]:
    """Send each message alone, with drafts and without, in turns.

    return  the rates with and without of each pair; drafted and accepted tokens
    """
    pairs, drafted, accepted = [], 0, 0
    for turn in range(turns):
        for at, message in enumerate(kind.messages):
            with_it, without = in_turns(
                lambda drafts, message=message, seed=1000 * turn + at: run(address, kind, [message], seed, drafts),  # type: ignore[misc]
                first=bool((turn + at) % 2),
            )
            if with_it.tokens != without.tokens:
                raise BenchError("drafts have changed a token")
            pairs.append((with_it.tokens_per_s, without.tokens_per_s))
            drafted += with_it.drafted
            accepted += with_it.accepted
        print(f"turn {turn + 1} of {turns}: {_ratios(pairs).median:.3f} so far", file=sys.stderr)
    return pairs, drafted, accepted


def in_turns(run: Callable[[bool], T], first: bool) -> tuple[T, T]:
    """Return what `run` returns for True and for False; `first` is run first."""
    results = {drafts: run(drafts) for drafts in (first, not first)}
    return results[True], results[False]


def _ratios(pairs: list[tuple[float, float]]) -> Spread:
    return Spread.of([mine / other for mine, other in pairs])


def main(
    turns: Annotated[int, typer.Option(min=1, help="How often each message, and mixed, is run.")] = 9,
    model: Annotated[str, typer.Option(help="The model to serve; by default, the default model.")] = "",
    draft_model: Annotated[str, typer.Option(help="What drafts; by default, prompt lookup.")] = "",
    picture: Annotated[Path | None, typer.Option(help="Draw the speed-up by the number of streams.")] = None,
    picture_turns: Annotated[int, typer.Option(min=1, help="Pairs of runs for each point of the picture.")] = 3,
) -> None:
    arguments = ["--model", model] if model else []
    drafting = ["--draft-model", draft_model] if draft_model else []
    table = Table(title="Speculative decoding, with ÷ without")
    for heading in ("", "pairs", "without, tok/s", "with", "ratio (middle half)", "drafts accepted"):
        table.add_column(heading, justify="right")
    with contextlib.ExitStack() as stack:
        with_it = stack.enter_context(served([*arguments, *drafting])).address
        driver.run(with_it, workloads.single(1000), lambda count: None)
        for name, kind in kinds().items():
            pairs, drafted, accepted = one_by_one(with_it, kind, turns)
            _add(table, name, pairs, f"{accepted} of {drafted}")
        without = stack.enter_context(served([*arguments, "--speculation", "off"])).address
        driver.run(without, workloads.single(1000), lambda count: None)
        mixed = workloads.mixed(_vocab_size(with_it))
        pairs = []
        for turn in range(turns):
            both = in_turns(
                lambda drafts: driver.run(with_it if drafts else without, mixed, lambda count: None).tokens_per_s,
                first=bool(turn % 2),
            )
            pairs.append(both)
            print(f"turn {turn + 1} of {turns}: {both[0] / both[1]:.2f}", file=sys.stderr)
        _add(table, "mixed, 64", pairs, "")
        Console().print(table)
        if picture is not None:
            ratios = {name: _by_streams(with_it, kind, picture_turns) for name, kind in kinds().items()}
            plots.speed_up(ratios, "Speculative decoding: output tokens/s with ÷ without", picture)


def _by_streams(address: str, kind: Kind, turns: int) -> dict[int, Spread]:
    """Return the ratios for each number of streams."""
    ratios = {}
    for level in LEVELS:
        pairs = []
        for turn in range(turns):
            messages = list(islice(cycle(kind.messages), turn, turn + level))
            both = in_turns(
                lambda drafts, messages=messages: run(address, kind, messages, 0, drafts).tokens_per_s,  # type: ignore[misc]
                first=bool(turn % 2),
            )
            pairs.append(both)
        ratios[level] = _ratios(pairs)
        print(f"{level} streams: {ratios[level].median:.2f}", file=sys.stderr)
    return ratios


def _add(table: Table, name: str, pairs: list[tuple[float, float]], drafts: str) -> None:
    with_it, without = (Spread.of(list(rates)) for rates in zip(*pairs, strict=True))
    ratios = [mine / other for mine, other in pairs]
    low, middle, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    ratio = f"{middle:.3f} ({low:.3f}–{high:.3f})"
    table.add_row(name, str(len(pairs)), f"{without.median:.1f}", f"{with_it.median:.1f}", ratio, drafts)


def _vocab_size(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        info = control_pb2_grpc.ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest())
    return int(info.engines[0].info.vocab_size)


if __name__ == "__main__":
    typer.run(main)
