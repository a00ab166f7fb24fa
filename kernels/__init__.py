"""The ops of a model on one device. Each has a contract, a reference in plain torch, and versions for the backends."""

from .activate import Activation, Function
from .adjust_logits import LogitAdjustments
from .backend import UNQUANTIZED, Backend
from .copy_blocks import bytes_of_block, copy_blocks, load_blocks, save_blocks
from .embedding import Embedding
from .experts import Experts, ExpertWeights
from .gguf_blocks import read_groups, read_values, reads_blocks
from .grouped_weight import INT4, GroupedFormat, GroupedWeight
from .linear import GATED, HEAD, PLAIN, ROUTER, Linear, Use, is_compiled_whole
from .linear_grouped import PackedGroups
from .linear_int8 import PackedInt8
from .linear_quantized import has_native_int8_weight
from .low_rank import BankShape, LowRankBank, LowRankPart, Packed
from .native_module import has_native, instruction_set, keep_freed_memory, set_num_threads
from .paged import AttentionPlan, PagedKV, Scoring
from .quantize_int4 import quantize_int4_native
from .recording import Recorder, Recording
from .registry import load_backend
from .rope_and_store_kv import HeadNorms
from .route import Routing
from .row_sampling import (
    MAX_TOP_LOGPROBS,
    SampledRows,
    SamplingRows,
    Verified,
    allocate_rows,
    allocate_sampled,
)
from .sample import Draws

__all__ = [
    "GATED",
    "HEAD",
    "INT4",
    "MAX_TOP_LOGPROBS",
    "PLAIN",
    "ROUTER",
    "UNQUANTIZED",
    "Activation",
    "AttentionPlan",
    "Backend",
    "BankShape",
    "Draws",
    "Embedding",
    "ExpertWeights",
    "Experts",
    "Function",
    "GroupedFormat",
    "GroupedWeight",
    "HeadNorms",
    "Linear",
    "LogitAdjustments",
    "LowRankBank",
    "LowRankPart",
    "Packed",
    "PackedGroups",
    "PackedInt8",
    "PagedKV",
    "Recorder",
    "Recording",
    "Routing",
    "SampledRows",
    "SamplingRows",
    "Scoring",
    "Use",
    "Verified",
    "allocate_rows",
    "allocate_sampled",
    "bytes_of_block",
    "copy_blocks",
    "has_native",
    "has_native_int8_weight",
    "instruction_set",
    "is_compiled_whole",
    "keep_freed_memory",
    "load_backend",
    "load_blocks",
    "quantize_int4_native",
    "read_groups",
    "read_values",
    "reads_blocks",
    "save_blocks",
    "set_num_threads",
]
