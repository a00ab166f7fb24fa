"""The ops of a model on one device: each with a contract, a plain torch reference and the versions of its backends."""

from kernels.adjust_logits import LogitAdjustments
from kernels.backend import Backend, load_backend
from kernels.copy_blocks import copy_blocks
from kernels.embedding import Embedding
from kernels.gumbel import noise_key
from kernels.host_blocks import bytes_of_block, load_blocks, save_blocks
from kernels.linear import Linear
from kernels.linear_int4 import Int4Weight
from kernels.linear_int8_native import has_native_int8_weight
from kernels.linear_whole_native import prefers_whole_native
from kernels.native_module import has_native, instruction_set, keep_freed_memory, set_num_threads
from kernels.paged import AttentionPlan, PagedKV
from kernels.recording import Recorder, Recording
from kernels.rope_and_store_kv import HeadNorms
from kernels.row_sampling import MAX_TOP_LOGPROBS, SampledRows, SamplingRows, allocate_rows, allocate_sampled
from kernels.sample import Draws

__all__ = [
    "MAX_TOP_LOGPROBS",
    "AttentionPlan",
    "Backend",
    "Draws",
    "Embedding",
    "HeadNorms",
    "Int4Weight",
    "Linear",
    "LogitAdjustments",
    "PagedKV",
    "Recorder",
    "Recording",
    "SampledRows",
    "SamplingRows",
    "allocate_rows",
    "allocate_sampled",
    "bytes_of_block",
    "copy_blocks",
    "has_native",
    "has_native_int8_weight",
    "instruction_set",
    "keep_freed_memory",
    "load_backend",
    "load_blocks",
    "noise_key",
    "prefers_whole_native",
    "save_blocks",
    "set_num_threads",
]
