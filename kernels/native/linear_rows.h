// What goes into a product: rows as they are, or gated on the way. And what comes out. No include guard: each instruction
// set compiles its own copy.

// A row as it is.
template <typename T>
struct Plain {
    static constexpr int64_t WIDTH = 1;
    const T* x;

    Plain(const T* row, int64_t) : x(row) {}
    f32x16 operator()(int64_t i) const { return load(x + i); }
    float at(int64_t i) const { return to_float(x[i]); }
};

// A row of gate and up, as silu(gate) · up.
template <typename T>
struct Gated {
    static constexpr int64_t WIDTH = 2;
    const T *gate, *up;

    Gated(const T* row, int64_t in) : gate(row), up(row + in) {}
    f32x16 operator()(int64_t i) const { return gated(load(gate + i), load(up + i)); }
    float at(int64_t i) const { return gated(broadcast(to_float(gate[i])), broadcast(to_float(up[i])))[0]; }
    static f32x16 gated(f32x16 gate, f32x16 up) { return gate / (1.0f + exponential(-gate)) * up; }
};

// LANES outputs of a row from `column` of their panel on. The panel has so many columns; what is beyond them is padding.
template <typename T>
PAGODA_INLINE void store_outputs(f32x16 sums, int64_t column, int64_t columns, const T* bias, T* out) {
    if (column + LANES <= columns) {
        store(out + column, bias ? sums + load(bias + column) : sums);
    } else {
        for (int64_t lane = 0; column + lane < columns; lane++)
            round_to(&out[column + lane], bias ? sums[lane] + to_float(bias[column + lane]) : sums[lane]);
    }
}
