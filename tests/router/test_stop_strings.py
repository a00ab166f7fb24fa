"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_server.router.text.stop_strings import StopMatcher

# Few letters, so that stop strings overlap each other and themselves.
letters = "ab\n😀"
stop_lists = st.lists(st.text(letters, min_size=1, max_size=6), min_size=1, max_size=5)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the earliest position at which any stop string ends; if several end there, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(stop_lists, st.lists(st.text(letters, max_size=8), max_size=12))
def test_any_split_of_the_text_gives_what_the_whole_text_gives(stops: list[str], deltas: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted = "".join([matcher.push(delta) for delta in deltas]) + matcher.flush()
    assert (emitted, matcher.matched) == expected("".join(deltas), stops)


@given(stop_lists, st.text(letters, max_size=30))
def test_text_is_held_back_only_while_it_may_become_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    emitted = "".join(map(matcher.push, text))
    if matcher.matched is None:
        beginnings = {stop[:end] for stop in stops for end in range(len(stop))}
        longest = max(len(beginning) for beginning in beginnings if text.endswith(beginning))
        assert emitted == text[: len(text) - longest]


def test_nothing_is_emitted_after_the_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one EN") == "one "
    assert matcher.push("D two") == ""
    assert matcher.matched == "END"
    assert matcher.push("three") + matcher.flush() == ""


def test_false_start_is_released() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push("EN"), matcher.push("EN"), matcher.push("x")] == ["", "EN", "ENx"]
    assert matcher.matched is None


def test_held_text_comes_with_flush() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("end\n") == "end"
    assert matcher.flush() == "\n"


@pytest.mark.parametrize("stop", ["a" * 255 + "b", "ab" * 128])
def test_cost_of_a_token_does_not_grow_with_the_text_or_the_text_held(stop: str) -> None:
    matcher = StopMatcher([stop] + [stop[at:] + "c" for at in range(15)])
    start = time.process_time()
    for _ in range(50_000):
        matcher.push("a")
    assert matcher.matched is None
    assert time.process_time() - start < 5  # a search of the whole text for each token would take minutes
