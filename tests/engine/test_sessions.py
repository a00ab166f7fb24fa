"""The engine's sessions over a link that the test controls."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2, inference_pb2
from pagoda_server.checkpoints import resolve
from pagoda_server.engine.core.sequence import EndReason
from pagoda_server.engine.core.step import Counters, StepOutput
from pagoda_server.engine.guidance import Grammars
from pagoda_server.engine.guidance.grammar_mask import GrammarMask
from pagoda_server.engine.loop.loop import Abort, Add, Inbox, LoadSnapshot
from pagoda_server.engine.scheduling.tenants import TenantTable
from pagoda_server.engine.serving import session as engine_session
from pagoda_server.engine.serving.server import EngineServer
from pagoda_server.grammars.fair_threads import FairThreads

LOAD = LoadSnapshot(
    Counters(),
    waiting=0,
    running=1,
    blocks_total=8,
    blocks_free=7,
    blocks_evictable=0,
    block_size=16,
    kv_slots_unused=0,
    step_s=0.0,
    tenants=TenantTable(),
)

INFO = control_pb2.EngineInfo(epoch=3, vocab_size=258, max_model_len=1000)


class HeldLink:
    """A router that submits one request and takes messages only while `takes` is set, then within the call."""

    def __init__(self, n: int = 1) -> None:
        self.takes = asyncio.Event()
        self.got: list[engine_pb2.EngineMessage] = []
        self.num_waits = 0
        self.is_writing = False
        self.is_full = False  # nothing is being written, and the next message has no room
        self.incoming: asyncio.Queue[engine_pb2.RouterMessage | None] = asyncio.Queue()
        sampling = inference_pb2.Sampling(n=n, seed=3)
        submit = engine_pb2.Submit(first_sequence=7, prompt=[1], sampling=sampling, max_tokens=100)
        self.incoming.put_nowait(engine_pb2.RouterMessage(submit=submit))

    async def read(self) -> engine_pb2.RouterMessage | None:
        return await self.incoming.get()

    async def write(self, message: engine_pb2.EngineMessage) -> None:
        self.num_waits += 1
        self.is_writing = True
        await self.takes.wait()
        self.is_writing = False
        self.got.append(message)

    @property
    def is_free(self) -> bool:
        return (self.takes.is_set() or self.is_full) and not self.is_writing

    def try_write(self, message: engine_pb2.EngineMessage) -> bool:
        if not self.is_full:
            self.got.append(message)
        return not self.is_full

    def close(self) -> None:
        self.incoming.put_nowait(None)


def step(token: int) -> StepOutput:
    return StepOutput(sequences=[0], tokens=[token], logprobs=[None])


async def until_idle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def server() -> EngineServer:
    server = EngineServer(INFO)
    server.attach(Inbox())
    return server


async def test_steps_that_a_router_is_too_slow_for_become_one_message(server: EngineServer) -> None:
    link = HeldLink()
    session = asyncio.create_task(server.serve(link))
    await until_idle()
    for token in range(50):
        server.send(step(token), LOAD)
        await until_idle()
    link.takes.set()
    await until_idle()
    hello, tokens = link.got
    assert (hello.epoch, hello.HasField("hello")) == (3, True)
    assert tokens.epoch == 3
    assert list(tokens.step.sequences) == [7] * 50
    assert list(tokens.step.tokens) == list(range(50))
    link.close()
    await session


async def test_a_step_that_finds_no_room_is_the_next_to_be_written(server: EngineServer) -> None:
    link = HeldLink()
    link.takes.set()
    session = asyncio.create_task(server.serve(link))
    await until_idle()
    link.takes.clear()
    link.is_full = True
    server.send(step(0), LOAD)
    server.send(step(1), LOAD)  # before the writer has had its turn
    await until_idle()
    server.send(step(2), LOAD)
    await until_idle()
    link.is_full = False
    link.takes.set()
    await until_idle()
    assert [token for message in link.got for token in message.step.tokens] == [0, 1, 2]
    link.close()
    await session


async def test_a_step_is_written_in_the_call_that_delivers_it_where_the_link_has_room(server: EngineServer) -> None:
    link = HeldLink()
    link.takes.set()
    session = asyncio.create_task(server.serve(link))
    await until_idle()
    for token in range(3):
        server.send(step(token), LOAD)
    await until_idle()
    steps = link.got[1:]
    assert [list(message.step.tokens) for message in steps] == [[0], [1], [2]]
    assert link.num_waits == 1  # for the hello alone
    link.close()
    await session


async def test_a_router_that_takes_nothing_for_too_long_is_dropped_with_its_sequences(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_session, "STALL_TIMEOUT_S", 0.05)
    inbox = Inbox()
    server.attach(inbox)
    link = HeldLink()
    with caplog.at_level(logging.WARNING):
        await asyncio.wait_for(server.serve(link), 5)
    added, aborted = inbox.take()
    assert aborted.ids == [added.seq.id]
    assert "took no message" in caplog.text


async def test_the_sequences_of_a_request_arrive_together_and_differ_in_their_seeds_alone(server: EngineServer) -> None:
    inbox = Inbox()
    server.attach(inbox)
    link = HeldLink(n=3)
    link.takes.set()
    session = asyncio.create_task(server.serve(link))
    await until_idle()
    (added,) = inbox.take()
    seqs = [added.seq, *added.siblings]
    assert [seq.params.seed for seq in seqs] == [3, 4, 5]
    assert {seq.request for seq in seqs} == {seqs[0].request}
    assert seqs[0].request.shares_prompt
    link.close()
    await session


class PanicOfALibrary(BaseException):
    """What a panic of a library in Rust becomes: it derives from nothing narrower."""


class SlowGrammars(Grammars):
    """Compiles nothing until it may go on."""

    def __init__(self, begun: threading.Event, goes_on: threading.Event) -> None:
        super().__init__(resolve("synthetic"), 258)
        self._begun, self._goes_on = begun, goes_on

    def mask_maker(self, guided: inference_pb2.Guided) -> Callable[..., GrammarMask]:
        self._begun.set()
        self._goes_on.wait()
        return super().mask_maker(guided)


def guided_submit(first: int, tenant: str = "") -> engine_pb2.Submit:
    guided = inference_pb2.Guided(regex=f"a{{{first}}}b+")
    return engine_pb2.Submit(first_sequence=first, prompt=[1], max_tokens=9, guided=guided, tenant=tenant)


async def test_grammars_that_nobody_waits_for_leave_the_queue_and_too_many_are_refused() -> None:
    begun, goes_on = threading.Event(), threading.Event()
    server, inbox = EngineServer(INFO, lambda: SlowGrammars(begun, goes_on)), Inbox()
    server.attach(inbox)
    server._compilations._threads = FairThreads(1, "test", most_own=3)
    connection = server.connect()
    server.submit(connection, guided_submit(1, "hostile"))
    begun.wait()
    for number in range(2, 6):
        server.submit(connection, guided_submit(number, "hostile"))
    ((number, ended),) = connection.pending.ended
    assert (number, ended.reason) == (5, EndReason.OVERLOADED)
    server.submit(connection, guided_submit(6, "other"))
    server.abort(connection, [2, 3])
    assert server._compilations._threads.num_waiting == 2
    assert [(number, ended.reason) for number, ended in connection.pending.ended[1:]] == [
        (2, EndReason.ABORTED),
        (3, EndReason.ABORTED),
    ]
    goes_on.set()
    added: list[Add] = []
    while len(added) < 3:
        added += [message for message in inbox.take() if isinstance(message, Add)]
        await asyncio.sleep(0.001)
    assert sorted(each.seq.request.tenant for each in added) == ["hostile", "hostile", "other"]
    server._drop(connection)


@pytest.mark.parametrize("error", [RuntimeError, PanicOfALibrary])
@pytest.mark.parametrize("is_known", [False, True])
async def test_a_library_that_fails_ends_the_sequences_of_one_request(
    error: type[BaseException], is_known: bool
) -> None:
    class Broken(Grammars):
        def knows(self, guided: inference_pb2.Guided) -> bool:
            return is_known and super().knows(guided)

        def mask_maker(self, guided: inference_pb2.Guided) -> Callable[..., GrammarMask]:
            found = super().mask_maker(guided)
            if guided.regex.startswith("a{4}"):
                raise error("injected")
            return found

    server, inbox = EngineServer(INFO, lambda: Broken(resolve("synthetic"), 258)), Inbox()
    server.attach(inbox)
    connection = server.connect()
    for number in (3, 4, 5):
        for turn in range(2 if number == 4 else 1):
            connection.pending.ended.clear()
            server.submit(connection, guided_submit(number))
            while not (inbox.take() if number != 4 else connection.pending.ended):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            if number == 4:
                ((_, ended),) = connection.pending.ended
                assert (ended.reason, error.__name__ in ended.detail) == (EndReason.FAILED, True), turn


async def test_sequences_that_are_aborted_while_their_grammar_is_compiled_end_so() -> None:
    begun, goes_on = threading.Event(), threading.Event()
    server, inbox = EngineServer(INFO, lambda: SlowGrammars(begun, goes_on)), Inbox()
    server.attach(inbox)
    connection = server.connect()
    server.submit(connection, guided_submit(7))
    begun.wait()
    server.abort(connection, [7])
    inbox.take()
    goes_on.set()
    while not (messages := inbox.take()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    added, aborted = messages
    assert isinstance(added, Add)
    assert aborted == Abort([added.seq.id])


async def test_a_grammar_that_is_wrong_ends_its_sequences_alone() -> None:
    server = EngineServer(INFO, lambda: Grammars(resolve("synthetic"), 258))
    server.attach(Inbox())
    connection = server.connect()
    sampling = inference_pb2.Sampling(n=2)
    guided = inference_pb2.Guided(regex="(")
    server.submit(connection, engine_pb2.Submit(prompt=[1], max_tokens=9, sampling=sampling, guided=guided))
    while not connection.pending.ended:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert [number for number, _ in connection.pending.ended] == [0, 1]
    assert {(ended.reason, ended.field) for _, ended in connection.pending.ended} == {(EndReason.REJECTED, "guided")}
    assert not connection.ids
