// The Python module `pagoda_server.kernels._native`: ops on addresses. The Python functions that call them, each in the file
// of its op, check shapes and dtypes.

// One binary for every CPython from 3.11 on (PEP 384); setup.py names the wheel after it.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "gguf_blocks.h"
#include "head_norms.h"
#include "ops.h"
#include "pack_low_rank.h"
#include "recording.h"
#include "route.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace {

using namespace pagoda;

// Never destroyed: at exit, its threads may already be gone.
ThreadPool& pool = *new ThreadPool;
std::mutex& one_op = *new std::mutex;  // ops share the pool and keep their buffers for the next
const Ops* ops = nullptr;

// Reads integers, addresses and floats from an argument list, in order.
class Arguments {
public:
    Arguments(PyObject* const* values, Py_ssize_t count, Py_ssize_t expected) : values_(values) {
        if (count != expected) PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", expected, count);
    }

    int64_t integer() { return failed() ? 0 : PyLong_AsLongLong(*values_++); }
    float real() { return failed() ? 0 : static_cast<float>(PyFloat_AsDouble(*values_++)); }
    Grouped format() { return static_cast<Grouped>(integer()); }
    Dtype dtype() { return integer() == 0 ? Dtype::float32 : Dtype::bfloat16; }

    template <typename T = void>
    T* address() {
        return failed() ? nullptr : static_cast<T*>(PyLong_AsVoidPtr(*values_++));
    }

    Activation activation() {
        Activation by{};
        by.function = static_cast<Function>(integer());
        by.is_gated = integer() != 0;
        for (float& parameter : by.parameters) parameter = real();
        return by;
    }

    bool failed() const { return PyErr_Occurred() != nullptr; }

private:
    PyObject* const* values_;
};

// Runs an op without the interpreter's lock, which other threads of the engine need. A recording keeps the op, so it must
// capture by value.
template <typename Op>
PyObject* run(const Arguments& arguments, const Op& op) {
    if (arguments.failed()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    {
        std::lock_guard lock(one_op);
        op();
    }
    Py_END_ALLOW_THREADS;
    if (open_recording) open_recording->add(op);
    Py_RETURN_NONE;
}

PyObject* norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 11);
    Dtype dtype = next.dtype();
    NormArgs args{};
    args.x = next.address();
    args.weight = next.address();
    args.bias = next.address();
    args.residual = next.address();
    args.residual_dtype = next.dtype();
    args.out = next.address();
    args.rows = next.integer();
    args.size = next.integer();
    args.eps = next.real();
    args.is_centred = next.integer() != 0;
    return run(next, [=] { ops->norm(pool, dtype, args); });
}

PyObject* activate(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 9);
    Dtype dtype = next.dtype();
    void *x = next.address(), *out = next.address();
    int64_t rows = next.integer(), size = next.integer();
    Activation activation = next.activation();
    return run(next, [=] { ops->activate(pool, dtype, x, out, rows, size, activation); });
}

PyObject* cap(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 4);
    Dtype dtype = next.dtype();
    void* x = next.address();
    int64_t size = next.integer();
    float softcap = next.real();
    return run(next, [=] { ops->cap(pool, dtype, x, size, softcap); });
}

PyObject* rope_and_store_kv(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 15);
    Dtype dtype = next.dtype();
    RopeArgs args{};
    args.qkv = next.address();
    args.cosines = next.address<float>();
    args.sines = next.address<float>();
    args.slots = next.address<int64_t>();
    args.keys = next.address();
    args.values = next.address();
    args.key_scales = next.address<float>();
    args.value_scales = next.address<float>();
    args.centre = next.address<float>();
    args.queries = next.address();
    args.num_tokens = next.integer();
    args.num_heads = next.integer();
    args.num_kv_heads = next.integer();
    args.head_dim = next.integer();
    return run(next, [=] { ops->rope_and_store_kv(pool, dtype, args); });
}

PyObject* head_norms(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 12);
    Dtype dtype = next.dtype();
    HeadNormArgs args{};
    args.qkv = next.address();
    args.query = next.address();
    args.key = next.address();
    args.out = next.address();
    args.num_tokens = next.integer();
    args.num_heads = next.integer();
    args.num_kv_heads = next.integer();
    args.head_dim = next.integer();
    args.query_size = next.integer();
    args.key_size = next.integer();
    args.eps = next.real();
    return run(next, [=] { pagoda::head_norms(pool, *ops, dtype, args); });
}

PyObject* paged_attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 19);
    AttentionArgs args{};
    args.dtype = next.dtype();
    args.queries = next.address();
    args.keys = next.address();
    args.values = next.address();
    args.key_scales = next.address<float>();
    args.value_scales = next.address<float>();
    args.query_start = next.address<int32_t>();
    args.context_len = next.address<int32_t>();
    args.block_table = next.address<int32_t>();
    args.out = next.address();
    args.num_seqs = next.integer();
    args.max_blocks = next.integer();
    args.block_size = next.integer();
    args.num_heads = next.integer();
    args.num_kv_heads = next.integer();
    args.head_dim = next.integer();
    args.sliding_window = next.integer();
    args.sinks = next.address<float>();
    args.softcap = next.real();
    return run(next, [=] { ops->paged_attention(pool, args); });
}

PyObject* argmax(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 7);
    Dtype dtype = next.dtype();
    void* x = next.address();
    int64_t* rows = next.address<int64_t>();
    uint32_t* masks = next.address<uint32_t>();
    int64_t* out = next.address<int64_t>();
    int64_t num_rows = next.integer(), size = next.integer();
    return run(next, [=] { ops->argmax(pool, dtype, x, rows, masks, out, num_rows, size); });
}

PyObject* mask_rows(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 5);
    float* x = next.address<float>();
    int64_t* rows = next.address<int64_t>();
    uint32_t* masks = next.address<uint32_t>();
    int64_t num_rows = next.integer(), size = next.integer();
    return run(next, [=] { ops->mask_rows(pool, x, rows, masks, num_rows, size); });
}

// Returns how many draws are unsure.
PyObject* sample(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 14);
    Dtype dtype = next.dtype();
    DrawArgs args{};
    args.x = next.address();
    args.tokens = next.address<int64_t>();
    int64_t num_rows = next.integer();
    args.size = next.integer();
    args.rows = next.address<int64_t>();
    args.temperature = next.address<float>();
    args.seed = next.address<int64_t>();
    args.positions = next.address<int64_t>();
    args.top_k = next.address<int64_t>();
    args.top_p = next.address<float>();
    args.lowest = next.address<float>();
    args.count = next.integer();
    args.only_likeliest = next.integer();
    PyObject* done = run(next, [=] {
        ops->argmax(pool, dtype, args.x, nullptr, nullptr, args.tokens, num_rows, args.size);
        ops->draw(pool, dtype, args);
    });
    if (!done) return nullptr;
    Py_DECREF(done);
    return PyLong_FromLongLong(std::count(args.tokens, args.tokens + num_rows, UNSURE_DRAW));
}

// A weight [out, in] of a dtype, and one in the blocks of a GGUF file.
struct DenseWeight {
    Dtype dtype;
    const void* values;
    int64_t in;

    static void read(const void* weight, int64_t row, float* to) {
        auto& self = *static_cast<const DenseWeight*>(weight);
        if (self.dtype == Dtype::float32) {
            std::memcpy(to, static_cast<const float*>(self.values) + row * self.in, self.in * sizeof(float));
            return;
        }
        auto* from = static_cast<const uint16_t*>(self.values) + row * self.in;
        for (int64_t i = 0; i < self.in; i++) {
            uint32_t bits = uint32_t{from[i]} << 16;
            std::memcpy(to + i, &bits, sizeof bits);
        }
    }
};

struct BlockWeight {
    Blocks kind;
    const uint8_t* blocks;
    const int8_t* table;
    int64_t blocks_a_row, row_bytes;

    static void read(const void* weight, int64_t row, float* to) {
        auto& self = *static_cast<const BlockWeight*>(weight);
        read_values(self.kind, self.blocks + row * self.row_bytes, self.blocks_a_row, self.table, to);
    }
};

// The same weight, read in groups.
struct BlockGroups {
    BlockWeight weight;
    int64_t in;

    static GroupRow read(const void* groups, int64_t row, uint8_t* buffer) {
        auto& self = *static_cast<const BlockGroups*>(groups);
        auto* scales = reinterpret_cast<uint16_t*>(buffer);
        uint16_t* minimums = scales + self.in / 16;  // a group has at least 16 inputs
        auto* values = reinterpret_cast<uint8_t*>(minimums + self.in / 16);
        read_groups(self.weight.kind, self.weight.blocks + row * self.weight.row_bytes, self.weight.blocks_a_row, values, scales, minimums);
        return {values, scales, minimums};
    }
};

template <typename Op>
PyObject* pack_int8_by(PyObject* const* values, Py_ssize_t count, const Op& op) {
    Arguments next(values, count, 6);
    DenseWeight weight{};
    weight.dtype = next.dtype();
    weight.values = next.address();
    int8_t* packed = next.address<int8_t>();
    float* scales = next.address<float>();
    int64_t out = 0;
    weight.in = next.integer();
    out = next.integer();
    return run(next, [=] { op(pool, WeightRows{DenseWeight::read, &weight, weight.in, out}, packed, scales); });
}

// Counts blocks; -1 if they are not what so many weights need, or if there is no such kind.
int64_t count_blocks(Blocks kind, int64_t num_bytes, int64_t num_weights) {
    if (kind < Blocks{} || kind >= Blocks::count) return -1;
    return with_layout(kind, [=](auto layout) {
        using L = decltype(layout);
        return num_bytes % L::BYTES == 0 && num_weights == num_bytes / L::BYTES * L::SIZE ? num_bytes / L::BYTES : -1;
    });
}

// Reads the arguments (kind, blocks, bytes), and later the sizes, which have to agree with them.
struct BlockArguments {
    BlockWeight weight{};
    int64_t num_bytes;

    explicit BlockArguments(Arguments& next) {
        weight.kind = static_cast<Blocks>(next.integer());
        weight.blocks = next.address<uint8_t>();
        num_bytes = next.integer();
        weight.table = next.address<int8_t>();
    }

    // Sets an exception if it returns false.
    bool fit(const Arguments& next, int64_t in, int64_t out) {
        if (next.failed()) return false;
        weight.row_bytes = out > 0 ? num_bytes / out : 0;
        weight.blocks_a_row = count_blocks(weight.kind, weight.row_bytes, in);
        if (weight.blocks_a_row >= 0 && weight.row_bytes * out == num_bytes) return true;
        PyErr_SetString(PyExc_ValueError, "blocks and weights differ in their sizes");
        return false;
    }
};

template <typename Op>
PyObject* pack_int8_blocks_by(PyObject* const* values, Py_ssize_t count, const Op& op) {
    Arguments next(values, count, 8);
    BlockArguments blocks(next);
    int8_t* packed = next.address<int8_t>();
    float* scales = next.address<float>();
    int64_t in = next.integer(), out = next.integer();
    if (!blocks.fit(next, in, out)) return nullptr;
    return run(next, [=] { op(pool, WeightRows{BlockWeight::read, &blocks.weight, in, out}, packed, scales); });
}

enum class Scales { apart, inside };  // where a packed weight has its scales

// Reads the arguments of a product, which those of experts may follow. Of products in a format there are several ops, and its
// number comes first.
template <typename Op>
PyObject* multiply(PyObject* const* values, Py_ssize_t count, Scales scales, const Op& op) {
    constexpr bool HAS_FORMAT = std::is_same_v<Op, decltype(Ops::linear_grouped)>;
    constexpr Py_ssize_t OF_EXPERTS = 5;
    Py_ssize_t expected = (scales == Scales::apart ? 15 : 14) + HAS_FORMAT;
    bool has_experts = count > expected;
    Arguments next(values, count, expected + (has_experts ? OF_EXPERTS : 0));
    [[maybe_unused]] Grouped format{};
    if constexpr (HAS_FORMAT) format = next.format();
    Dtype dtype = next.dtype();
    LinearArgs args{};
    args.x = next.address();
    args.weight = next.address();
    if (scales == Scales::apart) args.scales = next.address<float>();
    args.bias = next.address();
    args.out = next.address();
    args.out_dtype = next.dtype();
    args.rows = next.integer();
    args.in = next.integer();
    args.out_size = next.integer();
    args.out_stride = next.integer();
    args.activation = next.activation();
    if (has_experts) {
        args.experts.starts = next.address<int32_t>();
        args.experts.sources = next.address<int32_t>();
        args.experts.count = next.integer();
        args.experts.weight_bytes = next.integer();
        args.experts.num_scales = next.integer();
    }
    return run(next, [=] {
        if constexpr (HAS_FORMAT)
            op(pool, dtype, format, args);
        else
            op(pool, dtype, args);
    });
}

PyObject* pack_int8(PyObject*, PyObject* const* values, Py_ssize_t count) {
    return pack_int8_by(values, count, ops->pack_int8);
}

PyObject* pack_int8_blocks(PyObject*, PyObject* const* values, Py_ssize_t count) {
    return pack_int8_blocks_by(values, count, ops->pack_int8);
}

PyObject* linear_int8(PyObject*, PyObject* const* values, Py_ssize_t count) {
    return multiply(values, count, Scales::apart, ops->linear_int8);
}

PyObject* embedding_int8(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 7);
    Dtype dtype = next.dtype();
    int64_t* ids = next.address<int64_t>();
    int8_t* packed = next.address<int8_t>();
    float* scales = next.address<float>();
    void* out = next.address();
    int64_t num_tokens = next.integer(), in = next.integer();
    return run(next, [=] { ops->embedding_int8(pool, dtype, ids, packed, scales, out, num_tokens, in); });
}

PyObject* grouped_bytes(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 3);
    Grouped format = next.format();
    int64_t in = next.integer(), out = next.integer();
    return next.failed() ? nullptr : PyLong_FromLongLong(ops->grouped_bytes(format, in, out));
}

PyObject* pack_grouped(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 10);
    Grouped format = next.format();
    StoredGroups weight{};
    weight.values = next.address();
    weight.scales = next.address<uint16_t>();
    weight.minimums = next.address<uint16_t>();
    int8_t* table = next.address<int8_t>();
    uint8_t* packed = next.address<uint8_t>();
    weight.row_bytes = next.integer();
    weight.groups = next.integer();
    int64_t in = next.integer(), out = next.integer();
    return run(next, [=] { ops->pack_grouped(pool, format, GroupRows{StoredGroups::read, &weight, in, out}, table, packed); });
}

PyObject* pack_grouped_blocks(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 8);
    Grouped format = next.format();
    BlockArguments blocks(next);
    uint8_t* packed = next.address<uint8_t>();
    int64_t in = next.integer(), out = next.integer();
    if (!blocks.fit(next, in, out)) return nullptr;
    BlockGroups groups{blocks.weight, in};
    return run(next, [=] { ops->pack_grouped(pool, format, GroupRows{BlockGroups::read, &groups, in, out}, groups.weight.table, packed); });
}

PyObject* linear_grouped(PyObject*, PyObject* const* values, Py_ssize_t count) {
    return multiply(values, count, Scales::inside, ops->linear_grouped);
}

PyObject* embedding_grouped(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 8);
    Grouped format = next.format();
    Dtype dtype = next.dtype();
    int64_t* ids = next.address<int64_t>();
    uint8_t* packed = next.address<uint8_t>();
    void* out = next.address();
    int64_t num_tokens = next.integer(), in = next.integer(), out_size = next.integer();
    return run(next, [=] { ops->embedding_grouped(pool, dtype, format, ids, packed, out, num_tokens, in, out_size); });
}

PyObject* quantize_int4(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 6);
    Dtype dtype = next.dtype();
    void* weight = next.address();
    uint8_t* codes = next.address<uint8_t>();
    uint16_t *scales = next.address<uint16_t>(), *minimums = next.address<uint16_t>();
    int64_t groups = next.integer();
    return run(next, [=] { ops->quantize_int4(pool, dtype, weight, codes, scales, minimums, groups); });
}

// Reads blocks of a file, whose sizes are checked here: (kind, blocks, bytes, weights, [table], out…). Several threads
// may read at the same time, without the pool.
template <typename Read>
PyObject* read_blocks(const Arguments& arguments, Blocks kind, int64_t num_bytes, int64_t num_weights, const Read& read) {
    if (arguments.failed()) return nullptr;
    int64_t count = count_blocks(kind, num_bytes, num_weights);
    if (count < 0) return PyErr_Format(PyExc_ValueError, "blocks and weights differ in their sizes");
    Py_BEGIN_ALLOW_THREADS;
    read(count);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* read_block_groups(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 7);
    auto kind = static_cast<Blocks>(next.integer());
    uint8_t* blocks = next.address<uint8_t>();
    int64_t num_bytes = next.integer(), num_weights = next.integer();
    uint8_t* codes = next.address<uint8_t>();
    uint16_t *scales = next.address<uint16_t>(), *minimums = next.address<uint16_t>();
    return read_blocks(next, kind, num_bytes, num_weights,
                       [=](int64_t count) { read_groups(kind, blocks, count, codes, scales, minimums); });
}

PyObject* read_block_values(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 6);
    auto kind = static_cast<Blocks>(next.integer());
    uint8_t* blocks = next.address<uint8_t>();
    int64_t num_bytes = next.integer(), num_weights = next.integer();
    int8_t* table = next.address<int8_t>();
    float* out = next.address<float>();
    return read_blocks(next, kind, num_bytes, num_weights,
                       [=](int64_t count) { read_values(kind, blocks, count, table, out); });
}

PyObject* pack_whole(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 5);
    Dtype dtype = next.dtype();
    void *weight = next.address(), *packed = next.address();
    int64_t in = next.integer(), out = next.integer();
    return run(next, [=] { ops->pack_whole(pool, dtype, weight, packed, in, out); });
}

PyObject* linear_whole(PyObject*, PyObject* const* values, Py_ssize_t count) {
    return multiply(values, count, Scales::inside, ops->linear_whole);
}

PyObject* route(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 13);
    RouteArgs args{};
    args.logits = next.address<float>();
    args.correction = next.address<float>();
    args.experts = next.address<int32_t>();
    args.weights = next.address<float>();
    args.rows = next.integer();
    args.num_experts = next.integer();
    args.chosen = next.integer();
    args.groups = next.integer();
    args.chosen_groups = next.integer();
    args.is_sigmoid = next.integer();
    args.is_normalized = next.integer();
    args.scale = next.real();
    args.least_sum = next.real();
    return run(next, [=] { pagoda::route(pool, args); });
}

PyObject* group_rows(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 7);
    GroupArgs args{};
    args.experts = next.address<int32_t>();
    args.starts = next.address<int32_t>();
    args.sources = next.address<int32_t>();
    args.places = next.address<int32_t>();
    args.rows = next.integer();
    args.chosen = next.integer();
    args.num_experts = next.integer();
    return run(next, [=] { pagoda::group_rows(args); });
}

PyObject* weigh_experts(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 10);
    Dtype dtype = next.dtype();
    WeighArgs args{};
    args.x = next.address();
    args.places = next.address<int32_t>();
    args.weights = next.address<float>();
    args.shared = next.address();
    args.gates = next.address<float>();
    args.out = next.address();
    args.rows = next.integer();
    args.chosen = next.integer();
    args.size = next.integer();
    return run(next, [=] { ops->weigh_experts(pool, dtype, args); });
}

PyObject* add_low_rank(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 12);
    Dtype dtype = next.dtype();
    LowRankArgs args{};
    args.x = next.address();
    args.out = next.address();
    args.slots = next.address<int32_t>();
    args.table = next.address<LowRankEntry>();
    args.rows = next.integer();
    args.in = next.integer();
    args.out_stride = next.integer();
    args.activation = next.activation();
    return run(next, [=] { ops->add_low_rank(pool, dtype, args); });
}

// Returns whether all values are finite. Neither waits for an op nor lets one wait, because steps run meanwhile.
PyObject* pack_low_rank(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments next(values, count, 12);
    Dtype dtype = next.dtype();
    PackLowRankArgs args{};
    args.down_dtype = static_cast<Stored>(next.integer());
    args.up_dtype = static_cast<Stored>(next.integer());
    args.down = next.address();
    args.up = next.address();
    args.packed_down = next.address();
    args.packed_up = next.address();
    args.rank = next.integer();
    args.in = next.integer();
    args.size = next.integer();
    args.down_stride = next.integer();
    args.scale = next.real();
    if (next.failed()) return nullptr;
    bool is_finite;
    Py_BEGIN_ALLOW_THREADS;
    is_finite = dtype == Dtype::float32 ? pagoda::pack_low_rank<ToFloat32>(args) : pagoda::pack_low_rank<ToBf16>(args);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(is_finite);
}

#if defined(PAGODA_HAS_AMX)
PyObject* pack_int8_weight(PyObject*, PyObject* const* values, Py_ssize_t count) {
    return pack_int8_by(values, count, pack_int8_weight_amx);
}

PyObject* pack_int8_weight_blocks(PyObject*, PyObject* const* values, Py_ssize_t count) {
    return pack_int8_blocks_by(values, count, pack_int8_weight_amx);
}

PyObject* linear_int8_weight(PyObject*, PyObject* const* values, Py_ssize_t count) {
    return multiply(values, count, Scales::apart, linear_int8_weight_amx);
}
#endif

// From now on the ops that this thread runs are recorded too.
PyObject* begin_recording(PyObject*, PyObject*) {
    open_recording = std::make_unique<Recording>(ops);
    Py_RETURN_NONE;
}

PyObject* end_recording(PyObject*, PyObject*) {
    if (!open_recording) return PyErr_Format(PyExc_ValueError, "this thread has not begun a recording");
    return PyCapsule_New(open_recording.release(), "Recording", [](PyObject* capsule) {
        delete static_cast<Recording*>(PyCapsule_GetPointer(capsule, "Recording"));
    });
}

PyObject* replay(PyObject*, PyObject* capsule) {
    auto* recording = static_cast<const Recording*>(PyCapsule_GetPointer(capsule, "Recording"));
    if (!recording) return nullptr;
    bool has_run;
    Py_BEGIN_ALLOW_THREADS;
    {
        std::lock_guard lock(one_op);
        has_run = recording->replay(ops);
    }
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(has_run);
}

PyObject* set_num_threads(PyObject*, PyObject* number) {
    long threads = PyLong_AsLong(number);
    if (PyErr_Occurred()) return nullptr;
    if (threads < 1) return PyErr_Format(PyExc_ValueError, "%ld threads, at least 1 is needed", threads);
    if (threads != pool.size()) {
        Py_BEGIN_ALLOW_THREADS;
        {
            std::lock_guard lock(one_op);
            pool.resize(static_cast<int>(threads));
        }
        Py_END_ALLOW_THREADS;
    }
    Py_RETURN_NONE;
}

PyObject* instruction_sets(PyObject*, PyObject*) {
    std::vector<const Ops*> usable = usable_ops();
    PyObject* names = PyList_New(static_cast<Py_ssize_t>(usable.size()));
    for (size_t i = 0; names && i < usable.size(); i++)
        PyList_SetItem(names, static_cast<Py_ssize_t>(i), PyUnicode_FromString(usable[i]->name));
    return names;
}

PyObject* instruction_set(PyObject*, PyObject*) { return PyUnicode_FromString(ops->name); }

PyObject* pairs_are_limited(PyObject*, PyObject*) { return PyBool_FromLong(ops->pairs_are_limited); }

// Selects an instruction set by name and returns the previous one; the fastest is the first. Weights packed for another must
// not be used any more.
PyObject* use_instruction_set(PyObject*, PyObject* name) {
    for (const Ops* usable : usable_ops()) {
        if (PyUnicode_CompareWithASCIIString(name, usable->name) != 0) continue;
        const char* previous = ops->name;
        ops = usable;
        return PyUnicode_FromString(previous);
    }
    return PyErr_Format(PyExc_ValueError, "this processor, or this build, has no %R", name);
}

// By default malloc returns large tensors to the system each time, and the next step's tensors fault their pages in again.
PyObject* keep_freed_memory(PyObject*, PyObject*) {
#if defined(__GLIBC__)
    malloc_trim(0);
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
    Py_RETURN_NONE;
}

#define OP(NAME) {#NAME, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(NAME)), METH_FASTCALL, nullptr}
PyMethodDef methods[] = {
    OP(norm),
    OP(activate),
    OP(rope_and_store_kv),
    OP(head_norms),
    OP(paged_attention),
    OP(cap),
    OP(argmax),
    OP(mask_rows),
    OP(sample),
    OP(pack_int8),
    OP(pack_int8_blocks),
    OP(linear_int8),
    OP(embedding_int8),
    OP(grouped_bytes),
    OP(pack_grouped),
    OP(pack_grouped_blocks),
    OP(linear_grouped),
    OP(embedding_grouped),
    OP(quantize_int4),
    OP(read_block_groups),
    OP(read_block_values),
    OP(pack_whole),
    OP(linear_whole),
    OP(route),
    OP(group_rows),
    OP(weigh_experts),
    OP(add_low_rank),
    OP(pack_low_rank),
#if defined(PAGODA_HAS_AMX)
    OP(pack_int8_weight),
    OP(pack_int8_weight_blocks),
    OP(linear_int8_weight),
#endif
    {"begin_recording", begin_recording, METH_NOARGS, nullptr},
    {"end_recording", end_recording, METH_NOARGS, nullptr},
    {"replay", replay, METH_O, nullptr},
    {"instruction_sets", instruction_sets, METH_NOARGS, nullptr},
    {"instruction_set", instruction_set, METH_NOARGS, nullptr},
    {"pairs_are_limited", pairs_are_limited, METH_NOARGS, nullptr},
    {"use_instruction_set", use_instruction_set, METH_O, nullptr},
    {"set_num_threads", set_num_threads, METH_O, nullptr},
    {"keep_freed_memory", keep_freed_memory, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    ops = usable_ops().front();
    PyObject* module = PyModule_Create(&definition);
    if (module) PyModule_AddIntConstant(module, "FEW_QUERIES", FEW_QUERIES);
    if (module) PyModule_AddIntConstant(module, "UNSURE_DRAW", UNSURE_DRAW);
    return module;
}
