"""Eight sequences from one prompt."""

from __future__ import annotations

from dataclasses import dataclass

from bench.promises.calls import generate
from bench.promises.scenario import Bound, Figures, Turn, Variant
from bench.workloads import TEXT
from pagoda import AsyncClient

SEED = 1234
TEMPERATURE = 0.8


@dataclass(slots=True)
class Sampling:
    """Eight sequences from a prompt of prose, in one request and in eight requests run alone.

    Sequence i of a request with seed s draws as a single request with seed s + i does, so the tokens must be the same.
    Blocks are the most that any step referenced, from the engine's own trace; prefix caching is off. In float32 the
    batch changes logits too little to change a token.
    """

    name: str = "sampling"
    variants: tuple[Variant, ...] = (Variant("as served"), Variant("float32", ("--dtype", "float32")))
    n: int = 8
    prompt_len: int = 1000
    output_len: int = 48

    async def run(self, address: str, vocab_size: int, turn: int) -> Figures:
        async with AsyncClient(address, retries=0) as client:
            block_size = (await client.server_info()).engines[0].info.kv_cache.block_size
            prompt = (await client.tokenize(prompt=TEXT.read_text()))[: self.prompt_len]
            seed = SEED + turn * self.n
            alone = []
            blocks_alone = 0
            for index in range(self.n):
                tokens, blocks = await _sample(client, prompt, self.output_len, 1, seed + index)
                alone.append(tokens[0])
                blocks_alone = max(blocks_alone, blocks)
            together, blocks = await _sample(client, prompt, self.output_len, self.n, seed)
        return {
            "prompt tokens": float(len(prompt)),
            "blocks, n = 1": float(blocks_alone),
            f"blocks, n = {self.n}": float(blocks),
            f"blocks of {self.n} outputs": float(self.n * -(-self.output_len // block_size)),
            "sequences equal to the same one alone": float(
                sum(together[at] == tokens for at, tokens in enumerate(alone))
            ),
        }

    def bounds(self, turns: list[Turn]) -> list[Bound]:
        bounds = []
        for variant in self.variants:
            of = [turn[variant.name] for turn in turns]
            blocks = [
                (figures[f"blocks, n = {self.n}"] - figures[f"blocks of {self.n} outputs"]) / figures["blocks, n = 1"]
                for figures in of
            ]
            equal = [figures["sequences equal to the same one alone"] for figures in of]
            bounds.append(
                Bound(
                    f"{variant.name}: (blocks of n = {self.n} − blocks of its outputs) ÷ blocks of n = 1", 1.3, blocks
                )
            )
            bounds.append(
                Bound(
                    f"{variant.name}: of {self.n} sequences, number equal to the same one alone",
                    self.n,
                    equal,
                    is_floor=True,
                    digits=0,
                )
            )
        return bounds


async def _sample(
    client: AsyncClient, prompt: list[int], output_len: int, n: int, seed: int
) -> tuple[dict[int, list[int]], int]:
    """Return the tokens of each sequence, and the most blocks that a step referenced."""
    began = [part.taken_at_s async for part in client.step_trace(0.001)][-1]
    call = await generate(client, prompt, max_tokens=output_len, n=n, seed=seed, temperature=TEMPERATURE)
    referenced = [
        part.blocks_total - step.blocks_free - step.blocks_evictable
        async for part in client.step_trace()
        for step in part.steps
        if step.start_s > began
    ]
    return call.tokens, max(referenced)
