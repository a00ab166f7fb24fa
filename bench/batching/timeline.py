"""The batch over time, drawn from every step: a row is a slot, a column is a step, a colour is a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from bench.batching.recording import Recording, Work
from bench.plots import COLORS, DPI, STYLE

SEQUENCE_COLORS = COLORS[:6]
WHITE = np.ones(3)
PADDING: NDArray[np.float64] = np.array(to_rgb("#8c8c8c"))
IDLE: NDArray[np.float64] = np.array(to_rgb("#f4f4f4"))
SECOND_TINT, HELD_TINT = 0.35, 0.75  # towards white
PREFILL_SHADE = 0.55  # of the colour's own brightness


def draw(recordings: Sequence[Recording], title: str, path: Path) -> None:
    """One panel a recording, all on the same scale of steps."""
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        heights = [max(2, recording.num_slots) for recording in recordings]
        figure = Figure(figsize=(11, 1.4 + sum(0.55 + 0.17 * height for height in heights)))
        panels = figure.subplots(len(recordings), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axis, recording in zip(panels, recordings, strict=True):
            _panel(axis, recording)
        panels[-1].set(xlabel="step", xlim=(0, max(len(recording.steps) for recording in recordings)))
        figure.suptitle(title, x=0.01, ha="left")
        figure.legend(handles=_legend(), loc="outside lower center", ncols=5)
        figure.savefig(path, dpi=DPI)


def image(recording: Recording) -> NDArray[np.float64]:
    """[slots, steps, RGB]"""
    pixels = np.broadcast_to(IDLE, (recording.num_slots, len(recording.steps), 3)).copy()
    for step, cells in enumerate(recording.steps):
        for cell in cells:
            pixels[cell.slot, step] = shade(cell.request, cell.work)
    return pixels


def shade(request: int, work: Work) -> NDArray[np.float64]:
    color: NDArray[np.float64] = np.array(to_rgb(SEQUENCE_COLORS[request % len(SEQUENCE_COLORS)]))
    if request // len(SEQUENCE_COLORS) % 2:  # each twice, so that neighbours in a slot seldom look the same
        color = color + (WHITE - color) * SECOND_TINT
    match work:
        case Work.DECODE:
            return color
        case Work.PREFILL:
            return color * PREFILL_SHADE
        case Work.HELD:
            return color + (WHITE - color) * HELD_TINT
        case Work.PADDING:
            return PADDING


def _panel(axis: Axes, recording: Recording) -> None:
    slots, steps = recording.num_slots, len(recording.steps)
    axis.imshow(image(recording), extent=(0, steps, slots, 0), aspect="auto", interpolation="nearest")
    axis.hlines(range(1, slots), 0, steps, color="white", linewidth=0.8)
    axis.set_yticks([slot + 0.5 for slot in range(slots)], [str(slot + 1) for slot in range(slots)], fontsize=7)
    axis.tick_params(axis="y", length=0)
    axis.set_ylabel("slot")
    figures = f"{steps:,} steps, {recording.run.elapsed_s:.1f} s, {recording.run.tokens_per_s:.0f} tokens/s"
    axis.set_title(f"{recording.mode}: {figures}, {100 * recording.slot_use:.0f} % of the batch's rows give a token")


def _legend() -> list[Patch]:
    return [
        Patch(color=tuple(shade(0, Work.PREFILL)), label="prefill"),
        Patch(color=tuple(shade(0, Work.DECODE)), label="decode (a colour a sequence)"),
        Patch(color=tuple(shade(0, Work.HELD)), label="waits in its slot"),
        Patch(color=tuple(PADDING), label="padding"),
        Patch(facecolor=tuple(IDLE), edgecolor="#cccccc", label="no sequence"),
    ]
