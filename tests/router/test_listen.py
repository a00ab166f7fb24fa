"""The public port: addresses, tokens and certificates that it accepts."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import pytest
import trustme

from pagoda_server.router.errors import ConfigError
from pagoda_server.router.process.listen import auth_token, bind, check_exposure
from pagoda_server.settings import ServeConfig


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGODA_AUTH_TOKEN", raising=False)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\xff\xfe\x00", "is not text"),
        (b" \n", "is empty"),
        (b"two\nlines", "one line of printable ASCII"),
        ("größe".encode(), "one line of printable ASCII"),
    ],
)
def test_a_token_that_no_client_could_send_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match=f"--auth-token-file: .*token.* {complaint}"):
        auth_token(ServeConfig(auth_token_file=str(tmp_path / "token")))


def test_an_address_that_looks_local_and_is_not_is_guarded() -> None:
    with pytest.raises(ConfigError, match=r"--listen 127\.example\.com:50051 is reachable from other hosts"):
        check_exposure(ServeConfig(listen="127.example.com:50051"))


def test_a_token_that_travels_in_the_clear_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "token").write_text("s3cret")
    token = str(tmp_path / "token")
    with caplog.at_level(logging.WARNING):
        check_exposure(ServeConfig(listen="127.0.0.1:0", auth_token_file=token))
        check_exposure(ServeConfig(listen="0.0.0.0:0", auth_token_file=token, tls_cert="c", tls_key="k"))
        check_exposure(ServeConfig(listen="0.0.0.0:0", auth_token_file=token, allow_insecure=True))
    assert not caplog.records
    check_exposure(ServeConfig(listen="0.0.0.0:0", auth_token_file=token))
    assert "the token travels in the clear" in caplog.text


async def test_a_certificate_that_cannot_be_used_is_named_and_not_the_address(tmp_path: Path) -> None:
    authority = trustme.CA()
    for name in ("one", "other"):
        issued = authority.issue_cert("localhost")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.crt")
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
    (tmp_path / "junk").write_text("junk")
    for certificate, key, complaint in (
        ("one.crt", "other.key", "not a certificate and its own unencrypted key in PEM"),
        ("junk", "one.key", "not a certificate and its own unencrypted key in PEM"),
        ("one.crt", "missing.key", "cannot read .*missing.key: No such file"),
    ):
        config = ServeConfig(listen="127.0.0.1:0", tls_cert=str(tmp_path / certificate), tls_key=str(tmp_path / key))
        with pytest.raises(ConfigError, match=f"--tls-cert.*--tls-key.*{complaint}"):
            bind(grpc.aio.server(), config)
