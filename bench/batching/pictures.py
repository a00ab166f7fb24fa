"""Pictures of the experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.batching.costs import CONTEXT, SIZE, STEPS, Measured
from bench.batching.memory import Use
from bench.measure import Run
from bench.plots import COLORS, DPI, STYLE
from pagoda_server.engine.timing.cost_model import StepLoad

PUBLISHED_USE = (20.4, 26.8, 38.2, 96.3)  # % of the slots, of reservations as in RESERVATIONS and of paging
PUBLISHED_RATIOS = {"static": 4, "reserving": 8, "paging": 23}
Rates: TypeAlias = Mapping[int, tuple[float, ...]]


def draw(
    folder: Path,
    measured: Measured,
    spreads: tuple[Sequence[float], Mapping[str, Sequence[float]]],
    repeated: Rates,
    waits: tuple[Sequence[float], Mapping[float, Mapping[str, Run]]],
    uses: Mapping[str, Mapping[str, Use]],
) -> None:
    with mpl.rc_context(STYLE):
        figures = {
            "size": _batch_size(measured),
            "spread": _spread(*spreads, repeated),
            "waits": _waits(*waits),
            "memory": _memory(uses),
        }
        for name, figure in figures.items():
            figure.savefig(folder / f"batching-{name}.png", dpi=DPI)


def _batch_size(measured: Measured) -> Figure:
    """Throughput by batch size under the roofs of memory and of computing."""
    figure, (axis,) = _figure(1, "Decodes of the default model by batch size")
    costs, keys = measured.costs(), CONTEXT + STEPS // 2
    sizes, seconds = np.array(measured.decode_s).T
    predicted = [costs.predict(StepLoad.of(int(size), int(size) * keys)) for size in sizes]
    axis.plot(sizes, sizes * measured.memory_bound, "--", color=COLORS[1], label="only reads the weights")
    axis.axhline(measured.token_bound, ls="--", color=COLORS[2], label="only multiplies, as fast as for prompts")
    axis.plot(sizes, sizes / seconds, "o-", color=COLORS[0], label="measured")
    axis.plot(sizes, sizes / predicted, "x:", color=COLORS[6], label="the server's cost model")
    axis.set(xscale="log", yscale="log", xlabel="sequences in a step", ylabel="output tokens/s")
    axis.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    low, high = 0.6 / seconds[0], 2 * measured.token_bound
    ticks = [rate for power in range(16) if low <= (rate := 25 * 2**power) <= high]
    axis.set_yticks(ticks, [f"{rate:g}" for rate in ticks])
    axis.set_ylim(low, high)
    axis.minorticks_off()
    axis.legend()
    return figure


def _spread(spreads: Sequence[float], ratios: Mapping[str, Sequence[float]], repeated: Rates) -> Figure:
    """Static ÷ continuous by the spread of outputs; and a published comparison, repeated."""
    figure, axes = _figure(2, "What static batches lose when outputs differ (simulated)")
    for index, (name, values) in enumerate(ratios.items()):
        axes[0].plot(spreads, values, "o-" if index < 3 else "x:", color=COLORS[index % 3], label=name)
    axes[0].set(
        xlabel="standard deviation of output lengths ÷ mean", ylabel="time, static ÷ continuous", ylim=(0, None)
    )
    rates, places = np.array([*repeated.values()]), range(len(repeated))
    for index, (name, ratio) in enumerate(PUBLISHED_RATIOS.items(), 1):
        axes[1].plot(places, rates[:, index] / rates[:, 0], "o-", color=COLORS[index + 2], label=name)
        axes[1].plot(places[-1], ratio, "*", color=COLORS[index + 2], markersize=13)
    axes[1].plot([], [], "*", color="#666666", markersize=13, label="published")
    axes[1].set_xticks(places, [f"{cap:,}" for cap in repeated])
    axes[1].set(xlabel="longest output, tokens", ylabel="throughput ÷ the baseline's", ylim=(0, None))
    axes[1].set_title("OPT-13B on an A100, at the peaks of its data sheet")
    for axis in axes:
        axis.legend()
    return figure


def _waits(waits: Sequence[float], runs: Mapping[float, Mapping[str, Run]]) -> Figure:
    """Dynamic batches by how long they wait; dotted: continuous ones."""
    figure, axes = _figure(2, f"Dynamic batches of up to {SIZE}, by how long they wait (simulated)")
    places = range(len(waits))
    for color, (load, by_wait) in zip(COLORS, runs.items(), strict=False):
        *waited, beside = ([run.ttft_ms(50) / 1e3, run.tokens_per_s] for run in by_wait.values())
        for axis, values, level in zip(axes, np.array(waited).T, beside, strict=True):
            axis.plot(places, values, "o-", color=color, label=f"{load:.0%} of what continuous batches can serve")
            axis.axhline(level, ls=":", color=color)
            axis.set_xticks(places, [f"{wait:g}" for wait in waits])
            axis.set_xlabel("longest wait for a batch, s; dotted: continuous batches")
    axes[0].set(yscale="log", ylabel="median TTFT, s")
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[1].set(ylabel="output tokens/s", ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _memory(uses: Mapping[str, Mapping[str, Use]]) -> Figure:
    """What the slots of the KV memory hold, by how it is given out."""
    figure, axes = _figure(
        len(uses), "What 15,700 slots of KV memory hold while requests wait (simulated)", sharey=True
    )
    labels = ("tokens", "reserved for tokens to come", "reserved and never used", "free")
    for axis, (name, by_kind) in zip(axes, uses.items(), strict=True):
        rows, shares, left = range(len(by_kind)), 100 * np.array([use[:4] for use in by_kind.values()]), 0.0
        for column, color, label in zip(shares.T, (COLORS[0], COLORS[5], COLORS[1], "#dddddd"), labels, strict=True):
            axis.barh(rows, column, left=left, color=color, label=label if axis is axes[0] else None)
            left = left + column
        for row, use in enumerate(by_kind.values()):
            axis.text(101, row, f"{use.at_once:.0f}", va="center")
        axis.set_yticks(rows, list(by_kind))
        axis.set(xlabel="% of the slots, mean; right: sequences at once", xlim=(0, 100), title=f"lengths as in {name}")
        axis.grid(visible=False)
    axes[0].invert_yaxis()
    axes[0].plot(PUBLISHED_USE, rows, "|", color=COLORS[6], markersize=26, markeredgewidth=2)
    axes[0].plot([], [], "|", color=COLORS[6], markersize=10, markeredgewidth=2, label="tokens, published")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def _figure(count: int, title: str, *, sharey: bool = False) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(6.6 if count == 1 else 11, 4.8))
    figure.suptitle(title, x=0.01, ha="left")
    return figure, figure.subplots(1, count, squeeze=False, sharey=sharey)[0]
