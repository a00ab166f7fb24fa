// The common part of the self-test: numbers between guards, a test's findings, and the tests' names.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../../../kernels/native/ops.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(FIRST, SIZE)
#define ASAN_UNPOISON_MEMORY_REGION(FIRST, SIZE)
#endif

using namespace pagoda;

// Deterministic: xorshift64*.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15 + 1) {}

    uint64_t bits() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return state_ * 0x2545f4914f6cdd1d >> 16;
    }

    int64_t below(int64_t end) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(end)); }

    double normal() {  // approximately: the sum of twelve uniform numbers
        double sum = -6;
        for (int i = 0; i < 12; i++) sum += static_cast<double>(bits() & 0xffffff) * 0x1p-24;
        return sum;
    }

private:
    uint64_t state_;
};

// Elements of one type between two guards. Everything starts as poison, which is NaN in either dtype. AddressSanitizer lets
// nothing read or write the guards.
template <typename Element>
class Room {
public:
    // Allocates elements that start `offset` elements after a multiple of 64 bytes.
    Room(int64_t size, int64_t offset) : size_(size), bytes_(2 * GUARD + 128 + (size + offset) * sizeof(Element), POISON) {
        auto address = reinterpret_cast<uintptr_t>(bytes_.data());
        first_ = GUARD + (64 - address % 64) % 64 + offset * sizeof(Element);
        close_guards();
    }
    ~Room() { open_guards(); }
    Room(Room&&) = default;
    Room& operator=(Room&&) = default;

    Element* data() { return reinterpret_cast<Element*>(bytes_.data() + first_); }
    const Element* data() const { return reinterpret_cast<const Element*>(bytes_.data() + first_); }
    int64_t size() const { return size_; }

    bool is_poison(int64_t i) const {
        for (size_t byte = 0; byte < sizeof(Element); byte++)
            if (bytes_[first_ + i * sizeof(Element) + byte] != POISON) return false;
        return true;
    }

    bool has_whole_guards() const {
        open_guards();
        bool is_whole = true;
        for (size_t i = 0; i < bytes_.size(); i++) is_whole &= (i >= first_ && i < end()) || bytes_[i] == POISON;
        close_guards();
        return is_whole;
    }

private:
    static constexpr size_t GUARD = 512;
    static constexpr unsigned char POISON = 0xff;

    size_t end() const { return first_ + size_ * sizeof(Element); }
    void close_guards() const {
        ASAN_POISON_MEMORY_REGION(bytes_.data(), first_);
        ASAN_POISON_MEMORY_REGION(bytes_.data() + end(), bytes_.size() - end());
    }
    void open_guards() const { ASAN_UNPOISON_MEMORY_REGION(bytes_.data(), bytes_.size()); }

    int64_t size_;
    size_t first_;
    std::vector<unsigned char> bytes_;
};

// float32 or bfloat16, one element off alignment, as a row of an odd width is.
class Tensor {
public:
    Tensor(Dtype dtype, int64_t size) : dtype_(dtype), wide_(is_wide() ? size : 0, 1), narrow_(is_wide() ? 0 : size, 1) {}

    Tensor(Dtype dtype, int64_t size, Random& random, double scale = 1.0) : Tensor(dtype, size) {
        for (int64_t i = 0; i < size; i++) set(i, scale * random.normal());
    }

    void* data(int64_t from = 0) {
        return is_wide() ? static_cast<void*>(wide_.data() + from) : static_cast<void*>(narrow_.data() + from);
    }
    int64_t size() const { return is_wide() ? wide_.size() : narrow_.size(); }
    bool is_poison(int64_t i) const { return is_wide() ? wide_.is_poison(i) : narrow_.is_poison(i); }
    bool has_whole_guards() const { return wide_.has_whole_guards() && narrow_.has_whole_guards(); }

    double at(int64_t i) const {
        if (is_wide()) return wide_.data()[i];
        uint32_t bits = uint32_t{narrow_.data()[i]} << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

    // Rounds to the nearest, ties to even.
    void set(int64_t i, double value) {
        auto as_float = static_cast<float>(value);
        if (is_wide()) {
            wide_.data()[i] = as_float;
            return;
        }
        uint32_t bits;
        std::memcpy(&bits, &as_float, sizeof bits);
        narrow_.data()[i] = static_cast<uint16_t>(value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0);
    }

    bool has_bits_of(const Tensor& other, int64_t from, int64_t count) {  // compares this from 0 with other from `from`
        size_t element = is_wide() ? 4 : 2;
        return std::memcmp(data(), const_cast<Tensor&>(other).data(from), count * element) == 0;
    }

private:
    bool is_wide() const { return dtype_ == Dtype::float32; }

    Dtype dtype_;
    Room<float> wide_;
    Room<uint16_t> narrow_;
};

// The findings of a test of one op.
class Findings {
public:
    explicit Findings(double bound) : bound(bound) {}

    const double bound;
    double greatest_error = 0;
    std::vector<std::string> faults;

    // Errors are relative to `magnitude`.
    void compare(double got, double want, double magnitude) {
        double error = std::fabs(got - want) / std::max(magnitude, 1e-30);
        if (std::isnan(error)) error = std::numeric_limits<double>::infinity();
        greatest_error = std::max(greatest_error, error);
    }

    void require(bool holds, const char* what) {
        if (!holds && (faults.empty() || faults.back() != what)) faults.emplace_back(what);
    }

    void require_guards(const Tensor& tensor) { require(tensor.has_whole_guards(), "wrote beyond its output"); }

    bool passed() const { return greatest_error <= bound && faults.empty(); }
};

struct Subject {
    const Ops& ops;
    ThreadPool &alone, &pool;  // with one thread and with several
    Dtype dtype;

    // Relative error of rounding a result to its dtype; for float32 the bounds include it.
    double rounding() const { return dtype == Dtype::float32 ? 0.0 : 0x1p-8; }
    bool has_matrix_unit() const { return std::strcmp(ops.name, "amx") == 0; }
};

// How a test names an activation. Its parameters are 7 and 1.3, of functions that have any.
inline Activation activation(Function function, bool is_gated) { return {function, is_gated, {7, 1.3f}}; }

constexpr int FUNCTIONS = static_cast<int>(Function::xielu);  // the greatest number of one

inline double activate(const Activation& by, double x) {
    double limit = by.parameters[0], low = std::min(x, limit);
    switch (by.function) {
        case Function::none: return x;
        case Function::silu: return x / (1 + std::exp(-x));
        case Function::gelu_tanh: return x / (1 + std::exp(-std::sqrt(8 / M_PI) * (x + 0.044715 * x * x * x)));
        case Function::gelu: return x * std::erfc(-x / M_SQRT2) / 2;
        case Function::relu: return x < 0 ? 0 : x;
        case Function::relu2: return x < 0 ? 0 : x * x;
        case Function::clamped_silu: return std::isnan(x) ? x : low / (1 + std::exp(-1.702 * low));
        case Function::xielu: return (x > 0 ? limit * x * x : by.parameters[1] * (std::expm1(std::min(x, -1e-6)) - x)) + x / 2;
    }
    return x;
}

// Of a row of `size` outputs: x(i) is element i of the input.
template <typename Element>
double activate(const Activation& by, int64_t size, int64_t i, const Element& x) {
    double up = by.is_gated ? x(size + i) : 1;
    if (by.is_gated && by.function == Function::clamped_silu && !std::isnan(up))
        up = std::clamp<double>(up, -by.parameters[0], by.parameters[0]) + 1;
    return activate(by, x(i)) * up;
}

using Test = Findings(const Subject&);

Test test_norm, test_activate, test_rope_and_store_kv, test_argmax, test_argmax_of_masked_rows, test_mask_rows;
Test test_draw, test_unsure_draws;
Test test_decode_attention, test_attention_of_few_queries, test_attention_of_shared_blocks, test_prefill_attention;
Test test_int8_exactly, test_int8, test_int8_of_odd_rows, test_embedding_int8, test_grouped_exactly, test_grouped, test_embedding_grouped, test_quantize_int4, test_whole;
Test test_experts, test_weigh_experts, test_low_rank, test_finite_low_rank;
