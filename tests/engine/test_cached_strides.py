"""What routers learn of the prefix cache: always what it holds, and nothing before one asks."""

from __future__ import annotations

import random

import pytest

from pagoda_server.channel.strides import STRIDE, chain_root, first_key, stride_keys
from pagoda_server.engine.kv.blocks import BlockPool, chain_hashes
from tests.engine.harness import SteppedEngine


def keys_of(tokens: list[int], salt: str = "") -> list[int]:
    return stride_keys(first_key(chain_root(salt)), tokens)


def cached_keys(pool: BlockPool, tokens: list[int]) -> set[int]:
    """The keys of the strides of which the pool has the last block."""
    hashes = list(chain_hashes(chain_root(""), tokens, pool.block_size))
    return {
        key
        for at, key in enumerate(keys_of(tokens))
        if (last := -(-(at + 1) * STRIDE // pool.block_size) - 1) < len(hashes) and pool.match([hashes[last]])
    }


class Watched(SteppedEngine):
    """An engine whose cache is followed. `keys` are those that its outputs have reported."""

    def __init__(self, **options: int) -> None:
        self.keys: set[int] = set()
        super().__init__(max_model_len=2000, token_budget=128, **options)  # type: ignore[arg-type]
        self.scheduler.watch_cache()
        take_output = self.scheduler.take_output

        def noting() -> object:
            output = take_output()
            for key, is_cached in output.cached.items():
                (self.keys.add if is_cached else self.keys.discard)(key)
            return output

        self.scheduler.take_output = noting  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("block_size", [4, 16, 48, 64, 128])
def test_the_keys_that_are_reported_are_those_that_are_cached(block_size: int) -> None:
    engine = Watched(num_blocks=1280 // block_size, block_size=block_size)
    rng = random.Random(block_size)
    bases = [[at] * 300 for at in range(4)]
    prompts = []
    for at in range(60):
        prompt = rng.choice(bases)[: rng.randrange(60, 300)] + [rng.randrange(250) for _ in range(rng.randrange(150))]
        prompts.append(engine.add(prompt, max_tokens=rng.randrange(1, 40)))
        if at % 7 == 3:
            engine.run()
            expected = {key for seq in prompts for key in cached_keys(engine.pool, seq.tokens)}
            assert engine.keys == expected
    engine.run()
    assert engine.keys, "something is cached"
    engine.scheduler.flush_cache()
    engine.run()
    assert engine.keys == set()


def test_what_was_cached_before_anyone_asked_is_reported_once_it_is_used() -> None:
    before = SteppedEngine(num_blocks=128, block_size=16, max_model_len=2000, token_budget=128)
    prompt = [at % 200 for at in range(500)]
    before.add(prompt, max_tokens=1)
    before.run()
    assert before.scheduler.take_output().cached == {}
    before.scheduler.watch_cache()
    before.add([*prompt, *[5] * 60], max_tokens=1)
    plan = before.scheduler.schedule()
    before.steps.launch(plan)
    before.steps.commit_oldest()
    reported = before.scheduler.take_output().cached
    assert {key for key, is_cached in reported.items() if is_cached} >= set(keys_of(prompt))


def test_keys_depend_on_the_salt_and_a_request_that_bypasses_the_cache_has_none() -> None:
    engine = Watched(num_blocks=128, block_size=16)
    prompt = [at % 200 for at in range(200)]
    engine.add(prompt, max_tokens=1, salt="a")
    engine.run()
    assert engine.keys == set(keys_of(prompt, "a"))
    engine.add(prompt, max_tokens=1, bypass=True)
    engine.run()
    assert engine.keys == set(keys_of(prompt, "a"))


def test_the_backlog_counts_prompt_tokens_that_no_cache_holds() -> None:
    engine = SteppedEngine(num_blocks=128, block_size=16, max_model_len=2000, token_budget=128, max_num_seqs=1)
    shared = [7] * 320
    engine.add(shared, max_tokens=1)
    engine.run()
    assert engine.scheduler.num_uncomputed == 0
    engine.add([8] * 600, max_tokens=1)
    for at in range(40):
        engine.add([*shared, *[at] * 80], max_tokens=1)
    assert 600 + 40 * 80 <= engine.scheduler.num_uncomputed <= 600 * 2 + 40 * 96
    engine.run()
    assert engine.scheduler.num_uncomputed == 0
