"""The command `quality`: what a quantization costs, measured with the engine's own runner on a text.

The runners of all precisions read each text in windows, in chunks of a step. The logits after every token are compared
with those of float32, which holds the checkpoint's weights exactly. Then slices of the texts are continued greedily in
one batch, as the engine does it. The figures of each window can be kept in a file: a run that was stopped goes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import tokenizers
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from bench import BenchError, record, report
from bench.record import Setting
from bench.report import Cells
from bench.turns import bars
from pagoda_server.checkpoints.files import written_whole
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


BASE = Precision("float32", "float32", "none")
# bfloat16 shows how much of a difference comes from its rounding alone.
PRECISIONS = (
    Precision("bfloat16", "bfloat16", "none"),
    Precision("int8", "bfloat16", "int8"),
    Precision("int4", "bfloat16", "int4"),
    Precision("int8 cache", "bfloat16", "none", "int8"),
)
SERVED = (  # what the engine chooses by itself, which is one of the above for most files: measured only by name
    Precision("served", "auto", "auto"),
    Precision("served, int8 cache", "auto", "auto", "int8"),
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

    @classmethod
    def of(cls, lists: dict[str, Any]) -> Differences:
        types = {"is_same": torch.bool}
        return cls(**{name: torch.tensor(each, dtype=types.get(name, torch.float64)) for name, each in lists.items()})

    @classmethod
    def joined(cls, parts: list[Differences]) -> Differences:
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def lists(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name).tolist() for field in fields(self)}


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


class Parts:
    """Results of parts of the work, each in a JSON file of a folder: what is there is not computed again.

    folder  None: nothing is kept
    model   with its name, what the parts have in common
    """

    def __init__(self, folder: Path | None = None, model: str = "") -> None:
        self._folder = folder
        self._model = model

    def kept(self, part: list[Any], compute: Callable[[], Any]) -> Any:
        """Return a part's result, of JSON's types.

        part  all that the result depends on, but the code and the instruction set
        """
        if self._folder is None:
            return compute()
        digest = hashlib.sha256(json.dumps([self._model, *part]).encode()).hexdigest()
        path = self._folder / f"{digest[:24]}.json"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            result = compute()
            with written_whole(path) as temporary:
                temporary.write_text(json.dumps(result))
        return json.loads(path.read_text())


def windows(texts: list[list[int]], longest: int) -> list[list[int]]:
    """Cut each text for runners that hold `longest` tokens. Raise BenchError if they are too short."""
    num_tokens, shortest = sum(map(len, texts)), NUM_CONTINUATIONS * MIN_PROMPT_LEN
    if num_tokens < shortest:
        raise BenchError(f"the text has {num_tokens} tokens; at least {shortest} are needed")
    length = min(WINDOW_LEN, longest)
    return [text[start : start + length] for text in texts for start in range(0, len(text) - 1, length)]


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
    joined = Differences.joined(parts)
    difference = joined.losses - joined.base_losses
    ratio = difference.mean().exp().item()
    standard_error = difference.std().item() / math.sqrt(len(difference))
    pairs = list(zip(base_outputs, outputs, strict=True))
    return Quality(
        perplexity=joined.losses.mean().exp().item(),
        ratio=ratio,
        ratio_margin=ratio * NORMAL_95 * standard_error,
        agreement=joined.is_same.double().mean().item(),
        kl_nats=joined.divergences.mean().item(),
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


def chosen(names: list[str]) -> list[Precision]:
    """The base, and the precisions of these names; without any, PRECISIONS. Raise BenchError for an unknown name."""
    known = {precision.name: precision for precision in (*PRECISIONS, *SERVED)}
    if unknown := [name for name in names if name not in known]:
        raise BenchError(f"there is no precision {unknown[0]!r}, there are: {'; '.join(known)}")
    return [BASE, *([known[name] for name in dict.fromkeys(names)] or PRECISIONS)]


def measure(
    folder: Path,
    texts: list[list[int]],
    threads: int,
    precisions: list[Precision],
    parts: Parts | None = None,
) -> dict[str, Quality]:
    """Compare each precision with the first. Raise ConfigError if one cannot run.

    All models are in memory together, so that logits of one chunk are kept and not those of the text.
    """
    parts = parts or Parts()
    runners: list[ModelRunner] = []
    with shown_progress() as progress:
        for precision in precisions:
            config = EngineConfig(
                str(folder),
                dtype=precision.dtype,
                quantization=precision.quantization,
                kv_cache_dtype=precision.kv_cache_dtype,
                threads=threads,
            )
            runners.append(ModelRunner(config, progress))
    found: list[list[Differences]] = [[] for _ in runners]
    in_windows = windows(texts, min(runner.info.max_model_len for runner in runners))
    settings = [asdict(precision) for precision in precisions]
    with bars(sum(map(len, texts))) as shown:
        for number, window in enumerate(in_windows, 1):
            with shown.part(f"window {number} of {len(in_windows)}", len(window)):
                read_now = partial(_read, runners, window, shown.add)
                for each, lists in zip(found, parts.kept([CHUNK_LEN, settings, window], read_now), strict=True):
                    each.append(Differences.of(lists))
            shown.note(_so_far(number, len(in_windows), precisions, found))
    num_outputs = NUM_CONTINUATIONS * CONTINUATION_LEN
    outputs = []
    slices = prompts([token for text in texts for token in text])
    for precision, setting, runner in zip(precisions, settings, runners, strict=True):
        with bars(num_outputs) as shown, shown.part(precision.name, num_outputs):
            continue_now = partial(continuations, runner, slices, shown.add)
            outputs.append(parts.kept([CONTINUATION_LEN, setting, slices], continue_now))
    return {
        precision.name: summary(each, outputs[0], output)
        for precision, each, output in zip(precisions, found, outputs, strict=True)
    }


def read(
    runners: list[ModelRunner], window: list[int], on_tokens: Callable[[int], None] = lambda count: None
) -> list[Differences]:
    """Let every runner read one window, and compare it with the first."""
    found: list[list[Differences]] = [[] for _ in runners]
    chunks = torch.tensor(window[1:]).split(CHUNK_LEN)
    for targets, *logits in zip(chunks, *(text_logits(runner, window) for runner in runners), strict=True):
        base, *others = (each.float().log_softmax(dim=-1) for each in logits)
        for parts, other in zip(found, [base, *others], strict=True):
            parts.append(differences(base, other, targets))
        del logits, base, others, other
        keep_freed_memory()  # gives back what is free: tensors of logits would leave ever more holes in the heap
        on_tokens(len(targets))
    return [Differences.joined(parts) for parts in found]


def _read(runners: list[ModelRunner], window: list[int], on_tokens: Callable[[int], None]) -> list[dict[str, Any]]:
    return [each.lists() for each in read(runners, window, on_tokens)]


def _so_far(number: int, count: int, precisions: list[Precision], found: list[list[Differences]]) -> str:
    joined = [Differences.joined(parts) for parts in found[1:]]
    figures = [f"{each.name} {diff.divergences.mean():.5f}" for each, diff in zip(precisions[1:], joined, strict=True)]
    positions = len(joined[0].divergences) if joined else 0
    return f"window {number} of {count}, {positions:,} positions: KL nats {', '.join(figures)}"


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
        is_base = name == BASE.name
        compared = [
            f"{quality.ratio:.4f} ± {quality.ratio_margin:.4f}",
            f"{100 * quality.agreement:.1f} %",
            f"{quality.kl_nats:.5f}",
            f"{quality.identical} of {NUM_CONTINUATIONS}",
            f"{quality.mean_common:.1f} of {CONTINUATION_LEN}",
        ]
        rows.append([name, f"{quality.perplexity:.3f}", *([report.NONE] * len(compared) if is_base else compared)])
    return Cells(f"Quality on {num_tokens:,} tokens of text, and on greedy continuations of its slices", headings, rows)


def quality(
    folder: Path,
    texts: list[Path],
    *,
    threads: int,
    output: Path,
    precisions: list[Precision],
    parts: Path | None = None,
) -> None:
    """Print a table of the texts together; write quality.json and .md into the folder `output`.

    parts  folder that keeps the result of each window; None: nothing is kept
    """
    console = Console(width=max(130, Console().width))
    setting = Setting.here(threads)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [tokenizer.encode(text.read_text()).ids for text in texts]
    num_tokens = sum(map(len, tokens))
    found = measure(folder, tokens, threads, precisions, Parts(parts, str(folder)))
    cells = table(found, num_tokens)
    console.print(cells.rich(), "")
    record.write(
        output,
        NAME,
        {
            "setting": record.fields(setting),
            "model": folder.name,
            "texts": [text.name for text in texts],
            "tokens": num_tokens,
            "continuations": {"count": NUM_CONTINUATIONS, "tokens": CONTINUATION_LEN},
            "precisions": {name: asdict(quality) for name, quality in found.items()},
        },
    )
    (output / f"{NAME}.md").write_text(report.page("What a quantization costs", setting, [cells], [], []))
    console.print(f"JSON and Markdown: {output}")


def _sequence(number: int, tokens: list[int], max_tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(number, list(tokens), Request(len(tokens), bypass_cache=True), params)
