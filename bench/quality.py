"""The command `quality`: what a quantization costs, measured with the engine's own runner on a text.

The runners of all precisions read the text in windows, in chunks of a step. The logits after every token are compared
with those of float32, which holds the checkpoint's weights exactly. Then slices of the text are continued greedily in
one batch, as the engine does it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
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
from pagoda_server.cli.progress import shown_progress
from pagoda_server.engine.core.sequence import BlockTable, Request, SamplingParams, Sequence, WindowTable
from pagoda_server.engine.core.step import Chunk
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.kernels import keep_freed_memory
from pagoda_server.settings.engine import DType, EngineConfig, KVCacheDType, Quantization

NAME = "quality"
NUM_CONTINUATIONS = 20
CONTINUATION_LEN = 48
MIN_PROMPT_LEN, MAX_PROMPT_LEN = 4, 128
WINDOW_LEN = 2048  # a longer text is cut: no token is given more than these before it
CHUNK_LEN = 512  # the engine's default token budget
NORMAL_95 = 1.96  # standard errors on either side of the mean that hold 95 % of a normal distribution


@dataclass(frozen=True, slots=True)
class Precision:
    name: str
    dtype: DType
    quantization: Quantization
    kv_cache_dtype: KVCacheDType = "auto"


# The first is the base. bfloat16 shows how much of a difference comes from its rounding alone.
PRECISIONS = (
    Precision("float32", "float32", "none"),
    Precision("bfloat16", "bfloat16", "none"),
    Precision("int8", "bfloat16", "int8"),
    Precision("int4", "bfloat16", "int4"),
    Precision("int8 cache", "bfloat16", "none", "int8"),
)


@dataclass(frozen=True, slots=True)
class Differences:
    """One precision compared with the base at some positions of a text, each [positions].

    losses, base_losses  negative log-likelihood of the token that follows
    is_same              whether the most likely next token is the base's
    divergences          KL(base ‖ this) in nats
    """

    losses: Tensor
    base_losses: Tensor
    is_same: Tensor
    divergences: Tensor


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


def windows(tokens: list[int], longest: int) -> list[list[int]]:
    """Cut a text for runners that hold `longest` tokens. Raise BenchError if it is too short."""
    shortest = NUM_CONTINUATIONS * MIN_PROMPT_LEN
    if len(tokens) < shortest:
        raise BenchError(f"the text has {len(tokens)} tokens; at least {shortest} are needed")
    length = min(WINDOW_LEN, longest)
    return [tokens[start : start + length] for start in range(0, len(tokens) - 1, length)]


def text_logits(runner: ModelRunner, tokens: list[int]) -> Iterator[Tensor]:
    """Yield [positions, vocab] after every token but the last, by one chunked prefill into an empty cache."""
    seq = _sequence(0, tokens, max_tokens=0)
    spec, count = runner.info.kv_cache, -(-len(tokens) // runner.info.kv_cache.block_size)
    tables = [range(start, start + count) for start in range(0, count * len(spec.groups.windows), count)]
    if tables[-1].stop > runner.info.num_blocks:
        raise BenchError(f"the KV cache has {runner.info.num_blocks} blocks, not {tables[-1].stop}")
    seq.blocks = BlockTable(tables[0], windows=map(WindowTable, tables[1:]))
    for start in range(0, len(tokens) - 1, CHUNK_LEN):
        yield runner.logits(Chunk(seq, start, min(CHUNK_LEN, len(tokens) - 1 - start), samples=False)).cpu()


def prompts(tokens: list[int]) -> list[list[int]]:
    """One slice of the text per continuation, at equal distances."""
    distance = len(tokens) // NUM_CONTINUATIONS
    starts = range(0, NUM_CONTINUATIONS * distance, distance)
    return [tokens[start : start + min(distance, MAX_PROMPT_LEN)] for start in starts]


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


def differences(base: Tensor, other: Tensor, targets: Tensor) -> Differences:
    """Compare log-probabilities [positions, vocab] of the tokens that follow; `targets` [positions] int64 do."""
    return Differences(
        functional.nll_loss(other, targets, reduction="none").double(),
        functional.nll_loss(base, targets, reduction="none").double(),
        base.argmax(dim=-1) == other.argmax(dim=-1),
        functional.kl_div(other, base, reduction="none", log_target=True).sum(dim=-1).double(),
    )


def summary(parts: list[Differences], base_outputs: list[list[int]], outputs: list[list[int]]) -> Quality:
    """Sum up all positions of a text, and the continuations of the base and of the other precision."""
    loss, base_loss = (torch.cat(each) for each in ([p.losses for p in parts], [p.base_losses for p in parts]))
    difference = loss - base_loss
    ratio = difference.mean().exp().item()
    standard_error = difference.std().item() / math.sqrt(len(difference))
    pairs = list(zip(base_outputs, outputs, strict=True))
    return Quality(
        perplexity=loss.mean().exp().item(),
        ratio=ratio,
        ratio_margin=ratio * NORMAL_95 * standard_error,
        agreement=torch.cat([part.is_same for part in parts]).double().mean().item(),
        kl_nats=torch.cat([part.divergences for part in parts]).mean().item(),
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
    """Compare each precision with the first. Raise ConfigError if one cannot run.

    All models are in memory together, so that logits of one chunk are kept and not those of the text.
    """
    runners: dict[str, ModelRunner] = {}
    with shown_progress() as progress:
        for precision in PRECISIONS:
            config = EngineConfig(
                str(folder),
                dtype=precision.dtype,
                quantization=precision.quantization,
                kv_cache_dtype=precision.kv_cache_dtype,
                threads=threads,
            )
            runners[precision.name] = ModelRunner(config, progress)
    with bars(len(tokens)) as shown, shown.part("text", len(tokens)):
        parts = read(list(runners.values()), tokens, shown.add)
    num_outputs = NUM_CONTINUATIONS * CONTINUATION_LEN
    outputs = []
    for name, runner in runners.items():
        with bars(num_outputs) as shown, shown.part(name, num_outputs):
            outputs.append(continuations(runner, prompts(tokens), shown.add))
    return {name: summary(part, outputs[0], output) for name, part, output in zip(runners, parts, outputs, strict=True)}


def read(
    runners: list[ModelRunner], tokens: list[int], on_tokens: Callable[[int], None] = lambda count: None
) -> list[list[Differences]]:
    """Let every runner read a text, and compare it with the first. Raise BenchError if the text is too short."""
    found: list[list[Differences]] = [[] for _ in runners]
    for window in windows(tokens, min(runner.info.max_model_len for runner in runners)):
        chunks = torch.tensor(window[1:]).split(CHUNK_LEN)
        for targets, *logits in zip(chunks, *(text_logits(runner, window) for runner in runners), strict=True):
            base, *others = (each.float().log_softmax(dim=-1) for each in logits)
            for parts, other in zip(found, [base, *others], strict=True):
                parts.append(differences(base, other, targets))
            del logits, base, others, other
            keep_freed_memory()  # gives back what is free: tensors of logits would leave ever more holes in the heap
            on_tokens(len(targets))
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


def quality(folder: Path, texts: list[Path], *, threads: int, output: Path) -> None:
    """Print a table of the texts one after another; write quality.json and .md into the folder `output`."""
    console = Console(width=max(130, Console().width))
    setting = Setting.here(threads)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode("\n".join(text.read_text() for text in texts)).ids
    found = measure(folder, tokens, threads)
    cells = table(found, len(tokens))
    console.print(cells.rich(), "")
    record.write(
        output,
        NAME,
        {
            "setting": record.fields(setting),
            "model": folder.name,
            "texts": [text.name for text in texts],
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
