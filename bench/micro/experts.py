"""What a layer with experts reads and takes, with random weights in the shape of Qwen3-30B-A3B's.

For each number of rows: the experts that the rows chose, the bytes of their weights, and milliseconds. Beside them
stand a dense layer of the same arithmetic for each row, and the eager loop of transformers in bfloat16. Runs alternate,
and a figure is the median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pagoda_server.kernels import GATED, ExpertWeights, Routing, load_backend, set_num_threads
from pagoda_server.kernels.route import Routes

HIDDEN, FFN, CHOSEN = 2048, 768, 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.micro.experts", description=__doc__)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--weights", default="int8", choices=["unquantized", "int8"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    set_num_threads(given.threads)
    torch.manual_seed(0)
    weights = [_weights(FFN) for _ in range(given.experts)]
    backend = load_backend("native", given.weights, is_deterministic=True)
    layer = backend.experts(iter(weights), given.experts, GATED)
    dense = backend.experts(iter([_weights(FFN * CHOSEN)]), 1, GATED)
    stacks = layer.gate_up, layer.down  # type: ignore[attr-defined]
    of_expert = sum(part[0].nbytes for stack in stacks for part in stack.packed)
    print("rows  experts  MiB read      ms  dense MiB  dense ms  transformers ms")
    for rows in (1, 8, 64):
        x = torch.randn(rows, HIDDEN).bfloat16()
        routes = backend.route(torch.randn(rows, given.experts), Routing(given.experts, CHOSEN), None)
        only = Routes(torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1))
        calls = [lambda: layer(x, routes), lambda: dense(x, only), lambda: _eager(x, weights, routes)]  # noqa: B023
        ours, of_dense, theirs = _alternate(calls, given.runs)
        chosen = len(routes.experts.unique())
        mib = chosen * of_expert / 2**20
        print(
            f"{rows:4}  {chosen:7}  {mib:8.1f}  {ours:6.2f}  {CHOSEN * of_expert / 2**20:9.1f}  {of_dense:8.2f}"
            f"  {theirs:15.2f}"
        )


def _weights(ffn: int) -> ExpertWeights:
    gate_up, down = torch.empty(2 * ffn, HIDDEN), torch.empty(HIDDEN, ffn)
    return ExpertWeights(gate_up.normal_(0, 0.02).bfloat16(), None, down.normal_(0, 0.02).bfloat16(), None)


def _eager(x: Tensor, weights: list[ExpertWeights], routes: Routes) -> Tensor:
    """What the experts of transformers compute, an expert after the other."""
    out = torch.zeros_like(x)
    for expert in routes.experts.unique().tolist():
        rows, ranks = torch.where(routes.experts == expert)
        gate, up = functional.linear(x[rows], weights[expert].gate_up).chunk(2, dim=-1)
        outputs = functional.linear(functional.silu(gate) * up, weights[expert].down)
        out.index_add_(0, rows, (outputs * routes.weights[rows, ranks, None]).to(out.dtype))
    return out


def _alternate(calls: list[Callable[[], Tensor]], runs: int) -> list[float]:
    """The median milliseconds of each, in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(runs + 1):  # the first warms up
        for call, of_call in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            of_call.append((time.perf_counter() - start) * 1000)
    return [statistics.median(of_call[1:]) for of_call in times]


if __name__ == "__main__":
    main()
