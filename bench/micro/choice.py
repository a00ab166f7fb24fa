"""What processor time it costs a router to choose an engine by what they have cached: `python -m bench.micro.choice`.

Half of the prompts are those of which every engine has a beginning cached, to a depth of its own, and which have been
asked before; each of the others is new. Beside each choice, a loop of constant work shows how much of p99 is the
machine's. Then the engines report what changes in their caches.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial

import numpy as np

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2
from pagoda_server.router.engines.cached_keys import CachedKeys
from pagoda_server.router.engines.channel import EngineChannel
from pagoda_server.router.engines.choosing import Asked, ByPrefix
from pagoda_server.router.engines.fleet import Fleet, Member

NUM_PROMPTS = 75  # that are asked again and again
KEYS_A_SECOND = 26_000  # that all engines report
KEYS_A_REPORT = 64  # an engine has four reports a second; half of them stored, half evicted
INFO = control_pb2.EngineInfo(max_num_seqs=64, kv_cache={"num_blocks": 1 << 16, "block_size": 16})


async def _nothing() -> None:
    pass


async def fleet_of(num_engines: int, rng: random.Random) -> Fleet:
    """Ready engines with loads of their own."""
    chooser = ByPrefix(rng)

    def connect(member: Member, number: int) -> EngineChannel:
        return EngineChannel(member.address, hang_timeout_s=60, on_change=_nothing, table=chooser.table)

    fleet = Fleet(connect, chooser)
    for at in range(num_engines):
        fleet.join(Member(str(at), f"127.0.0.1:{at}"))
    for channel in fleet.channels:
        channel.info = INFO
        chooser.table.set_batch(channel.row, INFO.max_num_seqs)
        load = control_pb2.EngineLoad(
            running=rng.randrange(40), uncomputed_tokens=rng.randrange(4000), prefill_tokens_per_s=5000.0
        )
        channel.sequences.deliver(engine_pb2.StepOutput(load=load))
    return fleet


def fill(fleet: Fleet, prompts: list[list[int]], keys_each: int, rng: random.Random) -> list[list[int]]:
    """Let each engine have a beginning of each prompt, and keys that no prompt has. Return the keys of each."""
    held = []
    chains = [Asked(prompt).keys() for prompt in prompts]
    for channel in fleet.channels:
        channel.cached = CachedKeys(INFO, fleet.chooser.table.cached, channel.row)
        keys = [key for chain in chains for key in chain[: rng.randrange(1, len(chain))]]
        keys += [rng.getrandbits(63) for _ in range(keys_each - len(keys))]
        channel.cached.take_snapshot(engine_pb2.CacheSnapshot(keys=keys, is_first=True, is_last=True))
        held.append(keys)
    return held


def seconds_of_reports(fleet: Fleet, held: list[list[int]], turn: int, rng: random.Random) -> float:
    """The processor time of reading what the engines report in a second, from the bytes of the messages on.

    held  the keys of each engine, which is changed; `turn` counts the calls, from 0
    """
    half, each = KEYS_A_REPORT // 2, KEYS_A_SECOND // KEYS_A_REPORT // len(held)
    messages = []
    for channel, keys in zip(fleet.channels, held, strict=True):
        for number in range(turn * each, (turn + 1) * each):
            removed, stored = keys[:half], [rng.getrandbits(63) for _ in range(half)]
            keys[:] = keys[half:] + stored
            delta = engine_pb2.CacheDelta(number=1 + number, stored=stored, removed=removed)
            messages.append((channel.cached, engine_pb2.EngineMessage(cache_delta=delta).SerializeToString()))
    began = time.thread_time()
    for cached, message in messages:
        assert cached is not None
        assert cached.take_delta(engine_pb2.EngineMessage.FromString(message).cache_delta)
    return time.thread_time() - began


def constant_work() -> None:
    for _ in range(4000):
        pass


def timed(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.micro.choice", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt")
    parser.add_argument("--keys", type=int, default=20_000, help="that each engine has cached")
    parser.add_argument("--choices", type=int, default=2000)
    args = parser.parse_args(argv)
    rng = random.Random(1)
    prompts = [rng.choices(range(50_000), k=args.tokens) for _ in range(NUM_PROMPTS)]
    fleet = asyncio.run(fleet_of(args.engines, rng))
    held = fill(fleet, prompts, args.keys, rng)
    for prompt in 4 * prompts:
        fleet.pick(asked=Asked(prompt))
    seconds = []
    for number in range(args.choices):
        prompt = rng.choice(prompts) if number % 2 else rng.choices(range(50_000), k=args.tokens)
        asked = Asked(array("I", prompt).tolist())  # new numbers, as a tokenizer has just made them
        calls = (asked.keys, partial(fleet.pick, asked=asked), constant_work)
        seconds.append([timed(call) for call in calls])
    keys, choices, constant = np.array(seconds).T
    print(f"{args.engines} engines, prompts of {args.tokens} tokens, milliseconds at p50 and p99")
    for name, found in (("keys", keys), ("choice", choices), ("both", keys + choices), ("constant", constant)):
        low, high = 1e3 * np.percentile(found, [50, 99])
        print(f"{name:10}{low:8.3f}{high:8.3f}")
    share = statistics.median(seconds_of_reports(fleet, held, turn, rng) for turn in range(9))
    print(f"reports of {KEYS_A_SECOND} keys a second take {100 * share:.1f} % of a core")


if __name__ == "__main__":
    main(sys.argv[1:])
