"""How much of real prompts is cached where the router sends them, and where others do.

Two engines of the default model with caches that hold a third of the prefixes, and eight clients: Pagoda's router, the
gateway smg with events, and Dynamo's RadixTree, in turns on the same prompts.

    python -m tests.counterparts.measure_hits
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from random import Random

from pagoda import Client
from pagoda_server.checkpoints import DEFAULT_MODEL
from tests.counterparts.shared_prefixes import complete, hits, hits_of_the_router
from tests.counterparts.test_dynamo import radix_router
from tests.counterparts.test_smg import running_gateway
from tests.servers import running_server

ENGINE = ("--model", DEFAULT_MODEL, "--threads", "1", "--kv-cache-gb", "0.06", "--max-model-len", "1024")
WORDS = "sea ship wind star tree hill bird fish song road door lamp rain snow fire sand".split()  # noqa: SIM905


def prompts(seed: int) -> list[str]:
    """150 prompts of about 330 tokens, of which 250 are one of twelve prefixes, some more frequent than others."""
    random = Random(seed)
    prefixes = ["".join(f" {random.choice(WORDS)}" for _ in range(250)) for _ in range(12)]
    weights = [1 / place for place in range(1, 13)]
    return [
        random.choices(prefixes, weights)[0] + "".join(f" {random.choice(WORDS)}" for _ in range(80))
        for _ in range(150)
    ]  # fmt: skip


def hits_of_smg(asked: list[str], folder: Path) -> float:
    with (
        running_server(*ENGINE) as first,
        running_server(*ENGINE) as second,
        running_gateway(folder / "log", first, second, model=DEFAULT_MODEL) as gateway,
    ):
        return hits(partial(complete, gateway.base, model=DEFAULT_MODEL), asked)


def hits_of_dynamo(asked: list[str]) -> float:
    server = (*ENGINE, "--http", "127.0.0.1:0")
    with running_server(*server) as first, running_server(*server) as second, Client(first.address) as client:
        tokens = {prompt: client.tokenize(prompt=prompt) for prompt in asked}
        block_size = client.server_info().engines[0].info.kv_cache.block_size
        with radix_router(
            first, second, block_size=block_size, model=DEFAULT_MODEL, tokens=tokens.__getitem__
        ) as router:
            return hits(router.complete, asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    for turn in range(args.turns):
        asked = prompts(turn)
        ours, prompt_tokens = hits_of_the_router(asked, DEFAULT_MODEL, ENGINE)
        print(f"turn {turn}: Pagoda {ours:.3f} {prompt_tokens}", end=" ", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            print(f"smg {hits_of_smg(asked, Path(folder)):.3f}", end=" ", flush=True)
        print(f"RadixTree {hits_of_dynamo(asked):.3f}", flush=True)


if __name__ == "__main__":
    main()
