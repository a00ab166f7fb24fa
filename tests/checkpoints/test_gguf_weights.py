"""GGUF weights and configurations against the models they were made from."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagoda_server.checkpoints import CheckpointError, gguf_file
from pagoda_server.checkpoints.dequantized import write_dequantized
from pagoda_server.checkpoints.fingerprint import weights_fingerprint
from pagoda_server.checkpoints.folder import GGUF
from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.checkpoints.weight_files import open_weights
from pagoda_server.engine.models.tensors import FORMATS
from pagoda_server.kernels import INT4, GroupedWeight
from tests.checkpoints.tiny_gguf import MODELS, TinyModel, gguf_tensors, tiny_model


def imported(tiny: TinyModel, tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    import_gguf(tiny.write(folder / GGUF), folder, no_progress)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors, in the formats that the file has."""
    found = {name: (stored.whole(slice(None)), stored.encoding) for name, stored in open_weights(folder).items()}
    return {name: torch.from_numpy(values).view(FORMATS[encoding]) for name, (values, encoding) in found.items()}


def plain(folder: Path, tmp_path: Path) -> Path:
    """A copy that transformers reads."""
    (tmp_path / "plain").mkdir()
    write_dequantized(folder, tmp_path / "plain")
    return tmp_path / "plain"


VARIANTS = {
    "llama": tiny_model("llama"),
    "llama, tied": tiny_model("llama", tie_word_embeddings=True),
    "llama, biases": tiny_model("llama", attention_bias=True, mlp_bias=True),
    "llama, wide heads": tiny_model("llama", head_dim=32),
    "qwen2": tiny_model("qwen2"),
    "qwen3": tiny_model("qwen3", head_dim=32, tie_word_embeddings=True),
    "olmo2": tiny_model("olmo2"),
}


@pytest.mark.parametrize("tiny", VARIANTS.values(), ids=VARIANTS.keys())
def test_imported_tensors_are_the_originals(tiny: TinyModel, tmp_path: Path) -> None:
    tensors = tensors_of(imported(tiny, tmp_path))
    expected = tiny.model.state_dict()
    if tiny.model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(tensors[name], values), name


GEMMA = tiny_model(
    "gemma3", head_dim=32, query_pre_attn_scalar=32, sliding_window=8, tie_word_embeddings=True, num_hidden_layers=6
)


@pytest.mark.parametrize("tiny", [*VARIANTS.values(), GEMMA], ids=[*VARIANTS, "gemma3"])
def test_imported_model_computes_the_originals_logits(tiny: TinyModel, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(plain(imported(tiny, tmp_path), tmp_path), dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(model(ids).logits, tiny.model(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(gguf.GGMLQuantizationType.F16, torch.float16), (gguf.GGMLQuantizationType.BF16, torch.bfloat16)],
)
def test_matrices_of_16_bits_keep_their_format(
    kind: gguf.GGMLQuantizationType, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny = tiny_model("qwen2")
    tiny.quantisation = kind
    tensors = tensors_of(imported(tiny, tmp_path))
    for name, original in tiny.model.state_dict().items():
        assert torch.equal(tensors[name], original.to(dtype) if original.ndim == 2 else original), name


def test_a_scale_that_16_bits_cannot_hold_is_refused(tmp_path: Path) -> None:
    tiny = tiny_model("llama")
    tiny.quantisation = gguf.GGMLQuantizationType.MXFP4
    tiny.tensors["blk.1.ffn_up.weight"] = np.full((96, 64), 1e30, np.float32)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight has values that are not finite"):
        imported(tiny, tmp_path)


@pytest.mark.parametrize("family", MODELS)
def test_quantised_rows_are_dequantised_and_reordered(family: str, tmp_path: Path) -> None:
    tiny = tiny_model(family)
    tiny.quantisation = gguf.GGMLQuantizationType.Q8_0
    tensors = tensors_of(imported(tiny, tmp_path))
    for name, original in tiny.model.state_dict().items():
        if original.ndim == 2:
            # Q8_0 scales every 32 values of a row by themselves, so the order of rows does not matter to it.
            quantised = gguf.quants.quantize(original.numpy(), tiny.quantisation)
            expected = torch.from_numpy(gguf.quants.dequantize(quantised, tiny.quantisation))
            assert torch.equal(tensors[name], expected), name


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.Q8_0])
def test_vectors_may_have_any_format_that_matrices_have(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    tiny = tiny_model("llama")
    tiny.vectors = kind
    norm = tensors_of(imported(tiny, tmp_path))["model.norm.weight"]
    original = tiny.model.state_dict()["model.norm.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(original.numpy(), kind), kind)
    assert torch.equal(norm, torch.from_numpy(expected))


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1])
@pytest.mark.parametrize("family", MODELS)
def test_rows_of_4_bits_keep_their_nibbles(family: str, kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    tiny = tiny_model(family)
    with torch.no_grad():
        tiny.model.model.layers[0].mlp.up_proj.weight[5, 32:64] = 0.0
    tiny.quantisation = kind
    folder = imported(tiny, tmp_path)
    copy = plain(folder, tmp_path)
    stored, whole = open_weights(folder), load_file(copy / "model.safetensors")
    originals = tiny.model.state_dict()
    assert whole.keys() == originals.keys()
    for name, original in originals.items():
        if original.ndim == 2:
            # Q4_0 and Q4_1 scale every 32 values of a row by themselves, so the order of rows does not matter to them.
            expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(original.numpy(), kind), kind))
            assert torch.equal(whole[name], expected), name
            groups = stored[name].groups(slice(None))
            parts = (torch.tensor(np.array(part)) for part in (groups.values, groups.scales, groups.minimums))
            assert torch.equal(GroupedWeight(INT4, *parts).dequantize(), expected), name
        else:
            assert torch.equal(whole[name], original), name
    assert AutoConfig.from_pretrained(folder).quantization_config["quant_method"] == "gguf"
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, whole["model.layers.1.mlp.up_proj.weight"])


NOT_FINITE = r"blk\.1\.ffn_up\.weight has values that are not finite"


@pytest.mark.parametrize(
    ("kind", "bits", "message"),
    [
        *((gguf.GGMLQuantizationType.Q4_0, bits, NOT_FINITE) for bits in (0x7C00, 0xFC00, 0x7E00)),
        *((gguf.GGMLQuantizationType.Q4_1, bits, NOT_FINITE) for bits in (0x7C00, 0xFC00, 0x7E00)),
        (
            gguf.GGMLQuantizationType.Q4_0,
            0x5800,
            r"blk\.1\.ffn_up\.weight has a scale of 128; at most 127 is supported",
        ),
    ],
)
def test_a_scale_or_minimum_of_4_bits_that_kernels_cannot_hold_is_refused(
    kind: gguf.GGMLQuantizationType, bits: int, message: str, tmp_path: Path
) -> None:
    tiny = tiny_model("llama")
    tiny.quantisation = kind
    name = "blk.1.ffn_up.weight"
    rows = gguf.quants.quantize(gguf_tensors("llama", tiny.model)[name], kind)
    path = tiny.write(tmp_path / "tiny.gguf")
    file_bytes = bytearray(path.read_bytes())
    at = file_bytes.index(rows[0].tobytes()) + (2 if kind == gguf.GGMLQuantizationType.Q4_1 else 0)
    file_bytes[at : at + 2] = bits.to_bytes(2, "little")
    path.write_bytes(file_bytes)
    with pytest.raises(CheckpointError, match=message):
        import_gguf(path, tmp_path, no_progress)


def test_linear_and_yarn_scaling_reach_the_configuration(tmp_path: Path) -> None:
    for kind, more in (("linear", {}), ("yarn", {"llama.rope.scaling.original_context_length": 128})):
        tiny = tiny_model("llama")
        tiny.metadata = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0, **more}
        (tmp_path / kind).mkdir()
        rope = AutoConfig.from_pretrained(imported(tiny, tmp_path / kind)).rope_parameters
        assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == (kind, 4.0, 10000.0)
    assert rope["original_max_position_embeddings"] == 128


def test_llama3_scaling_is_recovered_from_its_frequency_factors(tmp_path: Path) -> None:
    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    parameters |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    tiny = tiny_model("llama", rope_parameters=parameters, head_dim=64, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](tiny.model.config, "cpu")
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    tiny.tensors["rope_freqs.weight"] = (plain / scaled.numpy()).astype(np.float32)
    assert AutoConfig.from_pretrained(imported(tiny, tmp_path)).rope_parameters == parameters


def test_context_beyond_a_sliding_window_is_not_offered(tmp_path: Path) -> None:
    tiny = tiny_model("llama")
    tiny.metadata = {"llama.attention.sliding_window": 96}
    config = json.loads((imported(tiny, tmp_path) / "config.json").read_text())
    assert config["max_position_embeddings"] == 96


def test_fields_that_switch_nothing_on_are_accepted(tmp_path: Path) -> None:
    imported(
        with_metadata(
            llama__attention__causal=True,
            llama__attention__clamp_kqv=0.0,
            llama__expert_count=0,
            llama__expert_weights_scale=1.0,
            llama__rope__scaling__attn_factor=1.0,
            llama__vocab_size=264,
        ),
        tmp_path,
    )


def test_a_factor_without_a_type_scales_linearly(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(imported(with_metadata(llama__rope__scaling__factor=4.0), tmp_path))
    assert (config.rope_parameters["rope_type"], config.rope_parameters["factor"]) == ("linear", 4.0)


def with_tensor(name: str, values: np.ndarray | None, **config: object) -> TinyModel:
    tiny = tiny_model("llama", **config)
    tiny.tensors[name] = values
    return tiny


def with_metadata(**metadata: object) -> TinyModel:
    tiny = tiny_model("llama")
    tiny.metadata = {key.replace("__", "."): value for key, value in metadata.items()}
    return tiny


UNUSABLE = {
    "lacks 1 of .* first blk.1.ffn_up.weight": with_tensor("blk.1.ffn_up.weight", None),
    "1 tensors unknown .* first blk.0.mystery.weight": with_tensor("blk.0.mystery.weight", np.zeros(4, np.float32)),
    "no tensor token_embd.weight": with_tensor("token_embd.weight", None),
    "blk.0.ffn_norm.weight has values that are not finite": with_tensor(
        "blk.0.ffn_norm.weight", np.full(64, np.nan, np.float32)
    ),
    r"attn_q.weight has shape \[62, 64\], but the metadata makes it \[64, 64\]": with_tensor(
        "blk.0.attn_q.weight", np.zeros((62, 64), np.float32)
    ),
    r"attn_k.bias has shape \[16\], but the metadata makes it \[32\]": with_tensor(
        "blk.0.attn_k.bias", np.zeros(16, np.float32), attention_bias=True
    ),
    r"ffn_down.weight has shape \[64, 96\], but the metadata makes it \[64, 2147483647\]": with_metadata(
        llama__feed_forward_length=(1 << 31) - 1
    ),
    r"token_embd.weight has shape \[264, 64\], but the metadata makes it \[264, 128\]": with_metadata(
        llama__embedding_length=128
    ),
    "frequency factors that differ": with_tensor("rope_freqs.weight", np.full(8, 2.0, np.float32)),
    "frequency factors that differ from those": with_tensor("rope_freqs.weight", np.full((2, 64), 2.0, np.float32)),
    "0 key-value heads of 16 values": with_metadata(llama__attention__head_count_kv=0),
    "4 heads and 2 key-value heads of 15 values": with_metadata(
        llama__attention__key_length=15, llama__attention__value_length=15
    ),
    "lacks 8 of .* first blk.0.ffn_gate_inp.weight": with_metadata(llama__expert_count=8),
    "rope.dimension_count is 8": with_metadata(llama__rope__dimension_count=8),
    "rope.scaling.type is 'longrope'; supported": with_metadata(
        llama__rope__scaling__type="longrope", llama__rope__scaling__factor=4.0
    ),
    "llama.rope.freq_base is nan; a finite": with_metadata(llama__rope__freq_base=float("nan")),
    "llama.rope.freq_base is inf; a finite": with_metadata(llama__rope__freq_base=float("inf")),
    "llama.rope.freq_base is -10000.0; a positive": with_metadata(llama__rope__freq_base=-1e4),
    "llama.rope.scaling.factor is -inf; a finite": with_metadata(llama__rope__scaling__factor=float("-inf")),
    "llama.rope.scaling.factor is 0.0; a positive": with_metadata(llama__rope__scaling__factor=0.0),
    "llama.rope.scaling.yarn_beta_fast is nan": with_metadata(
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=64,
        llama__rope__scaling__yarn_beta_fast=float("nan"),
    ),
    "llama.attention.layer_norm_rms_epsilon is nan; a finite": with_metadata(
        llama__attention__layer_norm_rms_epsilon=float("nan")
    ),
    "llama.attention.layer_norm_rms_epsilon is -1e-05; a number from 0 to 1": with_metadata(
        llama__attention__layer_norm_rms_epsilon=-1e-5
    ),
    "llama.attention.clamp_kqv is 8.0, which is not computed": with_metadata(llama__attention__clamp_kqv=8.0),
    "llama.attention.max_alibi_bias is nan, which is not computed": with_metadata(
        llama__attention__max_alibi_bias=float("nan")
    ),
    "llama.attention.causal is false": with_metadata(llama__attention__causal=False),
    "llama.rope.dimension_sections is 4, which is not computed": with_metadata(
        llama__rope__dimension_sections=[8, 8, 0, 0]
    ),
    "no metadata field llama.block_count": with_metadata(llama__block_count=None),
    "metadata field llama.block_count is a str, not a int": with_metadata(llama__block_count="two"),
    "metadata field llama.attention.head_count is a bool": with_metadata(llama__attention__head_count=True),
}


@pytest.mark.parametrize(("message", "tiny"), UNUSABLE.items(), ids=UNUSABLE.keys())
def test_a_file_that_cannot_be_used_says_why(message: str, tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        imported(tiny, tmp_path)


def test_an_unsupported_architecture_names_those_that_are(tmp_path: Path) -> None:
    tiny = tiny_model("llama")
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    for name, values in gguf_tensors("llama", tiny.model).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError, match="architecture mamba is not supported; supported: llama, llama with experts, qwen2"
    ):
        import_gguf(path, tmp_path, no_progress)


def test_an_unsupported_quantisation_is_named(tmp_path: Path) -> None:
    path = tiny_model("llama").write(tmp_path / "tiny.gguf")
    file_bytes = bytearray(path.read_bytes())
    name = b"blk.0.attn_v.weight"
    kind_at = file_bytes.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions and two sizes
    file_bytes[kind_at : kind_at + 4] = int(gguf.GGMLQuantizationType.I32).to_bytes(4, "little")
    path.write_bytes(file_bytes)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_v\.weight is quantized as I32"):
        import_gguf(path, tmp_path, no_progress)


def test_fingerprint_and_weights_parse_a_header_once_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = imported(tiny_model("llama"), tmp_path)
    place, parsed = gguf_file.GgufFile._placed, []
    monkeypatch.setattr(gguf_file.GgufFile, "_placed", lambda *given: parsed.append(1) or place(*given))
    before = weights_fingerprint(folder)
    open_weights(folder)
    open_weights(folder)
    assert len(parsed) == 1
    tiny_model("llama", seed=1).write(tmp_path / "new.gguf").replace(folder / GGUF)
    assert weights_fingerprint(folder) != before
    assert len(parsed) == 2


def test_a_file_cut_short_anywhere_is_one_clear_error(tmp_path: Path) -> None:
    whole = tiny_model("llama").write(tmp_path / "tiny.gguf").read_bytes()
    for length in [0, 3, 10, 100, 3000, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"not a GGUF file|truncated or corrupt"):
            import_gguf(tmp_path / "cut.gguf", tmp_path, no_progress)


def test_a_tensor_without_elements_is_named(tmp_path: Path) -> None:
    path = tiny_model("llama").write(tmp_path / "tiny.gguf")
    file_bytes, name = bytearray(path.read_bytes()), b"blk.1.ffn_up.weight"
    rows_at = file_bytes.index(name) + len(name) + 4 + 8  # after the number of dimensions and the first size
    file_bytes[rows_at : rows_at + 8] = bytes(8)
    path.write_bytes(file_bytes)
    with pytest.raises(CheckpointError, match=r"a tensor without elements, blk\.1\.ffn_up\.weight"):
        import_gguf(path, tmp_path, no_progress)


def test_metadata_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_TEXTS", 200)
    with pytest.raises(CheckpointError, match="more than 200 texts"):
        import_gguf(tiny_model("llama").write(tmp_path / "tiny.gguf"), tmp_path, no_progress)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_damaged_header_never_ends_in_another_error_or_a_hang(tmp_path: Path) -> None:
    whole = tiny_model("llama").write(tmp_path / "tiny.gguf").read_bytes()
    header_bytes = whole.index(b"blk.1.ffn_up.weight")
    rng = np.random.default_rng(0)
    outcomes = []
    for _ in range(60):
        damaged = bytearray(whole)
        for position in rng.integers(0, header_bytes, 3):
            damaged[position] = rng.integers(0, 256)
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            import_gguf(tmp_path / "damaged.gguf", tmp_path, no_progress)
            outcomes.append("imported")
        except CheckpointError:
            outcomes.append("refused")
    assert outcomes.count("refused") > 10
