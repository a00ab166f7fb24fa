"""Which engine gets a request, by each rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda_server.channel.strides import STRIDE, chain_root, first_key, stride_keys
from pagoda_server.router.engines.choosing import HASHED_STRIDES, Asked, ByHash


@dataclass
class Engine:
    name: str
    num_sequences: int = 0


def engines(count: int) -> list[Engine]:
    return [Engine(f"engine-{place}") for place in range(count)]


def prompts(count: int, length: int = 6000) -> list[list[int]]:
    return [[at, *range(1, length)] for at in range(count)]


def test_a_key_stands_for_all_tokens_up_to_its_stride() -> None:
    keys = stride_keys(first_key(chain_root("")), range(3 * STRIDE + 1))
    assert len(set(keys)) == 3
    assert stride_keys(first_key(chain_root("")), range(STRIDE)) == keys[:1]
    assert stride_keys(keys[0], range(STRIDE, 3 * STRIDE)) == keys[1:]
    assert not set(stride_keys(first_key(chain_root("salt")), range(3 * STRIDE))) & set(keys)
    assert stride_keys(first_key(chain_root("")), range(STRIDE - 1)) == []


def test_a_request_has_keys_unless_it_bypasses_the_cache() -> None:
    submit = engine_pb2.Submit(prompt=range(200), cache={"salt": "a"})
    assert Asked.of(submit).keys() == stride_keys(first_key(chain_root("a")), range(200))
    assert Asked.of(submit, list(range(200))).keys(1) == stride_keys(first_key(chain_root("a")), range(64))
    submit.cache.bypass = True
    assert Asked.of(submit).keys() == []


def chosen(rule: ByHash, fleet: Sequence[Engine], prompt: list[int]) -> str:
    return rule.choose(fleet, Asked(prompt)).name


def test_prompts_with_equal_beginnings_meet_in_one_engine_and_others_spread() -> None:
    rule, fleet = ByHash(), engines(8)
    found = {prompt[0]: chosen(rule, fleet, prompt) for prompt in prompts(400)}
    assert all(chosen(rule, fleet, prompt + [7] * prompt[0]) == found[prompt[0]] for prompt in prompts(400))
    counts = Counter(found.values())
    assert len(counts) == 8
    assert max(counts.values()) < 2 * min(counts.values())
    assert HASHED_STRIDES * STRIDE < 6000


def test_few_prompts_move_when_an_engine_leaves() -> None:
    rule, fleet = ByHash(), engines(8)
    before = {prompt[0]: chosen(rule, fleet, prompt) for prompt in prompts(400)}
    after = {prompt[0]: chosen(rule, fleet[1:], prompt) for prompt in prompts(400)}
    assert all(after[at] == before[at] for at in before if before[at] != "engine-0")


def test_an_engine_far_above_the_mean_gets_no_prompt_by_its_hash() -> None:
    rule, fleet = ByHash(), engines(4)
    (prompt,) = prompts(1)
    for _ in range(400):
        rule.choose(fleet, Asked(prompt)).num_sequences += 1
    assert max(each.num_sequences for each in fleet) <= 126


@pytest.mark.parametrize("asked", [None, Asked([1] * (STRIDE - 1)), Asked([1] * 500, salt=None)])
def test_a_request_without_keys_goes_to_the_least_loaded_engine(asked: Asked | None) -> None:
    rule, fleet = ByHash(), engines(3)
    for _ in range(30):
        rule.choose(fleet, asked).num_sequences += 1
    assert [each.num_sequences for each in fleet] == [10, 10, 10]
