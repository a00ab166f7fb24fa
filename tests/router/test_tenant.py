"""The tenant that a call names in its metadata."""

from __future__ import annotations

import pytest

from pagoda_server.router.errors import InvalidArgument
from pagoda_server.router.request.validation import TENANT_KEY, tenant_of


def test_a_call_that_names_no_tenant_is_of_the_nameless_one() -> None:
    assert tenant_of(None) == tenant_of((("user-agent", "x"),)) == ""


def test_the_name_is_taken_as_it_is() -> None:
    assert tenant_of(((TENANT_KEY, "acme/eu-1"),)) == "acme/eu-1"


@pytest.mark.parametrize("name", ["", "a" * 65, "a b", "a\n", "é", b"a"])
def test_a_bad_name_is_refused_by_its_key(name: str | bytes) -> None:
    with pytest.raises(InvalidArgument, match=TENANT_KEY):
        tenant_of(((TENANT_KEY, name),))


def test_two_names_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="2 times"):
        tenant_of(((TENANT_KEY, "a"), (TENANT_KEY, "b")))
