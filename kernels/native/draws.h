// Tokens drawn at random, by the noise of gumbel.py. No include guard: each instruction set compiles its own copy.

// The finalizer of MurmurHash3.
template <typename W>
PAGODA_INLINE W mix(W x) {
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

// A step of splitmix64.
inline uint64_t mix_64(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

inline uint64_t noise_key(uint64_t seed, uint64_t position) { return mix_64(mix_64(seed) ^ position); }

// The uniform number of each id, an odd multiple of 2^-24, as that multiple.
template <typename W>
PAGODA_INLINE W uniform(W ids, uint64_t key) {
    return (mix(mix(ids ^ static_cast<uint32_t>(key)) ^ static_cast<uint32_t>(key >> 32)) >> 8) | 1u;
}

template <int... LANE>
PAGODA_INLINE Words numbered(std::integer_sequence<int, LANE...>) {
    return Words{LANE...};
}

// At least the noise -log(-log u) of u = number · 2^-24. With v = 1 - u, -log u >= v. The bits of a float, as an integer,
// are its binary logarithm at powers of two; between them they are a line, which lies below the logarithm.
PAGODA_INLINE Floats noise_bound(Words number) {
    Floats rest = __builtin_convertvector((Ints)(0x1000000u - number), Floats);  // v · 2^24
    Ints logarithm = (127 + 24) * (1 << 23) - (Ints)rest;
    return __builtin_convertvector(logarithm, Floats) * (0.69314718f / (1 << 23));
}

// Calls block(i, values) for SCANNED vectors from element i on, and one(i) for each element behind the last whole block; those
// whose elements are all less than `least` are left out.
constexpr int SCANNED = 4;

template <typename T, typename Block, typename One>
PAGODA_INLINE void scan(const T* row, int64_t size, const float& least, const Block& block, const One& one) {
    int64_t i = 0;
    for (; i + SCANNED * LANES <= size; i += SCANNED * LANES) {
        Floats values[SCANNED], greatest = broadcast(-INFINITY);
        PAGODA_UNROLL
        for (int j = 0; j < SCANNED; j++) {
            values[j] = load(row + i + j * LANES);
            greatest = max(greatest, values[j]);
        }
        if (any(greatest >= least)) block(i, values);
    }
    for (; i < size; i++)
        if (to_float(row[i]) >= least) one(i);
}

constexpr float LOWEST = std::numeric_limits<float>::lowest();

inline float below(double bound) { return bound > LOWEST ? std::nextafter(static_cast<float>(bound), LOWEST) : LOWEST; }

// A row that draws. Its elements are scaled: (element - top) / temperature, as sample.py scales them, to the last bit.
template <typename T>
struct DrawnRow {
    const T* row;
    int64_t size, likeliest;
    float temperature;
    uint64_t key;
    float top = to_float(row[likeliest]);

    float scaled(int64_t at) const { return (to_float(row[at]) - top) / temperature; }

    // The index of the greatest of scaled element + noise among those whose scaled element is at least `lowest`, as the top
    // is. UNSURE_DRAW if two scores are too close for float32, where it takes torch's own logarithm to order them.
    //
    // A winner is scaled to -20 to 0, and its score is -3 to 17. With logarithms to 4 ulp, float32 noise is less than 2^-16
    // off, and the sum's rounding adds 2^-20. So any such logarithm orders two scores that are CLOSE apart as the doubles here
    // do. Few elements get as far as a score: most are too small to win with any noise, and of the others most are too small
    // with a bound of their noise. In float32 the bound of a score is off by less than NEAR - CLOSE.
    int64_t draw(float lowest) const {
        constexpr double CLOSE = 0x1p-14, NEAR = 0x1p-12;
        constexpr double GREATEST_NOISE = 16.7;  // 24 · log 2, and more than the rounding of what it is added to
        double best = -INFINITY;
        int64_t token = likeliest;
        float least = 0, bar = 0;  // of an element that can win, and of the bound of its score
        auto consider = [&](int64_t at) {
            float element = scaled(at);
            double score = element - std::log(-std::log(uniform(static_cast<uint32_t>(at), key) * 0x1p-24));
            if (!(element >= lowest) || score < best - CLOSE) return;
            token = score > best + CLOSE ? at : UNSURE_DRAW;
            best = std::max(best, score);
            bar = static_cast<float>(best - NEAR);
            // An element less than `lowest` may slip through the second bound, by rounding. It is found out here.
            double floor = std::max(best - GREATEST_NOISE, lowest * (1 + 0x1p-20));
            least = below(top + temperature * floor);
        };
        consider(likeliest);
        float inverse = std::min(1 / temperature, -LOWEST);  // finite, so that the top's 0 stays 0
        Words numbers = numbered(std::make_integer_sequence<int, LANES>{});
        auto consider_block = [&](int64_t i, const Floats* values) {
            Ints can_win[SCANNED], one_can{};
            PAGODA_UNROLL
            for (int j = 0; j < SCANNED; j++) {
                Words ids = numbers + static_cast<uint32_t>(i + j * LANES);
                can_win[j] = (values[j] - top) * inverse + noise_bound(uniform(ids, key)) >= bar;
                one_can |= can_win[j];
            }
            if (!any(one_can)) return;
            for (int j = 0; j < SCANNED; j++)
                for (int lane = 0; lane < LANES; lane++)
                    if (int64_t at = i + j * LANES + lane; can_win[j][lane] && at != likeliest) consider(at);
        };
        scan(row, size, least, consider_block, [&](int64_t at) {
            if (at != likeliest) consider(at);
        });
        return token;
    }

    // The k-th greatest scaled element, for a k up to MOST_TOP_K.
    float kth_greatest(int64_t k) const {
        float heap[MOST_TOP_K];
        std::fill(heap, heap + k, -INFINITY);
        float least = LOWEST;
        auto add = [&](float value) {
            if (value <= heap[0]) return;
            std::pop_heap(heap, heap + k, std::greater<>());
            heap[k - 1] = value;
            std::push_heap(heap, heap + k, std::greater<>());
            least = std::max(LOWEST, heap[0]);
        };
        auto add_block = [&](int64_t, const Floats* values) {
            for (int j = 0; j < SCANNED; j++)
                if (any(values[j] > heap[0]))
                    for (int lane = 0; lane < LANES; lane++) add(values[j][lane]);
        };
        scan(row, size, least, add_block, [&](int64_t at) { add(to_float(row[at])); });
        return (heap[0] - top) / temperature;
    }

    // The weight e^scaled of the elements that are greater than `value`, and of all that are at least `lowest`. Elements of
    // negligible weight are left out: up to 2^20 of them weigh less than 2^-23, and all weigh at least 1. Rounding in float32
    // is within a dozen parts of 2^-24.
    std::pair<double, double> masses(float value, float lowest) const {
        constexpr float NEGLIGIBLE = -30;
        float least = below(top + static_cast<double>(temperature) * NEGLIGIBLE);
        double greater = 0, total = 0;
        auto add_block = [&](int64_t, const Floats* values) {
            Floats greater_here{}, all_here{};
            PAGODA_UNROLL
            for (int j = 0; j < SCANNED; j++) {
                Floats element = (values[j] - top) / temperature;
                Floats weight = exponential_of_negative(element);
                greater_here += element > value ? weight : broadcast(0);
                all_here += element >= lowest ? weight : broadcast(0);
            }
            greater += sum(greater_here);
            total += sum(all_here);
        };
        scan(row, size, least, add_block, [&](int64_t at) {
            float weight = std::exp(scaled(at));
            if (scaled(at) > value) greater += weight;
            if (scaled(at) >= lowest) total += weight;
        });
        return {greater, total};
    }

    // What wins among all elements also wins among those that top-p keeps, if it is one of them: if the elements greater than
    // it have less than the share p of the mass. Otherwise top-p drops what is not greater, too, and the next draw leaves
    // that out.
    int64_t draw_by_rules(int64_t top_k, double top_p, float lowest) const {
        constexpr double UNSURE_SHARE = 0x1p-14;  // many times the error of the masses, here and in torch
        if (top_k >= size) top_k = 0;
        if (top_k > MOST_TOP_K) return UNSURE_DRAW;
        float kth = top_k > 0 ? kth_greatest(top_k) : -INFINITY;
        lowest = std::max(lowest, kth);
        for (;;) {
            int64_t token = draw(lowest);
            if (token < 0 || top_p >= 1 || scaled(token) == 0) return token;
            auto [greater, total] = masses(scaled(token), kth);
            if (greater < top_p * total * (1 - UNSURE_SHARE)) return token;
            if (greater < top_p * total * (1 + UNSURE_SHARE)) return UNSURE_DRAW;
            lowest = std::nextafter(scaled(token), 0.0f);
        }
    }
};

template <typename T>
void draw(ThreadPool& pool, const DrawArgs& args) {
    pool.run(static_cast<int>(args.count), [&](int part) {
        int64_t& token = args.tokens[args.rows[part]];
        if (token < 0) return;
        const T* row = static_cast<const T*>(args.x) + args.rows[part] * args.size;
        DrawnRow<T> drawn{row, args.size, token, args.temperature[part], noise_key(args.seed[part], args.positions[part])};
        int64_t likeliest = token;
        token = drawn.draw_by_rules(args.top_k[part], args.top_p[part], args.lowest[part]);
        if (args.only_likeliest && token != likeliest) token = -1;
    });
}
