"""Beam search of the Python clients, on a real server with the synthetic model: what a plain reference finds."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagoda import AsyncClient, Client, FinishReason, Hypothesis, InvalidArgument
from pagoda.v1 import inference_pb2_grpc
from tests.clients.beam_reference import Expected, expected_beams
from tests.end_to_end.asking import request
from tests.servers import ROOT, Server

VOCAB_SIZE = 258
STOPS = frozenset({5, 77, 130, 201})
FOLDER = ROOT / "clients" / "python"


def check(found: list[Hypothesis], expected: list[Expected]) -> None:
    assert [list(one.tokens) for one in found] == [one.tokens for one in expected]
    assert [one.score for one in found] == [pytest.approx(one.score, rel=1e-6) for one in expected]
    assert [one.matched for one in found] == [one.matched for one in expected]
    for one in found:
        assert one.finish_reason is (FinishReason.LENGTH if one.matched is None else FinishReason.STOP)
        assert one.text == bytes(id for id in one.body if id < 256).decode(errors="replace")


@pytest.mark.parametrize("early_stopping", ["estimated", "enough", "best"])
@pytest.mark.parametrize(("beams", "length_penalty"), [(2, 1.0), (4, 0.8), (16, 1.0)])
def test_hypotheses_are_those_of_the_reference(
    synthetic_server: Server, early_stopping: Any, beams: int, length_penalty: float
) -> None:
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    expected = expected_beams(list(b"beams"), 20, VOCAB_SIZE, stop_ids=STOPS, width=beams, **options)  # type: ignore[arg-type]
    with Client(synthetic_server.address) as client:
        found = client.beam_search(
            prompt="beams", beams=beams, max_tokens=20, stop_token_ids=sorted(STOPS), ignore_eos=True, **options
        )
    check(found, expected)


async def test_searches_beside_each_other_find_their_own(synthetic_server: Server) -> None:
    async with AsyncClient(synthetic_server.address) as client:
        prompts = [f"number {at}" for at in range(6)]
        searches = [client.beam_search(prompt=each, beams=5, max_tokens=15, min_tokens=3) for each in prompts]
        found = await asyncio.gather(*searches)
    for prompt, hypotheses in zip(prompts, found, strict=True):
        ends = frozenset({256, 257})
        expected = expected_beams(list(prompt.encode()), 15, VOCAB_SIZE, stop_ids=ends, min_tokens=3, width=5)
        check(hypotheses, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beams": 1}, "beams: is 1, must be from 2 to 16"),
        ({"beams": 17}, "beams: is 17, must be from 2 to 16"),
        ({"beams": 16, "stop_token_ids": [1, 2, 3, 4, 5]}, "beams: is 16, and 5 ids end a sequence; together at most"),
        ({"max_tokens": 0}, "max_tokens: is 0, must be at least 1"),
        ({"early_stopping": "never"}, "early_stopping: 'never' is none of estimated, enough, best"),
        ({"token_ids": []}, "token_ids"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(synthetic_server: Server, arguments: dict[str, Any], message: str) -> None:
    given = {"max_tokens": 5, "ignore_eos": True, "token_ids": [1]} | arguments
    with Client(synthetic_server.address) as client, pytest.raises(InvalidArgument, match=message):
        client.beam_search(**given)


def test_the_server_refuses_the_field_and_names_the_clients_search(
    inference: inference_pb2_grpc.InferenceStub,
) -> None:
    message = request("beams", 5)
    message.sampling.beam_search.width = 2
    with pytest.raises(grpc.RpcError) as refused:
        list(inference.Generate(message))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == (
        "sampling.beam_search: is set; beam search is in the Python client: Client.beam_search"
    )


def test_the_blocking_client_is_the_one_that_the_other_becomes(tmp_path: Path) -> None:
    sys.path.insert(0, str(FOLDER))
    try:
        from blocking import blocking  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(FOLDER))
    written = tmp_path / "client.py"
    written.write_text(blocking((FOLDER / "pagoda" / "aio.py").read_text()))
    ruff = [Path(sys.executable).parent / "ruff", "format", "--config", ROOT / "pyproject.toml", written]
    subprocess.run(ruff, check=True, capture_output=True)
    committed = (FOLDER / "pagoda" / "client.py").read_text()
    assert committed == written.read_text(), "it is stale: python clients/python/blocking.py"
