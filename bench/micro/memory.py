"""What `pagoda plan` says a server takes, beside the resident memory of one that has computed full steps.

    python -m bench.micro.memory MODEL [MODEL …]

Each model is served in each precision that its plan has. The KV blocks that prompts used are counted on both sides.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil

from pagoda import Client
from pagoda.v1 import control_pb2, control_pb2_grpc
from pagoda_server.checkpoints import resolve
from pagoda_server.cli.plan import Plan, read_plans
from tests.servers import running_server

WORDS = 700  # of a prompt: more tokens than a step takes
PROMPTS = 8


def measure(folder: str, plan: Plan, cache_dtype: str) -> tuple[int, int, int, int]:
    """The engine's and the router's resident bytes, and what the plan says of each."""
    options = ("--model", folder, "--quantization", plan.quantization, "--kv-cache-dtype", cache_dtype)
    with running_server(*options, "--max-model-len", "2048") as server:
        with Client(server.address) as client, ThreadPoolExecutor(PROMPTS) as threads:
            prompts = [f"{number} " + "word and other, " * (WORDS // 4) for number in range(PROMPTS)]
            list(threads.map(lambda prompt: client.answer(prompt=prompt, max_tokens=8), prompts))
        with grpc.insecure_channel(server.address) as channel:
            control = control_pb2_grpc.ControlStub(channel)
            cache = control.GetServerInfo(control_pb2.GetServerInfoRequest()).engines[0].info.kv_cache
            load = control.GetLoad(control_pb2.GetLoadRequest()).engines[0]
        used_bytes = (load.blocks_total - load.blocks_free) * cache.bytes_per_block
        engine = server.engine().memory_info().rss
        router = psutil.Process(server.process.pid).memory_info().rss
    return engine, plan.engine_bytes + used_bytes, router, plan.router


def main(*models: str) -> None:
    print("| model | precision | KV cache | engine, measured | plan | ratio | router, measured | plan | ratio |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for model in models:
        folder = resolve(model)
        for plan in asyncio.run(read_plans(folder)):
            for dtype in plan.kv_bytes_per_token:
                if plan.quantization == "auto":
                    continue
                engine, planned, router, planned_router = measure(str(folder), plan, dtype)
                print(
                    f"| {folder.name} | {plan.quantization} | {dtype} | {engine / 1e6:.0f} MB | {planned / 1e6:.0f} MB "
                    f"| {planned / engine:.3f} | {router / 1e6:.0f} MB | {planned_router / 1e6:.0f} MB "
                    f"| {planned_router / router:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
