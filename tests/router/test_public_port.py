"""The public port: addresses, tokens and certificates that it accepts."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme

from pagoda.v1.inference_pb2 import GenerateRequest
from pagoda_server.router.errors import ConfigError
from pagoda_server.router.process.announce import callable_address
from pagoda_server.router.process.public_port import auth_token, bind, check_exposure, max_message_bytes
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.models import LONGEST_CONTEXT, longest_context
from pagoda_server.router.request.validation import validate_generate
from pagoda_server.router.request.wire import MAX_FIELDS
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


@pytest.mark.parametrize(
    ("listening", "called"),
    [
        ("0.0.0.0:50051", "127.0.0.1:50051"),
        ("[::]:50051", "[::1]:50051"),
        ("[::1]:50051", "[::1]:50051"),
        ("10.0.0.7:1", "10.0.0.7:1"),
        ("unix:/run/pagoda.sock", "unix:/run/pagoda.sock"),
    ],
)
def test_the_address_to_try_is_one_that_the_server_listens_at(listening: str, called: str) -> None:
    assert callable_address(listening) == called


def test_an_address_that_looks_local_and_is_not_is_guarded() -> None:
    with pytest.raises(ConfigError, match=r"--listen 127\.example\.com:50051 is reachable from other hosts"):
        check_exposure(ServeConfig(listen="127.example.com:50051"))
    with pytest.raises(ConfigError, match=r"--http 0\.0\.0\.0:8000 is reachable from other hosts"):
        check_exposure(ServeConfig(http="0.0.0.0:8000"))


def test_a_token_that_travels_in_the_clear_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "token").write_text("s3cret")
    token = str(tmp_path / "token")
    with caplog.at_level(logging.WARNING):
        check_exposure(ServeConfig(listen="127.0.0.1:0", auth_token_file=token))
        check_exposure(ServeConfig(listen="0.0.0.0:0", auth_token_file=token, tls_cert="c", tls_key="k"))
        check_exposure(ServeConfig(listen="0.0.0.0:0", auth_token_file=token, allow_insecure=True))
    assert not caplog.records
    check_exposure(ServeConfig(listen="0.0.0.0:0", tenants_file=token))
    assert "tokens travel in the clear" in caplog.text


def test_one_token_and_tokens_of_tenants_are_not_both_taken() -> None:
    with pytest.raises(ConfigError, match="--auth-token-file and --tenants-file cannot be given together"):
        check_exposure(ServeConfig(auth_token_file="a", tenants_file="b"))


@pytest.mark.parametrize(("days", "warning"), [(-1, "it has expired"), (10, "it expires in 10.0 days"), (90, "")])
async def test_a_certificate_that_expires_soon_is_logged(
    days: int, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issued = trustme.CA().issue_cert("localhost", not_after=datetime.now(UTC) + timedelta(days=days, seconds=30))
    issued.cert_chain_pems[0].write_to_path(tmp_path / "own.crt")
    issued.private_key_pem.write_to_path(tmp_path / "own.key")
    files = {"tls_cert": str(tmp_path / "own.crt"), "tls_key": str(tmp_path / "own.key")}
    bind(grpc.aio.server(), ServeConfig(listen="127.0.0.1:0", **files)).close()
    assert caplog.messages == ([f"--tls-cert {tmp_path / 'own.crt'}: {warning}: renew it"] if warning else [])


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


@pytest.mark.parametrize(("max_text_bytes", "max_model_len"), [(1 << 20, 32_768), (1 << 16, 131_072)])
def test_a_request_at_all_of_its_limits_is_within_the_message_limit(max_text_bytes: int, max_model_len: int) -> None:
    vocab_size = 151_936
    limits = Limits(max_model_len, vocab_size, kv_token_capacity=1 << 20, max_text_bytes=max_text_bytes)
    last_id = vocab_size - 1
    request = GenerateRequest(
        request_id="x" * limits.max_request_id,
        sampling={
            "allowed_token_ids": [last_id] * vocab_size,
            "logit_bias": {last_id - at: -1.5 for at in range(limits.max_logit_bias)},
        },
        stopping={"stop": ["x" * limits.max_stop_bytes] * limits.max_stop, "stop_token_ids": [last_id] * 64},
        cache={"salt": "x" * limits.max_salt_bytes},
    )
    num_parts = MAX_FIELDS // 3 // limits.max_parts * limits.max_parts
    text = "x" * (max_text_bytes // num_parts - 1)  # joined by newlines
    message = {"role": 2, "parts": [{"text": text}] * limits.max_parts}
    for given in (
        {"chat": {"messages": [message] * (num_parts // limits.max_parts)}},
        {"token_ids": {"ids": [last_id] * (max_model_len - 1)}},
        {"prompt": "x" * max_text_bytes},
    ):
        full = GenerateRequest(**given)  # type: ignore[arg-type]
        full.MergeFrom(request)
        validate_generate(full, limits)
        assert full.ByteSize() <= max_message_bytes(max_text_bytes, max_model_len, vocab_size)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"max_position_embeddings": 8192}', 8192),
        ('{"max_position_embeddings": 8192, "rope_scaling": {"factor": 4.0}}', 32_768),
        ('{"max_position_embeddings": 8192, "rope_scaling": null}', 8192),
        ('{"max_position_embeddings": 1000000000000}', LONGEST_CONTEXT),
        ('{"max_position_embeddings": 1e999}', LONGEST_CONTEXT),
        ('{"max_position_embeddings": "many"}', LONGEST_CONTEXT),
        ("{}", LONGEST_CONTEXT),
        ("no JSON", LONGEST_CONTEXT),
    ],
)
def test_the_longest_context_is_read_from_the_model_and_bounded(tmp_path: Path, config: str, expected: int) -> None:
    (tmp_path / "config.json").write_text(config)
    assert longest_context(tmp_path) == expected
