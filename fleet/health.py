"""Whether a router on this machine answers: its health is asked for over gRPC, again and again.

A router hangs when its event loop stands still: the system still accepts connections, and nothing answers. From another
machine that would look like a cut network, so the router's own host asks.
"""

from __future__ import annotations

import ssl
import threading
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..channel.address import host_of

ANSWER_S = 5.0
PAUSE_S = 1.0
SERVICE = "pagoda.v1.Control"  # which serves whether engines are there or not
OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]  # each check connects by itself


class Health:
    """Asks a router for its health, in a thread, until it is closed.

    silent_s  how long it has not answered. Time in which this process could not ask, as on a machine that was
              suspended, does not count
    """

    def __init__(self, address: str, *, has_tls: bool) -> None:
        self.silent_s = 0.0
        self._address = address
        self._has_tls = has_tls
        self._is_closed = threading.Event()
        threading.Thread(target=self._ask, daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    def _ask(self) -> None:
        began = time.monotonic()
        while not self._is_closed.wait(PAUSE_S):
            answers = self._answers()
            began, took_s = time.monotonic(), time.monotonic() - began
            self.silent_s = 0.0 if answers else self.silent_s + min(took_s, PAUSE_S + ANSWER_S)

    def _answers(self) -> bool:
        """Whether it answers in time, whatever it says. A connection that is refused is the end of its process."""
        try:
            channel = self._tls_channel() if self._has_tls else grpc.insecure_channel(self._address, OPTIONS)
            with channel:
                asked = health_pb2.HealthCheckRequest()
                asked.service = SERVICE
                health_pb2_grpc.HealthStub(channel).Check(asked, timeout=ANSWER_S)
        except TimeoutError:
            return False
        except grpc.RpcError as error:
            return bool(error.code() != grpc.StatusCode.DEADLINE_EXCEEDED)
        except (OSError, ValueError):
            return True
        return True

    def _tls_channel(self) -> grpc.Channel:
        """A connection that trusts whatever certificate is shown: what is asked and answered is no secret.

        Raises OSError, and ValueError for a certificate that names nothing.
        """
        from cryptography import x509

        port = int(self._address.rpartition(":")[2])
        shown = ssl.get_server_certificate((host_of(self._address), port), timeout=ANSWER_S).encode()
        names = x509.load_pem_x509_certificate(shown).extensions.get_extension_for_class(x509.SubjectAlternativeName)
        name = str(next(iter(names.value)).value).replace("*", "any")
        options = [*OPTIONS, ("grpc.ssl_target_name_override", name)]
        return grpc.secure_channel(self._address, grpc.ssl_channel_credentials(shown), options)
