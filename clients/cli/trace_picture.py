"""Draw a step trace: what each sequence did, what the steps computed, and the KV blocks. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pagoda_server.cli.trace_timeline import Doing, Timeline

COLORS = {  # Okabe and Ito's palette, safe for the colour-blind; light is less work
    Doing.WAITING: "#d9d9d9",
    Doing.PREEMPTED: "#D55E00",
    Doing.HELD: "#E69F00",
    Doing.PREFILL: "#004a75",
    Doing.DECODE: "#56B4E9",
    Doing.PADDING: "#8c8c8c",
}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
MAX_NAMED = 48  # tracks that have room for a name
MAX_HEIGHT = 14.0  # inches
DPI = 150


def draw(timeline: Timeline, title: str, path: Path) -> None:
    """Draw one engine's trace, in the format that the path's suffix names."""
    tracks_height = min(MAX_HEIGHT - 4, 0.6 + 0.16 * len(timeline.tracks))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, tracks_height + 3.8))
        panels = figure.subplots(3, 1, sharex=True, height_ratios=[tracks_height, 1.4, 1.4])
        _sequences(panels[0], timeline)
        _tokens(panels[1], timeline)
        _blocks(panels[2], timeline)
        panels[-1].set(xlabel="seconds", xlim=(0, timeline.end_s or 1))
        figure.suptitle(title, x=0.01, ha="left")
        figure.savefig(path, dpi=DPI)


def _sequences(axis: Axes, timeline: Timeline) -> None:
    bars: dict[Doing, list[list[tuple[float, float]]]] = {doing: [] for doing in Doing}
    for row, track in enumerate(timeline.tracks):
        for span in track.spans:
            corners = [(span.start_s, row + 0.1), (span.start_s, row + 0.9)]
            bars[span.doing].append([*corners, (span.end_s, row + 0.9), (span.end_s, row + 0.1)])
    shown = [doing for doing in Doing if bars[doing]]
    for doing in shown:
        axis.add_collection(PolyCollection(bars[doing], facecolors=COLORS[doing], linewidths=0))
    preempted = [
        (at, row + 0.5) for row, track in enumerate(timeline.tracks) for at, what in track.moves if what == "preempted"
    ]
    if preempted:
        axis.plot(*zip(*preempted, strict=True), "x", color="black", markersize=3.5, clip_on=False)
    axis.set(ylim=(len(timeline.tracks) or 1, 0), title=f"{len(timeline.tracks)} sequences, in the order of arrival")
    axis.tick_params(axis="y", length=0)
    if len(timeline.tracks) <= MAX_NAMED:
        rows = [row + 0.5 for row in range(len(timeline.tracks))]
        names = [f"{track.sequence} {track.request_id[:8]}".rstrip() for track in timeline.tracks]
        axis.set_yticks(rows, names, fontsize=6)
    else:
        axis.set_yticks([])
    handles = [Patch(color=COLORS[doing], label=str(doing)) for doing in shown]
    axis.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), borderaxespad=0.2)


def _tokens(axis: Axes, timeline: Timeline) -> None:
    times, decodes, prefills = _levels(
        timeline, [[step.decode_tokens, step.prefill_tokens] for step in timeline.steps], width=2
    )
    axis.stackplot(
        times, decodes, prefills, colors=[COLORS[Doing.DECODE], COLORS[Doing.PREFILL]], labels=["decode", "prefill"]
    )
    axis.set(title=f"tokens of a step (budget {timeline.token_budget})", ylim=(0, None))


def _blocks(axis: Axes, timeline: Timeline) -> None:
    total = timeline.blocks_total or 1
    shares = [
        [100 * (total - step.blocks_free - step.blocks_evictable) / total, 100 * step.blocks_evictable / total]
        for step in timeline.steps
    ]
    times, referenced, evictable = _levels(timeline, shares, width=2)
    axis.stackplot(times, referenced, evictable, colors=["#009E73", "#b5ddd0"], labels=["referenced", "evictable"])
    axis.set(title=f"% of {timeline.blocks_total:,} KV blocks: referenced, and cached without a user", ylim=(0, 100))


def _levels(timeline: Timeline, values: list[list[float]], width: int) -> list[list[float]]:
    """Times, then each of `width` values: constant during a step, zero while the engine was idle."""
    points: list[list[float]] = []
    last_end = 0.0
    for step, row in zip(timeline.steps, values, strict=True):
        if step.start_s - last_end > 0.5 * (step.end_s - step.start_s):
            points += [[last_end, *[0.0] * width], [step.start_s, *[0.0] * width]]
        points += [[step.start_s, *row], [step.end_s, *row]]
        last_end = step.end_s
    return [list(column) for column in zip(*points, strict=True)] or [[0.0], *[[0.0]] * width]
