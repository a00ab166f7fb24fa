"""Pictures of latency distributions, drawn without a screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.measure import Turns

# Okabe and Ito's palette, safe for the colour-blind; its yellow is too pale for lines.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
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


def _cumulative(axis: Axes, names: Sequence[str], values_ms: Sequence[NDArray[np.float64]]) -> None:
    for index, (name, values) in enumerate(zip(names, values_ms, strict=True)):
        shares = np.arange(1, len(values) + 1) / len(values)
        axis.step(np.sort(values), shares, where="post", label=name, color=COLORS[index % len(COLORS)], linewidth=1.8)
    axis.set_xscale("log")
    # Tokens of one message are 0 ms apart, which a logarithmic axis cannot show: curves enter from the left.
    least = min((values[values > LEAST_MS].min(initial=np.inf) for values in values_ms), default=np.inf)
    axis.set_xlim(left=max(LEAST_MS, 0.8 * least) if np.isfinite(least) else None)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
