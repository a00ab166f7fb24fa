"""`python -m bench.micro.guided`: what a grammar costs per token, and what forced tokens save, on the default model.

Guided and unguided sequences take turns in this process, step by step, so that a machine that is busy slows both. The
time between two tokens (ITL) is that of scheduling, computing and committing: all that passes between them on the
engine's loop.

A model that is asked for JSON mostly chooses tokens that the grammar allows anyway. The worst case are random tokens as
prompts.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Annotated

import tokenizers
import torch
import typer
from rich.console import Console
from rich.table import Table

from pagoda.v1 import inference_pb2
from pagoda_server.checkpoints import DEFAULT_MODEL, resolve
from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.guidance import Grammars
from pagoda_server.engine.guidance.grammar_mask import GrammarMask
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.settings.engine import EngineConfig

CONTEXT = 128  # random tokens
ASKING = (
    "<|im_start|>system\nYou answer in JSON.<|im_end|>\n<|im_start|>user\nWrite a JSON array of {number} people with "
    "first_name, last_name, age, occupation (engineer, teacher, physician, student) and email_confirmed.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TOKENS = 40
SIZES = (1, 8, 32)
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "last_name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "occupation": {"enum": ["engineer", "teacher", "physician", "student"]},
        "email_confirmed": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "age", "occupation", "email_confirmed"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 100}  # more than the tokens that are measured


def prompts(tokenizer: tokenizers.Tokenizer) -> dict[str, list[list[int]]]:
    """Prompts of both kinds, one for each of the most sequences."""
    dice = random.Random(1)
    return {
        "asks for JSON": [
            tokenizer.encode(ASKING.format(number=100 + number), add_special_tokens=False).ids
            for number in range(max(SIZES))
        ],
        "random": [dice.choices(range(tokenizer.get_vocab_size()), k=CONTEXT) for _ in range(max(SIZES))],
    }


class Server:
    """Serves a sequence of each prompt to its end, all at once, step by step. Only the time of its own steps counts.

    num_steps  so far
    ms         of all steps behind the one that gave the first token
    itl_ms     from a sequence's first token to its last, over the tokens between: the mean of all sequences
    """

    def __init__(
        self,
        runner: ModelRunner,
        prompts: list[list[int]],
        max_tokens: int,
        make_mask: Callable[..., GrammarMask] | None = None,
        jumps: bool = False,
    ) -> None:
        self._runner = runner
        self._scheduler = Scheduler(
            BlockPool(runner.info.num_blocks, runner.info.kv_cache.block_size),
            max_num_seqs=max(SIZES),
            token_budget=runner.info.limits.token_budget,
            max_model_len=runner.info.max_model_len,
            prefix_caching=False,
            clock=time.monotonic,
        )
        self.seqs: list[Sequence] = []
        for number, prompt in enumerate(prompts):
            mask = make_mask(prompt_len=len(prompt), jumps=jumps) if make_mask else None
            request = Request(len(prompt), bypass_cache=True)
            self.seqs.append(Sequence(number, list(prompt), request, SamplingParams(max_tokens=max_tokens), mask))
            self._scheduler.add(self.seqs[-1])
        self.num_steps = 0
        self._spent_ms = 0.0
        self._first: dict[int, tuple[float, int]] = {}  # by id: when the first tokens were there, and how many
        self._last: dict[int, float] = {}

    def step(self) -> bool:
        """Return False once all sequences have ended."""
        began = time.perf_counter()
        plan = self._scheduler.schedule()
        if plan.is_empty:
            return False
        self._scheduler.commit(plan, self._runner.launch(plan).result())
        self._scheduler.take_output()
        self._spent_ms += 1e3 * (time.perf_counter() - began)
        self.num_steps += 1
        for chunk in plan.chunks:
            if chunk.samples:
                self._first.setdefault(chunk.seq.id, (self._spent_ms, chunk.seq.output_len))
                self._last[chunk.seq.id] = self._spent_ms
        return True

    @property
    def ms(self) -> float:
        return max(self._last.values()) - self._first[0][0]

    @property
    def itl_ms(self) -> float:
        return mean(
            (self._last[seq.id] - self._first[seq.id][0]) / (seq.output_len - self._first[seq.id][1])
            for seq in self.seqs
        )


def take_turns(servers: list[Server]) -> None:
    """Run servers to their ends, a step of each after the other."""
    while servers:
        servers = [server for server in servers if server.step()]


def main(
    turns: Annotated[int, typer.Option(min=1, help="Of each kind, for each number of sequences.")] = 9,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
) -> None:
    """Measure the time per output token with and without a grammar, and what forced tokens save."""
    folder = resolve(DEFAULT_MODEL)
    config = EngineConfig(str(folder), dtype="bfloat16", device="cpu", threads=threads, kv_cache_gb=0.5)
    runners = [ModelRunner(config) for _ in range(3)]
    grammars = Grammars(folder, runners[0].info.vocab_size, needs_all_masks=False)
    people, person = (
        grammars.mask_maker(inference_pb2.Guided(json_schema=json.dumps(schema))) for schema in (PEOPLE, PERSON)
    )
    kinds = prompts(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    table = Table(title=f"Milliseconds between two tokens, {threads} threads, medians of {turns} turns")
    for heading in ("prompts", "sequences", "unguided", "guided", "÷ unguided", "with forced tokens", "÷ unguided"):
        table.add_column(heading, justify="right")
    for kind, of_kind in kinds.items():
        for size in SIZES:
            times = []
            for turn in range(1 + turns):
                servers = [
                    Server(runners[0], of_kind[:size], TOKENS),
                    Server(runners[1], of_kind[:size], TOKENS, people),
                    Server(runners[2], of_kind[:size], TOKENS, people, jumps=True),
                ]
                take_turns(servers)
                if turn:  # the first one records steps
                    times.append([server.itl_ms for server in servers])
            plain, guided, jumping = (median(column) for column in zip(*times, strict=True))
            ratios = [median(each[at] / each[0] for each in times) for at in (1, 2)]
            table.add_row(
                kind,
                str(size),
                f"{plain:.2f}",
                f"{guided:.2f}",
                f"{ratios[0]:.3f}",
                f"{jumping:.2f}",
                f"{ratios[1]:.3f}",
            )
    Console().print(table)

    table = Table(title="One answer to a schema of five properties")
    for heading in ("forced tokens", "output tokens", "of them forced", "steps", "milliseconds"):
        table.add_column(heading, justify="right")
    answers = []
    for _ in range(turns):
        answers.append([Server(runners[at], kinds["asks for JSON"][:1], 200, person, jumps=at == 1) for at in (0, 1)])
        take_turns(answers[-1])
    for name, same in zip(("computed one by one", "appended"), zip(*answers, strict=True), strict=True):
        (seq,) = same[0].seqs
        table.add_row(
            name,
            str(seq.output_len),
            str(seq.account.forced_tokens),
            str(same[0].num_steps),
            f"{median(server.ms for server in same):.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
