"""The command `quality`: what a quantization costs, measured with the engine's own runner on a text.

The runner reads the text once, in chunks of a step. The logits after every token are compared with those of float32,
which holds the checkpoint's weights exactly. Then slices of the text are continued greedily in one batch, as the engine
does it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import tokenizers
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from bench import BenchError, record, report
from bench.record import Setting
from bench.report import Cells
from bench.turns import bars
from pagoda_server.cli.terminal import shown_progress
from pagoda_server.engine.core.sequence import BlockTable, Request, SamplingParams, Sequence, WindowTable
from pagoda_server.engine.core.step import Chunk
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.settings.engine import DType, EngineConfig, Quantization

NAME = "quality"
NUM_CONTINUATIONS = 20
CONTINUATION_LEN = 48
MIN_PROMPT_LEN = 4
CHUNK_LEN = 512  # the engine's default token budget
NORMAL_95 = 1.96  # standard errors on either side of the mean that hold 95 % of a normal distribution


@dataclass(frozen=True, slots=True)
class Precision:
    name: str
    dtype: DType
    quantization: Quantization


# The first is the base. bfloat16 shows how much of a difference comes from its rounding alone.
PRECISIONS = (
    Precision("float32", "float32", "none"),
    Precision("bfloat16", "bfloat16", "none"),
    Precision("int8", "bfloat16", "int8"),
    Precision("int4", "bfloat16", "int4"),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """The results of one precision on a text.

    logits         [num_tokens - 1, vocab] after every token but the last, in the weights' dtype
    targets        [num_tokens - 1] int64, the tokens that follow
    continuations  the greedy output for each prompt
    """

    logits: Tensor
    targets: Tensor
    continuations: list[list[int]]


@dataclass(frozen=True, slots=True)
class Quality:
    """One precision compared with the base.

    perplexity     exp of the mean negative log-likelihood of the text's tokens
    ratio          perplexity ÷ the base's
    ratio_margin   half the width of the ratio's 95 % interval, from the differences token by token: how far another
                   text of the same kind could move it
    agreement      share of the text's positions where the most likely next token is the base's
    kl_nats        mean over positions of KL(base ‖ this)
    identical      number of continuations equal to the base's
    mean_common    mean number of tokens that a continuation shares with the base's from the start
    """

    perplexity: float
    ratio: float
    ratio_margin: float
    agreement: float
    kl_nats: float
    identical: int
    mean_common: float


def read(runner: ModelRunner, tokens: list[int], on_tokens: Callable[[int], None] = lambda count: None) -> Reading:
    """Run one precision on a text. Raise BenchError if the text is too short, or longer than the runner can hold."""
    shortest = NUM_CONTINUATIONS * MIN_PROMPT_LEN
    if not shortest <= len(tokens) <= runner.info.max_model_len:
        raise BenchError(f"the text has {len(tokens)} tokens, not {shortest} to {runner.info.max_model_len}")
    logits = text_logits(runner, tokens, on_tokens)
    return Reading(logits, torch.tensor(tokens[1:]), continuations(runner, prompts(tokens), on_tokens))


def text_logits(runner: ModelRunner, tokens: list[int], on_tokens: Callable[[int], None]) -> Tensor:
    """Compute `Reading.logits` by one chunked prefill, with nothing else in the cache."""
    seq = _sequence(0, tokens, max_tokens=0)
    spec, count = runner.info.kv_cache, -(-len(tokens) // runner.info.kv_cache.block_size)
    tables = [range(start, start + count) for start in range(0, count * len(spec.groups.windows), count)]
    if tables[-1].stop > runner.info.num_blocks:
        raise BenchError(f"the KV cache has {runner.info.num_blocks} blocks, not {tables[-1].stop}")
    seq.blocks = BlockTable(tables[0], windows=map(WindowTable, tables[1:]))
    parts = []
    for start in range(0, len(tokens) - 1, CHUNK_LEN):
        chunk = Chunk(seq, start, min(CHUNK_LEN, len(tokens) - 1 - start), samples=False)
        parts.append(runner.logits(chunk).cpu())
        on_tokens(chunk.length)
    return torch.cat(parts)


def prompts(tokens: list[int]) -> list[list[int]]:
    """Cut the text into one equal slice per continuation; drop the remainder."""
    length = len(tokens) // NUM_CONTINUATIONS
    return [tokens[index * length : (index + 1) * length] for index in range(NUM_CONTINUATIONS)]


def continuations(runner: ModelRunner, prompts: list[list[int]], on_tokens: Callable[[int], None]) -> list[list[int]]:
    """Continue prompts greedily, batched by the engine's scheduler, to their full length."""
    scheduler = Scheduler(
        BlockPool(runner.info.num_blocks, runner.info.kv_cache.block_size),
        max_num_seqs=len(prompts),
        token_budget=CHUNK_LEN,
        max_model_len=runner.info.max_model_len,
        windows=runner.info.kv_cache.groups.windows,
        prefix_caching=False,
        clock=time.monotonic,
    )
    seqs = [_sequence(number, prompt, CONTINUATION_LEN) for number, prompt in enumerate(prompts)]
    for seq in seqs:
        scheduler.add(seq)
    while not (plan := scheduler.schedule()).is_empty:
        scheduler.commit(plan, runner.execute(plan))
        on_tokens(len(scheduler.take_output().tokens))
    return [seq.tokens[seq.request.prompt_len :] for seq in seqs]


def compare(base: Reading, other: Reading) -> Quality:
    """Compare two readings of the same text, in float32, a chunk of positions at a time."""
    losses, base_losses, same, divergences = [], [], [], []
    for start in range(0, len(base.targets), CHUNK_LEN):
        rows = slice(start, start + CHUNK_LEN)
        expected = base.logits[rows].float().log_softmax(dim=-1)
        found = other.logits[rows].float().log_softmax(dim=-1)
        base_losses.append(functional.nll_loss(expected, base.targets[rows], reduction="none"))
        losses.append(functional.nll_loss(found, base.targets[rows], reduction="none"))
        same.append(expected.argmax(dim=-1) == found.argmax(dim=-1))
        divergences.append(functional.kl_div(found, expected, reduction="none", log_target=True).sum(dim=-1))
    loss, base_loss = torch.cat(losses).double(), torch.cat(base_losses).double()
    difference = loss - base_loss
    ratio = difference.mean().exp().item()
    standard_error = difference.std().item() / math.sqrt(len(difference))
    pairs = list(zip(base.continuations, other.continuations, strict=True))
    return Quality(
        perplexity=loss.mean().exp().item(),
        ratio=ratio,
        ratio_margin=ratio * NORMAL_95 * standard_error,
        agreement=torch.cat(same).double().mean().item(),
        kl_nats=torch.cat(divergences).double().mean().item(),
        identical=sum(one == two for one, two in pairs),
        mean_common=fmean(common_prefix_len(one, two) for one, two in pairs),
    )


def common_prefix_len(one: list[int], two: list[int]) -> int:
    length = 0
    for left, right in zip(one, two, strict=True):
        if left != right:
            break
        length += 1
    return length


def measure(folder: Path, tokens: list[int], threads: int) -> dict[str, Quality]:
    """Compare each precision with the first, one model in memory at a time. Raise ConfigError if one cannot run."""
    found: dict[str, Quality] = {}
    base: Reading | None = None
    num_tokens = len(tokens) + NUM_CONTINUATIONS * CONTINUATION_LEN
    with shown_progress() as progress:
        for precision in PRECISIONS:
            config = EngineConfig(
                str(folder), dtype=precision.dtype, quantization=precision.quantization, threads=threads
            )
            runner = ModelRunner(config, progress)
            with bars(num_tokens) as shown, shown.part(precision.name, num_tokens):
                reading = read(runner, tokens, shown.add)
            del runner
            base = base or reading
            found[precision.name] = compare(base, reading)
    return found


def table(found: dict[str, Quality], num_tokens: int) -> Cells:
    headings = [
        "precision",
        "perplexity",
        "÷ float32's",
        "same top token",
        "KL nats",
        "identical outputs",
        "common prefix",
    ]
    rows = []
    for name, quality in found.items():
        is_base = name == PRECISIONS[0].name
        compared = [
            f"{quality.ratio:.4f} ± {quality.ratio_margin:.4f}",
            f"{100 * quality.agreement:.1f} %",
            f"{quality.kl_nats:.5f}",
            f"{quality.identical} of {NUM_CONTINUATIONS}",
            f"{quality.mean_common:.1f} of {CONTINUATION_LEN}",
        ]
        rows.append([name, f"{quality.perplexity:.3f}", *([report.NONE] * len(compared) if is_base else compared)])
    return Cells(f"Quality on {num_tokens:,} tokens of text, and on greedy continuations of its slices", headings, rows)


def quality(folder: Path, text: Path, *, threads: int, output: Path) -> None:
    """Print a table; write quality.json and .md into the folder `output`."""
    console = Console(width=max(130, Console().width))
    setting = Setting.here(threads)
    tokens = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text.read_text()).ids
    found = measure(folder, tokens, threads)
    cells = table(found, len(tokens))
    console.print(cells.rich(), "")
    record.write(
        output,
        NAME,
        {
            "setting": record.fields(setting),
            "model": folder.name,
            "text": text.name,
            "tokens": len(tokens),
            "continuations": {"count": NUM_CONTINUATIONS, "tokens": CONTINUATION_LEN},
            "precisions": {name: asdict(quality) for name, quality in found.items()},
        },
    )
    (output / f"{NAME}.md").write_text(report.page("What a quantization costs", setting, [cells], [], []))
    console.print(f"JSON and Markdown: {output}")


def _sequence(number: int, tokens: list[int], max_tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(number, list(tokens), Request(len(tokens), bypass_cache=True), params)
