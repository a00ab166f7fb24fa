"""The families that are served, by their names in config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import dense_families as dense
from . import expert_families as experts
from .config import ModelConfig
from .config_file import ConfigFile


@dataclass(frozen=True, slots=True)
class Family:
    """
    architecture  the family's name in `architectures` of config.json
    model_type    its name in `model_type`
    configure     reads config.json; raises ConfigError for whatever is not supported
    """

    architecture: str
    model_type: str
    configure: Callable[[ConfigFile, str], ModelConfig]

    @property
    def base_architecture(self) -> str:
        """What a checkpoint of the base model alone has in `architectures`."""
        return self.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")


FAMILIES = (
    Family("LlamaForCausalLM", "llama", dense.llama),
    Family("LlamaForCausalLM", "internlm3", dense.llama),
    Family("LlamaForCausalLM", "iquestcoder", dense.llama),
    Family("MistralForCausalLM", "mistral", dense.mistral),
    Family("MinistralForCausalLM", "ministral", dense.mistral),
    Family("Ministral3ForCausalLM", "ministral3", dense.ministral3),
    Family("CwmForCausalLM", "cwm", dense.cwm),
    Family("ArceeForCausalLM", "arcee", dense.arcee),
    Family("ApertusForCausalLM", "apertus", dense.apertus),
    Family("Qwen2ForCausalLM", "qwen2", dense.qwen2),
    Family("Qwen3ForCausalLM", "qwen3", dense.qwen3),
    Family("Olmo2ForCausalLM", "olmo2", dense.olmo2),
    Family("Olmo3ForCausalLM", "olmo3", dense.olmo3),
    Family("SmolLM3ForCausalLM", "smollm3", dense.smollm3),
    Family("GraniteForCausalLM", "granite", dense.granite),
    Family("GraniteSWAForCausalLM", "granite_swa", dense.granite_swa),
    Family("HyperCLOVAXForCausalLM", "hyperclovax", dense.hyperclovax),
    Family("GlmForCausalLM", "glm", dense.glm),
    Family("Glm4ForCausalLM", "glm4", dense.glm4),
    Family("Exaone4ForCausalLM", "exaone4", dense.exaone4),
    Family("SeedOssForCausalLM", "seed_oss", dense.seed_oss),
    Family("Ernie4_5ForCausalLM", "ernie4_5", dense.ernie),
    Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", dense.hunyuan),
    Family("HeliumForCausalLM", "helium", dense.helium),
    Family("Phi3ForCausalLM", "phi3", dense.phi3),
    Family("PhiForCausalLM", "phi", dense.phi),
    Family("Starcoder2ForCausalLM", "starcoder2", dense.starcoder2),
    Family("StableLmForCausalLM", "stablelm", dense.stablelm),
    Family("GPTNeoXForCausalLM", "gpt_neox", dense.gpt_neox),
    Family("GPT2LMHeadModel", "gpt2", dense.gpt2),
    Family("GPTBigCodeForCausalLM", "gpt_bigcode", dense.gpt_bigcode),
    Family("GPTJForCausalLM", "gptj", dense.gptj),
    Family("OPTForCausalLM", "opt", dense.opt),
    Family("CohereForCausalLM", "cohere", dense.cohere),
    Family("Cohere2ForCausalLM", "cohere2", dense.cohere2),
    Family("NemotronForCausalLM", "nemotron", dense.nemotron),
    Family("Jais2ForCausalLM", "jais2", dense.jais2),
    Family("OlmoForCausalLM", "olmo", dense.olmo),
    Family("GemmaForCausalLM", "gemma", dense.gemma),
    Family("Gemma2ForCausalLM", "gemma2", dense.gemma2),
    Family("VaultGemmaForCausalLM", "vaultgemma", dense.vaultgemma),
    Family("Gemma3ForCausalLM", "gemma3_text", dense.gemma3),
    Family("MixtralForCausalLM", "mixtral", experts.mixtral),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", experts.qwen2_moe),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", experts.qwen3_moe),
    Family("OlmoeForCausalLM", "olmoe", experts.olmoe),
    Family("FlexOlmoForCausalLM", "flex_olmo", experts.flex_olmo),
    Family("Glm4MoeForCausalLM", "glm4_moe", experts.glm4_moe),
    Family("Dots1ForCausalLM", "dots1", experts.dots1),
    Family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", experts.ernie_moe),
    Family("GraniteMoeForCausalLM", "granitemoe", experts.granite_moe),
    Family("GraniteMoeSharedForCausalLM", "granitemoeshared", experts.granite_moe_shared),
    Family("GptOssForCausalLM", "gpt_oss", experts.gpt_oss),
    Family("MiniMaxM2ForCausalLM", "minimax_m2", experts.minimax_m2),
)
