"""`python -m bench.micro.kv_store`: TTFT of a long system prompt after `kill -9` of everything, beside a warm cache.

Each turn starts a server, asks until the prompt is warm, and kills router and engine. The next start finds the prompt
in the file of --kv-store. The questions ask for one token, and differ right behind the prompt: each computes as much as
the others.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Annotated

import grpc
import typer

from bench.processes import kill_tree
from bench.systems import served
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

WARM_ASKS = 5


def main(
    tokens: Annotated[int, typer.Option(help="Length of the prompt, about.")] = 4096,
    turns: Annotated[int, typer.Option(help="Times that everything is killed.")] = 5,
    options: Annotated[str, typer.Option(help="The server's options.")] = "--host-kv-gb 0.5",
) -> None:
    prompt = "The keeper wrote down the weather. " * (tokens // 7)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*options.split(), "--kv-store", folder]
        ratios = []
        for turn in range(turns + 1):
            with served(arguments) as server, grpc.insecure_channel(server.address) as channel:
                inference = inference_pb2_grpc.InferenceStub(channel)
                ask(inference, "warm up the process")
                (first, num_cached), *others = (
                    ask(inference, f"{prompt}{at} days ago, was it fine?") for at in range(1 + WARM_ASKS)
                )
                warm = statistics.median(seconds for seconds, _ in others)
                if turn == 0:
                    print(f"computed {first:.3f} s")
                    wait_for_file(channel)
                else:
                    ratios.append(first / warm)
                    print(
                        f"after kill -9: {first:.3f} s with {num_cached} tokens cached; "
                        f"warm {warm:.3f} s with {others[0][1]}"
                    )
                kill_tree(server.pid)
        print(f"after kill -9 ÷ warm: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def ask(inference: inference_pb2_grpc.InferenceStub, text: str) -> tuple[float, int]:
    """Return the seconds until the first token, and how many tokens of the prompt were cached."""
    request = inference_pb2.GenerateRequest(
        prompt=text,
        sampling=inference_pb2.Sampling(temperature=0),
        stopping=inference_pb2.Stopping(max_tokens=1, ignore_eos=True),
    )
    started = time.monotonic()
    first_s, num_cached = 0.0, 0
    for response in inference.Generate(request):
        if response.HasField("tokens") and not first_s:
            first_s = time.monotonic() - started
        num_cached = max(num_cached, response.usage.cached_tokens)
    return first_s, num_cached


def wait_for_file(channel: grpc.Channel) -> None:
    """Wait until no more blocks are written."""
    control, before = control_pb2_grpc.ControlStub(channel), -1
    while (now := control.GetLoad(control_pb2.GetLoadRequest()).engines[0].stored_blocks) != before or not now:
        before = now
        time.sleep(1.0)


if __name__ == "__main__":
    typer.run(main)
