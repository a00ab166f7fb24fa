"""Pictures of latency distributions and of throughput, drawn without a screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.measure import Run, Spread, Turns

# Okabe and Ito's palette, safe for the colour-blind; its yellow is too pale for lines.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "os^Dv<>P"
STYLE: dict[Any, Any] = {  # matplotlib's own type lists every name as a literal
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
DPI = 150
LEAST_MS = 1.0


def latency(systems: Sequence[Turns], title: str, path: Path) -> None:
    """Draw cumulative distributions of TTFT and ITL over all turns."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.4))
        axes = figure.subplots(1, 2, sharey=True)
        names = [turns.name for turns in systems]
        ttfts = [[1e3 * times.ttft_s for run in turns.runs for times in run.times] for turns in systems]
        _cumulative(axes[0], names, [np.array(values) for values in ttfts])
        itls = [np.concatenate([run.itls_ms() for run in turns.runs]) for turns in systems]
        _cumulative(axes[1], names, itls)
        axes[1].set_visible(any(len(values) for values in itls))
        axes[0].set(
            title="Time to first token", xlabel="TTFT, ms", ylabel="share of requests or tokens", ylim=(0, 1.02)
        )
        axes[1].set(title="Between two tokens of a request", xlabel="ITL, ms")
        figure.suptitle(title, x=0.01, ha="left")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
        figure.savefig(path, dpi=DPI)


def concurrency(counts: Sequence[int], results: Sequence[Sequence[Turns]], title: str, path: Path) -> None:
    """Draw total tokens/s and time per token of a stream: medians, with bars from minimum to maximum."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.4))
        axes = figure.subplots(1, 2)
        for at in range(len(results[0])):
            runs = [level[at].runs for level in results]
            name = results[0][at].name
            _spread(axes[0], counts, [[run.tokens_per_s for run in level] for level in runs], name, at)
            _spread(axes[1], counts, [[_tpot_ms(run) for run in level] for level in runs], name, at)
        axes[0].set(title="Throughput", xlabel="streams at once", ylabel="output tokens/s", ylim=(0, None))
        axes[1].set(
            title="Time per output token of a stream", xlabel="streams at once", ylabel="TPOT, ms", ylim=(0, None)
        )
        for axis in axes:
            axis.set_xscale("log", base=2)
            axis.set_xticks(list(counts), [str(count) for count in counts])
            axis.minorticks_off()
        figure.suptitle(title, x=0.01, ha="left")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
        figure.savefig(path, dpi=DPI)


def modes(figures: Mapping[str, Mapping[int, Spread]], title: str, path: Path) -> None:
    """Draw output tokens/s by batch size; a mode that does not batch has one figure, a level line."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 4.4))
        axis = figure.subplots()
        sizes = sorted({size for values in figures.values() if len(values) > 1 for size in values})
        for at, (name, values) in enumerate(figures.items()):
            if len(values) == 1:
                level = next(iter(values.values())).median
                axis.axhline(level, color=COLORS[at], linestyle=("--", ":")[at % 2], linewidth=1.8, label=name)
                continue
            medians = [values[size].median for size in sizes]
            ranges = [
                [values[s].median - values[s].least for s in sizes],
                [values[s].most - values[s].median for s in sizes],
            ]
            axis.errorbar(sizes, medians, yerr=ranges, label=name, color=COLORS[at], marker=MARKERS[at], capsize=3)
        axis.set(xlabel="batch size", ylabel="output tokens/s", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.legend()
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.savefig(path, dpi=DPI)


def speed_up(ratios: Mapping[str, Mapping[int, Spread]], title: str, path: Path) -> None:
    """Draw ratios by the number of streams: medians, with bars from minimum to maximum, and a line at 1."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 4.4))
        axis = figure.subplots()
        axis.axhline(1.0, color="#666666", linewidth=1.2)
        counts: list[int] = []
        for at, (name, values) in enumerate(ratios.items()):
            counts = list(values)
            spreads = list(values.values())
            _spread(axis, counts, [[of.least, of.median, of.most] for of in spreads], name, at)
        axis.set(xlabel="streams at once", ylabel="with ÷ without", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
        axis.legend()
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.savefig(path, dpi=DPI)


def _cumulative(axis: Axes, names: Sequence[str], values_ms: Sequence[NDArray[np.float64]]) -> None:
    for at, (name, values) in enumerate(zip(names, values_ms, strict=True)):
        shares = np.arange(1, len(values) + 1) / len(values)
        axis.step(np.sort(values), shares, where="post", label=name, color=COLORS[at % len(COLORS)], linewidth=1.8)
    axis.set_xscale("log")
    # Tokens of one message are 0 ms apart, which a logarithmic axis cannot show: curves enter from the left.
    least = min((values[values > LEAST_MS].min(initial=np.inf) for values in values_ms), default=np.inf)
    axis.set_xlim(left=max(LEAST_MS, 0.8 * least) if np.isfinite(least) else None)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")


def _spread(axis: Axes, counts: Sequence[int], levels: list[list[float]], name: str, at: int) -> None:
    middle = np.array([median(level) for level in levels])
    least, most = np.array([min(level) for level in levels]), np.array([max(level) for level in levels])
    color = COLORS[at % len(COLORS)]
    axis.errorbar(
        counts,
        middle,
        yerr=[middle - least, most - middle],
        label=name,
        color=color,
        marker=MARKERS[at % len(MARKERS)],
        capsize=3,
    )


def _tpot_ms(run: Run) -> float:
    return 1e3 * median(times.tpot_s for times in run.times)
