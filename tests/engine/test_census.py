"""Every causal family of transformers is served and equal, or refused with a reason: nothing is silently different."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.models import FAMILIES, read_config
from tests.engine.census import changed, changes, outcome_of
from tests.engine.tiny_models import MODELS, ONE_OF_EACH_FAMILY

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
_WITHOUT_SIZES = ("dots1", "glm4_moe")  # their classes' default sizes are those of no model
SERVED = {family.model_type: family.architecture for family in FAMILIES}


@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_a_family_of_transformers_is_served_or_refused_by_its_name(model_type: str, tmp_path: Path) -> None:
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    try:
        fields = AutoConfig.for_model(model_type).to_dict()
    except StrictDataclassError:  # a class whose own default values are not valid
        fields = {"model_type": model_type}
    fields["architectures"] = [architecture]
    (tmp_path / "config.json").write_text(json.dumps(fields, default=str))
    if model_type in _WITHOUT_SIZES:
        with pytest.raises(ConfigError, match=r"config\.json"):
            read_config(tmp_path)
    elif SERVED.get(fields["model_type"]) == architecture:
        assert read_config(tmp_path).family == fields["model_type"]
    else:
        with pytest.raises(ConfigError, match=f"architecture {architecture} .*is not supported; of the "):
            read_config(tmp_path)


def cases() -> list[ParameterSet]:
    """Every third value of a field, in each family others; all of them at night."""
    return [
        *(pytest.param(each, at, 3, marks=pytest.mark.thorough) for at, each in enumerate(ONE_OF_EACH_FAMILY)),
        *(pytest.param(each, 0, 1, marks=pytest.mark.nightly) for each in ONE_OF_EACH_FAMILY),
    ]


@pytest.mark.parametrize(("model", "first", "stride"), cases())
def test_a_field_with_another_value_is_computed_or_refused(model: str, first: int, stride: int, tmp_path: Path) -> None:
    config = MODELS[model]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    saved: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    assert outcome_of(saved, tmp_path).kind == "equal"
    outcomes = {
        f"{name} = {value}": outcome_of(changed(saved, name, value), tmp_path)
        for name, value in changes(config, saved, first, stride)
    }
    assert {change: each for change, each in outcomes.items() if each.kind == "different"} == {}
    assert sum(each.kind == "equal" for each in outcomes.values()) > 5 / stride
    refused = [each.detail for each in outcomes.values() if each.kind == "refused"]
    assert refused
    assert all("\n" not in line for line in refused)


def test_the_page_of_models_has_a_row_for_every_family() -> None:
    page = DOCS.read_text()
    assert [architecture for architecture in SERVED.values() if f"`{architecture}`" not in page] == []
    refused = {
        architecture
        for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if architecture not in SERVED.values()
    }
    assert sorted(architecture for architecture in refused if f"`{architecture}`" not in page) == []
