"""`python -m bench.gpu.expected` prints what an H100 should measure: estimates, which no card has confirmed.

They are the arithmetic of bytes, operations and launches with the assumptions below. They tell a measurement that is
worth a look from one that is as it should be, and are no bars: a bar says what is good enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from bench.gpu.sampling import SPREAD, TEMPERATURE, TOP_P, VOCAB
from bench.workloads import mixed
from pagoda_server.kernels.triton.inputs import LLAMA_1B, LLAMA_8B, ModelShape

US = 1e-6

# The card: what a copy moves and what cuBLAS multiplies in bfloat16.
BYTES_PER_S = 3.0e12
FLOPS_PER_S = 790e12

# The kernels: shares of the above, and times that do not depend on the size.
SMALL_S = 2.0 * US  # from one short kernel of a graph to the next, with programmatic dependent launch
STREAMED = 0.88  # a norm, an activation or a product that only moves bytes
PAGES_READ, ATTENTION_S = 0.93, 5.0 * US  # decode attention: its bytes, and what it takes to start and to merge parts
CAUSAL_FLOPS_PER_S = 430e12  # prefill attention over pages; Triton's tutorial is at 460 to 480 without pages
MANY_ROWS = 0.88  # of the product rate, with thousands of rows
OVERLAP = 0.4  # of a product's arithmetic that is not hidden by its bytes, with few rows
EIGHT_BIT_READ = 0.80  # a product of few rows that widens an 8-bit weight on its way
INPUTS_S = 20 * US  # packing of a step, embedding and sampler, beside their bytes
PASS_S = 1.8 * US  # of a sampler's search in up to 4,096 candidates, most of which is agreeing on an interval
CHUNK_S = 0.7 * US  # of 4,096 more: about 36 operations each, on one processor's 128 lanes at 1.7 GHz
LISTED_S = 1.5 * US  # to list those of 4,096 tokens that matter: a prefix sum and two stores


@dataclass(frozen=True, slots=True)
class Expected:
    """
    limit_s  what the card allows; NaN if that is not the question
    how      the arithmetic, in words
    """

    what: str
    bar: str
    limit_s: float
    time_s: float
    how: str
    rate: str = ""

    @property
    def value(self) -> str:
        share = "" if math.isnan(self.limit_s) else f", {100 * self.limit_s / self.time_s:.0f} % of the limit"
        return f"{_time(self.time_s)}{share}{self.rate and f', {self.rate}'}"


def layer_weights(model: ModelShape) -> int:
    return sum(math.prod(size) for name, size in model.projections.items() if name != "head")


def weights(model: ModelShape) -> int:
    """The weights that a decode step reads."""
    return model.num_layers * layer_weights(model) + math.prod(model.projections["head"])


def kv_bytes(model: ModelShape, tokens: float) -> float:
    """Keys and values of one layer in bfloat16."""
    return 4 * tokens * model.num_kv_heads * model.head_dim


def product_s(size: int, rows: float, count: int = 1) -> float:
    """`count` products by cuBLAS with `size` weights in all."""
    arithmetic = 2 * size * rows / FLOPS_PER_S
    few = 2 * size / (STREAMED * BYTES_PER_S) + count * SMALL_S + OVERLAP * arithmetic
    return max(few, arithmetic / MANY_ROWS)


def decode_attention_s(model: ModelShape, tokens: float) -> float:
    """One layer's, for decodes whose contexts have so many tokens together."""
    return kv_bytes(model, tokens) / (PAGES_READ * BYTES_PER_S) + ATTENTION_S


def causal_s(model: ModelShape, queries: float, context: float) -> float:
    """One layer's attention of a prompt's last `queries` tokens."""
    pairs = queries * (context - queries / 2)
    return 4 * pairs * model.num_heads * model.head_dim / CAUSAL_FLOPS_PER_S


def streamed_s(num_bytes: float) -> float:
    return max(SMALL_S, num_bytes / (STREAMED * BYTES_PER_S))


def norm_bytes(model: ModelShape, rows: float) -> float:
    return 8 * rows * model.hidden_size


def activation_bytes(model: ModelShape, rows: float) -> float:
    return 6 * rows * model.ffn_size


def rotation_bytes(model: ModelShape, rows: float) -> float:
    return 4 * rows * model.qkv_size


def around_attention_s(model: ModelShape, rows: float) -> float:
    """One layer's norms, activation and rotation."""
    norms = 2 * streamed_s(norm_bytes(model, rows))
    return norms + streamed_s(activation_bytes(model, rows)) + streamed_s(rotation_bytes(model, rows))


def step_s(
    model: ModelShape, decodes: float, context: float, chunk: float = 0.0, sampled: float | None = None
) -> float:
    """One pass for decodes and one chunk of prompts. Nothing overlaps."""
    rows = decodes + chunk
    layer = product_s(layer_weights(model), rows, 4) + around_attention_s(model, rows)
    if decodes:
        layer += decode_attention_s(model, decodes * context)
    if chunk:
        layer += causal_s(model, chunk, chunk)
    drawn = decodes if sampled is None else sampled
    head = product_s(math.prod(model.projections["head"]), drawn) + streamed_s(2 * drawn * model.vocab_size)
    return model.num_layers * layer + head + INPUTS_S


def step_limit_s(model: ModelShape, batch: int, context: int) -> float:
    size = weights(model)
    read = kv_bytes(model, batch * context) * model.num_layers / BYTES_PER_S
    return max(2 * size / BYTES_PER_S, 2 * size * batch / FLOPS_PER_S) + read


def serving_s(count: int, most: int, budget: int) -> tuple[float, int]:
    """How long the GPU computes for the `mixed` workload if all requests come at once, and its output tokens."""
    waiting = [(len(request.prompt), request.output_len) for request in mixed(LLAMA_8B.vocab_size, 0, count).requests]
    total, output = 0.0, sum(length for _, length in waiting)
    running: list[list[int]] = []  # context, tokens to come
    while waiting or running:
        started: list[list[int]] = []
        while waiting and len(running) + len(started) < most and sum(one[0] for one in started) < budget:
            started.append(list(waiting.pop(0)))
        contexts = sum(one[0] for one in running)
        chunk = sum(one[0] for one in started)
        total += step_s(
            LLAMA_8B, len(running), contexts / max(len(running), 1), chunk, sampled=len(running) + len(started)
        )
        running = [[context + 1, left - 1] for context, left in [*running, *started] if left > 1]
    return total, output


@cache
def table() -> tuple[Expected, ...]:
    return tuple(_rows())


def _rows() -> Iterator[Expected]:
    big, small = LLAMA_8B, LLAMA_1B
    for batch, context, bar in (
        (1, 4096, "≤ 15 µs"),
        (32, 1024, "≥ 85 %"),
        (128, 1024, "≥ 90 %"),
        (32, 8192, "≥ 90 %"),
    ):
        moved = kv_bytes(big, batch * context)
        yield Expected(
            f"decode attention, 8B, {batch} × {context:,}", bar, moved / BYTES_PER_S,
            decode_attention_s(big, batch * context),
            f"{moved / 1e6:,.0f} MB at {100 * PAGES_READ:.0f} % of a copy, and 5 µs",
        )  # fmt: skip
    flops = 4 * 4096 * 2048 * big.num_heads * big.head_dim
    yield Expected(
        "prefill attention, 8B, 4 × 4,096", "≥ 400 TFLOP/s", 4 * flops / FLOPS_PER_S, 4 * causal_s(big, 4096, 4096),
        f"{4 * flops / 1e9:,.0f} GFLOP", f"{CAUSAL_FLOPS_PER_S / 1e12:.0f} TFLOP/s",
    )  # fmt: skip
    for name, moved_by, few in (
        ("residual + RMSNorm", norm_bytes, "≤ 3 µs"),
        ("SiLU · mul", activation_bytes, "≤ 3 µs"),
        ("RoPE + KV write", rotation_bytes, "≤ 4 µs"),
    ):
        for rows, bar in ((32, few), (8192, "≥ 85 %" if few == "≤ 3 µs" else "–")):
            moved = moved_by(big, rows)
            limit_s = math.nan if rows == 32 else moved / BYTES_PER_S
            how = "a short kernel" if rows == 32 else f"{moved / 1e6:,.0f} MB"
            yield Expected(f"{name}, 8B, {rows:,} rows", bar, limit_s, streamed_s(moved), how)
    for rows, bar in ((1, "≥ 85 %"), (32, "≥ 85 %"), (128, "–"), (2048, "–"), (8192, "–")):
        size = layer_weights(big)
        limit_s = max(2 * size / BYTES_PER_S, 2 * size * rows / FLOPS_PER_S)
        how = f"{2 * size / 1e6:,.0f} MB, {2e-9 * size * rows:,.{0 if rows > 1 else 1}f} GFLOP, four products"
        yield Expected(
            f"products of a layer, 8B, {rows:,} row{'s' * (rows > 1)}", bar, limit_s, product_s(size, rows, 4), how
        )
    size = layer_weights(big)
    yield Expected(
        "the same with 8-bit weights, 1 row", "≥ 85 %", size / BYTES_PER_S,
        size / (EIGHT_BIT_READ * BYTES_PER_S) + 4 * SMALL_S,
        f"half the bytes, at {100 * EIGHT_BIT_READ:.0f} % of a copy",
    )  # fmt: skip
    widened_s = 3 * size / (STREAMED * BYTES_PER_S)
    yield Expected(
        "the same with 8-bit weights, 2,048 rows", "–", 2 * size * 2048 / FLOPS_PER_S,
        product_s(size, 2048, 4) + widened_s, f"a widened copy moves {3 * size / 1e6:,.0f} MB, then cuBLAS",
    )  # fmt: skip
    yield from _sampling()
    for model, name, batch, context, bar in (
        (big, "8B", 1, 1024, "≥ 80 %"), (big, "8B", 32, 1024, "≥ 80 %"), (big, "8B", 128, 1024, "≥ 80 %"),
        (big, "8B", 256, 1024, "≥ 80 %"), (big, "8B", 32, 8192, "≥ 80 %"), (small, "1B", 1, 1024, "≥ 65 %"),
        (small, "1B", 128, 1024, "–"),
    ):  # fmt: skip
        time_s = step_s(model, batch, context)
        yield Expected(
            f"decode step, {name}, batch {batch}, context {context:,}", bar, step_limit_s(model, batch, context),
            time_s, _parts(model, batch, context), f"{batch / time_s:,.0f} tok/s",
        )  # fmt: skip
    one, decodes, prompt = (step_s(big, 64, 1024, 512, 65), step_s(big, 64, 1024), step_s(big, 0, 0, 512, 1))
    yield Expected(
        "mixed step, 8B, 64 decodes at 1,024 and 512 prompt tokens", "–", math.nan, one,
        f"one pass; two passes would take {1e3 * decodes:.1f} + {1e3 * prompt:.1f} ms and read the weights twice",
    )  # fmt: skip
    prefill = step_s(big, 0, 0, 8192, 8) - big.num_layers * (causal_s(big, 8192, 8192) - 8 * causal_s(big, 1024, 1024))
    yield Expected(
        "prefill step, 8B, 8 prompts of 1,024", "–", 2 * size * big.num_layers * 8192 / FLOPS_PER_S, prefill,
        f"products {1e3 * big.num_layers * product_s(size, 8192, 4):.0f} ms, "
        f"attention {1e3 * big.num_layers * 8 * causal_s(big, 1024, 1024):.0f}, "
        f"norms, activations and rotations {1e3 * big.num_layers * around_attention_s(big, 8192):.0f}",
        f"{8192 / prefill:,.0f} tok/s",
    )  # fmt: skip
    total, output = serving_s(512, 256, 8192)
    yield Expected(
        "`mixed` through gRPC, 8B, 512 requests at once, 256 sequences", "–", math.nan, total,
        "the sum of the steps' times",
        f"{output / total:,.0f} tok/s",
    )  # fmt: skip


def listed_share() -> float:
    """The share of tokens that top-p may keep as far as the sampler knows, of normally distributed logits."""
    normal, spread = NormalDist(), SPREAD / TEMPERATURE
    best = normal.inv_cdf(1 - 1 / VOCAB)
    mass = VOCAB * math.exp(spread * spread / 2 - spread * best)  # relative to the most likely token
    reach = math.log(VOCAB / ((1 - TOP_P) * mass)) + 1
    return 1 - normal.cdf(best - reach / spread)


def _sampling() -> Iterator[Expected]:
    """A pass of a search reads its candidates and agrees on the next interval, so a small one takes as long as that."""
    scan_s = {batch: 2 * SMALL_S + streamed_s(2 * batch * VOCAB) for batch in (1, 128)}
    few_s = 25 * PASS_S  # find the k-th group, list its tokens, find the k-th token, then the mass
    chunks, share = VOCAB / 4096, listed_share()
    all_s = chunks * LISTED_S + 8 * share * chunks * CHUNK_S + 20 * PASS_S
    for batch in (1, 128):
        bars = "≤ 60 µs" if batch == 1 else "≤ 360 µs"
        shape = f"{batch} × {VOCAB:,}"
        yield Expected(f"sampling, greedy, {shape}", bars, math.nan, scan_s[batch], "two launches, logits read once")
        yield Expected(
            f"sampling, top-k and top-p, {shape}", bars, math.nan, scan_s[batch] + few_s, "25 passes of 1.8 µs"
        )
        yield Expected(
            f"sampling, top-p alone, {shape}", bars, math.nan, scan_s[batch] + all_s,
            f"one program a row lists {100 * share:.0f} % of the tokens in {1e6 * chunks * LISTED_S:.0f} µs "
            "and searches them 8 times",
        )  # fmt: skip


def _parts(model: ModelShape, batch: int, context: int) -> str:
    products = model.num_layers * product_s(layer_weights(model), batch, 4)
    products += product_s(math.prod(model.projections["head"]), batch)
    attention = model.num_layers * decode_attention_s(model, batch * context)
    rest = step_s(model, batch, context) - products - attention
    return f"products {1e3 * products:.2f} ms, attention {1e3 * attention:.2f}, other {1e3 * rest:.2f}"


def _time(seconds: float) -> str:
    """Format with two or three digits: an estimate is no more exact."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    value, unit = (1e3 * seconds, "ms") if seconds >= 1e-3 else (1e6 * seconds, "µs")
    return f"{value:.0f} {unit}" if value >= 20 else f"{value:.1f} {unit}"


def lines() -> list[str]:
    """A Markdown table's rows, without its last cell, which is for the measurement."""
    return [f"| {row.what} | {row.bar} | {row.value} | {row.how} |" for row in table()]


if __name__ == "__main__":
    print("| what | bar | expected (an estimate) | because | measured |\n|---|---|---|---|---|")
    for line in lines():
        print(f"{line} not measured |")
