"""Every input that a fuzzer or its author has found worth keeping: each is accepted, or refused as promised."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import CORPUS, TARGETS, check_of

MAX_CORPUS_BYTES = 200_000


@pytest.mark.parametrize("target", TARGETS)
def test_every_file_of_the_corpus_is_accepted_or_refused_as_promised(target: str) -> None:
    check, verdicts = check_of(target), set()
    for file in sorted((CORPUS / target).iterdir()):
        try:
            verdicts.add(check(file.read_bytes()))
        except BaseException as error:
            error.add_note(f"with {file}")
            raise
    assert verdicts == {True, False}, "the corpus shows only one of the two"


def test_the_corpus_stays_small() -> None:
    assert sum(file.stat().st_size for file in CORPUS.glob("*/*")) < MAX_CORPUS_BYTES
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)
