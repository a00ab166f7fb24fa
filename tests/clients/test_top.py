"""`pagoda top`: figures from an engine in simulated time, screens of every size, and the command in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from pagoda.v1 import control_pb2, trace_pb2
from pagoda_server.cli.app import app
from pagoda_server.cli.top_board import Board
from pagoda_server.cli.top_screen import BLOCKS, DOING, draw
from pagoda_server.cli.trace_timeline import Doing
from pagoda_server.engine.serving.codec import trace_messages
from pagoda_server.router.tenants.caller import Caller, set_caller
from pagoda_server.router.tenants.own_view import seen_trace
from tests.clients.fake_server import FakeServer, fail, running
from tests.clients.test_trace import TimedEngine
from tests.end_to_end.asking import ask, request
from tests.servers import Server

# -- figures -----------------------------------------------------------------------------------------------------------


def parts_of(engine: TimedEngine, last_s: float = 1e9) -> list[trace_pb2.StepTracePart]:
    return [message.part for message in trace_messages(0, engine.steps.trace.take(last_s))]


def board_of(engine: TimedEngine) -> Board:
    """A board whose clock differs from the engine's."""
    return Board("here:1", clock=lambda: engine.now + 1e5 / 3)


def ready_info(num_engines: int = 1) -> control_pb2.ServerInfo:
    info = control_pb2.ServerInfo(version="1.2.3", model="some-model", state=control_pb2.SERVER_STATE_SERVING)
    for at in range(num_engines):
        engine = control_pb2.EngineInfo(device="cpu", dtype="bfloat16", kernel_backend="cpu", max_num_seqs=8)
        info.engines.add(engine=at, state=control_pb2.ENGINE_STATE_READY, restarts=at, info=engine)
    return info


def some_load(num_engines: int = 1, tenants: tuple[str, ...] = ()) -> control_pb2.Load:
    load = control_pb2.Load(requests=9, num_tenants=len(tenants))
    for at in range(num_engines):
        load.engines.add(
            engine=at, running=4, waiting=5, blocks_total=100, blocks_free=10, blocks_evictable=30,
            blocks_referenced=60, kv_slots=240, kv_slots_unused=24, steps=7, step_tokens=20, step_time_s=0.041,
            prompt_tokens=400, cached_tokens=100, preemptions=3, recomputed_tokens=17,
        )  # fmt: skip
    for name in tenants:
        load.tenants.add(name=name, share=1 / len(tenants), running=1, waiting=2)
    return load


def busy_engine(tenant: str = "") -> TimedEngine:
    """An engine that has preempted, some of whose sequences wait, compute prompts and decode."""
    engine = TimedEngine(num_blocks=14, block_size=4, token_budget=12, max_num_seqs=4)
    for head in range(9):
        engine.add([head + 1] * (6 + 2 * head), max_tokens=30, tenant=tenant)
    for _ in range(60):
        engine.step(0.25)
        doing = {track.spans[-1].doing for track in engine.timeline().tracks if track.last_move != "finished"}
        if doing >= {Doing.PREEMPTED, Doing.WAITING, Doing.DECODE}:
            break
    return engine


def ms(latency_s: float) -> float:
    return round(1e3 * latency_s, 1)


def test_latencies_and_rates_are_those_of_the_engine_however_the_trace_is_cut() -> None:
    engine = TimedEngine(token_budget=10, max_num_seqs=2)
    in_parts = board_of(engine)
    for head, length in ((1, 14), (2, 3), (3, 3)):
        engine.add([head] * length, max_tokens=4)
    for step in range(12):
        engine.step(0.7)
        if step % 3:  # a trace may tell again what an earlier one told
            in_parts.saw_trace(parts_of(engine, 3.3), window_s=3.3)
    engine.now += 1.0
    in_parts.saw_trace(parts_of(engine, 3.3), window_s=3.3)
    at_once = board_of(engine)
    at_once.saw_trace(parts_of(engine), window_s=10)
    assert len(engine.ended) == 3
    for board in (in_parts, at_once):
        seconds = [second for second in board.seconds(14) if second is not None]
        assert sum(second.output_tokens for second in seconds) == 12
        assert sum(second.prefill_tokens for second in seconds) == 20
        assert sum((second.itl for second in seconds), Counter()) == {ms(0.7): 9}
        firsts = [ended.seq.account.first_token - ended.seq.request.arrived for ended in engine.ended.values()]
        assert sum((second.ttft for second in seconds), Counter()) == Counter(map(ms, firsts))
        assert board.latencies().itl == pytest.approx((0.7, 0.7))
        assert board.latencies().ttft == pytest.approx((sorted(firsts)[1], max(firsts)))


def test_a_sequence_stays_for_a_moment_after_its_end_and_then_leaves() -> None:
    engine = TimedEngine()
    board = board_of(engine)
    engine.add([1] * 4, max_tokens=2)
    engine.add([2] * 4, max_tokens=20)
    for _ in range(3):
        engine.step(0.25)
    board.saw_trace(parts_of(engine), window_s=10)
    assert [(each.row.end, each.output_tokens) for each in board.sequences] == [("finished", 2), ("", 3)]
    for _ in range(9):
        engine.step(0.25)
    board.saw_trace(parts_of(engine, 2.5), window_s=2.5)
    assert [(each.row.end, each.output_tokens) for each in board.sequences] == [("", 12)]


def test_an_engine_that_starts_again_brings_other_sequences_under_the_same_ids() -> None:
    first = TimedEngine()
    board = board_of(first)
    first.add([1] * 4, max_tokens=9)
    first.step()
    first.step()
    board.saw_trace(parts_of(first), window_s=10)
    second = TimedEngine()
    second.now = first.now
    second.add([1] * 6, max_tokens=9)
    second.step()
    first.now = second.now
    board.saw_trace(parts_of(second), window_s=2)
    assert [(each.row.prompt_tokens, each.output_tokens) for each in board.sequences] == [(6, 1)]


def test_change_is_that_of_the_last_minute_and_begins_again_with_the_engine() -> None:
    now = [0.0]
    board = Board("here:1", clock=lambda: now[0])
    assert board.change() is None
    for at in (0, 50, 100):
        now[0] = at
        load = some_load()
        load.engines[0].steps += at
        load.engines[0].prompt_tokens += 4 * at
        load.engines[0].cached_tokens += at
        load.engines[0].preemptions += at
        board.saw_load(load)
    change = board.change()
    assert change is not None
    assert (change.hit_rate, change.preemptions) == (0.25, 50)
    board.saw_load(some_load())
    assert board.change() is None


# -- screens -----------------------------------------------------------------------------------------------------------


SIZES = [(1, 1), (12, 4), (40, 10), (60, 15), (80, 24), (100, 30), (132, 43), (250, 80)]


def boards() -> Iterator[tuple[str, Board]]:
    engine = busy_engine("acme")
    for name, num_engines, tenants in (("one", 1, ()), ("many", 12, tuple(f"tenant-{at}" for at in range(20)))):
        board = board_of(engine)
        board.saw_info(ready_info(num_engines))
        board.saw_load(some_load(num_engines, tenants))
        board.saw_trace(parts_of(engine), window_s=60)
        yield name, board
    yield "empty", Board("here:1")
    lost = board_of(engine)
    lost.saw_info(ready_info())
    lost.lost("Connection refused " * 20)
    yield "lost", lost


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_screen_has_its_size(width: int, height: int) -> None:
    for name, board in boards():
        for is_paused in (False, True):
            lines = draw(board, width, height, is_paused=is_paused)
            assert len(lines) == height, name
            assert max(line.cell_len for line in lines) <= width, name


def plain(board: Board, width: int, height: int | None) -> str:
    return "\n".join(line.plain for line in draw(board, width, height))


def test_a_screen_names_all_models_and_the_machines_of_engines() -> None:
    board, info = Board("here:1"), ready_info(2)
    info.engines[0].model, info.engines[1].model = "some-model", "other-model"
    info.engines[1].name, info.engines[1].info.settings["node"] = "engine-2", "rack-7"
    board.saw_info(info)
    board.saw_load(some_load(2))
    screen = plain(board, 100, None)
    assert "Pagoda some-model, other-model  " in screen
    assert re.search(r"engine engine-2.*on rack-7", screen)


@pytest.mark.parametrize(("width", "height"), [(60, 15), (80, 24), (120, 40)])
def test_a_screen_tells_what_matters_at_every_size(width: int, height: int) -> None:
    board = dict(boards())["one"]
    screen = plain(board, width, height)
    for fact in (
        "some-model",
        "serving",
        "generated",
        "4 running of 8",
        "5 waiting",
        "25 % of prompts",
        "ITL",
        "q quit",
    ):
        assert fact in screen
    assert len(re.findall("(?m)^[█━╌·×] ", screen)) >= (5 if height == 15 else 8)


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        ({}, ""),
        ({"drafted_tokens": 1200, "accepted_tokens": 300}, "drafts     25 % of 1,200 drafted tokens accepted"),
        ({"forced_tokens": 28}, "drafts     28 tokens forced by grammars"),
        (
            {"drafted_tokens": 8, "forced_tokens": 28},
            "drafts     0 % of 8 drafted tokens accepted · 28 tokens forced by grammars",
        ),
    ],
)
def test_drafts_have_a_line_once_there_are_some(figures: dict[str, int], line: str) -> None:
    board = dict(boards())["one"]
    load = some_load()
    load.engines[0].MergeFrom(control_pb2.EngineLoad(**figures))
    board.saw_load(load)
    assert [each.rstrip() for each in plain(board, 100, 30).splitlines() if "draft" in each] == ([line] if line else [])


def test_a_larger_screen_shows_more_sequences() -> None:
    board = dict(boards())["one"]
    small, large = plain(board, 60, 15), plain(board, 120, 40)
    assert "… and 3 more: 3 waiting" in small
    assert "more" not in large
    assert len(re.findall("(?m)^[█━╌·×] ", large)) == 9


def test_states_and_blocks_are_told_apart_without_colours() -> None:
    assert len({glyph for glyph, *_ in DOING.values()}) == len(DOING)
    assert len({glyph for glyph, _ in BLOCKS.values()}) == len(BLOCKS)
    board = dict(boards())["one"]
    console = Console(color_system=None, force_terminal=True, width=120, no_color=True)
    with console.capture() as capture:
        console.print(*draw(board, 120, 40), sep="\n")
    rows = set(re.findall("(?m)^([█━╌·×]) (\\w+)", Text.from_ansi(capture.get()).plain))
    assert rows <= {(glyph, word) for glyph, _, word in DOING.values()}
    assert {"waiting", "preempted", "decode"} <= {name for _, name in rows}


def test_colours_are_the_sixteen_that_every_terminal_has() -> None:
    for name, board in boards():
        console = Console(color_system="truecolor", force_terminal=True, width=120)
        with console.capture() as capture:
            console.print(*draw(board, 120, 40), sep="\n")
        assert not re.search(r"\x1b\[[\d;]*[34]8;[25]", capture.get()), name


def test_names_from_clients_cannot_steer_the_terminal() -> None:
    engine = TimedEngine()
    engine.add([1] * 4, max_tokens=9, tenant="\x1b[2J\x07evil")
    engine.step()
    board = board_of(engine)
    board.saw_load(some_load(tenants=("\x1b[2J", "b\n")))
    parts = parts_of(engine)
    parts[0].moves[0].request_id = "\x1b]0;owned\x07"
    board.saw_trace(parts, window_s=9)
    for size in ((60, 15), (120, 40), (120, None)):
        screen = plain(board, *size)
        assert all(line.isprintable() for line in screen.split("\n"))
    assert "evil" in screen


async def test_a_tenant_sees_its_own_sequences_and_is_told_so() -> None:
    engine = TimedEngine(max_num_seqs=4)
    for at in range(4):
        engine.add([at + 1] * 4, max_tokens=9, tenant="ab"[at % 2])
    engine.step()
    set_caller(Caller("b", frozenset(), is_proven=True))
    board = board_of(engine)
    board.saw_info(ready_info())
    load = control_pb2.Load(requests=4)
    load.engines.add(running=4)
    board.saw_load(load)
    board.saw_trace([part async for part in seen_trace(parts_of(engine))], window_s=9)
    screen = plain(board, 100, 30)
    assert "own sequences" in screen
    assert "shown to those that may observe" in screen
    assert len(re.findall("(?m)^[█━╌·×] ", screen)) == 2


# -- the command -------------------------------------------------------------------------------------------------------


def test_once_prints_a_snapshot_of_a_real_server(synthetic_server: Server, inference) -> None:  # type: ignore[no-untyped-def]
    message = request("how long does it take", max_tokens=50)
    message.request_id = "watched"
    ask(inference, message)
    call = inference.Generate(request("go on", max_tokens=5000), timeout=60)
    next(call)
    result = CliRunner().invoke(app, ["top", synthetic_server.address, "--once"], env={"COLUMNS": "100"})
    call.cancel()
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 100
    for fact in ("Pagoda synthetic  ● serving", "engine 0   ● ready", "━ decode", "TTFT ", "ITL "):
        assert fact in result.stdout
    assert "q quit" not in result.stdout
    assert "none yet" not in result.stdout


def test_no_server_is_one_line_and_exit_code_1() -> None:
    result = CliRunner().invoke(app, ["top", "127.0.0.1:1"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: 127.0.0.1:1 is unavailable: ")
    assert result.stderr.count("\n") == 1


def test_a_wrong_token_is_one_line_and_exit_code_1() -> None:
    with running(FakeServer(behaviours=[fail(grpc.StatusCode.UNAUTHENTICATED, "no such token")])) as server:
        result = CliRunner().invoke(app, ["top", server.address, "--token", "secret", "--tenant", "acme"])
        assert (result.exit_code, result.stderr) == (1, "error: no such token\n")
        sent = server.metadata[0]
    assert (sent["authorization"], sent["x-pagoda-tenant"]) == ("Bearer secret", "acme")


class Paced(FakeServer):
    """A server with one sequence, which it tells of at the interval that is asked for."""

    def WatchLoad(self, request, context):  # type: ignore[no-untyped-def]
        self._note(request, context)
        while context.is_active():
            yield some_load()
            time.sleep(request.interval_s)

    def GetStepTrace(self, request, context):  # type: ignore[no-untyped-def]
        self._note(request, context)
        part = trace_pb2.StepTracePart(taken_at_s=5.0)
        part.moves.add(at_s=4.0, kind=trace_pb2.MOVE_KIND_WAITS, sequence=3, request_id="waiter", arrived_s=4.0)
        yield part


IN_TERMINAL = """\
import os, sys
os.login_tty(0)
os.execv(sys.executable, [sys.executable, "-m", "pagoda_server.cli", "top", *sys.argv[1:]])
"""


@dataclass
class Terminal:
    """`pagoda top` in a pseudo-terminal."""

    process: subprocess.Popen[bytes]
    descriptor: int
    written: bytes = b""
    deadline: float = field(default_factory=lambda: time.monotonic() + 200)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self.descriptor, keys.encode())

    @property
    def lines(self) -> list[str]:
        """The screen as drawn last, from the cursor's home on, without colours."""
        drawn = self.written.rsplit(b"\x1b[H", 1)[-1].decode(errors="replace")
        return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", drawn).splitlines()

    def read(self, timeout_s: float) -> bool:
        """Whether there was more."""
        if not select.select([self.descriptor], [], [], timeout_s)[0]:
            return False
        with contextlib.suppress(OSError):  # the process has ended
            self.written += os.read(self.descriptor, 1 << 16)
            return True
        return False

    def wait_for(self, condition: Callable[[list[str]], bool], what: str) -> None:
        while not condition(self.lines):
            assert time.monotonic() < self.deadline, f"{what}:\n" + "\n".join(self.lines)
            self.read(0.1)

    def shows(self, text: str) -> None:
        self.wait_for(lambda lines: any(text in line for line in lines), text)

    def exit_code(self) -> int:
        while self.process.poll() is None:
            self.read(0.05)
            assert time.monotonic() < self.deadline
        return self.process.returncode


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *arguments], stdin=theirs, env=environment | {"TERM": "xterm"}
    )
    it = Terminal(process, ours)
    it.resize(24, 80)
    before = termios.tcgetattr(theirs)
    try:
        yield it
        while it.read(0.2):
            pass
        assert termios.tcgetattr(theirs) == before, "the terminal is as it was"
        assert it.written.endswith(b"\x1b[?1049l"), "it shows again what it showed before"
        assert it.written.rindex(b"\x1b[?25h") > it.written.rindex(b"\x1b[?25l"), "the cursor is back"
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.thorough
def test_it_follows_the_terminals_size_obeys_keys_and_survives_a_server_that_comes_back() -> None:
    with contextlib.ExitStack() as stack:
        with running(Paced()) as server:
            top = stack.enter_context(terminal(server.address, "--interval", "0.1"))
            top.shows("waiter")
            top.wait_for(lambda lines: len(lines) == 24, "24 lines")
            top.resize(15, 60)
            top.wait_for(lambda lines: len(lines) == 15 and max(map(len, lines)) <= 60, "15 lines of 60 columns")
            top.type("p")
            top.shows("paused")
            top.type("ps")
            top.shows("sort: tokens")
            top.wait_for(lambda lines: not any("paused" in line for line in lines), "it goes on")
        top.shows("no connection for")
        with running(Paced(), server.address):
            top.wait_for(lambda lines: any("serving" in line for line in lines), "it is connected again")
            top.shows("waiter")
            top.type("q")
            assert top.exit_code() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_leaves_the_terminal_as_it_was(number: signal.Signals, code: int) -> None:
    with running(Paced()) as server, terminal(server.address) as top:
        top.shows("waiter")
        if number == signal.SIGINT:
            top.type("\x03")
        else:
            top.process.send_signal(number)
        assert top.exit_code() == code
