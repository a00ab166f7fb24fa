"""Which engine gets a request, by each rule."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from random import Random
from typing import Any

import pytest

from bench.fleet import RULES, Machine, Outcome, arrivals, simulate
from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2
from pagoda_server.channel.strides import STRIDE, chain_root, first_key, stride_keys
from pagoda_server.router.engines import cached_keys, prompt_keys
from pagoda_server.router.engines.cached_keys import EXPECTED_S, MOST_KEYS, CachedBits, CachedKeys
from pagoda_server.router.engines.choosing import (
    HASHED_STRIDES,
    MOST_TO_FEWEST,
    NEAR_S,
    PATIENCE_PER_SAVED_S,
    PATIENCE_S,
    UNKNOWN_RATE,
    WARM,
    Asked,
    Automatic,
    ByHash,
    ByPrefix,
    Candidates,
    Chooser,
)
from pagoda_server.router.engines.prompt_keys import PromptKeys
from pagoda_server.router.engines.refusals import InvalidMessage
from pagoda_server.router.engines.table import FULL_S, QUEUE_S, SLACK, SLACK_PART, EngineTable

INFO = control_pb2.EngineInfo(kv_cache={"num_blocks": 1000, "block_size": 16})
TABLE = EngineTable()  # of the engines of these tests


@dataclass
class Engine:
    name: str
    num_sequences: int = 0
    address: str = ""
    block_layout: bytes = b""
    max_num_seqs: int = 64
    num_uncomputed: int = 0
    prefill_tokens_per_s: float = 10_000.0
    row: int = field(default_factory=TABLE.take_row)
    cached: CachedKeys | None = None

    def __post_init__(self) -> None:
        self.cached = CachedKeys(INFO, TABLE.cached, self.row)


def choose(rule: Chooser, fleet: Sequence[Engine], asked: Asked | None) -> Engine:
    """Let a rule choose by what the engines have now."""
    for each in fleet:
        TABLE.set_batch(each.row, each.max_num_seqs)
        TABLE.update(each.row, each.num_sequences, each.num_uncomputed, each.prefill_tokens_per_s)
    return rule.choose(Candidates(fleet), asked)


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


def test_routers_and_engines_of_all_versions_give_a_stride_the_same_key() -> None:
    random, root = Random(1), chain_root("salt")
    for length in (64, 127, 1000):
        tokens = [*random.choices(range(1 << 32), k=length - 1), (1 << 32) - 1]
        key, expected = root[:8], []
        for start in range(0, length // STRIDE * STRIDE, STRIDE):
            content = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + STRIDE])
            key = blake2b(key + content, digest_size=8).digest()
            expected.append(int.from_bytes(key, "little"))
        assert stride_keys(first_key(root), tokens) == expected


def test_keys_of_pieces_that_came_before_are_those_that_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_keys, "MOST_PIECES", 6)
    random, known = Random(1), PromptKeys()
    contents = [random.choices(range(9), k=1024) for _ in range(3)]
    for _ in range(300):
        tokens = [token for content in random.choices(contents, k=3) for token in content][: random.randrange(3073)]
        root = random.randrange(2)
        assert known.of(root, tokens) == stride_keys(root, tokens)
        assert len(known) <= 6


def test_a_request_has_keys_unless_it_bypasses_the_cache() -> None:
    submit = engine_pb2.Submit(prompt=range(200), cache={"salt": "a"})
    assert Asked.of(submit).keys() == stride_keys(first_key(chain_root("a")), range(200))
    assert Asked.of(submit, list(range(200))).first_keys(STRIDE) == stride_keys(first_key(chain_root("a")), range(64))
    submit.cache.bypass = True
    assert Asked.of(submit).keys() == []


def chosen(rule: ByHash, fleet: Sequence[Engine], prompt: list[int]) -> str:
    return choose(rule, fleet, Asked(prompt)).name


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
        choose(rule, fleet, Asked(prompt)).num_sequences += 1
    assert max(each.num_sequences for each in fleet) <= 126


@pytest.mark.parametrize("asked", [None, Asked([1] * (STRIDE - 1)), Asked([1] * 500, salt=None)])
def test_a_request_without_keys_goes_to_the_least_loaded_engine(asked: Asked | None) -> None:
    rule, fleet = ByHash(), engines(3)
    for _ in range(30):
        choose(rule, fleet, asked).num_sequences += 1
    assert [each.num_sequences for each in fleet] == [10, 10, 10]


# -- by what is cached -------------------------------------------------------------------------------------------------


def caching(engine: Engine, prompt: list[int]) -> Engine:
    assert engine.cached is not None
    engine.cached.take_snapshot(engine_pb2.CacheSnapshot(keys=Asked(prompt).keys(), is_first=True, is_last=True))
    return engine


def rule_with_caches(rule: type[ByPrefix]) -> ByPrefix:
    made = rule(Random(1))
    made.table = TABLE
    return made


class Cache(CachedKeys):
    """What the cache of an engine alone holds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.bits = CachedBits()
        super().__init__(INFO, self.bits, 0, clock)

    def num_cached(self, keys: list[int]) -> int:
        return sum(self.bits.num_cached(keys, 1))


def by_prefix(fleet: Sequence[Engine], asked: Asked) -> tuple[str, str]:
    """The chosen engine and why."""
    rule = rule_with_caches(ByPrefix)
    name = choose(rule, fleet, asked).name
    return name, next(iter(rule.choices))[1]


def test_a_short_prompt_whose_last_stride_is_not_known_is_still_warm() -> None:
    (prompt,) = prompts(1, 330)
    fleet = [caching(Engine("warm", num_sequences=4), prompt[:128]), Engine("cold")]
    assert by_prefix(fleet, Asked(prompt)) == ("warm", "cached")
    fleet = [caching(Engine("warm", num_sequences=4), prompt[:64]), Engine("cold")]
    assert by_prefix(fleet, Asked(prompt)) == ("cold", "cost")


def test_a_prompt_goes_to_the_engine_that_has_it_cached_unless_that_makes_it_wait() -> None:
    (prompt,) = prompts(1)
    fleet = [*engines(3), caching(Engine("warm"), prompt[:5500])]
    asked = Asked([*prompt[:5500], *range(900)])
    assert by_prefix(fleet, asked) == ("warm", "cached")
    assert asked.num_cached == 5500 // STRIDE * STRIDE
    fleet[3].num_uncomputed = 10_000
    assert by_prefix(fleet, asked) == ("warm", "cached")
    fleet[3].num_uncomputed = int(10_000 * (PATIENCE_S + 1))
    assert by_prefix(fleet, asked)[1] == "released"
    fleet[3].num_uncomputed = 10_000
    assert by_prefix(fleet, replace(asked, ttft_s=0.5))[1] == "released", "its target leaves it less patience"
    fleet[3].num_uncomputed = 0
    fleet[3].num_sequences = int(SLACK_PART * fleet[3].max_num_seqs)
    assert by_prefix(fleet, asked)[1] == "cost", "it has too many sequences"
    for each in fleet[:3]:
        each.num_sequences = 10
    fleet[3].num_sequences = int(SLACK_PART * 64 + 10 * MOST_TO_FEWEST) - 1
    assert by_prefix(fleet, asked) == ("warm", "cached")


def test_slow_engines_leave_a_prompt_where_it_is_cached_for_longer() -> None:
    (prompt,) = prompts(1, 330)
    fleet = [
        caching(Engine("warm", prefill_tokens_per_s=100.0), prompt[:256]),
        Engine("cold", prefill_tokens_per_s=100.0),
    ]
    fleet[0].num_uncomputed = 800
    assert by_prefix(fleet, Asked(prompt)) == ("warm", "cached"), "5.4 s later, which is twice what is saved"
    fleet[0].num_uncomputed = 1200
    assert by_prefix(fleet, Asked(prompt)) == ("cold", "released")


def test_a_prompt_that_no_engine_has_goes_where_it_is_computed_first() -> None:
    fast, slow, busy = (
        Engine("fast", prefill_tokens_per_s=20_000),
        Engine("slow"),
        Engine("busy", num_uncomputed=50_000),
    )
    asked = Asked([1] * 6000)
    assert by_prefix([busy, slow, fast], asked) == ("fast", "cost")
    fast.num_uncomputed = 9_000
    assert by_prefix([busy, slow, fast], asked) == ("slow", "cost")


def test_engines_that_are_as_good_share_prompts_at_random() -> None:
    rule, fleet = rule_with_caches(ByPrefix), engines(4)
    counts = Counter(choose(rule, fleet, Asked([1] * 500)).name for _ in range(400))
    assert min(counts.values()) > 60


def test_engines_are_chosen_by_load_while_one_reports_nothing() -> None:
    (prompt,) = prompts(1)
    fleet = [caching(Engine("warm", num_sequences=1), prompt), Engine("cold")]
    assert choose(rule_with_caches(Automatic), fleet, Asked(prompt)).name == "warm"
    assert fleet[1].cached is not None
    fleet[1].cached.close()
    assert choose(rule_with_caches(Automatic), fleet, Asked(prompt)).name == "cold"


class First(Random):
    """Takes the first of those that are as good."""

    def choice(self, seq: Sequence[Any]) -> Any:
        return seq[0]


def by_formula(fleet: Sequence[Engine], prompt_len: int, cached: Sequence[int]) -> tuple[str, str]:
    """Which engine a ByPrefix must choose and why, engine by engine.

    cached  the prompt's tokens that each engine has
    """
    rates = [each.prefill_tokens_per_s for each in fleet if each.prefill_tokens_per_s]
    usual = sum(rates) / len(rates) if rates else UNKNOWN_RATE
    fewest = min(each.num_sequences for each in fleet)
    costs, warm = [], []
    for place, each in enumerate(fleet):
        fill = each.num_sequences / each.max_num_seqs
        seconds = (each.num_uncomputed + prompt_len - cached[place]) / (each.prefill_tokens_per_s or usual)
        costs.append(seconds + FULL_S * fill + QUEUE_S * max(0, fill - 1))
        most = MOST_TO_FEWEST * fewest + max(SLACK, SLACK_PART * each.max_num_seqs)
        if cached[place] > max(0, WARM * prompt_len - STRIDE) and each.num_sequences < most:
            warm.append(place)
    near = [place for place, cost in enumerate(costs) if cost <= min(costs) + NEAR_S]
    if not warm:
        return fleet[near[0]].name, "cost"
    best = next(place for place in warm if costs[place] <= min(costs[each] for each in warm) + NEAR_S)
    saved_s = (cached[best] - cached[near[0]]) / (fleet[near[0]].prefill_tokens_per_s or usual)
    is_near = costs[best] <= costs[near[0]] + max(PATIENCE_S, PATIENCE_PER_SAVED_S * saved_s)
    return (fleet[best].name, "cached") if is_near else (fleet[near[0]].name, "released")


def test_a_choice_from_columns_is_what_the_formula_says_engine_by_engine() -> None:
    random, found = Random(1), Counter[str]()
    (prompt,) = prompts(1, 4000)
    everyone = engines(40)
    for _ in range(600):
        rule = ByPrefix(First())
        rule.table = TABLE
        some = sorted(random.sample(range(40), random.choice((2, 9, 40))))
        fleet = [everyone[place] for place in some]
        cached = []
        for each in everyone:
            each.num_sequences, each.max_num_seqs = random.randrange(random.choice((12, 100))), random.choice((8, 64))
            each.num_uncomputed = random.randrange(random.choice((1, 90_000)))
            each.prefill_tokens_per_s = random.choice((0.0, 900.0, 9_000.0, 10_000.0))
            known = random.choice((0, 0, random.randrange(4000)))
            caching(each, prompt[:known])
            cached.append(known // STRIDE * STRIDE)
        asked = Asked(prompt[: random.choice((50, 300, 4000))])
        least = [min(cached[place], len(asked.prompt) // STRIDE * STRIDE) for place in some]
        expected = by_formula(fleet, len(asked.prompt), least)
        chosen = choose(rule, fleet, asked)
        assert (chosen.name, next(iter(rule.choices))[1]) == expected
        assert asked.num_cached == least[fleet.index(chosen)]
        found[expected[1]] += 1
    assert min(found[reason] for reason in ("cached", "released", "cost")) > 50


def test_an_engine_that_says_it_computes_next_to_nothing_counts_as_one_that_does_not_say() -> None:
    fleet = [Engine("slow", prefill_tokens_per_s=5e-324), Engine("other", num_sequences=9)]
    assert by_prefix(fleet, Asked([1] * 64)) == ("slow", "cost")


def test_a_prompt_counts_as_cached_where_it_was_sent_until_the_engine_must_have_reported_it() -> None:
    now = 0.0
    cached, keys = Cache(lambda: now), Asked([1] * 640).keys()
    cached.expect(keys)
    assert cached.num_cached(keys) == 10
    now = EXPECTED_S
    cached.expect([])
    assert cached.num_cached(keys) == 0


def test_deltas_follow_a_snapshot_and_a_gap_needs_another_one() -> None:
    cached, keys = Cache(), Asked([1] * 640).keys()
    assert cached.take_delta(engine_pb2.CacheDelta(number=7, stored=keys)), "a snapshot is under way"
    cached.take_snapshot(engine_pb2.CacheSnapshot(number=7, keys=keys[:3], is_first=True))
    cached.take_snapshot(engine_pb2.CacheSnapshot(number=7, keys=keys[3:6], is_last=True))
    assert cached.num_cached(keys) == 6
    assert cached.take_delta(engine_pb2.CacheDelta(number=8, stored=keys[6:], removed=keys[8:]))
    assert cached.num_cached(keys) == 10
    assert not cached.take_delta(engine_pb2.CacheDelta(number=10, removed=keys))
    cached.take_snapshot(engine_pb2.CacheSnapshot(number=10, is_first=True, is_last=True))
    assert cached.num_cached(keys) == 0


def test_a_key_that_was_sent_stays_cached_when_the_engine_says_that_it_has_left() -> None:
    now = 0.0
    cached, keys = Cache(lambda: now), Asked([1] * 640).keys()
    cached.take_snapshot(engine_pb2.CacheSnapshot(keys=keys, is_first=True, is_last=True))
    cached.expect(keys[:4])
    assert cached.take_delta(engine_pb2.CacheDelta(number=1, removed=keys))
    assert cached.num_cached(keys) == 4
    cached.take_snapshot(engine_pb2.CacheSnapshot(keys=keys[:2], is_first=True, is_last=True))
    assert cached.num_cached(keys) == 4
    now = EXPECTED_S
    cached.expect([])
    assert cached.num_cached(keys) == 2


@pytest.mark.parametrize("most_recent", [25, 10_000])
def test_what_is_found_of_many_engines_is_what_is_counted_engine_by_engine(
    monkeypatch: pytest.MonkeyPatch, most_recent: int
) -> None:
    """Engines come, go, and take each other's bits; one dictionary of all must say what a set for each says."""
    monkeypatch.setattr(cached_keys, "MOST_RECENT", most_recent)
    random, table = Random(1), EngineTable()
    chains = [Asked([at] * 640).keys() for at in range(6)]
    caches: dict[CachedKeys, set[int]] = {}
    numbers: dict[CachedKeys, int] = {}
    rows: dict[CachedKeys, int] = {}
    for _ in range(2000):
        if len(caches) < 70 and random.random() < 0.2:
            row = table.take_row()
            assert row not in rows.values()
            cached = CachedKeys(INFO, table.cached, row)
            rows[cached] = row
            cached.take_snapshot(engine_pb2.CacheSnapshot(is_first=True, is_last=True))
            caches[cached], numbers[cached] = set(), 0
        if not caches:
            continue
        cached = random.choice(list(caches))
        if random.random() < 0.03:
            cached.close()
            table.give_back(rows.pop(cached))
            del caches[cached], numbers[cached]
            continue
        chain, (low, high) = random.choice(chains), sorted(random.choices(range(11), k=2))
        numbers[cached] += 1
        if random.random() < 0.7:
            cached.take_delta(engine_pb2.CacheDelta(number=numbers[cached], stored=chain[:high]))
            caches[cached].update(chain[:high])
        else:
            cached.take_delta(engine_pb2.CacheDelta(number=numbers[cached], removed=chain[low:]))
            caches[cached].difference_update(chain[low:])
        found = table.cached.num_cached(chain, len(table))
        for each, held in caches.items():
            leading = next((at for at, key in enumerate(chain) if key not in held), len(chain))
            assert (found[rows[each]] if found else 0) == leading
        assert sum(map(bool, found)) == sum(chain[0] in held for held in caches.values()), "a row that no engine has"
    for each in list(caches):
        each.close()
        table.give_back(rows[each])
    assert (len(table.cached), table.cached.reporting) == (0, 0)
    assert table.take_row() == 0


@pytest.mark.parametrize("num_blocks", [1000, (1 << 32) - 1])
def test_an_engine_that_reports_more_than_its_cache_holds_is_refused(num_blocks: int) -> None:
    cached = CachedKeys(control_pb2.EngineInfo(kv_cache={"num_blocks": num_blocks, "block_size": 16}), CachedBits(), 0)
    most = min(num_blocks, MOST_KEYS)
    cached.take_snapshot(engine_pb2.CacheSnapshot(keys=range(most), is_first=True, is_last=True))
    with pytest.raises(InvalidMessage, match=f"{most}"):
        cached.take_delta(engine_pb2.CacheDelta(number=1, stored=[most]))
    with pytest.raises(InvalidMessage, match=f"{most}"):
        cached.take_snapshot(engine_pb2.CacheSnapshot(keys=range(2 * most), is_first=True))
    assert len(cached) <= most + 1


# -- eight engines, simulated ------------------------------------------------------------------------------------------

SMALL = Machine(num_strides=1500, max_num_seqs=32)


def served(rule: str, num_routers: int = 1, **workload: float) -> Outcome:
    """What becomes of 2,000 requests: `python -m bench.fleet` with smaller caches, shorter prompts and outputs."""
    requests = arrivals(2000, 100.0, prefix_len=1536, prompt_len=1856, output_len=120, **workload)  # type: ignore[arg-type]
    return simulate(RULES[rule], requests, num_routers=num_routers, machine=SMALL)


def test_prompts_that_share_prefixes_find_them_and_start_sooner() -> None:
    load, one, two = (
        served("load", num_prefixes=80),
        served("auto", num_prefixes=80),
        served("auto", 2, num_prefixes=80),
    )
    assert one.hit_rate >= 0.9 * one.best_hit_rate
    assert one.ttft_p90_s <= load.ttft_p90_s / 3
    assert one.tokens_per_s >= 1.25 * load.tokens_per_s
    assert two.hit_rate >= 0.95 * one.hit_rate, "what two routers see a quarter second late is enough"


def test_prompts_that_share_nothing_lose_nothing() -> None:
    load, prefix = served("load", num_prefixes=0), served("auto", num_prefixes=0)
    assert prefix.tokens_per_s >= 0.97 * load.tokens_per_s
    assert prefix.ttft_p90_s <= 1.03 * load.ttft_p90_s


def test_a_prefix_that_most_prompts_have_is_spread_over_engines() -> None:
    found = served("auto", num_prefixes=150, popular=0.8)
    assert found.max_to_min <= 1.5
    assert found.hit_rate >= 0.9 * found.best_hit_rate
