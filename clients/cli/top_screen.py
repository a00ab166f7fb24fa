"""Draw a Board as lines of text that fit a terminal. Glyphs and words say everything that colours say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from pagoda.v1 import control_pb2
from pagoda_server.cli.top_board import CELL_S, Board, Followed

# By the letter of a cell: glyph, colour, word. Names of ANSI colours follow the terminal's own palette and exist on
# terminals with 16 colours.
DOING = {
    "p": ("█", "blue", "prefill"),
    "d": ("━", "cyan", "decode"),
    "w": ("·", "dim", "waiting"),
    "x": ("×", "bold red", "preempted"),
    "h": ("╌", "yellow", "held"),
}
BLOCKS = {"referenced": ("█", "green"), "waste": ("▓", "yellow"), "evictable": ("▒", "cyan"), "free": ("░", "dim")}
ENDED = {"finished": ("✓", "green"), "cancelled": ("✗", "yellow"), "expired": ("✗", "yellow")}
SERVER_STATES = {"serving": ("●", "green"), "starting": ("○", "yellow"), "draining": ("▼", "yellow")}
ENGINE_STATES = {"ready": ("●", "green"), "loading": ("○", "yellow"), "draining": ("◌", "yellow")}
FAILED = ("✗", "bold red")
SPARKS = "▁▂▃▄▅▆▇█"
SORTS: dict[str, Callable[[Followed], Any]] = {
    "state": lambda each: (_group(each), each.arrived_s, each.id),
    "tokens": lambda each: (bool(each.row.end), -each.output_tokens, each.id),
    "tenant": lambda each: (each.row.tenant, _group(each), each.arrived_s, each.id),
}
LEAST_BAR = 40
LABEL = 11  # columns for the name of a figure
SILENCE_S = 5.0
SNAPSHOT_ROWS = 100
WIDE = 100
LOW = 20  # lines


def draw(
    board: Board,
    width: int,
    height: int | None,
    *,
    sort: str = "state",
    is_paused: bool = False,
    interval_s: float = 1.0,
) -> list[Text]:
    """Lines of at most `width` columns; `height` of them, or as many as there are figures and no keys if it is None."""
    is_low = height is not None and height < LOW
    lines = [_header(board, width), *_notices(board, is_paused, interval_s), _rates(board, width)]
    lines += [*_kv(board, width, is_low), _batch(board, width), *_prefix(board, width)]
    lines += [*_drafts(board, width), _latency(board, width)]
    engines, tenants = _engines(board, width), _tenants(board, width, is_low)
    if height is not None:
        # At least half of what is left is for the sequences.
        most = max(1, (height - len(lines)) // 4)
        engines = [] if is_low and len(engines) == 1 else _cut(engines, most)
        tenants = _cut(tenants, most)
    lines += engines + tenants
    lines += _sequences(board, width, None if height is None else height - len(lines) - 1, sort)
    if height is not None:
        lines = lines[: height - 1]
        lines += [Text()] * (height - 1 - len(lines))
        lines.append(_footer(width, sort, is_paused))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return lines


# -- the server --------------------------------------------------------------------------------------------------------


def _header(board: Board, width: int) -> Text:
    info = board.info
    state = control_pb2.ServerState.Name(info.state).removeprefix("SERVER_STATE_").lower()
    glyph, style = SERVER_STATES.get(state, FAILED)
    if board.problem:
        glyph, style, state = *FAILED, "away"
    models = dict.fromkeys((info.model, *(engine.model for engine in info.engines if engine.model)))
    names = _clean(", ".join(models))
    left = Text.assemble(("Pagoda", "bold"), " ", (names, "bold cyan"), "  ", (f"{glyph} {state}", style))
    facts = [f"up {_age(board.uptime_s)}", board.address, f"version {info.version}"]
    while facts and cell_len(right := " · ".join(facts)) + left.cell_len + 2 > width:
        facts.pop()
    if facts:
        left.append(" " * (width - left.cell_len - cell_len(right)) + right, "dim")
    return left


def _notices(board: Board, is_paused: bool, interval_s: float) -> Iterable[Text]:
    """Lines on what keeps the figures from being current."""
    if board.problem:
        why = f"✗ no connection for {_age(board.problem_s)}, trying again: {_clean(board.problem)}"
        yield Text(why, style="bold reverse")
    elif is_paused:
        yield Text("‖ paused: p goes on", style="bold reverse")
    elif board.silence_s > interval_s + SILENCE_S:
        yield Text(f"✗ no word from the server for {_age(board.silence_s)}", style="bold reverse")


def _label(name: str) -> Text:
    return Text().append(f"{name:<{LABEL}}", "bold")


def _rates(board: Board, width: int) -> Text:
    half = (width - LABEL) // 2
    line = _label("tokens/s")
    for name, style in (("output_tokens", "cyan"), ("prefill_tokens", "blue")):
        words = "generated" if name == "output_tokens" else "prefilled"
        figures = [None if each is None else getattr(each, name) for each in board.seconds(half)]
        text = Text.assemble((f"{_last(figures):>6,}", "bold"), f" {words} ")
        text.append(_sparkline(figures, half - 2 - text.cell_len), style)
        text.append(" " * (half - text.cell_len))
        line.append_text(text)
    return line


def _last(figures: list[int | None]) -> int:
    return next((figure for figure in reversed(figures) if figure is not None), 0)


def _sparkline(figures: list[int | None], width: int) -> str:
    """The last figures, as heights between 0 and their maximum; a blank where there is none."""
    last = figures[-width:] if width > 0 else []
    top = max((each for each in last if each), default=0) or 1
    return "".join(" " if each is None else SPARKS[math.ceil(each / top * (len(SPARKS) - 1))] for each in last)


def _kv(board: Board, width: int, is_low: bool) -> Iterable[Text]:
    """A bar of all blocks and its legend: beside it, or below it on a narrow screen."""
    total = board.total
    if not total.blocks_total:
        if board.load.engines:
            yield _label("KV blocks").append("shown to those that may observe", "dim")
        return
    wasted = total.kv_waste * total.blocks_referenced
    parts = {
        "referenced": total.blocks_referenced - wasted,
        "waste": wasted,
        "evictable": total.blocks_evictable,
        "free": total.blocks_free,
    }
    waste = f"{100 * total.kv_waste:.1f} %"
    legend = _legend(
        referenced=f"{total.blocks_referenced:,} referenced",
        waste=f"{waste} waste",
        evictable=f"{total.blocks_evictable:,} evictable",
        free=f"{total.blocks_free:,} free",
    )
    if width - LABEL - legend.cell_len < LEAST_BAR and not is_low:
        yield _label("KV blocks").append_text(_bar(parts, width - LABEL))
        yield _label("").append_text(legend)
        return
    if is_low:
        used = _percent(total.blocks_referenced, total.blocks_total)
        evictable = _percent(total.blocks_evictable, total.blocks_total)
        legend = _legend(referenced=used, waste=f"{waste} waste", evictable=f"{evictable} evictable")
    yield (
        _label("KV blocks")
        .append_text(_bar(parts, width - LABEL - legend.cell_len - 2))
        .append("  ")
        .append_text(legend)
    )


def _legend(**parts: str) -> Text:
    legend = Text()
    for name, words in parts.items():
        glyph, style = BLOCKS[name]
        legend.append("  " if legend else "").append(glyph, style).append(f" {words}")
    return legend


def _bar(parts: dict[str, float], width: int) -> Text:
    """A bar of BLOCKS' glyphs."""
    total = sum(parts.values())
    ends = [round(width * end / total) for end in itertools.accumulate(parts.values())]
    cells = {name: end - begin for name, begin, end in zip(parts, [0, *ends], ends, strict=False)}
    bar = Text()
    for name, count in cells.items():
        bar.append(BLOCKS[name][0] * count, BLOCKS[name][1])
    return bar


def _batch(board: Board, width: int) -> Text:
    total = board.total
    places = sum(status.info.max_num_seqs for status in board.info.engines)
    preempted = sum(each.row.state == "x" and not each.row.end for each in board.sequences)
    facts = [
        f"{total.running:,} running of {places:,}",
        f"{total.waiting:,} waiting" + (f" ({board.hold})" if board.hold and total.waiting else ""),
    ]
    facts += [f"{preempted:,} preempted"] if preempted else []
    return _joined(_label("batch"), [*facts, f"{board.load.requests:,} requests admitted"], width)


def _prefix(board: Board, width: int) -> Iterable[Text]:
    total, change = board.total, board.change()
    if not total.blocks_total:
        return
    since_start = f"{100 * total.prefix_hit_rate:.0f} %"
    preemptions = f"{total.preemptions:,} preemptions"
    if change is None or change.hit_rate is None:
        facts = [f"{since_start} of prompts cached"]
    else:
        facts = [f"{100 * change.hit_rate:.0f} % of prompts cached"]
    facts += [preemptions + (f" ({change.preemptions:,} in the last minute)" if change and change.preemptions else "")]
    facts += [f"{total.recomputed_tokens:,} tokens computed again"] if total.recomputed_tokens else []
    facts += [f"{since_start} since start"] if change is not None and change.hit_rate is not None else []
    yield _joined(_label("prefix"), facts, width)


def _drafts(board: Board, width: int) -> Iterable[Text]:
    """A line on the tokens that took no step each, once there are drafts or forced tokens."""
    total = board.total
    facts = []
    if total.drafted_tokens:
        accepted = _percent(total.accepted_tokens, total.drafted_tokens)
        facts.append(f"{accepted} of {total.drafted_tokens:,} drafted tokens accepted")
    facts += [f"{total.forced_tokens:,} tokens forced by grammars"] if total.forced_tokens else []
    if facts:
        yield _joined(_label("drafts"), facts, width)


def _latency(board: Board, width: int) -> Text:
    latencies = board.latencies()
    facts = [
        f"{name} none yet" if found is None else f"{name} {_time(found[0])}, p95 {_time(found[1])}"
        for name, found in (("TTFT", latencies.ttft), ("ITL", latencies.itl))
    ]
    return _joined(_label("latency"), [*facts, f"last {latencies.covered_s:.0f} s"], width)


def _engines(board: Board, width: int) -> list[Text]:
    loads = {load.engine: load for load in board.load.engines}
    return [_engine(status, loads.get(status.engine), width) for status in board.info.engines]


def _engine(status: control_pb2.EngineStatus, load: control_pb2.EngineLoad | None, width: int) -> Text:
    state = control_pb2.EngineState.Name(status.state).removeprefix("ENGINE_STATE_").lower()
    glyph, style = ENGINE_STATES.get(state, FAILED)
    line = _label(f"engine {_clean(status.name) or status.engine}").append(f"{glyph} {state}", style)
    node = status.info.settings.get("node")
    facts = [f"on {_clean(node)}"] if node else []
    facts += [f"restarted {status.restarts} times"] if status.restarts else []
    if load is not None:
        facts.append(f"{load.running} running, {load.waiting} waiting")
        if load.blocks_total:
            facts.append(f"KV {_percent(load.blocks_referenced, load.blocks_total)}")
            facts.append(f"step of {load.step_tokens:,} tokens in {_time(load.step_time_s)}")
        if load.host_blocks_total:
            facts.append(f"{_percent(load.host_blocks_used, load.host_blocks_total)} of host blocks")
    if status.HasField("info"):
        facts.append(f"{_clean(status.info.device)}, {status.info.dtype}, {status.info.kernel_backend} kernels")
    return _joined(line.append("  "), facts, width)


def _tenants(board: Board, width: int, is_low: bool) -> list[Text]:
    """The most served first, one per line or all on one. "(none)" stands for calls without a tenant."""
    load = board.load
    if not any(tenant.name for tenant in load.tenants):
        return []
    if is_low:
        shares = [f"{_clean(tenant.name) or '(none)'} {100 * tenant.share:.0f} %" for tenant in load.tenants]
        return [_joined(_label("tenants"), shares, width)]
    lines = []
    names = max(LABEL, min(24, width // 5, max(cell_len(tenant.name) for tenant in load.tenants)))
    for index, tenant in enumerate(load.tenants):
        name = Text(_clean(tenant.name) or "(none)")
        name.truncate(names, overflow="ellipsis", pad=True)
        line = _label("" if index else "tenants").append_text(name)
        bar = max(0, min(30, width - LABEL - names - 38))
        line.append(f" {100 * tenant.share:3.0f} % ")
        line.append("█" * round(bar * tenant.share), "cyan").append("░" * (bar - round(bar * tenant.share)), "dim")
        lines.append(line.append(f" {tenant.running} running, {tenant.waiting} waiting"))
    if more := load.num_tenants - len(load.tenants):
        lines.append(_label("").append(f"and {more} more", "dim"))
    return lines


# -- the batch ---------------------------------------------------------------------------------------------------------


def _group(sequence: Followed) -> int:
    return 3 if sequence.row.end else {"x": 1, "w": 2}.get(sequence.row.state, 0)


def _sequences(board: Board, width: int, height: int | None, sort: str) -> list[Text]:
    """A heading and one row per sequence; the last row counts those without room."""
    sequences = sorted(board.sequences, key=SORTS[sort])
    if height is None:
        sequences = [each for each in sequences if not each.row.end]
        height = SNAPSHOT_ROWS
    if height < 2:
        return []
    has_tenants = any(each.row.tenant for each in sequences)
    state_width = 22 if width >= WIDE else 12
    texts = [("request", 10 if width < WIDE else 16 if width < 150 else 32)] + (
        [("tenant", 10)] if has_tenants and width >= 72 else []
    )
    numbers = [("prompt", 7), ("output", 7), ("age", 7)]
    if width < 72:
        numbers.pop()
    history = width - state_width - sum(1 + size for _, size in texts + numbers) - 1
    heading = Text(f"{'own sequences' if board.is_partial else 'sequences':<{state_width}}", style="bold")
    heading.append("".join(f" {name:<{size}}" for name, size in texts))
    heading.append("".join(f" {name:>{size}}" for name, size in numbers))
    if history > 0:
        heading.append(f" {f'last {history * CELL_S:.0f} s ':─<{history - 1}}▸")
    heading.stylize("dim", state_width)
    if board.trace_problem:
        return [heading, Text(f"no step trace: {_clean(board.trace_problem)}", style="dim")]
    shown = sequences if len(sequences) < height else sequences[: height - 2]
    rows = [heading]
    for each in shown:
        row = _state(each, state_width)
        for name, size in texts:
            cell = Text(
                " " + (_clean(each.row.tenant) if name == "tenant" else _clean(each.row.request_id) or f"#{each.id}")
            )
            cell.truncate(1 + size, overflow="ellipsis", pad=True)
            row.append_text(cell)
        age_s = min(board.now, each.ended_s) - each.arrived_s
        figures = {"prompt": f"{each.row.prompt_tokens:,}", "output": f"{each.output_tokens:,}", "age": _age(age_s)}
        row.append("".join(f" {figures[name]:>{size}}" for name, size in numbers))
        rows.append(row.append(" ").append_text(_history(each, board.now, history)))
    if more := sequences[len(shown) :]:
        kinds = {"running": 0, "preempted": 1, "waiting": 2, "ended": 3}
        counts = {name: sum(_group(each) == at for each in more) for name, at in kinds.items()}
        summary = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        rows.append(Text(f"… and {len(more):,} more: {summary}", style="dim"))
    return rows


def _state(sequence: Followed, width: int) -> Text:
    if words := sequence.row.end:
        glyph, style = ENDED.get(words, FAILED)
    else:
        glyph, style, words = DOING[sequence.row.state]
        words += f": {sequence.why}" if sequence.why and width > 12 else ""
    state = Text().append(f"{glyph} {words}", style)
    state.truncate(width, overflow="ellipsis", pad=True)
    return state


def _history(sequence: Followed, now: float, width: int) -> Text:
    """What the sequence did, up to now at the right end."""
    newest = math.ceil(now / CELL_S) - 1
    history = Text()
    for doing, run in itertools.groupby(map(sequence.cells.get, range(newest - width + 1, newest + 1))):
        glyph, style, _ = DOING.get(doing or "", (" ", "", ""))
        history.append(glyph * len(list(run)), style)
    return history


def _footer(width: int, sort: str, is_paused: bool) -> Text:
    footer = Text()
    for key, what in (("q", "quit"), ("p", "go on" if is_paused else "pause"), ("s", f"sort: {sort}")):
        footer.append(key, "bold reverse").append(f" {what}  ")
    shown = list(DOING.values())
    while shown and footer.cell_len + sum(4 + len(word) for _, _, word in shown) > width:
        shown.pop()
    footer.append(" " * (width - footer.cell_len - sum(4 + len(word) for _, _, word in shown)))
    for glyph, style, word in shown:
        footer.append("  ").append(glyph, style).append(f" {word}")
    return footer


# -- words -------------------------------------------------------------------------------------------------------------


def _cut(lines: list[Text], most: int) -> list[Text]:
    """At most so many lines; the last then counts the others."""
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], _label("").append(f"and {len(lines) - most + 1} more", "dim")]


def _joined(line: Text, facts: list[str], width: int) -> Text:
    """Append as many facts as there is room for."""
    for index, fact in enumerate(facts):
        if line.cell_len + len(fact) + 3 * (index > 0) > width:
            break
        line.append((" · " if index else "") + fact)
    return line


def _clean(text: str) -> str:
    """A name that may come from any client, without what a terminal would obey."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"


def _age(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    if minutes < 100:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h" if hours < 100 else f"{hours // 24} d"
