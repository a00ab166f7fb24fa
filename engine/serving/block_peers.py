"""Fetches blocks from other engines, on threads of its own: the engine's loop never waits for a network."""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from pagoda.engine.v1 import engine_pb2, engine_pb2_grpc

from ...channel.address import is_unix
from ...channel.link import MAX_MESSAGE_BYTES
from ...channel.listening import channel_keepalive
from ...runtime.channel_trust import ChannelTrust, Trust
from ..kv.block_store import Done, HostRows
from .block_lender import Lent

log = logging.getLogger("pagoda.engine")

AT_ONCE = 4  # calls: a lender that hangs must not hold up those that do not
TIMEOUT_S = 2.0  # of a call: no sequence waits longer
MOST_CHANNELS = 32
_LOG_EVERY_S = 60.0
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class BlockPeers:
    """
    rows   host memory
    lent   what this engine lends, and what a lender must have, too
    trust  what guards engines at HOST:PORT

    `read` and `take_done` are for the loop's thread.
    """

    def __init__(self, rows: HostRows, lent: Lent, trust: ChannelTrust) -> None:
        self.rows = rows
        self.lent = lent
        self._trust = trust
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._calls: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._channels: dict[str, tuple[Trust, grpc.Channel]] = {}
        self._logged_at = -_LOG_EVERY_S

    def start(self, wake: Callable[[], None]) -> None:
        """Call `wake` from now on when there are outcomes to take."""
        self._wake = wake

    def read(self, peer: str, wanted: Sequence[tuple[bytes, int]]) -> None:
        """See Peers."""
        if self._calls is None:
            self._calls = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="block-peers")
        self._calls.submit(self._read, peer, wanted, time.perf_counter())

    def take_done(self) -> list[Done]:
        return [self._done.get_nowait() for _ in range(self._done.qsize())]

    def close(self) -> None:
        """Give up the calls under way."""
        if self._calls is not None:
            self._calls.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for _, channel in self._channels.values():
                channel.close()

    def _read(self, peer: str, wanted: Sequence[tuple[bytes, int]], asked_at: float) -> None:
        num_read, last_at = 0, asked_at
        try:
            for host in self._fetched(peer, wanted, asked_at):
                num_read += 1  # each at once: a sequence that has waited long enough starts with what has come
                now = time.perf_counter()
                self._done.put(Done(host, True, now - last_at))
                last_at = now
        except Exception:
            log.exception("blocks of %s could not be fetched", peer)
        failed = wanted[num_read:]
        for _, host in failed:
            self._done.put(Done(host, False, (time.perf_counter() - last_at) / len(failed)))
        self._wake()

    def _fetched(self, peer: str, wanted: Sequence[tuple[bytes, int]], asked_at: float) -> Iterator[int]:
        """Fetch blocks; yield the host block of each that has come whole, up to the first one that does not."""
        trust, channel = self._channel(peer)
        request = engine_pb2.FetchRequest(layout=self.lent.layout, addresses=[address for address, _ in wanted])
        timeout_s = TIMEOUT_S - (time.perf_counter() - asked_at)
        if timeout_s <= 0:
            return
        call = engine_pb2_grpc.BlocksStub(channel).Fetch(request, timeout=timeout_s, metadata=trust.metadata)
        try:
            for (_, host), block in zip(wanted, call, strict=False):
                if len(block.content) != self.lent.bytes_per_block or zlib.crc32(block.content) != block.crc32:
                    self._log(f"{peer} has sent a damaged block")
                    break
                self.rows.host_row(host)[:] = block.content
                yield host
        except grpc.RpcError as error:
            self._log(f"{peer} does not lend its blocks: {error.code().name}: {error.details()}")
        finally:
            call.cancel()

    def _channel(self, peer: str) -> tuple[Trust, grpc.Channel]:
        """A channel to an engine with this end's certificates of now."""
        trust = Trust() if is_unix(peer) else self._trust.current
        with self._lock:
            known = self._channels.pop(peer, None)
            if known is None or (known[0] is not trust and known[0] != trust):
                if known is not None:
                    known[1].close()
                known = (trust, _channel_to(peer, trust))
            self._channels[peer] = known  # the last used one is the last to be closed
            while len(self._channels) > MOST_CHANNELS:
                self._channels.pop(next(iter(self._channels)))[1].close()
            return known

    def _log(self, what: str) -> None:
        if (now := time.monotonic()) - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            log.warning("%s; what it does not lend is computed", what)


def _channel_to(peer: str, trust: Trust) -> grpc.Channel:
    options: list[tuple[str, int | str]] = [*_OPTIONS, *channel_keepalive(peer)]
    if (certificates := trust.certificates) is None:
        return grpc.insecure_channel(peer, options=options)
    credentials = grpc.ssl_channel_credentials(certificates.authorities, certificates.key, certificates.certificate)
    if certificates.peer_name is not None:
        options.append(("grpc.ssl_target_name_override", certificates.peer_name))
    return grpc.secure_channel(peer, credentials, options=options)
