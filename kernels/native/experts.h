// The sums of experts' outputs. No include guard: each instruction set compiles its own copy.

// Adds up a row's experts in the order in which they were chosen, then what all rows share.
template <typename T>
void weigh_experts(ThreadPool& pool, const WeighArgs& args) {
    constexpr int64_t COLUMNS = 512;  // of a part
    int64_t column_parts = ceil_div(args.size, COLUMNS);
    pool.run(static_cast<int>(args.rows * column_parts), [&](int part) {
        int64_t row = part / column_parts, first = part % column_parts * COLUMNS, end = std::min(args.size, first + COLUMNS);
        const float* weights = args.weights + row * args.chosen;
        const int32_t* places = args.places + row * args.chosen;
        const T* x = static_cast<const T*>(args.x);
        const T* shared = args.shared ? static_cast<const T*>(args.shared) + row * args.size : nullptr;
        T* out = static_cast<T*>(args.out) + row * args.size;
        Floats share = broadcast(1.0f);
        if (args.gates) share = share / (share + exponential(-broadcast(args.gates[row])));
        int64_t i = first;
        for (; i + LANES <= end; i += LANES) {
            Floats sum{};
            for (int64_t rank = 0; rank < args.chosen; rank++) sum += weights[rank] * load(x + places[rank] * args.size + i);
            store(out + i, shared ? sum + share * load(shared + i) : sum);
        }
        for (; i < end; i++) {
            float sum = 0;
            for (int64_t rank = 0; rank < args.chosen; rank++) sum += weights[rank] * to_float(x[places[rank] * args.size + i]);
            round_to(&out[i], shared ? sum + share[0] * to_float(shared[i]) : sum);
        }
    });
}
