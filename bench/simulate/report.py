"""A simulation's tables, JSON and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from bench.measure import PERCENTILES, Targets
from bench.plots import COLORS, DPI, MARKERS, STYLE
from bench.report import Cells
from bench.simulate.arrivals import HOSTILE, URGENT, Arrivals
from bench.simulate.simulator import Outcome, System
from pagoda_server.engine.scheduling.policies import POLICIES


def table(outcomes: Sequence[Outcome], arrivals: Arrivals, load: float, targets: Targets) -> Cells:
    percentiles = "/".join(f"p{p}" for p in PERCENTILES)
    headings = [
        "system",
        f"TTFT {percentiles} ms",
        f"ITL {percentiles} ms",
        "goodput/s",
        "met both",
        "finished",
        "expired",
        "refused",
        "preemptions",
        "requests/s simulated",
    ]
    rows = []
    for outcome in outcomes:
        count = len(arrivals)
        ttft = outcome.ttft_s[~np.isnan(outcome.ttft_s)]
        rows.append(
            [
                outcome.system.name,
                " / ".join(f"{1e3 * float(np.percentile(ttft, p)):.0f}" for p in PERCENTILES) if len(ttft) else "–",
                " / ".join(f"{1e3 * outcome.gaps.percentile_s(p):.0f}" for p in PERCENTILES),
                f"{outcome.goodput(targets):.2f}",
                _share(int(outcome.meets(targets).sum()), count),
                _share(outcome.ends["length"], count),
                _share(outcome.ends["deadline"], count),
                _share(outcome.ends["refused"] + outcome.ends["rejected"], count),
                f"{outcome.preemptions:,}",
                f"{count / outcome.wall_s:,.0f}",
            ]
        )
    title = (
        f"{len(arrivals):,} requests, load {load:g}; goodput: TTFT ≤ {targets.ttft_ms:g} ms, "
        f"TPOT ≤ {targets.tpot_ms:g} ms; TTFT of requests that finished"
    )
    return Cells(title, headings, rows)


def groups_table(outcomes: Sequence[Outcome], arrivals: Arrivals, targets: Targets) -> Cells:
    """Share of each group that met both targets: the effect of priority, and of a hostile tenant on others."""
    is_hostile = np.array([tenant == HOSTILE for tenant in arrivals.tenant])
    is_urgent = np.array(arrivals.priority) == URGENT
    meanwhile = np.arange(len(arrivals)) // max(1, len(arrivals) // 3) == 1
    groups = {
        "high priority": is_urgent,
        "normal priority": ~is_urgent,
        "hostile tenant": is_hostile,
        "others meanwhile": meanwhile & ~is_hostile,
    }
    rows = []
    for outcome in outcomes:
        met = outcome.meets(targets)
        rows.append([outcome.system.name, *(_share(int(met[of].sum()), int(of.sum())) for of in groups.values())])
    return Cells("Met both targets", ["system", *groups], rows)


def figures(outcome: Outcome, targets: Targets) -> dict[str, Any]:
    """The figures without wall time, so that the same seed gives the same record."""
    ttft = outcome.ttft_s[~np.isnan(outcome.ttft_s)]
    return {
        "system": asdict(outcome.system),
        "ttft_ms": {f"p{p}": 1e3 * float(np.percentile(ttft, p)) if len(ttft) else None for p in PERCENTILES},
        "itl_ms": {f"p{p}": 1e3 * outcome.gaps.percentile_s(p) for p in PERCENTILES},
        "goodput_per_s": outcome.goodput(targets),
        "ends": dict(sorted(outcome.ends.items())),
        "output_tokens": outcome.output_tokens,
        "steps": outcome.steps,
        "preemptions": outcome.preemptions,
        "recomputed_tokens": outcome.recomputed_tokens,
        "span_s": outcome.span_s,
    }


def draw_latency(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Draw cumulative distributions of TTFT, over all requests with or without a token, and of ITL."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.6))
        left, right = figure.subplots(1, 2, sharey=True)
        for outcome in outcomes:
            color, style = _line(outcome.system)
            ttft = np.sort(1e3 * outcome.ttft_s[~np.isnan(outcome.ttft_s)])
            shares = np.arange(1, len(ttft) + 1) / len(outcome.ttft_s)
            left.step(ttft, shares, where="post", color=color, linestyle=style, label=outcome.system.name)
            gaps = np.cumsum(outcome.gaps.counts[: len(outcome.gaps.edges)]) / max(1, outcome.gaps.counts.sum())
            right.step(1e3 * outcome.gaps.edges, gaps, where="post", color=color, linestyle=style)
        counts = sum((outcome.gaps.counts for outcome in outcomes), np.zeros_like(outcomes[0].gaps.counts))
        seen = np.flatnonzero(counts[: len(outcomes[0].gaps.edges)])
        if len(seen):
            right.set_xlim(*(1e3 * outcomes[0].gaps.edges[seen[[0, -1]]]))
        left.set(title="Time to first token", xlabel="TTFT, ms", ylabel="share of requests, of tokens", ylim=(0, 1.02))
        right.set(title="Between two tokens of a request", xlabel="ITL, ms")
        for axis in (left, right):
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("")
        figure.suptitle(title, x=0.01, ha="left")
        figure.legend(loc="outside lower center", ncols=4)
        figure.savefig(path, dpi=DPI)


def draw_goodput(by_load: Mapping[float, Sequence[Outcome]], targets: Targets, title: str, path: Path) -> None:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.8))
        axis = figure.subplots()
        loads = sorted(by_load)
        for at, first in enumerate(by_load[loads[0]]):
            values = [by_load[load][at].goodput(targets) for load in loads]
            color, style = _line(first.system)
            axis.plot(loads, values, style, color=color, marker=MARKERS[at % len(MARKERS)], label=first.system.name)
        axis.set(
            xlabel="load: work that arrives ÷ what a full batch computes",
            ylabel="goodput, requests/s",
            ylim=(0, None),
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.legend(loc="outside lower center", ncols=3)
        figure.savefig(path, dpi=DPI)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _line(system: System) -> tuple[str, str]:
    """Return colour and style: a colour a policy, solid where it holds an ITL; the baseline is black."""
    if system.token_budget is None:
        return "#000000", "--"
    return COLORS[list(POLICIES).index(system.policy)], "-" if system.target_itl_ms else ":"
