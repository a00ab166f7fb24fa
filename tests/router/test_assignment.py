"""Which of a router's models an engine is found to have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagoda.v1 import control_pb2
from pagoda_server.checkpoints.fingerprint import weights_fingerprint
from pagoda_server.router.engines.assignment import Signature, model_of, signatures
from pagoda_server.router.engines.refusals import WrongEngine
from pagoda_server.router.errors import ConfigError


def folder(path: Path, **config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "synthetic"} | config))
    return path


def info(tokenizer: str, weights: str = "") -> control_pb2.EngineInfo:
    return control_pb2.EngineInfo(model="m", tokenizer_sha256=tokenizer, weights_fingerprint=weights)


def test_a_tokenizer_that_one_model_has_tells_the_model() -> None:
    known = [Signature("one", "aa"), Signature("two", "bb")]
    assert [model_of(info(tokenizer, "any"), known) for tokenizer in ("aa", "bb")] == ["one", "two"]
    with pytest.raises(WrongEngine, match=r"^it serves m with the tokenizer of no model that this router serves$"):
        model_of(info("cc"), known)
    with pytest.raises(WrongEngine, match=r"^it serves m with another tokenizer$"):
        model_of(info("cc"), known[:1])


def test_models_with_one_tokenizer_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "1", vocab_size=10), folder(tmp_path / "2", vocab_size=20)
    known = signatures([("one", one, "aa"), ("two", two, "aa"), ("three", tmp_path, "bb")])
    assert known[2] == Signature("three", "bb"), "no weights are read where the tokenizer decides"
    assert model_of(info("aa", weights_fingerprint(two)), known) == "two"
    assert model_of(info("bb"), known) == "three"
    for unknown in ("", "cc"):
        with pytest.raises(WrongEngine, match=r"^it serves m, whose weights are none of those of one, two$"):
            model_of(info("aa", unknown), known)


def test_models_that_no_engine_can_be_told_apart_by_end_the_start(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "1", vocab_size=10), folder(tmp_path / "2", vocab_size=10)
    with pytest.raises(ConfigError, match="one and two have the same tokenizer and the same weights"):
        signatures([("one", one, "aa"), ("two", two, "aa")])
    dice = folder(tmp_path / "3", random_weights=True)
    with pytest.raises(ConfigError, match="dice has random weights, and the tokenizer of another model"):
        signatures([("one", one, "aa"), ("dice", dice, "aa")])
