"""Checkpoints with 4-bit weights: kept if the backend takes them, otherwise dequantized."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagoda_server.checkpoints.dequantized import write_dequantized
from pagoda_server.checkpoints.folder import GGUF
from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.checkpoints.weight_files import open_weights
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.models import load_model
from pagoda_server.engine.models.config import Names
from pagoda_server.engine.models.tensors import Checkpoint, Rows
from pagoda_server.engine.models.weights import Weights
from pagoda_server.engine.runners.loaded_model import choose_backend, choose_dtype, load_for_serving
from pagoda_server.kernels import (
    INT4,
    PLAIN,
    UNQUANTIZED,
    Backend,
    GroupedFormat,
    GroupedWeight,
    Linear,
    Recorder,
    Use,
    has_native,
    has_native_int8_weight,
    load_backend,
)
from pagoda_server.kernels.backend import REFERENCE
from pagoda_server.kernels.linear import linear
from pagoda_server.kernels.linear_grouped import linear_grouped
from pagoda_server.settings.engine import EngineConfig, Quantization
from tests.checkpoints.quantized_tensors import packed_in_4_bits
from tests.checkpoints.tiny_gguf import tiny_model
from tests.engine.tiny_models import (
    MODELS,
    ShuffledBlocks,
    load_runner,
    next_chunk,
    random_prompt,
    save_model,
    step_logits,
)

CPU = torch.device("cpu")
VALUE_PROJECTION = "model.layers.1.self_attn.v_proj.weight"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list what is mapped")
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_nothing_of_a_file_is_mapped_once_it_is_loaded(quantization: Quantization, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    import_gguf(tiny_model("qwen2").write(folder / GGUF), folder, no_progress)
    model = load_for_serving(EngineConfig(model=str(folder), quantization=quantization), CPU)
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert model.model.weight_bytes


def test_an_embedding_stays_in_groups_where_products_are_in_another_format(tmp_path: Path) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=False)
    model.kinds["token_embd.weight"] = Kind.Q5_0
    folder = tmp_path / "folder"
    folder.mkdir()
    import_gguf(model.write(folder / GGUF), folder, no_progress)
    weights = Weights(Checkpoint(folder), load_backend("reference", "int8-weight"), CPU, torch.bfloat16)
    rows = Rows("model.embed_tokens", 264)
    table = weights.table(rows, 64, is_multiplied=False)
    assert isinstance(table, GroupedWeight)
    stored = open_weights(folder)["model.embed_tokens.weight"]
    assert weights.num_bytes == table.nbytes < 2 * stored.shape[0] * stored.shape[1]
    ids = torch.tensor([263, 0, 5])
    found = weights.ops.embedding(table, None, torch.float32)(ids)
    assert torch.equal(found, torch.from_numpy(stored.whole(slice(None)))[ids])
    assert isinstance(weights.table(rows, 64, is_multiplied=True), Tensor)
    unquantized = Weights(Checkpoint(folder), load_backend("reference", UNQUANTIZED), CPU, torch.bfloat16)
    assert isinstance(unquantized.table(rows, 64, is_multiplied=False), Tensor)


@pytest.mark.skipif(not has_native_int8_weight(), reason="needs a processor with AMX for bfloat16")
def test_a_head_is_packed_apart_from_the_embedding_whose_values_it_would_round(tmp_path: Path) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    model.kinds["token_embd.weight"] = Kind.Q8_0
    import_gguf(model.write(tmp_path / GGUF), tmp_path, no_progress)
    ops = load_backend("native", "int8-weight")
    weights = Weights(Checkpoint(tmp_path), ops, CPU, torch.bfloat16)
    rows = Rows("model.embed_tokens", 264)
    table = weights.table(rows, 64, is_multiplied=True)
    head = weights.head(Rows("lm_head", 264), 64, False, tied_to=(rows, table))
    stored = torch.from_numpy(open_weights(tmp_path)["model.embed_tokens.weight"].whole(slice(None)))
    assert isinstance(table, GroupedWeight)
    assert weights.num_bytes < 2.4 * stored.numel()  # about a byte for each value, twice
    ids, x = torch.tensor([263, 0, 5]), torch.randn(3, 64)
    assert torch.equal(ops.embedding(table, head, torch.float32)(ids), stored[ids])
    assert torch.equal(head(x), ops.linear(stored, None)(x))


def reference_int4() -> Backend:
    """The reference, with matrices as they are where the checkpoint does not have them in 4 bits."""

    def make(weight: Tensor | GroupedWeight, bias: Tensor | None, use: Use = PLAIN, /) -> Linear:
        return (linear_grouped if isinstance(weight, GroupedWeight) else linear)(weight, bias, use)  # type: ignore[operator]

    return dataclasses.replace(REFERENCE, makers={**REFERENCE.makers, "int4": make}, weights="int4")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def folder(family: str = "llama", kinds: Mapping[str, Kind] = MappingProxyType({}), **config: object) -> Path:
        path = tmp_path_factory.mktemp("model")
        tiny = tiny_model(family, **config)
        tiny.quantisation = Kind.Q4_1
        tiny.kinds |= kinds
        import_gguf(tiny.write(path / "model.gguf"), path, no_progress)
        return path

    return folder


@pytest.fixture
def whole(make: Callable[..., Path]) -> Path:
    return make(attention_bias=True)


@pytest.fixture
def mixed(make: Callable[..., Path]) -> Path:
    """One of three projections that are merged is not quantized."""
    return make(kinds={"blk.1.attn_v.weight": Kind.F32})


@pytest.fixture
def packed(make: Callable[..., Path], tmp_path: Path) -> Path:
    """Two safetensors files in the format of compressed-tensors, with a module that is left out."""
    write_dequantized(make("qwen3", head_dim=32), tmp_path)
    tensors: list[dict[str, Tensor]] = [{}, {}]
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        part = tensors[".layers.1." in name]
        if tensor.ndim == 1 or "embed_tokens" in name or name == VALUE_PROJECTION:
            part[name] = tensor
        else:
            part |= packed_in_4_bits(name, tensor)
    (tmp_path / "model.safetensors").unlink()
    for number, part in enumerate(tensors):
        save_file(part, tmp_path / f"{number}.safetensors")
    weight_map = {name: f"{number}.safetensors" for number, part in enumerate(tensors) for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    edit(
        tmp_path / "config.json", quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}
    )
    return tmp_path


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def post_norm(make: Callable[..., Path]) -> Path:
    return make("olmo2")


@pytest.fixture(params=["whole", "mixed", "packed", "post_norm"])
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def save_wider_model(family: str, folder: Path) -> None:
    """A tiny model whose sizes are multiples of 32."""
    config = copy.deepcopy(MODELS[family])
    config.hidden_size = 64
    config.num_attention_heads = 4  # of which a head is a share of the hidden size in some families
    if family != "gpt2":
        config.intermediate_size, config.num_key_value_heads = 96, 2
    save_model(config, folder)


def parameters(
    folder: Path, dtype: torch.dtype, *, keeps_int4: bool, packs: bool = False
) -> dict[str, Tensor | GroupedWeight]:
    """Return the tensors that a model is loaded from, by their names in the checkpoint."""
    filled: dict[str, Tensor | GroupedWeight] = {}
    fill = Checkpoint.fill

    def remember(self: Checkpoint, place: Tensor | GroupedWeight, name: str, rows: Rows) -> None:
        fill(self, place, name, rows)
        filled[name] = place

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "fill", remember)
        load_model(folder, reference_int4() if keeps_int4 else REFERENCE, CPU, dtype, packs=packs)
    return filled


def test_rows_in_4_bits_are_ordered_and_multiplied_as_whole_ones_are(whole: Path, tmp_path: Path) -> None:
    write_dequantized(whole, tmp_path)
    size, in_size = load_file(tmp_path / "model.safetensors")[VALUE_PROJECTION].shape
    name = VALUE_PROJECTION.removesuffix(".weight")
    rows = Rows(name, size, torch.arange(size).flip(0), torch.linspace(0.5, 2, size))
    kept, expected = GroupedWeight.allocate(INT4, size, in_size), torch.empty(size, in_size)
    Checkpoint(whole).fill(kept, VALUE_PROJECTION, rows)
    Checkpoint(tmp_path).fill(expected, VALUE_PROJECTION, rows)
    torch.testing.assert_close(kept.dequantize().float(), expected, rtol=2**-8, atol=5e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows_at_once", [1, 1 << 20])
def test_weights_are_dequantized_for_a_backend_that_takes_none(
    whole: Path, dtype: torch.dtype, rows_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda_server.engine.models.tensors.VALUES_AT_ONCE", rows_at_once)
    write_dequantized(whole, tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    found = parameters(whole, dtype, keeps_int4=False)
    assert found.keys() == expected.keys()
    for name, place in found.items():
        assert isinstance(place, Tensor)
        assert torch.equal(place, expected[name].to(dtype)), name


def test_what_is_kept_has_the_same_values(folder: Path) -> None:
    kept = parameters(folder, torch.float32, keeps_int4=True)
    for name, place in parameters(folder, torch.float32, keeps_int4=False).items():
        found = kept[name]
        assert torch.equal(found if isinstance(found, Tensor) else found.dequantize(), place), name


def test_a_merged_weight_keeps_its_parts_that_are_in_4_bits(mixed: Path) -> None:
    kept = {
        name
        for name, place in parameters(mixed, torch.bfloat16, keeps_int4=True).items()
        if isinstance(place, GroupedWeight)
    }
    second = [name for name in kept if ".layers.1." in name]
    assert VALUE_PROJECTION not in kept
    assert len(second) == 7 - 1
    assert len(kept) == 7 + 6 + 2  # the head as well, and the embedding


def test_logits_with_weights_in_4_bits_are_near_those_in_float32(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def logits() -> Tensor:
        runner = load_runner(folder, quantization="none")
        return step_logits(runner, [next_chunk(ShuffledBlocks(runner).sequence(random_prompt(40, seed=5), 1))])[0]

    exact = logits()
    monkeypatch.setattr("pagoda_server.engine.runners.loaded_model.load_backend", lambda *_: reference_int4())
    assert 0 < (logits() - exact).norm() / exact.norm() < 0.05  # only activations are rounded


def test_the_weights_take_the_bytes_that_they_take_in_the_file(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_server.engine.runners.loaded_model.load_backend", lambda *_: reference_int4())
    stored = open_weights(whole)
    vectors = sum(tensor.num_bytes for tensor in stored.values() if len(tensor.shape) == 1)
    runner = load_runner(whole, dtype="bfloat16", quantization="none")
    assert runner.info.weight_bytes == sum(tensor.num_bytes for tensor in stored.values()) - vectors // 2


def test_a_checkpoint_in_4_bits_is_served_in_bfloat16(whole: Path) -> None:
    assert choose_dtype("auto", whole, Names()) == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("lm_head.weight_scale"), r"tensor lm_head.weight_scale is missing"),
        (
            lambda tensors: tensors.update({"lm_head.weight_scale": torch.ones(264, 3)}),
            r"lm_head: 64 inputs have 3 groups; groups of a multiple of 32 are supported",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight_packed": torch.zeros(264, 8)}),
            r"tensor lm_head.weight_packed is stored as F32, not I32",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            r"model\.norm\.weight is stored as I8; supported: F64, F32, F16, BF16",
        ),
        (lambda tensors: tensors.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    packed: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    tensors = load_file(packed / "0.safetensors")
    change(tensors)
    save_file(tensors, packed / "0.safetensors")
    with pytest.raises(ConfigError, match=message):
        parameters(packed, torch.bfloat16, keeps_int4=True)


@pytest.mark.parametrize("keeps_int4", [True, False])
def test_a_weight_of_another_shape_is_named(whole: Path, keeps_int4: bool) -> None:
    edit(whole / "config.json", intermediate_size=128)
    with pytest.raises(ConfigError, match=r"gate_proj.weight has shape \[96, 64\] .* config.json makes it \[128, 64\]"):
        parameters(whole, torch.bfloat16, keeps_int4=keeps_int4)


def test_auto_takes_4_bits_where_there_are_weights_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_server.engine.runners.loaded_model.has_native", lambda: True)
    monkeypatch.setattr("pagoda_server.engine.runners.loaded_model.has_native_int8_weight", lambda: False)
    monkeypatch.setattr("pagoda_server.engine.runners.loaded_model.instruction_set", lambda: "avx2")
    assert choose_backend(CPU, torch.bfloat16, "auto", has_grouped_weights=True) == ("native", "int4")
    assert choose_backend(CPU, torch.bfloat16, "auto", has_grouped_weights=False) == ("native", "int8")
    assert choose_backend(CPU, torch.float32, "auto", has_grouped_weights=True) == ("native", UNQUANTIZED)
    assert choose_backend(CPU, torch.float32, "int4", has_grouped_weights=True) == ("native", "int4")
    assert choose_backend(CPU, torch.bfloat16, "int8", has_grouped_weights=True) == ("native", "int8")
    with pytest.raises(ConfigError, match="--quantization int4: activations can be bfloat16 or float32, not float16"):
        choose_backend(CPU, torch.float16, "int4", has_grouped_weights=True)
    assert choose_backend(CPU, torch.bfloat16, "int4", has_grouped_weights=False) == ("native", "int4")
    cuda = torch.device("cuda")
    for quantization in ("auto", "int4"):
        assert choose_backend(cuda, torch.bfloat16, quantization, has_grouped_weights=True) == ("triton", "groups")
    assert choose_backend(cuda, torch.bfloat16, "none", has_grouped_weights=True) == ("triton", UNQUANTIZED)
    assert choose_backend(cuda, torch.bfloat16, "auto", has_grouped_weights=False) == ("triton", UNQUANTIZED)
    assert choose_backend(cuda, torch.bfloat16, "int4", has_grouped_weights=False) == ("triton", "groups")
    assert choose_backend(cuda, torch.bfloat16, "auto", has_float8_weights=True) == ("triton", "groups")
    monkeypatch.setattr("pagoda_server.engine.runners.loaded_model.has_native", lambda: False)
    with pytest.raises(ConfigError, match="--quantization int4 needs Pagoda installed where there is a C"):
        choose_backend(CPU, torch.bfloat16, "int4", has_grouped_weights=True)
    assert choose_backend(CPU, torch.bfloat16, "auto", has_grouped_weights=True) == ("cpu", UNQUANTIZED)


@pytest.mark.skipif(not has_native(), reason="no kernels for products in 4 bits")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_logits_are_near_those_in_float32(folder: Path, dtype: str) -> None:
    def logits(dtype: str, quantization: str) -> Tensor:
        runner = load_runner(folder, dtype=dtype, quantization=quantization)
        return step_logits(runner, [next_chunk(ShuffledBlocks(runner).sequence(random_prompt(40, seed=5), 1))])[0]

    exact = logits("float32", "none")
    assert (logits(dtype, "int4").float() - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mixtral"])
def test_whole_weights_are_rounded_to_4_bits_if_that_is_wanted(family: str, tmp_path: Path) -> None:
    """Matrices that are multiplied, with what is folded into them; the embedding, the head and routers stay."""
    save_wider_model(family, tmp_path)
    packed = parameters(tmp_path, torch.float32, keeps_int4=True, packs=True)
    whole = parameters(tmp_path, torch.float32, keeps_int4=False)
    rounded = {name for name, weight in packed.items() if isinstance(weight, GroupedWeight)}
    kept = ("embed", "wte", "wpe", "norm", "ln_", "lm_head", "block_sparse_moe.gate.", "mlp.gate.")
    matrices = {name for name, weight in whole.items() if weight.shape[1:] and not any(each in name for each in kept)}
    assert len(rounded) > 3
    assert rounded == {name for name in matrices if whole[name].shape[1] % INT4.group == 0}
    for name in rounded:
        weight, before = packed[name], whole[name]
        assert isinstance(weight, GroupedWeight)
        assert isinstance(before, Tensor)
        assert weight.format == INT4
        error = (weight.dequantize() - before).norm() / before.norm()
        assert 0.03 < error < 0.09, name


def test_weights_that_4_bits_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    save_wider_model("qwen3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = 1e5
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=f"tensor {name} has weights that do not fit into 4 bits: --quantization int4"
    ):
        parameters(tmp_path, torch.float32, keeps_int4=True, packs=True)


@pytest.mark.parametrize(("quantization", "is_rounded"), [("auto", False), ("int4", True)])
def test_whole_weights_beside_others_in_groups_are_rounded_only_if_that_is_wanted(
    quantization: Quantization, is_rounded: bool, tmp_path: Path
) -> None:
    """A GPU has products in groups for FP8 checkpoints too, of which some layers are left whole."""
    save_wider_model("qwen3", tmp_path)
    whole, served = (
        load_for_serving(EngineConfig(str(tmp_path), quantization=each), CPU, backend=("reference", form))
        for each, form in (("none", UNQUANTIZED), (quantization, "groups"))
    )
    assert (served.model.weight_bytes < whole.model.weight_bytes) == is_rounded


@pytest.mark.skipif(not has_native(), reason="no kernels for products in 4 bits")
def test_a_model_in_16_bits_is_served_in_4(tmp_path: Path) -> None:
    save_wider_model("qwen3", tmp_path)

    def logits(quantization: str) -> Tensor:
        runner = load_runner(tmp_path, dtype="float32", quantization=quantization)
        return step_logits(runner, [next_chunk(ShuffledBlocks(runner).sequence(random_prompt(40, seed=5), 1))])[0]

    exact = logits("none")
    assert 0.01 < (logits("int4").float() - exact).norm() / exact.norm() < 0.25


@pytest.mark.skipif(not has_native(), reason="no kernels for products in 4 bits")
@pytest.mark.parametrize("rows", [1, 9])
def test_parts_in_several_formats_are_one_product(rows: int) -> None:
    forms = [GroupedFormat(6, 16), INT4, None, GroupedFormat(8)]
    x, bias = torch.randn(rows, 96).bfloat16(), torch.randn(4 * 30).bfloat16()
    weights: list[Tensor | GroupedWeight] = []
    for form in forms:
        weight = torch.randn(30, 96).bfloat16() if form is None else GroupedWeight.allocate(form, 30, 96)
        if isinstance(weight, GroupedWeight):
            weight.values.random_(0, 16)
            weight.scales.normal_(0, 0.1)
            if weight.minimums is not None:
                weight.minimums.normal_(0, 0.1)
        weights.append(weight)
    product = load_backend("native", "int4").linear(weights, bias)
    found = [product(x)]
    recording = Recorder().record(lambda: product(x))
    recording.result.zero_()
    assert recording.replay()
    found.append(recording.result)
    expected = dataclasses.replace(REFERENCE, weights="int4").linear(weights, bias)(x)
    for each in found:
        assert each.shape == (rows, 120)
        torch.testing.assert_close(each, expected, atol=0.3, rtol=0.02)
