"""The sampler, compared with torch's `argmax` and with the usual sampler that sorts the vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.gpu.rows import Bar, Bench, Row, Work, measure
from pagoda_server.kernels.row_sampling import SampledRows, SamplingRows, allocate_sampled, sample_rows
from pagoda_server.kernels.triton.inputs import sampling_rows
from pagoda_server.kernels.triton.row_sampling import sample_rows_triton
from pagoda_server.kernels.triton.timing import num_copies

PART = "sampling"
VOCAB = 131072
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.95
SPREAD = 3.0  # standard deviation of the logits of a moderately confident model
ALONE, TOGETHER = Bar(time_us=60), Bar(time_us=360)
# Another token is no error where two scores, or the mass for top-p, differ only in the last bit.
TOLERANCE = 0.02


def rows(bench: Bench) -> Iterator[Row]:
    for batch in (2,) if bench.is_small else (1, 128):
        yield measure(_work("greedy", batch, bench, 0.0, 0, 1.0), bench)
        yield measure(_work("temperature", batch, bench, TEMPERATURE, 0, 1.0), bench)
        yield measure(_work("top-p", batch, bench, TEMPERATURE, 0, TOP_P), bench)
        yield measure(_work("top-k, top-p", batch, bench, TEMPERATURE, TOP_K, TOP_P), bench)


def _work(kind: str, batch: int, bench: Bench, temperature: float, top_k: int, top_p: float) -> Work:
    vocab = 500 if bench.is_small else VOCAB
    sampling = sampling_rows(batch, vocab, bench.device, temperature=temperature, top_k=top_k, top_p=top_p)
    copies = 2 if bench.is_small else num_copies(2 * batch * vocab)
    logits = [_logits(batch, vocab, bench.device) for _ in range(copies)]
    numbers = torch.arange(batch, dtype=torch.int32, device=bench.device)
    positions = torch.full_like(numbers, 100)
    out = allocate_sampled(batch, bench.device)

    def error() -> float:
        theirs = allocate_sampled(batch, bench.device)
        out.tokens.fill_(-7)
        sample_rows_triton(logits[0].clone(), numbers, positions, _copied(sampling), out)
        sample_rows(logits[0].clone(), numbers, positions, _copied(sampling), theirs)
        return float((out.tokens != theirs.tokens).float().mean())

    torchs = torch.argmax if temperature == 0 else partial(_sorting_sampler, top_k=top_k, top_p=top_p)
    return Work(
        PART,
        f"{kind}, {batch} × {vocab}",
        num_bytes=logits[0].nbytes,
        flops=0.0,
        calls=lambda: [partial(_sample, x, numbers, positions, sampling, out) for x in logits],
        error=error,
        tolerance=TOLERANCE,
        others={
            "torch argmax" if temperature == 0 else "torch sort": lambda: [partial(torchs, x, dim=-1) for x in logits]
        },
        bar=ALONE if batch == 1 else TOGETHER,
    )


def _sample(logits: Tensor, numbers: Tensor, positions: Tensor, sampling: SamplingRows, out: SampledRows) -> None:
    sample_rows_triton(logits, numbers, positions, sampling, out)


def _sorting_sampler(logits: Tensor, top_k: int, top_p: float, dim: int) -> Tensor:
    ordered, ids = (logits.float() / TEMPERATURE).sort(dim=dim, descending=True)
    if top_k:
        ordered[:, top_k:] = float("-inf")
    probabilities = ordered.softmax(dim=dim)
    probabilities.masked_fill_(probabilities.cumsum(dim=dim) - probabilities > top_p, 0.0)
    noise = torch.empty_like(probabilities).exponential_()
    return ids.gather(dim, (probabilities / noise).argmax(dim=dim, keepdim=True))


def _logits(batch: int, vocab: int, device: torch.device) -> Tensor:
    return (SPREAD * torch.randn(batch, vocab, device=device)).to(torch.bfloat16)


def _copied(sampling: SamplingRows) -> SamplingRows:
    fields = {field.name: getattr(sampling, field.name).clone() for field in dataclasses.fields(sampling)}
    return SamplingRows(**fields)
