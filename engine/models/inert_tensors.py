"""The tensors of a checkpoint that cannot change what a model computes for a prompt.

Every other tensor is either read by the model's family or refused by its name.
"""

from __future__ import annotations

import re

_NAMES = re.compile(
    r"\brotary_emb\.(inv_freq|cos_cached|sin_cached)$"  # computed from config.json
    r"|\.(attn|attention)\.(bias|masked_bias)$"  # causal masks, which GPT-2 and its kin save
    r"|\.[kv]_scale$"  # of a KV cache in another format
    r"|(^|\.)mtp[._]"  # layers that predict a token after the next one
)


def is_inert(name: str, unused_head: str, layers: str, last: range) -> bool:
    """Whether a tensor that no family read leaves the model's mathematics as they are.

    unused_head  the head of a model that uses its embedding instead; empty: the head is used
    layers       what the names of layers begin with
    last         numbers of the layers behind the model's own, which predict a token after the next one
    """
    if name == f"{unused_head}.weight" or _NAMES.search(name):
        return True
    number = name.removeprefix(f"{layers}.").partition(".")[0]
    return name.startswith(f"{layers}.") and number.isdecimal() and int(number) in last
