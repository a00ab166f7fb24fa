"""Quantized safetensors weights against what their formats' definitions give, computed in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagoda_server.checkpoints import CheckpointError
from pagoda_server.checkpoints.stored import Grouping
from pagoda_server.checkpoints.weight_files import open_weights
from tests.checkpoints.quantized_tensors import AWQ_ORDER, pack_words

OUT, IN = 24, 128


def folder(tmp_path: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    return tmp_path


def drawn(bits: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], zeros [out, groups] and scales [out, groups] float16."""
    torch.manual_seed(0)
    most = (1 << bits) - 1
    codes, zeros = torch.randint(0, most + 1, (OUT, IN)), torch.randint(1, most + 1, (OUT, groups))
    return codes, zeros, (torch.rand(OUT, groups) / 50 + 0.001).half()


def check(found: Any, expected: Tensor, scales: Tensor, grouping: Grouping | None) -> None:
    """Rows in any order, and by groups too. A minimum is rounded to float16 once: that is all that may differ."""
    assert found.shape == (OUT, IN)
    assert found.grouping == grouping
    rows = np.random.default_rng(0).permutation(OUT)
    for index in (slice(None), slice(8, 24), rows):
        whole = torch.from_numpy(np.array(found.whole(index)))
        codes = 0 if grouping is None else 1 << grouping.bits
        most = 2.0**-11 * codes * scales.double().amax(1)[index, None] + 1e-6
        assert ((whole.double() - expected[index]).abs() <= most).all()
    if grouping is not None:
        groups = found.groups(rows)
        assert groups.scales.dtype == (np.float32 if grouping.is_float else np.float16)
        assert np.array_equal(groups.dequantize(grouping), found.whole(rows))
    for start, stop in ((32, 96), (0, 64), (5, 70)):
        part = found.columns(slice(start, stop))
        assert part.shape == (OUT, stop - start)
        assert np.array_equal(part.whole(rows), found.whole(rows)[:, start:stop])
        assert part.grouping == (
            None if grouping is None or start % grouping.group or stop % grouping.group else grouping
        )
        if part.grouping is not None:
            assert np.array_equal(part.groups(rows).dequantize(part.grouping), part.whole(rows))


INT4, INT8 = Grouping(4, has_minimum=True), Grouping(8, has_minimum=True)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq(group: int, tmp_path: Path) -> None:
    codes, zeros, scales = drawn(4, IN // group)
    tensors = {
        "a.qweight": pack_words(codes.T, 4, 1, AWQ_ORDER),
        "a.qzeros": pack_words(zeros.T, 4, 1, AWQ_ORDER),
        "a.scales": scales.T.contiguous(),
        "b.weight": torch.ones(2, 2),
    }
    found = open_weights(folder(tmp_path, tensors, {"quant_method": "awq", "bits": 4, "group_size": group}))
    assert set(found) == {"a.weight", "b.weight"}
    expected = (codes - zeros.repeat_interleave(group, 1)) * scales.double().repeat_interleave(group, 1)
    check(found["a.weight"], expected, scales, INT4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(bits: int, version: str, act_order: bool, tmp_path: Path) -> None:
    codes, zeros, scales = drawn(bits, IN // 32)
    group_of_input = torch.arange(IN) // 32
    if act_order:
        group_of_input = group_of_input[torch.randperm(IN)]
    tensors = {
        "a.qweight": pack_words(codes.T, bits, 0),
        "a.qzeros": pack_words(zeros.T - int(version == "gptq"), bits, 1),
        "a.scales": scales.T.contiguous(),
        "a.g_idx": group_of_input.int(),
    }
    quantization = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": version}
    found = open_weights(folder(tmp_path, tensors, quantization))
    assert set(found) == {"a.weight"}
    expected = (codes - zeros[:, group_of_input]) * scales.double()[:, group_of_input]
    check(found["a.weight"], expected, scales, None if act_order else INT4 if bits == 4 else INT8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("group", [32, 128])
def test_compressed_tensors_packed(bits: int, is_symmetric: bool, group: int, tmp_path: Path) -> None:
    codes, zeros, scales = drawn(bits, IN // group)
    tensors = {
        "a.weight_packed": pack_words(codes, bits, 1),
        "a.weight_scale": scales.bfloat16(),
        "a.weight_shape": torch.tensor([OUT, IN]),
    }
    if is_symmetric:
        zeros = torch.full_like(zeros, 1 << bits - 1)
    else:
        tensors["a.weight_zero_point"] = pack_words(zeros, bits, 0)
    found = open_weights(folder(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "pack-quantized"}))
    assert set(found) == {"a.weight"}
    exact = scales.bfloat16().double().repeat_interleave(group, 1)
    check(found["a.weight"], (codes - zeros.repeat_interleave(group, 1)) * exact, scales, INT4 if bits == 4 else INT8)


def test_compressed_tensors_int8(tmp_path: Path) -> None:
    codes, _, scales = drawn(8, 1)
    values = (codes - 128).to(torch.int8)
    tensors = {"a.weight": values, "a.weight_scale": scales}
    found = open_weights(folder(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "int-quantized"}))
    check(found["a.weight"], values.double() * scales.double(), scales * 0, Grouping(8))


@pytest.mark.parametrize("scale", ["tensor", "channel", "block", "block that does not fit"])
def test_float8(scale: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(OUT, IN).to(torch.float8_e4m3fn)
    quantization: dict[str, Any] = {"quant_method": "fp8"}
    group = IN
    match scale:
        case "tensor":
            name, factors = "weight_scale", torch.tensor(0.03)
            whole = factors.double()
        case "channel":
            name, factors = "weight_scale", torch.rand(OUT, 1)
            whole = factors.double()
            quantization = {"quant_method": "compressed-tensors", "format": "float-quantized"}
        case _:
            width = 64 if scale == "block" else 96
            name, factors = "weight_scale_inv", torch.rand(2, 2)
            whole = factors.double().repeat_interleave(16, 0)[:OUT].repeat_interleave(width, 1)[:, :IN]
            quantization["weight_block_size"] = [16, width]
            group = width
    tensors = {"a.weight": weight, f"a.{name}": factors, "b.weight": torch.ones(2, 2)}
    found = open_weights(folder(tmp_path, tensors, quantization))
    assert set(found) == {"a.weight", "b.weight"}
    grouping = None if scale == "block that does not fit" else Grouping(8, group, is_float=True)
    check(found["a.weight"], weight.double() * whole, torch.full((OUT, 1), 1e-5), grouping)


def test_every_code_of_float8_has_its_value(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    tensors = {"a.weight": codes, "a.weight_scale": torch.tensor(1.0)}
    whole = open_weights(folder(tmp_path, tensors, {"quant_method": "fp8"}))["a.weight"].whole(slice(None))
    np.testing.assert_array_equal(whole, codes.float().numpy())


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def test_mxfp4_experts_have_the_values_that_transformers_gives_them(tmp_path: Path) -> None:
    count, ffn, name = 3, 64, "model.layers.0.mlp.experts"
    tensors = {"b.weight": torch.ones(2, 2)}
    expected = {}
    for module, rows, groups in (("gate_up_proj", 2 * ffn, IN // 32), ("down_proj", IN, ffn // 32)):
        blocks = torch.randint(0, 256, (count, rows, groups, 16), dtype=torch.uint8)
        scales = torch.randint(110, 134, (count, rows, groups), dtype=torch.uint8)
        bias = torch.randn(count, rows).bfloat16()
        tensors |= {f"{name}.{module}_blocks": blocks, f"{name}.{module}_scales": scales, f"{name}.{module}_bias": bias}
        expected[module] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).mT, bias.float()
    found = open_weights(folder(tmp_path, tensors, MXFP4))
    projections = ("gate_up_proj", "gate_proj", slice(0, None, 2)), ("gate_up_proj", "up_proj", slice(1, None, 2))
    names = {"b.weight"}
    for module, projection, turn in (*projections, ("down_proj", "down_proj", slice(None))):
        for expert in range(count):
            weight, bias = (found[f"{name}.{expert}.{projection}.{kind}"] for kind in ("weight", "bias"))
            names |= {f"{name}.{expert}.{projection}.{kind}" for kind in ("weight", "bias")}
            whole, of_bias = (each[expert, turn].numpy() for each in expected[module])
            assert (weight.shape, bias.shape) == (whole.shape, of_bias.shape)
            rows = np.random.default_rng(0).permutation(len(whole))
            np.testing.assert_array_equal(weight.whole(rows), whole[rows])
            np.testing.assert_array_equal(weight.groups(slice(8, 24)).dequantize(weight.grouping), whole[8:24])
            np.testing.assert_array_equal(bias.whole(slice(8, 24)), of_bias[8:24])
    assert set(found) == names
    assert sum(each.num_bytes for each in found.values()) == sum(each.nbytes for each in tensors.values())


@pytest.mark.parametrize(
    ("name", "shapes", "message"),
    [
        (
            "experts.down_proj",
            ((2, 8, 1, 15), (2, 8, 1)),
            r"down_proj_blocks has shape \[2, 8, 1, 15\], and its scales",
        ),
        ("experts.down_proj", ((2, 8, 1, 16), (2, 8, 2)), r"and its scales \[2, 8, 2\]"),
        ("self_attn.q_proj", ((2, 8, 1, 16), (2, 8, 1)), "q_proj_blocks: only experts are supported in mxfp4"),
    ],
)
def test_mxfp4_tensors_that_do_not_fit_are_named(
    name: str, shapes: tuple[tuple[int, ...], ...], message: str, tmp_path: Path
) -> None:
    blocks, scales = (torch.zeros(shape, dtype=torch.uint8) for shape in shapes)
    with pytest.raises(CheckpointError, match=message):
        open_weights(folder(tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": scales}, MXFP4))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "weights in bitsandbytes are not supported; supported: awq, gptq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv is not supported; supported: gemm"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported; supported: 4, 8"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format marlin-24 is not supported"),
        ({"quant_method": "gptq", "bits": 4.0}, "bits 4.0 is not supported; supported: 4, 8"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {"a": 1}},
            "transform_config .* is not supported",
        ),
        ([4], r"quantization_config must be an object, not \[4\]"),
    ],
)
def test_what_is_not_supported_is_named(quantization: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_weights(folder(tmp_path, {"a.weight": torch.ones(2, 2)}, quantization))


def test_groups_that_do_not_fit_are_named(tmp_path: Path) -> None:
    codes, zeros, scales = drawn(4, IN // 16)
    tensors = {
        "a.qweight": pack_words(codes.T, 4, 1, AWQ_ORDER),
        "a.qzeros": pack_words(zeros.T, 4, 1, AWQ_ORDER),
        "a.scales": scales.T.contiguous(),
    }
    with pytest.raises(CheckpointError, match="a: 128 inputs have 8 groups; groups of a multiple of 32 are supported"):
        open_weights(folder(tmp_path, tensors, {"quant_method": "awq", "bits": 4}))


Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]

AWQ_TENSORS: Layout = {
    "a.qweight": ((IN, OUT // 8), torch.int32),
    "a.qzeros": ((4, OUT // 8), torch.int32),
    "a.scales": ((4, OUT), torch.float16),
}
GPTQ_TENSORS = AWQ_TENSORS | {
    "a.qweight": ((IN // 8, OUT), torch.int32),
    "a.g_idx": ((IN,), torch.int32),
}
PACKED_TENSORS: Layout = {
    "a.weight_packed": ((OUT, IN // 8), torch.int32),
    "a.weight_scale": ((OUT, 4), torch.float16),
    "a.weight_zero_point": ((OUT // 8, 4), torch.int32),
}
INT8_TENSORS: Layout = {
    "a.weight": ((OUT, IN), torch.int8),
    "a.weight_scale": ((OUT, 1), torch.float32),
}
FLOAT8_TENSORS: Layout = {
    "a.weight": ((OUT, IN), torch.float8_e4m3fn),
    "a.weight_scale_inv": ((1, 1), torch.float32),
}
LAYOUTS: list[tuple[dict[str, Any], Layout]] = [
    ({"quant_method": "awq", "bits": 4}, AWQ_TENSORS),
    ({"quant_method": "gptq", "bits": 4}, GPTQ_TENSORS),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, PACKED_TENSORS),
    ({"quant_method": "compressed-tensors", "format": "int-quantized"}, INT8_TENSORS),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, FLOAT8_TENSORS),
]


SHAPES = [(), (2,), (2, 3, 4)]


@pytest.mark.parametrize(
    ("quantization", "layout", "name", "shape"),
    [
        (quantization, layout, name, shape)
        for quantization, layout in LAYOUTS
        for name in layout
        for shape in SHAPES
        if (layout, shape) != (INT8_TENSORS, ()) or name == "a.weight"  # one scale may be that of all outputs
    ],
)
def test_a_tensor_of_another_shape_is_refused(
    quantization: dict[str, Any], layout: Layout, name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = {each: torch.zeros(right, dtype=dtype) for each, (right, dtype) in layout.items()}
    if "a.weight_packed" in tensors:
        tensors["a.weight_shape"] = torch.tensor([OUT, IN])
    assert set(open_weights(folder(tmp_path, tensors, quantization))) == {"a.weight"}
    tensors[name] = torch.zeros(shape, dtype=layout[name][1])
    with pytest.raises(CheckpointError, match=r"'?a"):
        open_weights(folder(tmp_path, tensors, quantization))


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "fp8"}, "weight_scale"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_scale"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "weight_scale"),
    ],
)
def test_float8_weights_without_their_scale_are_refused(
    quantization: dict[str, Any], name: str, tmp_path: Path
) -> None:
    tensors = {"a.weight": torch.ones(OUT, IN).to(torch.float8_e4m3fn), f"a.{name}": torch.ones(1, 1)}
    assert set(open_weights(folder(tmp_path, tensors, quantization))) == {"a.weight"}
    del tensors[f"a.{name}"]
    with pytest.raises(CheckpointError, match=r"tensor a\.weight is stored as F8_E4M3, but its scale is missing"):
        open_weights(folder(tmp_path, tensors, quantization))


def test_scales_of_blocks_are_not_taken_for_those_of_outputs(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(OUT, IN).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(OUT // 4, 4)}
    with pytest.raises(CheckpointError, match="not one value for each output"):
        open_weights(folder(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "float-quantized"}))


def test_groups_in_the_order_of_activations_need_their_index(tmp_path: Path) -> None:
    tensors = {each: torch.zeros(shape, dtype=dtype) for each, (shape, dtype) in GPTQ_TENSORS.items()}
    del tensors["a.g_idx"]
    with pytest.raises(CheckpointError, match="g_idx is missing, but desc_act is set"):
        open_weights(folder(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "desc_act": True}))
