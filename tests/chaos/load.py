"""The clients of a chaos run: what they ask for, how they behave, and what they saw.

Everything is drawn from the seed before the run: the catalogue of requests, and a list of calls that each name an item
of it, a tenant, a connection and a behaviour.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import string
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from pagoda.v1 import admin_pb2, admin_pb2_grpc, chat_pb2, inference_pb2
from tests.chaos.checker import CANCELLED, DEADLINE, EXHAUSTED, INVALID, NOT_FOUND, UNAVAILABLE, Outcome, Output

GENERATE = "/pagoda.v1.Inference/Generate"
RESUME = "/pagoda.v1.Inference/Resume"
TENANTS = ("ann", "bob", "eve")
OPERATORS = "operators"  # who alone may see and administer the whole server
MOST_OF_BOB = 12  # bob's requests at once
MODEL_LEN = 1024
STALL_TIMEOUT_S = 2.0  # the server's
NUM_ITEMS = 120
NUM_LARGE = 2
CALL_LIMIT_S = 300.0  # a call that takes longer counts as hanging
SILENCE_S = 0.02  # a sequence that waits for blocks is silent for longer
NEWEST = -1  # the connection that was opened last
AWAY_S = 0.4  # a client's pause after UNAVAILABLE
MOST_RESUMES = 20  # of a stream: a crash loop of the engine breaks it several times

# Cancels, by what the client aims at, with their frequencies. What they hit is counted in the engine.
CANCELS = {
    "before its message": 10,
    "tokenizing": 6,
    "rendering a chat": 4,
    "at any moment": 36,
    "a prompt": 10,
    "decoding": 16,
    "silence between tokens": 8,
    "a stalled reader": 1,
    "after the last token": 6,
    "several sequences": 8,
}
READS = {"read": 60, "read slowly": 8, "abort": 10, "another tenant's abort": 6, "a deadline": 6, "a bad request": 6,
         "a big request": 4, "a stalled reader given up": 2, "break off and resume": 10,
         "resume what breaks": 10}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A request of the catalogue; its prompt decides its tokens, and no other item has the same prompt."""

    message: inference_pb2.GenerateRequest
    kind: str

    @property
    def is_large(self) -> bool:
        return self.kind == "large output"


@dataclass(frozen=True)
class Call:
    """A call to make.

    after_s  when a cancel, an abort or a deadline comes
    tokens   or after how many messages
    """

    number: int
    item: int
    tenant: str
    connection: int
    behaviour: str
    cancels: bool = False
    after_s: float = 0.0
    tokens: int = 0

    @property
    def resumes(self) -> bool:
        return "resume" in self.behaviour


def token(tenant: str) -> str:
    return f"chaos-{tenant}"


def credentials(tenant: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a tenant's calls."""
    return (("authorization", f"Bearer {token(tenant)}"),)


def tenants_file() -> str:
    """The server's tenants, in TOML: everyone who calls, and a quota."""
    everyone = dict.fromkeys((*TENANTS, "solo", "flood"), "[]") | {OPERATORS: '["admin", "observe"]'}
    tokens = [
        f'[[token]]\nsha256 = "{hashlib.sha256(token(name).encode()).hexdigest()}"\n'
        f'tenant = "{name}"\nrights = {rights}\n'
        for name, rights in everyone.items()
    ]
    return "\n".join([*tokens, f"[tenant.bob]\nmax_requests = {MOST_OF_BOB}\n"])


# -- the plan ---------------------------------------------------------------------------------------------------------


def catalogue(chance: random.Random) -> list[Item]:
    """Requests of every kind that a solo run repeats token by token."""
    prefixes = [text(chance, 160) for _ in range(4)]
    items = [_item(chance, at, prefixes) for at in range(NUM_ITEMS)]
    for at in range(NUM_LARGE):  # more than a connection buffers for a reader that stalls
        message = inference_pb2.GenerateRequest(
            prompt=f"{at} large",
            sampling={"n": 3, "temperature": 1.0, "seed": at},
            stopping={"max_tokens": 200, "ignore_eos": True},
            output={"logprobs": 20, "token_bytes": True},
        )
        items.append(Item(message, "large output"))
    return items


def text(chance: random.Random, length: int) -> str:
    return "".join(chance.choices(string.ascii_lowercase + " ", k=length))


def _item(chance: random.Random, at: int, prefixes: Sequence[str]) -> Item:
    kind = chance.choices(
        ("plain", "long prompt", "long output", "shared prefix", "several", "chat", "ids"),
        (37, 14, 4, 12, 12, 10, 6),
    )[0]
    own = f"{at} " + text(chance, chance.randint(4, 40))
    message = inference_pb2.GenerateRequest()
    message.stopping.ignore_eos = chance.random() < 0.8
    message.stopping.max_tokens = chance.choice((1, 4, 8, 16, 32, 64))
    message.priority = chance.choice((0, 0, 0, 5))
    if chance.random() < 0.2:
        message.slo.ttft_s = 0.2
    if chance.random() < 0.5:
        message.sampling.seed = chance.getrandbits(40)
        message.sampling.temperature = chance.choice((0.5, 1.0, 1.5))
        message.sampling.top_k = chance.choice((0, 0, 20))
        message.sampling.top_p = chance.choice((1.0, 0.9))
        message.sampling.presence_penalty = chance.choice((0.0, 0.5))
    if chance.random() < 0.15:
        message.stopping.stop.append(chance.choice(string.ascii_lowercase))
    if chance.random() < 0.15:
        message.output.logprobs = chance.choice((0, 5))
    match kind:
        case "long prompt":
            message.prompt = own + text(chance, chance.randint(200, 600))
        case "long output":
            message.prompt = own
            message.stopping.max_tokens = 250
            message.stopping.ignore_eos = True
        case "shared prefix":
            message.prompt = chance.choice(prefixes) + own
        case "chat":
            message.message = own
        case "ids":
            message.token_ids.ids.extend(own.encode())
        case "several":
            message.prompt = own
            message.sampling.n = chance.choice((2, 3, 4))
            message.sampling.seed = chance.getrandbits(40)
            message.sampling.temperature = 1.0
        case _:
            message.prompt = own
    return Item(message, kind)


def calls(chance: random.Random, items: Sequence[Item], first: int, num_connections: int) -> Iterator[Call]:
    """Endless calls, numbered from `first`: nine cancels and one that is read, on average."""
    by_kind: dict[str, list[int]] = {}
    for at, item in enumerate(items):
        by_kind.setdefault(item.kind, []).append(at)
    resumable = range(min(NUM_ITEMS, len(items)))
    number = first
    while True:
        cancels = chance.random() < 0.9
        frequencies = CANCELS if cancels else READS
        behaviour = chance.choices(list(frequencies), list(frequencies.values()))[0]
        kind = {"a prompt": "long prompt", "several sequences": "several",
                "rendering a chat": "chat", "silence between tokens": "long output", "a stalled reader": "large output",
                "a stalled reader given up": "large output"}.get(behaviour)  # fmt: skip
        yield Call(
            number,
            chance.choice(by_kind[kind] if kind else resumable if "resume" in behaviour else range(NUM_ITEMS)),
            chance.choices(TENANTS, (6, 3, 1))[0],
            chance.randrange(num_connections),
            behaviour,
            cancels,
            after_s=chance.choice((0.0, 0.003, 0.01, 0.03, 0.1, 0.3)) * chance.random(),
            tokens=chance.choice((1, 2, 5, 10, 30)),
        )
        number += 1


def big_message(chance: random.Random) -> inference_pb2.GenerateRequest:
    """A request near the limits of size, or beyond: each must be refused."""
    match chance.randrange(4):
        case 0:
            return inference_pb2.GenerateRequest(prompt="x" * chance.choice((100_000, 1_000_000, 3_000_000)))
        case 1:
            return inference_pb2.GenerateRequest(token_ids={"ids": [1] * 200_000})
        case 2:
            messages = [chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content="x" * 30)] * 20_000
            return inference_pb2.GenerateRequest(chat={"messages": messages})
        case _:
            request = inference_pb2.GenerateRequest(prompt="x")
            request.stopping.stop.extend(["stop"] * 100_000)
            return request


def bad_message(chance: random.Random) -> inference_pb2.GenerateRequest:
    return chance.choice(
        [
            inference_pb2.GenerateRequest(),
            inference_pb2.GenerateRequest(prompt="x", sampling={"temperature": -1.0}),
            inference_pb2.GenerateRequest(prompt="x", stopping={"max_tokens": 10 * MODEL_LEN}),
            inference_pb2.GenerateRequest(prompt="x", sampling={"n": 1_000_000}),
            inference_pb2.GenerateRequest(prompt="x" * (MODEL_LEN + 1)),
            inference_pb2.GenerateRequest(token_ids={"ids": [1 << 30]}),
        ]
    )


# -- a call -----------------------------------------------------------------------------------------------------------

STALLING = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.use_local_subchannel_pool", 1)]


@dataclass
class Clients:
    """Makes calls, and keeps their outcomes.

    address    of the server, and `cables`, other addresses that lead to it and can be cut
    cancelled  cancels that were made while the call was live, by what they aimed at
    """

    address: str
    cables: Sequence[str]
    items: Sequence[Item]
    begun: list[int] = field(default_factory=list)  # the calls that were made, by number
    outcomes: list[Outcome] = field(default_factory=list)
    cancelled: Counter[str] = field(default_factory=Counter)
    resumed: Counter[int] = field(default_factory=Counter)  # streams that broke and completed, by attempts
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)  # set when a call ends
    _channels: list[tuple[grpc.aio.Channel, bool]] = field(default_factory=list)

    def connect(self) -> None:
        """Open connections: one through each cable, and three straight to the server."""
        addresses = [*self.cables, *[self.address] * 3]
        self._channels = [(self.channel(address), address != self.address) for address in addresses]
        self._stalling = self.channel(self.address)

    @property
    def num_connections(self) -> int:
        return 3 + len(self.cables)

    def channel(self, address: str) -> grpc.aio.Channel:
        options = [*STALLING, ("grpc.max_reconnect_backoff_ms", 300), ("grpc.initial_reconnect_backoff_ms", 100)]
        return grpc.aio.insecure_channel(address, options=options)

    def connect_anew(self) -> None:
        """Open one more connection, for the calls that name NEWEST."""
        self._channels.append((self.channel(self.address), False))

    async def close(self) -> None:
        for channel, _ in self._channels:
            await channel.close()
        await self._stalling.close()
        self._channels = []

    async def make(self, call: Call) -> Outcome:
        """Make a call, and keep its outcome."""
        self.begun.append(call.number)
        channel, is_cable = self._channels[call.connection]
        if "stalled" in call.behaviour:
            channel, is_cable = self._stalling, False
        item: int | None = call.item
        chance = random.Random(call.number)
        allowed: set[str] = set()
        match call.behaviour:
            case "a bad request":
                item, message, allowed = None, bad_message(chance), {INVALID}
            case "a big request":
                item, message, allowed = None, big_message(chance), {INVALID, EXHAUSTED}
            case "tokenizing":
                item, message, allowed = None, inference_pb2.GenerateRequest(prompt="x" * 40_000), {INVALID}
            case _:
                message = inference_pb2.GenerateRequest()
                message.CopyFrom(self.items[call.item].message)
        message.request_id = f"chaos-{call.number}"
        message.resumable = call.resumes
        if call.behaviour == "a deadline":
            allowed = {DEADLINE}
        elif call.behaviour == "a stalled reader given up":
            allowed = {EXHAUSTED}
        scopes = ("cable",) if is_cable else ()
        outcome = Outcome(
            call.number, item, time.monotonic(), scopes=frozenset(scopes), allowed=frozenset(allowed),
            was_aborted=call.behaviour == "abort",
        )  # fmt: skip
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                await self._run(call, channel, message, outcome)
        except TimeoutError:
            outcome.status = ""  # it never ended
        outcome.ended_s = time.monotonic()
        self.outcomes.append(outcome)
        self.has_ended.set()
        if outcome.was_cancelled:
            self.cancelled[call.behaviour] += 1
        return outcome

    async def _run(
        self, call: Call, channel: grpc.aio.Channel, message: inference_pb2.GenerateRequest, outcome: Outcome
    ) -> None:
        metadata = credentials(call.tenant)
        if call.behaviour == "before its message":
            silent = channel.stream_stream(GENERATE)(metadata=metadata)
            await asyncio.sleep(call.after_s / 4)
            outcome.was_cancelled = silent.cancel()
            await _take_status(silent, outcome)
            return
        generate = channel.unary_stream(
            GENERATE,
            request_serializer=inference_pb2.GenerateRequest.SerializeToString,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )
        timeout_s = 0.02 + call.after_s if call.behaviour == "a deadline" else None
        stream = generate(message, metadata=metadata, timeout=timeout_s)

        def cancel() -> None:
            outcome.was_cancelled = stream.cancel() or outcome.was_cancelled

        timer = None
        if call.cancels and call.behaviour in ("tokenizing", "rendering a chat", "at any moment", "a prompt",
                                               "several sequences"):  # fmt: skip
            timer = asyncio.get_running_loop().call_later(call.after_s, cancel)
        aborting = None
        if "abort" in call.behaviour:
            who = call.tenant if call.behaviour == "abort" else TENANTS[TENANTS.index(call.tenant) - 1]
            aborting = asyncio.ensure_future(self._abort(channel, call, credentials(who)))
        try:
            await self._read(call, stream, outcome, cancel)
        except (grpc.RpcError, asyncio.CancelledError):
            if (task := asyncio.current_task()) is not None and task.cancelling():
                stream.cancel()
                raise
        finally:
            if timer:
                timer.cancel()
        if aborting:
            await aborting
        await _take_status(stream, outcome)
        if message.resumable and outcome.status in (CANCELLED, UNAVAILABLE):
            await self._resume(call, channel, outcome)

    async def _resume(self, call: Call, channel: grpc.aio.Channel, outcome: Outcome) -> None:
        """Resume a stream that broke until it has ended."""
        resume = channel.unary_stream(
            RESUME,
            request_serializer=inference_pb2.ResumeRequest.SerializeToString,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )
        num_attempts = 0
        while num_attempts < MOST_RESUMES:
            num_attempts += 1
            await asyncio.sleep(outcome.retry_s or AWAY_S)
            rewind(outcome)
            received = [len(outcome.outputs[at].ids) for at in range(len(outcome.outputs))]
            request = inference_pb2.ResumeRequest(request_id=f"chaos-{call.number}", received=received)
            stream = resume(request, metadata=credentials(call.tenant))
            with contextlib.suppress(grpc.RpcError):
                await self._read(replace(call, behaviour="read"), stream, outcome, stream.cancel)
            await _take_status(stream, outcome)
            if outcome.status not in (UNAVAILABLE, EXHAUSTED):
                break
        if outcome.status == NOT_FOUND:
            outcome.status = UNAVAILABLE  # what explains that explains a lost stream: its router has died
        elif outcome.status == "OK":
            self.resumed[num_attempts] += 1

    async def _read(self, call: Call, stream: Any, outcome: Outcome, cancel: Callable[[], None]) -> None:
        num_read = 0
        while True:
            if call.behaviour == "silence between tokens" and num_read:
                read = asyncio.ensure_future(stream.read())
                done, _ = await asyncio.wait({read}, timeout=SILENCE_S)
                if not done:
                    cancel()
                response = await read
            else:
                response = await stream.read()
            if response is grpc.aio.EOF:
                break
            num_read += 1
            if outcome.item is not None:
                take(response, outcome)
            match call.behaviour:
                case "decoding" if num_read >= call.tokens:
                    cancel()
                case "break off and resume" if num_read == call.tokens:
                    stream.cancel()
                case "after the last token" if outcome.usage is not None:
                    cancel()
                case "a stalled reader":
                    await asyncio.sleep(0.1 + 2 * call.after_s)
                    cancel()
                case "a stalled reader given up" if num_read == 1:
                    await asyncio.sleep(3 * STALL_TIMEOUT_S)
                case "read slowly":
                    await asyncio.sleep(0.02)

    async def _abort(self, channel: grpc.aio.Channel, call: Call, metadata: Any) -> None:
        """Abort a call by its id; it may have ended, or not have begun, or be another's."""
        await asyncio.sleep(call.after_s)
        request = admin_pb2.AbortRequest(request_id=f"chaos-{call.number}")
        try:
            await admin_pb2_grpc.AdminStub(channel).Abort(request, metadata=metadata, timeout=60)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE):
                raise


async def _take_status(stream: Any, outcome: Outcome) -> None:
    """How the call ended, with what the server attached to it."""
    outcome.status = (await stream.code()).name
    outcome.details = await stream.details() or ""
    for key, value in await stream.trailing_metadata() or ():
        if key == "grpc-retry-pushback-ms":
            outcome.pushback = value
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
                if detail.Unpack(info):
                    outcome.error_reason = info.reason
                elif detail.Unpack(retry):
                    outcome.retry_s = retry.retry_delay.ToTimedelta().total_seconds()


def take(response: inference_pb2.GenerateResponse, outcome: Outcome) -> None:
    """Add a response to an outcome."""
    outcome.num_after_last += outcome.usage is not None
    if response.HasField("usage"):
        outcome.usage = response.usage.completion_tokens
        outcome.completed_s = time.monotonic()
    event = response.tokens if response.HasField("tokens") else response.finished
    output = outcome.outputs.setdefault(event.index, Output())
    output.num_after_end += bool(output.reasons)
    if response.HasField("tokens"):
        output.ids += [token.id for token in response.tokens.tokens]
        output.text += response.tokens.text
        output.end = "" if response.tokens.tokens else output.end + response.tokens.text
    else:
        reason = inference_pb2.FinishReason.Name(response.finished.reason).removeprefix("FINISH_REASON_")
        output.reasons.append(reason)
        output.matched = response.finished.stop_string or str(response.finished.stop_token_id)


def rewind(outcome: Outcome) -> None:
    """Forget what Resume sends again: the ends, and the text that only an end adds."""
    outcome.usage, outcome.completed_s, outcome.retry_s, outcome.num_after_last = None, 0.0, None, 0
    for index in range(max(outcome.outputs, default=-1)):
        outcome.outputs.setdefault(index, Output())
    for output in outcome.outputs.values():
        output.text = output.text.removesuffix(output.end)
        output.reasons, output.matched, output.num_after_end, output.end = [], "", 0, ""


async def solo_runs(address: str, items: Sequence[Item]) -> dict[int, list[Output]]:
    """What each item gives on an idle server, one after the other, without the prefix cache."""
    found = {}
    async with grpc.aio.insecure_channel(address) as channel:
        clients = Clients(address, (), items)
        clients._channels = [(channel, False)]
        for at, item in enumerate(items):
            item.message.cache.bypass = True
            outcome = await clients.make(Call(at, at, "solo", 0, "read"))
            item.message.ClearField("cache")
            assert outcome.status == "OK", f"{item}: {outcome}"
            found[at] = [output for _, output in sorted(outcome.outputs.items())]
    return found


async def work(clients: Clients, queue: Iterator[Call], until: Callable[[], bool]) -> None:
    """One client: makes calls one after another until told to stop."""
    for call in queue:
        outcome = await clients.make(call)
        if outcome.status == "UNAVAILABLE":
            await asyncio.sleep(AWAY_S)
        if until():
            return
