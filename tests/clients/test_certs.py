"""`pagoda certs`: what it writes, what it refuses, and that its lines start a fleet."""

from __future__ import annotations

import os
import re
import shlex
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store
from typer.testing import CliRunner, Result

from pagoda_server.channel.address import host_of
from pagoda_server.cli.app import app
from tests.servers import free_address, running_engine, running_server


def certs(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["certs", *arguments])


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path: Path) -> set[str]:
    found = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(each.value) for each in found}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    folder = tmp_path / "fleet"
    assert certs(str(folder), "gpu1", "gpu2.example.org,10.0.0.7,fd00::7", "--days", "30").exit_code == 0
    return folder


def test_certificates_bear_their_names_and_their_roles_and_are_valid_for_the_days(fleet: Path) -> None:
    assert names(fleet / "gpu1.pem") == {"gpu1", "pagoda-engine"}
    assert names(fleet / "gpu2.example.org.pem") == {"gpu2.example.org", "10.0.0.7", "fd00::7", "pagoda-engine"}
    verifier = PolicyBuilder().store(Store([certificate(fleet / "ca.pem")]))
    verifier.build_client_verifier().verify(certificate(fleet / "router.pem"), [])
    verifier.build_server_verifier(x509.DNSName("gpu1")).verify(certificate(fleet / "gpu1.pem"), [])
    for engine in ("gpu1", "gpu2.example.org"):
        roles = certificate(fleet / f"{engine}.pem").extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(roles) == [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        rest = certificate(fleet / f"{engine}.pem").not_valid_after_utc - datetime.now(UTC)
        assert timedelta(days=29) < rest <= timedelta(days=30)


def test_keys_are_readable_for_their_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert certs(str(tmp_path / "fleet"), "gpu1").exit_code == 0
    finally:
        os.umask(before)
    keys = list((tmp_path / "fleet").glob("*.key"))
    assert {path.name for path in keys} == {"ca.key", "router.key", "gpu1.key"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
    assert stat.S_IMODE((tmp_path / "fleet").stat().st_mode) == 0o700


def test_nothing_is_overwritten_and_an_engine_is_added_to_the_same_authority(fleet: Path) -> None:
    before = content(fleet)
    refused = certs(str(fleet), "gpu3", "gpu1")
    assert (refused.exit_code, content(fleet)) == (2, before)
    assert "gpu1.pem is there already: --renew replaces it" in refused.output
    assert certs(str(fleet), "gpu3").exit_code == 0
    after = content(fleet)
    assert before.items() <= after.items()
    assert after.keys() - before.keys() == {"gpu3.pem", "gpu3.key"}


def test_renewal_makes_new_keys_for_the_same_names_under_the_same_authority(fleet: Path) -> None:
    before, named = content(fleet), names(fleet / "gpu2.example.org.pem")
    assert certs(str(fleet), "--renew", "gpu1").exit_code == 0
    changed = {name for name, each in content(fleet).items() if before[name] != each}
    assert changed == {"gpu1.pem", "gpu1.key"}
    assert certs(str(fleet), "--renew").exit_code == 0
    kept = {name for name, each in content(fleet).items() if before[name] == each}
    assert kept == {"ca.pem", "ca.key"}
    assert names(fleet / "gpu2.example.org.pem") == named
    assert stat.S_IMODE((fleet / "gpu1.key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "name the host of an engine"),
        (["gpu 1"], "'gpu 1' is neither the name of a host nor an IP address"),
        (["../gpu1"], "'../gpu1' is neither the name of a host nor an IP address"),
        (["gpu1,"], "'' is neither the name of a host nor an IP address"),
        (["router"], "an engine cannot be called router"),
        (["--renew", "gpu9"], "gpu9.pem is not there: without --renew it is made"),
        (["--renew"], "holds no certificates"),
    ],
)
def test_wrong_arguments_write_nothing(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    refused = certs(str(tmp_path / "fleet"), *arguments)
    assert refused.exit_code == 2
    assert complaint in refused.output
    assert not (tmp_path / "fleet").exists()


@pytest.mark.parametrize("lost", ["ca.key", "ca.pem"])
def test_an_authority_that_is_not_whole_signs_nothing(fleet: Path, lost: str) -> None:
    (fleet / lost).write_bytes((fleet / "gpu1.key").read_bytes())
    before = content(fleet)
    refused = certs(str(fleet), "--renew")
    assert (refused.exit_code, content(fleet)) == (2, before)
    (fleet / lost).unlink()
    assert certs(str(fleet), "--renew").exit_code == 2


@pytest.mark.thorough
def test_the_printed_lines_start_an_engine_and_a_router_that_trust_each_other(tmp_path: Path) -> None:
    address = free_address()
    printed = certs(str(tmp_path / "a fleet"), host_of(address)).output.replace(f"{host_of(address)}:50052", address)
    (engine,) = re.findall(r"^  python -m pagoda_server.engine --listen \S+ (.+)$", printed, re.MULTILINE)
    (router,) = re.findall(r"^  pagoda serve (--engine .+)$", printed, re.MULTILINE)
    with (
        running_engine(address, *shlex.split(engine), "--model", "synthetic"),
        running_server("--model", "synthetic", *shlex.split(router)),
    ):
        pass
