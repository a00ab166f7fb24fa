"""Dynamo's RadixTree, fed by SubscribeKvEvents with what two servers have cached, beside the router's own choice."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagoda_server.router.adapters.protocols import smg_common_pb2 as smg
from tests.counterparts.environments import python_with
from tests.counterparts.shared_prefixes import (
    SMALL_CACHE,
    complete,
    hits,
    hits_of_the_router,
    prompts_with_shared_prefixes,
)
from tests.servers import Server, running_server

pytestmark = pytest.mark.counterpart
METHOD = "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents"
BLOCK_SIZE = 4  # of the synthetic model


class RadixRouter:
    """Sends each prompt to the server that has most of it, and of those that have as much to the one with fewest.

    model, tokens  what the servers serve, and its tokens of a text
    """

    def __init__(
        self,
        tree: subprocess.Popen[str],
        servers: tuple[Server, ...],
        model: str = "synthetic",
        tokens: Callable[[str], list[int]] = lambda text: list(text.encode()),
    ) -> None:
        self._model = model
        self._tokens = tokens
        self._tree = tree
        self._servers = servers
        self._running = [0] * len(servers)
        self._one_at_a_time = threading.Lock()
        self._choosing = threading.Lock()

    def ask(self, **asked: Any) -> dict[str, int]:
        assert self._tree.stdin is not None
        assert self._tree.stdout is not None
        with self._one_at_a_time:
            self._tree.stdin.write(json.dumps(asked) + "\n")
            self._tree.stdin.flush()
            found: dict[str, int] = json.loads(self._tree.stdout.readline())
        return found

    def follow(self, engine: int, batches: Any) -> None:
        with contextlib.suppress(grpc.RpcError, BrokenPipeError, ValueError):  # it ends with the test
            for event in (event for batch in batches for event in batch.events):
                if event.HasField("stored"):
                    has_parent = event.stored.HasField("parent_block_hash")
                    parent = unsigned(event.stored.parent_block_hash) if has_parent else None
                    blocks = [(unsigned(each.block_hash), list(each.token_ids)) for each in event.stored.blocks]
                    self.ask(engine=engine, stored=blocks, parent=parent)
                elif event.HasField("removed"):
                    self.ask(engine=engine, removed=list(map(unsigned, event.removed.block_hashes)))
                else:
                    self.ask(engine=engine, cleared=True)

    def complete(self, prompt: str) -> str:
        with self._choosing:
            found = self.ask(find=self._tokens(prompt))
            engine = max(range(len(self._servers)), key=lambda at: (found.get(str(at), 0), -self._running[at]))
            self._running[engine] += 1
        try:
            return complete(self._servers[engine].http, prompt, self._model)
        finally:
            with self._choosing:
                self._running[engine] -= 1


def unsigned(hash: int) -> int:
    return hash % (1 << 64)


@contextlib.contextmanager
def radix_router(*servers: Server, block_size: int = BLOCK_SIZE, **model: Any) -> Iterator[RadixRouter]:
    """
    model  see RadixRouter
    """
    python = python_with("dynamo", "ai-dynamo-runtime==1.6.1")
    script = Path(__file__).parent / "radix_tree.py"
    with contextlib.ExitStack() as stack:
        tree = stack.enter_context(
            subprocess.Popen(
                [python, script, str(block_size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        stack.callback(tree.kill)
        router = RadixRouter(tree, servers, **model)
        for engine, server in enumerate(servers):
            channel = stack.enter_context(grpc.insecure_channel(server.address))
            subscribe = channel.unary_stream(
                METHOD, smg.SubscribeKvEventsRequest.SerializeToString, smg.KvEventBatch.FromString
            )
            batches = subscribe(smg.SubscribeKvEventsRequest())
            stack.callback(batches.cancel)
            threading.Thread(target=router.follow, args=(engine, batches), daemon=True).start()
        yield router


def test_the_router_finds_as_many_cached_tokens_as_a_radix_tree_of_the_same_blocks() -> None:
    server = (*SMALL_CACHE, "--http", "127.0.0.1:0")
    with running_server(*server) as first, running_server(*server) as second, radix_router(first, second) as router:
        theirs = hits(router.complete, prompts_with_shared_prefixes())
    assert theirs > 0.75, "the tree knows what is cached"
    ours, _ = hits_of_the_router(prompts_with_shared_prefixes())
    assert ours > theirs - 0.03, "one prefix computed twice is 0.2 points, and a slow machine computes several so"
