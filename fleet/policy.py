"""How many engines the load asks for: a pure function of what the engines report.

A fleet grows by one engine when a new request would wait longer than its target for the first token, or when most
places are taken, and has done so for `up_after_s`. It shrinks by one when the engines that would be left keep far from
both, and have for `down_after_s`. The two conditions lie apart, so that a steady load never causes both.

The last engine ends, if it may, once it has computed nothing for `idle_after_s`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine that serves has reported last.

    num_sequences         in it, waiting or running
    max_num_seqs          that it computes at once
    uncomputed_tokens     of prompts, which it has yet to compute
    prefill_tokens_per_s  how many of these it computes in a second; 0: it has computed none yet
    steps                 that it has computed since it started
    """

    num_sequences: int
    max_num_seqs: int
    uncomputed_tokens: int
    prefill_tokens_per_s: float
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Targets:
    """
    ttft_s        longest predicted time to the first token
    full          part of the places above which the fleet grows
    spare         part of the places, of one engine fewer, below which it shrinks
    up_after_s    how long either must have been so before the fleet grows
    down_after_s  and before it shrinks
    idle_after_s  how long the last engine must have computed nothing before it ends
    """

    ttft_s: float = 2.0
    full: float = 0.8
    spare: float = 0.6
    up_after_s: float = 10.0
    down_after_s: float = 300.0
    idle_after_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Since:
    """
    more   since when the load has asked for one engine more, in seconds; None: it does not
    fewer  the same of one engine fewer
    steps  that the engines had computed then: requests may come and go between two looks
    """

    more: float | None = None
    fewer: float | None = None
    steps: int = 0


def predicted_ttft_s(loads: Sequence[Load]) -> float:
    """The mean time to the first token of a request that comes now, beside the computation of its own prompt."""
    rate = sum(load.prefill_tokens_per_s for load in loads)
    return sum(load.uncomputed_tokens for load in loads) / rate if rate else 0.0


def taken(loads: Sequence[Load]) -> float:
    """The part of all places that is taken; above 1 where sequences wait for one."""
    return sum(load.num_sequences for load in loads) / (sum(load.max_num_seqs for load in loads) or math.inf)


def decide(
    since: Since, targets: Targets, now: float, loads: Sequence[Load], num_coming: int = 0, *, may_be_none: bool = False
) -> tuple[Since, int]:
    """Return the change in the number of engines that the load asks for, -1, 0 or 1, and what to remember.

    now         seconds on any clock
    loads       of the engines that serve
    num_coming  engines that are wanted and do not serve yet: their effect is awaited before another one is asked for
    may_be_none whether the last engine may end
    """
    if not loads:
        return Since(), 0
    num_left = len(loads) + num_coming - 1
    ttft_s, places, grows = predicted_ttft_s(loads), taken(loads), len(loads) / max(1, num_left)
    asks_more = not num_coming and (ttft_s > targets.ttft_s or places > targets.full)
    steps, down_after_s = sum(load.steps for load in loads), targets.down_after_s
    if num_left:
        asks_fewer = ttft_s * grows < targets.ttft_s / 2 and places * grows < targets.spare
    else:
        asks_fewer, down_after_s = may_be_none and not places and steps == since.steps, targets.idle_after_s
    more = (now if since.more is None else since.more) if asks_more else None
    fewer = (now if since.fewer is None else since.fewer) if asks_fewer else None
    if more is not None and now - more >= targets.up_after_s:
        return Since(), 1
    if fewer is not None and now - fewer >= down_after_s:
        return Since(), -1
    return Since(more, fewer, steps), 0
