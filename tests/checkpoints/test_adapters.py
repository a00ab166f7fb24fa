"""Adapters are read whole, or refused with one error that says what is wrong with them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_server.checkpoints import CheckpointError
from pagoda_server.checkpoints.adapters import AdapterFile, AdapterLimits, AdapterNotFound, read_adapter
from pagoda_server.checkpoints.gguf_adapters import read_gguf_adapter
from pagoda_server.checkpoints.stored import widened
from tests.engine.lora import CONFIG, random_pairs, write_adapter

MODULES = {"model.layers.0.self_attn.q_proj": (6, 8), "model.layers.1.mlp.down_proj": (10, 6)}
LIMITS = AdapterLimits(MODULES, max_rank=8, head_dim=4)
CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"


def values(stored: Any) -> Any:
    return widened(stored) if stored.dtype == np.uint16 else stored.astype(np.float32)


def read(folder: Path, limits: AdapterLimits = LIMITS) -> AdapterFile:
    return read_adapter(folder, limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_adapter_has_the_values_and_the_scale_that_were_written(tmp_path: Path, dtype: torch.dtype) -> None:
    pairs = random_pairs(MODULES, rank=3)
    found = read(write_adapter(tmp_path / "a", pairs, dtype, r=3, lora_alpha=12))
    assert found.rank == 3
    for module, (down, up) in pairs.items():
        pair = found.pairs[module]
        assert np.array_equal(values(pair.down), down.to(dtype).float().numpy())
        assert np.array_equal(values(pair.up), up.to(dtype).float().numpy())
        assert pair.scale == 4


def test_patterns_give_modules_ranks_and_scales_of_their_own(tmp_path: Path) -> None:
    (query, of_query), (down, of_down) = MODULES.items()
    pairs = random_pairs({query: of_query}, rank=2) | random_pairs({down: of_down}, rank=4)
    folder = write_adapter(
        tmp_path / "a",
        pairs,
        r=2,
        lora_alpha=8,
        use_rslora=True,
        target_modules=r".*\.(q_proj|down_proj)",
        rank_pattern={"down_proj": 4},
        alpha_pattern={r"^model\.layers\.[0-3]\.mlp\.down_proj": 3},
        layers_to_transform=[0, 1],
    )
    found = read(folder)
    assert found.pairs[query].scale == pytest.approx(8 / 2**0.5)
    assert found.pairs[down].scale == pytest.approx(3 / 4**0.5)


def write_gguf(
    path: Path, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], dtype: Any = np.float32, **fields: Any
) -> Path:
    """Write what llama.cpp's conversion makes of an adapter of Llama's first layers."""
    fields = {"general.type": "adapter", "adapter.type": "lora"} | fields
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", 6.0)
    names = {"q_proj": "attn_q", "down_proj": "ffn_down"}
    for module, (down, up) in pairs.items():
        layer, stem = module.split(".")[2], names[module.rpartition(".")[2]]
        if stem == "attn_q":  # pairs of dimensions that are rotated together become neighbours
            up = up.view(-1, 2, LIMITS.head_dim // 2, up.shape[1]).transpose(1, 2).reshape(up.shape)
        for half, values in (("lora_a", down), ("lora_b", up)):
            writer.add_tensor(f"blk.{layer}.{stem}.weight.{half}", values.contiguous().numpy().astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_gguf_adapter_is_that_of_peft(tmp_path: Path, dtype: Any) -> None:
    pairs = {name: (down.half().float(), up.half().float()) for name, (down, up) in random_pairs(MODULES).items()}
    expected = read(write_adapter(tmp_path / "a", pairs))
    found = read_gguf_adapter(write_gguf(tmp_path / "a.gguf", pairs, dtype), LIMITS)
    assert found.pairs.keys() == expected.pairs.keys()
    for module, pair in found.pairs.items():
        assert np.array_equal(pair.down, expected.pairs[module].down)
        assert np.array_equal(pair.up, expected.pairs[module].up)
        assert pair.scale == expected.pairs[module].scale == 1.5


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"general.type": "model"}, "not a LoRA adapter"),
        ({"adapter.type": "other"}, "not a LoRA adapter"),
        ({"adapter.alora.invocation": "x"}, "adapter.alora.invocation"),
    ],
)
def test_another_kind_of_gguf_file_is_refused(fields: dict[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read_gguf_adapter(write_gguf(tmp_path / "a.gguf", random_pairs(MODULES), **fields), LIMITS)


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_gguf_file_is_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write_gguf(tmp_path_factory.mktemp("damaged") / "a.gguf", random_pairs(MODULES))
    content = bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    content[start : start + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=20))
    path.write_bytes(content)
    try:
        found = read_gguf_adapter(path, LIMITS)
    except CheckpointError:
        return
    assert found.pairs.keys() <= MODULES.keys()
    assert all(pair.down.shape[1] == MODULES[module][0] for module, pair in found.pairs.items())


def test_an_identity_is_that_of_the_bytes(tmp_path: Path) -> None:
    pairs = random_pairs(MODULES)
    first, same = (read(write_adapter(tmp_path / name, pairs)).identity for name in "ab")
    assert first == same
    assert read(write_adapter(tmp_path / "c", pairs, lora_alpha=7)).identity != first
    assert read(write_adapter(tmp_path / "d", random_pairs(MODULES, seed=1))).identity != first


def truncate(folder: Path) -> None:
    path = folder / TENSORS_NAME
    path.write_bytes(path.read_bytes()[:-5])


def with_header(header: object) -> Callable[[Path], None]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()

    def write(folder: Path) -> None:
        (folder / TENSORS_NAME).write_bytes(struct.pack("<Q", len(text)) + text)

    return write


def with_length(length: int) -> Callable[[Path], None]:
    return lambda folder: (folder / TENSORS_NAME).write_bytes(struct.pack("<Q", length) + b"{}")  # type: ignore[return-value]


def with_config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / CONFIG_NAME).write_text(json.dumps(CONFIG | fields))  # type: ignore[return-value]


def with_text(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / CONFIG_NAME).write_text(text)  # type: ignore[return-value]


def with_pairs(change: Callable[[dict[str, Any]], object], **fields: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        pairs: dict[str, Any] = random_pairs(MODULES)
        change(pairs)
        write_adapter(folder, pairs, **fields)

    return write


def pipe(folder: Path) -> None:
    (folder / CONFIG_NAME).unlink()
    os.mkfifo(folder / CONFIG_NAME)


def pickled(folder: Path) -> None:
    (folder / TENSORS_NAME).rename(folder / "adapter_model.bin")


QUERY, DOWN = MODULES
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "truncated or corrupt"),
    "a header of 2^63 bytes": (with_length(1 << 63), "header of 9223372036854775808 bytes"),
    "a header longer than the file": (with_length(9000), "truncated or corrupt"),
    "a header that is no JSON": (with_header(b"{]"), "truncated or corrupt"),
    "a header nested too deep": (with_header(b"[" * 60_000), "nested too deep"),
    "a header of too many tensors": (with_header({f"t{n}": n for n in range(10_000)}), "bytes; an adapter may have"),
    "more tensors than the model has": (
        with_header({f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(5)}),
        "5 tensors; an adapter may have 4",
    ),
    "a huge shape": (
        with_header({"t": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 0]}}),
        "truncated or corrupt",
    ),
    "no tensors": (with_header({}), "changes nothing"),
    "a file too large": (lambda folder: os.truncate(folder / TENSORS_NAME, 1 << 33), "8589934592 bytes"),
    "not a file": (pipe, "is not a file"),
    "a pickle": (pickled, "can run code"),
    "no config": (lambda folder: (folder / CONFIG_NAME).unlink(), "has no adapter_config.json"),
    "a config too large": (with_text(" " * (1 << 19)), "524288 bytes"),
    "a config that is no JSON": (with_text("{"), "not JSON"),
    "a config nested too deep": (with_text("[" * 100_000), "not JSON"),
    "a config that is a list": (with_text("[]"), "not an object"),
    "another method": (with_config(peft_type="IA3"), "peft_type is IA3"),
    "DoRA": (with_config(use_dora=True), "use_dora"),
    "saved modules": (with_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "biases": (with_config(bias="all"), "bias"),
    "transposed weights": (with_config(fan_in_fan_out=True), "fan_in_fan_out"),
    "parameters of experts": (with_config(target_parameters=["mlp.experts.gate_up_proj"]), "target_parameters"),
    "a target without tensors": (
        with_config(target_modules=["q_proj", "k_proj", "down_proj"]),
        "target_modules names k_proj, which have no tensors",
    ),
    "a layer without tensors": (
        with_pairs(lambda pairs: pairs.pop(DOWN), target_modules="all-linear"),
        f"target_modules names {DOWN}, which have no tensors",
    ),
    "tensors of no target": (with_config(target_modules=["q_proj"]), f"target_modules does not name {DOWN}"),
    "tensors of another layer": (
        with_config(target_modules=["q_proj", "down_proj"], layers_to_transform=0),
        f"target_modules does not name {DOWN}",
    ),
    "tensors that no pattern names": (
        with_config(target_modules=r".*\.q_proj"),
        f"target_modules does not name {DOWN}",
    ),
    "tensors of what is excluded": (
        with_config(target_modules="all-linear", exclude_modules=["down_proj"]),
        f"target_modules does not name {DOWN}",
    ),
    "targets that are no names": (with_config(target_modules=[5]), "target_modules is [5]; a list of names"),
    "targets of endless names": (with_config(target_modules=["a." * 50_000], exclude_modules=["b"]), "a list of names"),
    "layers that are no numbers": (
        with_config(target_modules=["q_proj"], layers_to_transform=["0"]),
        "layers_to_transform is ['0']",
    ),
    "replicated layers": (with_config(layer_replication=[[0, 1]]), "layer_replication"),
    "a changed base": (with_config(init_lora_weights="pissa"), "init_lora_weights pissa"),
    "an unknown field": (with_config(use_magic=1), "use_magic"),
    "no rank": (with_config(r=None), "r is None"),
    "a rank of 0": (with_config(r=0), "r is 0; a whole number from 1 to 999999999 is needed"),
    "a rank of 10^9": (with_config(r=10**9), "r is 1000000000; a whole number from 1 to 999999999"),
    "a rank that tensors cannot have": (with_config(r=10**8), "r is 100000000; --max-lora-rank allows 1 to 8"),
    "a scale that may be another": (with_config(use_rslora="yes"), "use_rslora is yes"),
    "a rank that is no number": (with_config(r=True), "r is True"),
    "another rank than the tensors'": (with_config(r=3), f"r is 3, but tensors of {QUERY} have rank 4"),
    "another rank of one module": (
        with_config(rank_pattern={"down_proj": 2}),
        f"rank_pattern.down_proj is 2, but tensors of {DOWN} have rank 4",
    ),
    "a rank too high that a pattern does not lower": (
        with_config(r=9, rank_pattern={"q_proj": 4}),
        "r is 9; --max-lora-rank allows 1 to 8",
    ),
    "an alpha below any": (with_config(lora_alpha=-(10**9)), "a number between -1000000000 and 1000000000 is needed"),
    "an alpha that is not finite": (with_config(lora_alpha=float("inf")), "lora_alpha is inf"),
    "a pattern that takes forever": (with_config(alpha_pattern={"(a+)+b": 2}), "too complex"),
    "a pattern with endless ways to match": (with_config(alpha_pattern={"(.|.)" * 40 + "x": 2}), "too complex"),
    "too many patterns that repeat": (
        with_config(rank_pattern={f".*{n}.*": 2 for n in range(65)}),
        "rank_pattern has more than 64",
    ),
    "a pattern that is none": (with_config(rank_pattern={"(": 2}), "invalid pattern"),
    "too many patterns": (with_config(rank_pattern={str(n): 2 for n in range(2000)}), "at most 1024"),
    "a rank too high": (
        with_pairs(lambda pairs: pairs.update(random_pairs({QUERY: (6, 8)}, 9)), rank_pattern={"q_proj": 9}),
        "rank_pattern.q_proj is 9; --max-lora-rank allows 1 to 8",
    ),
    "another shape": (with_pairs(lambda pairs: pairs.update(random_pairs({QUERY: (7, 8)}))), "needs [[4, 6], [8, 4]]"),
    "an expert": (
        with_pairs(lambda pairs: pairs.update({"model.layers.0.mlp.experts.1.up_proj": pairs.pop(QUERY)})),
        "cannot be adapted in this model; what can is called down_proj, q_proj",
    ),
    "the head": (with_pairs(lambda pairs: pairs.update({"lm_head": pairs.pop(QUERY)})), "lm_head"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_served_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    change, reason = HOSTILE[name]
    folder = write_adapter(tmp_path / "a", random_pairs(MODULES))
    change(folder)
    with pytest.raises(CheckpointError) as refused:
        read(folder)
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["self_attn.q_proj", DOWN], "layers_to_transform": [0]},
        {"target_modules": ["q_proj", "down_proj", "lm_head"], "exclude_modules": ["lm_head"]},
        {"target_modules": r".*\.(self_attn|mlp)\.(q|down)_proj"},
        {"target_modules": "all-linear", "exclude_modules": r"vision.*"},
        {"target_modules": r"(?:.*?(?:model|text).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)"},  # is not compared
        {"target_modules": None},
    ],
)
def test_an_adapter_has_the_modules_that_its_configuration_names(fields: dict[str, Any], tmp_path: Path) -> None:
    assert read(write_adapter(tmp_path / "a", random_pairs(MODULES), **fields)).pairs.keys() == MODULES.keys()


def test_a_gguf_file_with_more_tensors_than_the_model_has_is_refused_unread(tmp_path: Path) -> None:
    content = bytearray(write_gguf(tmp_path / "a.gguf", random_pairs(MODULES)).read_bytes())
    content[8:16] = struct.pack("<Q", 1_000_000)
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"it has 1000000 tensors and .* fields; 4 and"):
        read_gguf_adapter(tmp_path / "a.gguf", LIMITS)


def test_names_of_other_methods_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = write_adapter(tmp_path / "a", random_pairs(MODULES))
    prefix = f"base_model.model.{QUERY}"
    for name, reason in (
        (f"{prefix}.lora_magnitude_vector.weight", "DoRA"),
        (f"{prefix}.lora_B.bias", "not supported"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "not supported"),
    ):
        save_file({name: torch.zeros(1, 1)}, folder / TENSORS_NAME)
        with pytest.raises(CheckpointError, match=reason):
            read(folder)
    save_file({f"{prefix}.lora_A.weight": torch.zeros(4, 6)}, folder / TENSORS_NAME)
    with pytest.raises(CheckpointError, match=r"has no tensor lora_B\.weight"):
        read(folder)


@pytest.mark.parametrize("path", ["missing", "file/in/it", "a\0b", "x" * 5000])
def test_a_path_with_nothing_is_not_found(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path / path)
    assert isinstance(refused.value, AdapterNotFound) or "too long" in str(refused.value)


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_adapter(tmp_path_factory.mktemp("damaged"), random_pairs(MODULES))
    path = folder / data.draw(st.sampled_from([CONFIG_NAME, TENSORS_NAME]))
    content = bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    content[start : start + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=20))
    path.write_bytes(content)
    try:
        found = read(folder)
    except CheckpointError:
        return
    assert found.pairs.keys() <= MODULES.keys()
    assert all(pair.down.flags.aligned and pair.rank <= 8 for pair in found.pairs.values())
