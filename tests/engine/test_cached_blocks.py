"""What gateways learn of cached blocks: those that can be found, with their tokens, and nothing under a salt."""

from __future__ import annotations

import random

import pytest

from pagoda_server.channel.strides import chain_root
from pagoda_server.engine.core.step import CachedBlock
from pagoda_server.engine.kv.blocks import chain_hashes
from pagoda_server.engine.kv.cached_blocks import block_key
from tests.engine.harness import SteppedEngine


class Watched(SteppedEngine):
    """An engine whose blocks are followed. `blocks` are those that its outputs have reported."""

    def __init__(self, **options: int) -> None:
        self.blocks: dict[int, CachedBlock] = {}
        super().__init__(max_model_len=2000, token_budget=128, **options)  # type: ignore[arg-type]
        self.scheduler.watch_cache(blocks=True)
        take_output = self.scheduler.take_output

        def noting() -> object:
            output = take_output()
            assert output.cached == {}
            for key, block in output.blocks.items():
                if block is None:
                    del self.blocks[key]
                else:
                    self.blocks[key] = block
            return output

        self.scheduler.take_output = noting  # type: ignore[method-assign, assignment]

    def cached(self, tokens: list[int]) -> dict[int, CachedBlock]:
        """The blocks of a sequence that can be found."""
        size, parent, found = self.pool.block_size, None, {}
        for at, address in enumerate(chain_hashes(chain_root(""), tokens, size)):
            if not self.pool.match([address]):
                break
            found[block_key(address)] = CachedBlock(parent, tokens[at * size : (at + 1) * size])
            parent = block_key(address)
        return found


@pytest.mark.parametrize("block_size", [4, 16, 48])
def test_the_blocks_that_are_reported_are_those_that_are_cached(block_size: int) -> None:
    engine = Watched(num_blocks=1280 // block_size, block_size=block_size)
    rng = random.Random(block_size)
    bases = [[at] * 300 for at in range(4)]
    seqs = []
    for at in range(60):
        prompt = rng.choice(bases)[: rng.randrange(60, 300)] + [rng.randrange(250) for _ in range(rng.randrange(150))]
        seqs.append(engine.add(prompt, max_tokens=rng.randrange(1, 40)))
        if at % 7 == 3:
            engine.run()
            expected = {key: block for seq in seqs for key, block in engine.cached(list(seq.tokens)).items()}
            assert {key: (parent, list(tokens)) for key, (parent, tokens) in engine.blocks.items()} == expected
    engine.run()
    assert engine.blocks, "something is cached"
    engine.scheduler.flush_cache()
    engine.run()
    assert engine.blocks == {}


def test_blocks_under_a_salt_are_left_out() -> None:
    engine = Watched(num_blocks=128, block_size=16)
    engine.add([3] * 200, max_tokens=1, salt="a")
    engine.add([3] * 200, max_tokens=1, bypass=True)
    engine.run()
    assert engine.blocks == {}
