"""Whose a call is, by its metadata, and files of tenants."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagoda_server.router.errors import ConfigError, InvalidArgument, PermissionDenied, Unauthenticated
from pagoda_server.router.tenants.caller import ANYONE, Caller, Right
from pagoda_server.router.tenants.identity import (
    FAIRNESS_KEY,
    TENANT_KEY,
    Identities,
    Tenants,
    TenantsFile,
    digest,
    read_tenants,
)
from pagoda_server.router.tenants.quotas import Quota
from pagoda_server.runtime import followed
from pagoda_server.settings.request import MAX_SALT_BYTES

ACME = Caller("acme", frozenset(), is_proven=True)
GATEWAY = Caller("gateway", frozenset({Right.ACT_FOR_TENANTS}), is_proven=True)
NAMED = Identities({digest("of acme"): ACME, digest("of the gateway"): GATEWAY})
SHA256 = hashlib.sha256(b"x").hexdigest()
TOKEN = f'[[token]]\nsha256 = "{SHA256}"\ntenant = "acme"\n'


def bearer(token: str) -> tuple[str, str]:
    return "authorization", f"Bearer {token}"


def test_without_tokens_a_header_names_the_tenant_and_everyone_may_do_everything() -> None:
    anyone = Identities()
    assert anyone.caller_of(None) == anyone.caller_of((("user-agent", "x"),)) == ANYONE
    named = anyone.caller_of(((TENANT_KEY, "acme/eu-1"),))
    assert (named.tenant, named.rights, named.is_proven) == ("acme/eu-1", frozenset(Right), False)


KEYS = pytest.mark.parametrize("key", [TENANT_KEY, FAIRNESS_KEY])


@KEYS
@pytest.mark.parametrize("name", ["", "a" * 65, "a b", "a\n", "é", b"a"])
def test_a_bad_name_is_refused_by_its_key(key: str, name: str | bytes) -> None:
    with pytest.raises(InvalidArgument, match=key):
        Identities().caller_of(((key, name),))


@KEYS
def test_two_names_are_refused(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{key}: is given 2 times"):
        Identities().caller_of(((key, "a"), (key, "a")))


def test_two_headers_name_one_tenant() -> None:
    assert Identities().caller_of(((TENANT_KEY, "a"), (FAIRNESS_KEY, "a"))).tenant == "a"
    for keys in ((TENANT_KEY, FAIRNESS_KEY), (FAIRNESS_KEY, TENANT_KEY)):
        with pytest.raises(InvalidArgument, match=f"{FAIRNESS_KEY}: names another tenant than {TENANT_KEY}"):
            Identities().caller_of(tuple(zip(keys, "ab", strict=True)))


def test_one_token_for_all_calls_leaves_the_tenant_to_the_header() -> None:
    shared = Identities.of_one_token("s3cret")
    assert shared.caller_of((bearer("s3cret"), (TENANT_KEY, "acme"))).tenant == "acme"
    with pytest.raises(Unauthenticated):
        shared.caller_of(((TENANT_KEY, "acme"),))


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (bearer("of nobody"),),
        (bearer(""),),
        (("authorization", "of acme"),),
        (("authorization", "Basic of acme"),),
        (("authorization", b"Bearer of acme"),),
        (bearer("of acme"), bearer("of acme")),
        (bearer("of acme "),),
        (bearer(digest("of acme").hex()),),
    ],
)
def test_a_call_without_one_known_token_is_refused(metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    with pytest.raises(Unauthenticated):
        NAMED.caller_of(metadata)


@KEYS
def test_a_token_names_the_tenant_and_a_header_may_only_repeat_it(key: str) -> None:
    assert NAMED.caller_of((bearer("of acme"),)) == ACME
    assert NAMED.caller_of((bearer("of acme"), (key, "acme"))) == ACME
    with pytest.raises(PermissionDenied, match=rf"{key}.*act_for_tenants"):
        NAMED.caller_of((bearer("of acme"), (key, "other")))


@KEYS
def test_a_gateway_acts_for_the_tenant_that_it_names_and_the_cache_knows(key: str) -> None:
    own = NAMED.caller_of((bearer("of the gateway"),))
    acting = NAMED.caller_of((bearer("of the gateway"), (key, "acme")))
    assert (own.tenant, acting.tenant) == ("gateway", "acme")
    assert acting.cache_salt("s") == ACME.cache_salt("s") != own.cache_salt("s")


def test_salts_of_proven_tenants_never_meet_and_fit() -> None:
    pairs = [("a", ""), ("a", "b"), ("ab", ""), ("a", "b\0"), ("b", "a"), ("a", "x" * MAX_SALT_BYTES)]
    salts = {Caller(tenant, frozenset(), is_proven=True).cache_salt(given) for tenant, given in pairs}
    assert len(salts) == len(pairs)
    assert all(len(salt.encode()) <= MAX_SALT_BYTES for salt in salts)
    assert ANYONE.cache_salt("given") == "given"


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_tells_tokens_rights_and_quotas(tmp_path: Path) -> None:
    more = 'rights = ["admin", "observe"]\n[tenant."a/b"]\nmax_requests = 3\ntokens_per_minute = 9\n[tenant.c]\n'
    tenants = read_tenants(written(tmp_path, TOKEN + more))
    assert tenants.tokens == {bytes.fromhex(SHA256): Caller("acme", frozenset({Right.ADMIN, Right.OBSERVE}), True)}
    assert tenants.quotas == {"a/b": Quota(max_requests=3, tokens_per_minute=9), "c": Quota()}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[token]\n", r"at line 1, column 8"),
        (b"\xff", "invalid start byte"),
        ("tokens = 1", "the file: 'tokens' is none of tenant, token"),
        ("token = 1", r"each under \[\[token\]\]"),
        ("token = [1]", r"each under \[\[token\]\]"),
        ("tenant = 1", r"each under \[tenant\.NAME\]"),
        ("[[token]]\ntenant = 'a'", r"\[\[token\]\] number 1: sha256 must be"),
        (TOKEN.replace(SHA256, SHA256[1:]), "number 1: sha256 must be"),
        (TOKEN + TOKEN, "number 2: sha256 is that of another token"),
        (TOKEN.replace('"acme"', '"a b"'), "number 1: tenant must be 1 to 64 letters"),
        (TOKEN.replace('"acme"', "5"), "number 1: tenant must be a name"),
        (TOKEN + "rights = 'admin'", "number 1: rights must be a list of names"),
        (TOKEN + "rights = [['admin']]", "number 1: rights must be a list of names"),
        (TOKEN + "rights = ['root']", "number 1: rights: 'root' is none of admin, observe, act_for_tenants"),
        (TOKEN + "right = ['admin']", "number 1: 'right' is none of rights, sha256, tenant"),
        ("[tenant.'a b']", r"\[tenant\.\"a b\"\]: the name must be 1 to 64"),
        ("[tenant]\na = 5", r"\[tenant\.a\]: must be a table"),
        ("[tenant.a]\ntokens = 5", r"\[tenant\.a\]: 'tokens' is none of adapters, max_requests"),
        ("[tenant.a]\nmax_requests = 0", "max_requests must be a whole number from 1"),
        ("[tenant.a]\nmax_requests = true", "max_requests must be a whole number from 1"),
        ("[tenant.a]\ntokens_per_minute = 1.5", "tokens_per_minute must be a whole number from 1"),
        ("x = " + "[" * 100_000, "nested|recursion"),
    ],
)
def test_a_wrong_file_is_told_in_one_line_with_the_place(tmp_path: Path, text: str | bytes, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--tenants-file: .*tenants\.toml: .*({complaint})") as caught:
        read_tenants(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tenants-file: cannot read .*missing\.toml: No such file"):
        read_tenants(tmp_path / "missing.toml")


def test_a_file_without_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    for text in ("", "# a comment\n", "[tenant.acme]\nmax_requests = 3\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"has no \[\[token\]\], so that every call would be refused"):
            read_tenants(path)


@pytest.mark.timeout(30)
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    os.mkfifo(path)
    for place in (path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is not a regular file"):
            read_tenants(place)


async def test_a_file_that_is_being_written_is_read_when_it_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "POLL_S", 0.001)
    path = tmp_path / "tenants.toml"
    path.write_text(TOKEN)
    seen: list[int] = []  # looks at the file, by the time that each of them finds
    read_after: list[int] = []
    rested = asyncio.Event()

    def adopt(_: Tenants) -> None:
        read_after.append(len(seen))
        if seen:
            rested.set()

    file = TenantsFile(path, adopt)
    file.load()

    def stamps(_: Sequence[Path]) -> followed.Stamps:
        seen.append(min(len(seen), 20))  # it changes between any two of the first 20 looks
        return ((seen[-1],),)

    monkeypatch.setattr(followed, "stamps", stamps)
    following = asyncio.create_task(file.follow())
    await asyncio.wait_for(rested.wait(), 30)
    following.cancel()
    assert read_after == [0, 22]


async def test_a_file_system_that_hangs_stops_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router ends although a thread still waits for the file."""
    monkeypatch.setattr(followed, "POLL_S", 0.01)
    loop, hangs, ends = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def stamps(_: Sequence[Path]) -> None:
        loop.call_soon_threadsafe(hangs.set)
        ends.wait()

    path = tmp_path / "tenants.toml"
    path.write_text(TOKEN)
    file = TenantsFile(path, lambda tenants: None)
    file.load()
    monkeypatch.setattr(followed, "stamps", stamps)
    following = asyncio.create_task(file.follow())
    await hangs.wait()
    following.cancel()
    await asyncio.wait([following], timeout=5)
    assert following.cancelled()
    await asyncio.wait_for(loop.shutdown_default_executor(), 5)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "followed files")
    ends.set()
