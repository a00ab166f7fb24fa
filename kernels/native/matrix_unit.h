// The matrix unit of AMX: products of bfloat16, summed in float32. No include guard: only isa_amx.cpp includes it.

constexpr int64_t TILE = 16;         // rows or columns of a tile of sums
constexpr int64_t DEPTH = 32;        // products that one instruction (a step) adds to each sum of a tile
constexpr int64_t BATCH = 2 * TILE;  // rows; with as many columns they have four tiles of sums, half of the unit's registers

// Rounds to bfloat16 and back.
PAGODA_INLINE Floats rounded(Floats value) {
    auto half = (Halves)_mm512_cvtneps_pbh((__m512)value);
    return (Floats)(__builtin_convertvector(half, Words) << 16);
}

// This thread's unit. Until it is released, every context switch saves its registers.
class MatrixUnit {
public:
    ~MatrixUnit() { _tile_release(); }

    // Configures it for batches of `rows` rows. Registers 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights; those of a second
    // tile are unused if the batch has only one.
    void shape_for(int64_t rows) {
        if (rows == rows_) return;
        rows_ = rows;
        struct alignas(64) Shape {
            uint8_t palette = 1, first_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {};
        } shape;
        uint8_t first = static_cast<uint8_t>(std::min(rows, TILE)), second = static_cast<uint8_t>(std::max<int64_t>(1, rows - TILE));
        uint8_t tiles[8] = {first, first, second, second, first, second, DEPTH / 2, DEPTH / 2};
        std::memcpy(shape.rows, tiles, sizeof tiles);
        _tile_loadconfig(&shape);
    }

private:
    int64_t rows_ = 0;
};

// Saves the sums of a batch, which has one or two tiles of rows and two of columns, as [rows][stride].
template <int TILES>
void save_sums(float* sums, int64_t stride) {
    _tile_stored(0, sums, 4 * stride);
    _tile_stored(1, sums + TILE, 4 * stride);
    if constexpr (TILES == 2) {
        _tile_stored(2, sums + TILE * stride, 4 * stride);
        _tile_stored(3, sums + TILE * stride + TILE, 4 * stride);
    }
}

template <int TILES>
void load_sums(const float* sums, int64_t stride) {
    _tile_loadd(0, sums, 4 * stride);
    _tile_loadd(1, sums + TILE, 4 * stride);
    if constexpr (TILES == 2) {
        _tile_loadd(2, sums + TILE * stride, 4 * stride);
        _tile_loadd(3, sums + TILE * stride + TILE, 4 * stride);
    }
}

PAGODA_INLINE void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Completes earlier writes: compilers do not know that the unit's loads read memory.
PAGODA_INLINE void written_for_unit() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Adds left [rows, steps * DEPTH] · right to the sums of TILES tiles of rows and COLUMNS of columns. In `right` a step's tiles
// of columns are adjacent, each [DEPTH / 2][TILE][2] with two inputs side by side.
template <int TILES, int COLUMNS, typename EachStep>
PAGODA_INLINE void add_products(const bf16* left, int64_t left_stride, const uint16_t* right, int64_t right_stride, int64_t steps,
                                const EachStep& each_step) {
    written_for_unit();
    for (int64_t step = 0; step < steps; step++, left += DEPTH, right += right_stride) {
        each_step();
        _tile_loadd(4, left, 2 * left_stride);
        _tile_loadd(6, right, 4 * TILE);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (COLUMNS == 2) {
            _tile_loadd(7, right + DEPTH * TILE, 4 * TILE);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (TILES == 2) {
            _tile_loadd(5, left + TILE * left_stride, 2 * left_stride);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (COLUMNS == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
}
