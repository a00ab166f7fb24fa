"""`sample_rows` in two launches: a scan that splits each row over many programs, and a choice for each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..row_sampling import MAX_TOP_LOGPROBS, SampledRows, SamplingRows, Verified
from .configs import tuned
from .dependent_launch import dependent_launch
from .row_sampling_choice import choice_kernel
from .row_sampling_scan import scan_kernel

GROUP = 64  # adjacent tokens that are looked at together or not at all


@dataclass(frozen=True, slots=True)
class Config:
    """
    tile          tokens a program of the scan
    chunk         tokens that a program of the choice looks at in one go
    """

    tile: int
    scan_warps: int
    chunk: int
    choice_warps: int


DEFAULT = Config(tile=2048, scan_warps=4, chunk=4096, choice_warps=8)


@dataclass(frozen=True, slots=True)
class Partials:
    """What the scan passes to the choice; only what a row asks for is written.

    adjusted        [batch, vocab] float32, logits after all adjustments, where `is_changed` [batch] int32
    tile_best       [batch, tiles] float32, the greatest adjusted logit; +inf if the tile holds NaN
    tile_token      [batch, tiles] int32, where that is; of a draw without limits, the token with the best score
    tile_score      [batch, tiles] float32, that score, with distances below the tile's best
    tile_mass       [batch, tiles] float32, the sum of exp(-distance), likewise
    group_best      [batch, groups] float32
    moments         [batch, 3, tiles] float32, of finite distances below the tile's best: how many there are, their
                    mean, and the sum of their squared differences from it
    raw_…           the same of the model's logits at temperature 1
    hits            [batch, groups] int32, the groups that the choice looks at
    near, near_ids  [batch, groups * GROUP] int32, their tokens that can matter: the bits of the distance, and the id
    """

    adjusted: Tensor
    is_changed: Tensor
    tile_best: Tensor
    tile_token: Tensor
    tile_score: Tensor
    tile_mass: Tensor
    group_best: Tensor
    moments: Tensor
    raw_best: Tensor
    raw_mass: Tensor
    raw_group_best: Tensor
    hits: Tensor
    near: Tensor
    near_ids: Tensor


def allocate_partials(batch: int, vocab: int, tile: int, device: torch.device) -> Partials:
    tiles = triton.cdiv(vocab, tile)
    groups = tiles * (tile // GROUP)

    def floats(width: int) -> Tensor:
        return torch.empty(batch, width, dtype=torch.float32, device=device)

    def integers(width: int) -> Tensor:
        return torch.empty(batch, width, dtype=torch.int32, device=device)

    return Partials(
        adjusted=floats(vocab),
        is_changed=integers(1),
        tile_best=floats(tiles),
        tile_token=integers(tiles),
        tile_score=floats(tiles),
        tile_mass=floats(tiles),
        group_best=floats(groups),
        moments=floats(3 * tiles),
        raw_best=floats(tiles),
        raw_mass=floats(tiles),
        raw_group_best=floats(groups),
        hits=integers(groups),
        near=integers(groups * GROUP),
        near_ids=integers(groups * GROUP),
    )


def sample_rows_triton(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    sampling: SamplingRows,
    out: SampledRows,
    verified: Verified | None = None,
) -> None:
    """`sample_rows`. Two launches, whatever the rows ask for; `logits` stay as they are.

    A row pays for what it asks for: greedy rows and draws without limits read their logits once. Draws with limits also
    read the groups of tokens that can matter, a few times over. Stop ids, biases, masks, counts and drafts are read
    only if the row has them.

    Equal calls choose equal tokens, every time and in any batch: programs share no sum and use no atomics, each adds up
    its own values in a fixed order, ties go to the lowest token, and one program writes what a row keeps.

    The same seed and position give the token of every other backend, unless a choice hangs on the last bits of a float:
    two scores, or the mass that top-p asks for.
    """
    batch, vocab = logits.shape
    assert logits.stride(1) == 1
    config = tuned("sample_rows", f"vocab{vocab}", DEFAULT)
    partials = allocate_partials(batch, vocab, config.tile, logits.device)
    num_tiles = triton.cdiv(vocab, config.tile)
    s = sampling
    p = partials
    scanned = (p.tile_best, p.tile_token, p.tile_score, p.tile_mass, p.group_best, p.moments)
    raw = (p.raw_best, p.raw_mass, p.raw_group_best)
    ranks, step_tokens = (None, None) if verified is None else (verified.ranks, verified.tokens)
    scan_kernel[(num_tiles, batch)](
        logits, rows, positions, ranks, step_tokens,
        s.numbers, s.integers, s.stop_ids, s.bias_ids, s.bias, s.token_masks, s.counts,
        p.adjusted, p.is_changed, *scanned, *raw,
        vocab, logits.stride(0), s.stop_ids.shape[1], s.bias_ids.shape[1], s.token_masks.shape[1],
        len(s.numbers),
        TILE=config.tile,
        GROUP=GROUP,
        STOPS=triton.next_power_of_2(max(s.stop_ids.shape[1], 1)),
        BIASES=triton.next_power_of_2(max(s.bias_ids.shape[1], 1)),
        num_warps=config.scan_warps,
        enable_fp_fusion=False,  # penalties, rounded as the reference rounds them
        **dependent_launch(),
    )  # fmt: skip
    choice_kernel[(batch,)](
        logits, rows, positions, ranks,
        s.numbers, s.integers, s.counts, s.last_token,
        p.adjusted, p.is_changed, *scanned, *raw, p.hits, p.near, p.near_ids,
        out.tokens, out.chosen, out.top_ids, out.top,
        vocab, logits.stride(0), num_tiles,
        TILE=config.tile,
        GROUP=GROUP,
        TILES=triton.next_power_of_2(num_tiles),
        GROUPS=triton.next_power_of_2(num_tiles * (config.tile // GROUP)),
        CHUNK=config.chunk,
        MAX_TOP=MAX_TOP_LOGPROBS,
        num_warps=config.choice_warps,
        enable_fp_fusion=False,
        **dependent_launch(),
    )  # fmt: skip
