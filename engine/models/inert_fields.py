"""The fields of config.json that cannot change what a model computes for a prompt.

Every other field is either read by the model's family or refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PATTERNS = ("_token_id", "_token_ids", "dropout", "_pdrop", "layerdrop", "_loss_coef")  # how their names end
_NAMES = frozenset(
    name
    for names in (
        # what the model is called, and who wrote the file
        "_name_or_path name_or_path architectures model_type transformers_version auto_map _commit_hash tokenizer_class"
        " transformers.js_config unsloth_version unsloth_fixed is_llama_config language bos_token eos_token pad_token",
        # how it is computed, not what
        "_attn_implementation _attn_implementation_autoset attn_implementation _experts_implementation dtype"
        " torch_dtype use_cache cache_implementation cache_config chunk_size_feed_forward torchscript use_bfloat16"
        " tf_legacy_loss use_flash_attn use_flash_attention legacy_cache pretraining_tp random_weights"
        " use_parallel_embedding",
        # training
        "initializer_range initializer_factor init_std embedding_init_std gradient_checkpointing router_jitter_noise",
        # outputs and heads of other tasks
        "output_attentions output_hidden_states output_router_logits return_dict return_dict_in_generate output_scores"
        " id2label label2id num_labels problem_type finetuning_task task_specific_params prefix summary_type"
        " summary_use_proj summary_activation summary_proj_to_labels is_decoder",
        # generation, which requests and generation_config.json decide
        "temperature top_k top_p min_p typical_p do_sample num_beams num_beam_groups max_length min_length"
        " max_new_tokens length_penalty repetition_penalty diversity_penalty no_repeat_ngram_size"
        " encoder_no_repeat_ngram_size early_stopping num_return_sequences bad_words_ids suppress_tokens"
        " begin_suppress_tokens exponential_decay_length_penalty remove_invalid_values",
    )
    for name in names.split()
)
# Fields that published files have for features which no family here has, with the values that leave the feature out.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "causal": (True,),
    "compression_ratio": (1,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "is_causal": (True,),
    "scale_attn_weights": (True,),
}
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})


def is_inert(name: str, value: Any) -> bool:
    """Whether a field that a family did not read leaves its mathematics as they are.

    A field that is null, false, zero or empty switches nothing on, unless its name is in _NEUTRAL.
    """
    return name in _NAMES or name.endswith(_PATTERNS) or value in _NEUTRAL.get(name, _OFF)
