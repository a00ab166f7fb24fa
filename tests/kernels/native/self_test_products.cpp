// Tests of products with int8, grouped and unquantized weights, and of embeddings read from them.
#include <memory>

#include "self_test.h"

namespace {

constexpr int64_t GROUP = 64, HALF = 32;  // inputs that share a scale: in activations and int8 weights, and in 4-bit weights
constexpr int64_t PANEL = 32;             // packed weights have room for a multiple of this many outputs, on every instruction set

double from_fp16(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double magnitude = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return bits >> 15 ? -magnitude : magnitude;
}

uint16_t fp16(int whole, int exponent) {  // whole * 2^exponent, |whole| below 2048
    int magnitude = std::abs(whole), shift = 0;
    if (magnitude == 0) return 0;
    while (magnitude << shift < 1024) shift++;
    return static_cast<uint16_t>((whole < 0) << 15 | (exponent - shift + 25) << 10 | ((magnitude << shift) & 1023));
}

struct Shape {
    int64_t rows, in, out;
    Activation activation{};

    int64_t width() const { return activation.width() * in; }
};

std::vector<Shape> shapes(int64_t multiple_of) {
    std::vector<Shape> shapes{{3, 1, 1}, {5, 576, 96}, {2, 63, 31}, {9, 65, 33}, {100, 130, 40}, {64, 64, 1}, {200, 64, 70}};
    for (int64_t rows = 1; rows <= 17; rows++) shapes.push_back({rows, 72 + 8 * (rows % 3), 70 - rows});
    for (Shape& shape : shapes) shape.in = ceil_div(shape.in, multiple_of) * multiple_of;
    return shapes;
}

// Of the first functions, gated, results have no sign or limit of their own, so that rounding errors of quantized
// results are independent of each other.
constexpr int EVENLY_ROUNDED = 2;

std::vector<Shape> with_activations(std::vector<Shape> shapes, int functions) {
    for (size_t i = shapes.size(); i-- > 0;) {
        bool is_gated = functions == EVENLY_ROUNDED || i % 3 != 0;
        shapes.push_back({shapes[i].rows, shapes[i].in, shapes[i].out, activation(static_cast<Function>(1 + i % functions), is_gated)});
    }
    return shapes;
}

double square(double x) { return x * x; }

// Sums over every `span` inputs of a row.
class Table {
public:
    template <typename Term>
    Table(int64_t rows, int64_t in, int64_t span, const Term& term) : width_(ceil_div(in, span)), sums_(rows * width_) {
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < in; i++) sums_[row * width_ + i / span] += term(row, i);
    }

    double operator()(int64_t row, int64_t number) const { return sums_[row * width_ + number]; }

private:
    int64_t width_;
    std::vector<double> sums_;
};

// A weight packed for an instruction set; derived classes choose the format.
class Weight {
public:
    Weight(const Subject& on, const Shape& shape, int64_t num_bytes, int64_t num_scales) : packed_(num_bytes, 0), scales_(num_scales, 0), on_(on), shape_(shape) {}

    virtual ~Weight() = default;
    virtual double at(int64_t column, int64_t i) const = 0;
    virtual void pack() = 0;
    virtual void multiply(ThreadPool& pool, const LinearArgs& args) const = 0;

    bool has_whole_guards() const { return packed_.has_whole_guards() && scales_.has_whole_guards(); }
    const void* packed() const { return packed_.data(); }
    const float* scales() const { return scales_.data(); }
    int64_t num_bytes() const { return packed_.size(); }
    int64_t num_scales() const { return scales_.size(); }

protected:
    Room<uint8_t> packed_;
    Room<float> scales_;
    const Subject& on_;
    const Shape& shape_;
};

// Inputs that share a scale in int8.
int64_t int8_group(const Subject& on) { return on.ops.pairs_are_limited ? HALF : GROUP; }

// A weight in int8, or unquantized.
class DenseWeight : public Weight {
public:
    DenseWeight(const Subject& on, const Shape& shape, int64_t num_bytes, int64_t num_scales, Random& random)
        : Weight(on, shape, num_bytes, num_scales), values_(on.dtype, shape.out * shape.in, random) {}

    double at(int64_t column, int64_t i) const override { return values_.at(column * shape_.in + i); }
    void set(int64_t column, int64_t i, double value) { values_.set(column * shape_.in + i, value); }

protected:
    Tensor values_;
};

class Int8Weight : public DenseWeight {
public:
    Int8Weight(const Subject& on, const Shape& shape, Random& random)
        : DenseWeight(on, shape, ceil_div(shape.out, PANEL) * PANEL * ceil_div(shape.in, GROUP) * GROUP,
                      ceil_div(shape.out, PANEL) * PANEL * ceil_div(shape.in, GROUP) * (GROUP / int8_group(on) + 1), random) {}

    void pack() override {
        auto read = [](const void* weight, int64_t row, float* to) {
            auto& self = *static_cast<const Int8Weight*>(weight);
            for (int64_t i = 0; i < self.shape_.in; i++) to[i] = static_cast<float>(self.at(row, i));
        };
        on_.ops.pack_int8(on_.pool, {read, this, shape_.in, shape_.out}, reinterpret_cast<int8_t*>(packed_.data()), scales_.data());
    }
    void multiply(ThreadPool& pool, const LinearArgs& args) const override { on_.ops.linear_int8(pool, on_.dtype, args); }

    // The step between neighbouring int8 values in the group from `first` on.
    double step(int64_t column, int64_t first) const {
        double most = 0;
        auto value = [&](int64_t i) { return i < shape_.in ? at(column, i) : 0.0; };
        for (int64_t i = first; i < first + int8_group(on_); i += 2) {
            double one = value(i), other = value(i + 1), both = on_.ops.pairs_are_limited ? one + other : 0;
            most = std::max({most, std::fabs(one), std::fabs(other), std::fabs(both) * 127 / 127.99});
        }
        return most / 127;
    }
};

// An unquantized weight.
class WholeWeight : public DenseWeight {
public:
    WholeWeight(const Subject& on, const Shape& shape, Random& random)
        : DenseWeight(on, shape, ceil_div(shape.out, PANEL) * PANEL * shape.in * (on.dtype == Dtype::float32 ? 4 : 2), 0, random) {}

    void pack() override { on_.ops.pack_whole(on_.pool, on_.dtype, values_.data(), packed_.data(), shape_.in, shape_.out); }
    void multiply(ThreadPool& pool, const LinearArgs& args) const override { on_.ops.linear_whole(pool, on_.dtype, args); }
};

// What a format of weights in groups is made of, as kernels/grouped_weight.py says.
struct GroupedFormat {
    Grouped format;
    int bits;
    int64_t group;
    bool has_minimum;
    int middle;  // the code of value 0, if there is neither a table nor a minimum
    std::vector<int8_t> table;
};

const GroupedFormat GROUPED_FORMATS[] = {
    {Grouped::nibbles_above_minimum, 4, 32, true, 0, {}},
    {Grouped::nibbles, 4, 32, false, 8, {}},
    {Grouped::small_table, 4, 32, false, 0, {-16, 16, 1, -1, 2, -2, 3, -3, 4, -4, 6, -6, 8, -8, 12, -12}},
    {Grouped::table, 4, 32, false, 0, {-128, 127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89}},
    {Grouped::five_bits, 5, 32, false, 16, {}},
    {Grouped::five_bits_above_minimum, 5, 32, true, 0, {}},
    {Grouped::six_bits, 6, 16, false, 32, {}},
    {Grouped::bytes, 8, 32, false, 128, {}},
};

// weight = scale * value, or scale * value + minimum, with scale and minimum for every group of inputs of an output.
class GroupedWeight : public Weight {
public:
    GroupedWeight(const Subject& on, const Shape& shape, Random& random, const GroupedFormat& format = GROUPED_FORMATS[0])
        : Weight(on, shape, on.ops.grouped_bytes(format.format, shape.in, shape.out), 0), format_(format),
          values_(shape.out * shape.in / (format.bits == 4 ? 2 : 1)), scales_of_(shape.out * shape.in / format.group), minimums_(scales_of_.size()) {
        int shift = format.bits == 8 ? 0 : format.middle, range = format.bits == 4 ? 256 : 1 << format.bits;
        for (uint8_t& value : values_) value = static_cast<uint8_t>(random.below(range) - (format.bits == 4 ? 0 : shift));
        for (size_t i = 0; i < scales_of_.size(); i++) {
            scales_of_[i] = fp16(static_cast<int>(1024 + random.below(1024)), static_cast<int>(-random.below(5)) - 14);
            minimums_[i] = fp16(static_cast<int>(random.below(2047)) - 1023, -12);  // like Q4_1's
            if (i % 3 == 0) minimums_[i] = static_cast<uint16_t>((scales_of_[i] + (3 << 10)) | 1 << 15);  // -8 scales, like Q4_0's
            if (i % 19 == 5) scales_of_[i] = static_cast<uint16_t>(random.below(1024));  // a denormal
        }
        // The greatest values: their products with the greatest activations must not overflow.
        int8_t least = static_cast<int8_t>(-format.middle), most = static_cast<int8_t>((1 << format.bits) - 1 + least);
        for (int64_t i = 0; i < shape.in / (format.bits == 4 ? 2 : 1); i++) {
            values_[i] = format.bits == 4 ? 0xff * (format.table.empty()) + 0x11 * !format.table.empty() : static_cast<uint8_t>(most);
            if (shape.out > 1) values_[values_.size() - 1 - i] = format.bits == 4 ? 0 : static_cast<uint8_t>(least);
        }
    }

    double at(int64_t column, int64_t i) const override { return scale(column, i) * value(column, i) + minimum(column, i); }
    void pack() override {
        StoredGroups stored{values_.data(), scales_of_.data(), format_.has_minimum ? minimums_.data() : nullptr,
                            shape_.in / (format_.bits == 4 ? 2 : 1), shape_.in / format_.group};
        on_.ops.pack_grouped(on_.pool, format_.format, {StoredGroups::read, &stored, shape_.in, shape_.out}, format_.table.data(), packed_.data());
    }
    void multiply(ThreadPool& pool, const LinearArgs& args) const override { on_.ops.linear_grouped(pool, on_.dtype, format_.format, args); }

    int64_t group_size() const { return format_.group; }
    double scale(int64_t column, int64_t i) const { return from_fp16(scales_of_[group(column, i)]); }
    double minimum(int64_t column, int64_t i) const { return format_.has_minimum ? from_fp16(minimums_[group(column, i)]) : 0; }

    double value(int64_t column, int64_t i) const {
        if (format_.bits > 4) {
            uint8_t value = values_[column * shape_.in + i];
            return format_.has_minimum ? value : static_cast<int8_t>(value);
        }
        int64_t half = format_.group / 2;  // the first half of a group is in the low bits
        int code = values_[group(column, i) * half + i % half] >> (i % format_.group < half ? 0 : 4) & 15;
        return format_.table.empty() ? code - format_.middle : format_.table[code];
    }

    void set_group(int64_t column, int64_t first, uint16_t scale, uint16_t minimum) {
        scales_of_[group(column, first)] = scale;
        minimums_[group(column, first)] = minimum;
    }

private:
    int64_t group(int64_t column, int64_t i) const { return (column * shape_.in + i) / format_.group; }

    const GroupedFormat& format_;
    std::vector<uint8_t> values_;
    std::vector<uint16_t> scales_of_, minimums_;
};

// The step in which the activations of a group are counted, and the least of them.
struct Counted {
    double step, least;
};

template <typename SomeWeight>
class Product {
public:
    template <typename... Format>
    Product(const Subject& on, const Shape& shape, Random& random, const Format&... format)
        : shape(shape), x(on.dtype, shape.rows * shape.width(), random, 2.0), bias(on.dtype, shape.out, random),
          weight(on, this->shape, random, format...), on_(on), out_dtype_(shape.rows % 3 == 1 ? Dtype::float32 : on.dtype),
          out_(out_dtype_, shape.rows * shape.out) {}

    const Shape shape;
    Tensor x, bias;
    SomeWeight weight;

    double input(int64_t row, int64_t i) const { return inputs_[row * shape.in + i]; }

    void set_input(int64_t row, int64_t i, double value) { x.set(row * shape.width() + i, value); }

    double exact(int64_t row, int64_t column) const {
        double sum = bias.at(column);
        for (int64_t i = 0; i < shape.in; i++) sum += input(row, i) * weights_[column * shape.in + i];
        return sum;
    }

    double output(int64_t row, int64_t column) const { return out_.at(row * shape.out + column); }

    Counted counted(int64_t row, int64_t first) const { return counted_[row * ceil_div(shape.in, GROUP) + first / GROUP]; }

    // Computes with several threads, then some rows alone, which must get the same bits.
    void run(Findings& found) {
        prepare();
        weight.pack();
        found.require(weight.has_whole_guards(), "packed beyond its room");
        multiply(on_.pool, 0, shape.rows, out_);
        found.require_guards(out_);
        for (int64_t row = 0; row < shape.rows; row += 1 + shape.rows / 8) {
            Tensor one(out_dtype_, shape.out);
            multiply(on_.alone, row, 1, one);
            found.require(one.has_bits_of(out_, row * shape.out, shape.out), "a row alone has other bits than in a batch");
            found.require_guards(one);
        }
    }

    // Checks outputs; the error of an output is relative to magnitude(row, column).
    template <typename Magnitude>
    void compare(Findings& found, const Magnitude& magnitude) const {
        for (int64_t row = 0; row < shape.rows; row++)
            for (int64_t column = 0; column < shape.out; column++) {
                double want = exact(row, column);
                found.compare(output(row, column), want, magnitude(row, column, want));
            }
    }

private:
    void prepare() {
        for (int64_t row = 0; row < shape.rows; row++) {
            auto input_of_row = [&](int64_t i) { return x.at(row * shape.width() + i); };
            for (int64_t i = 0; i < shape.in; i++) inputs_.push_back(activate(shape.activation, shape.in, i, input_of_row));
            for (int64_t group = 0; group < shape.in; group += GROUP) {
                double low = group + GROUP > shape.in ? 0 : INFINITY, high = -low;  // padded with zeros
                for (int64_t i = group; i < std::min(shape.in, group + GROUP); i++) {
                    low = std::min(low, input(row, i));
                    high = std::max(high, input(row, i));
                }
                counted_.push_back({(high - low) / 255, low});
            }
        }
        for (int64_t column = 0; column < shape.out; column++)
            for (int64_t i = 0; i < shape.in; i++) weights_.push_back(weight.at(column, i));
    }

    void multiply(ThreadPool& pool, int64_t row, int64_t rows, Tensor& to) {
        LinearArgs args{};
        args.x = x.data(row * shape.width());
        args.weight = weight.packed();
        args.scales = weight.scales();
        args.bias = bias.data();
        args.out = to.data();
        args.out_dtype = out_dtype_;
        args.rows = rows;
        args.in = shape.in;
        args.out_size = args.out_stride = shape.out;
        args.activation = shape.activation;
        weight.multiply(pool, args);
    }

    const Subject& on_;
    const Dtype out_dtype_;  // always float32 for some products, such as logits
    Tensor out_;
    std::vector<double> inputs_, weights_;  // as they enter the product
    std::vector<Counted> counted_;          // of each row and group
};

// Activations that quantization keeps exactly: q + low in steps of a power of two, with q from 0 to 255 and both extremes
// present. A group padded with zeros contains 0 anyway.
template <typename SomeWeight>
void set_exact_input(Product<SomeWeight>& product, Random& random) {
    const Shape& shape = product.shape;
    for (int64_t row = 0; row < shape.rows; row++)
        for (int64_t first = 0; first < shape.in; first += GROUP) {
            int64_t end = std::min(shape.in, first + GROUP), low = -random.below(256);
            double step = std::ldexp(1.0, static_cast<int>(random.below(9)) - 6);
            for (int64_t i = first; i < end; i++) {
                int64_t q = i == first ? 0 : i == end - 1 ? 255 : random.below(256);
                product.set_input(row, i, static_cast<double>(q + low) * step);
            }
        }
}

}  // namespace

// Numbers that int8 holds exactly, so that only float32 sums are rounded.
Findings test_int8_exactly(const Subject& on) {
    Findings found(1e-6 + on.rounding());
    Random random(6);
    for (const Shape& shape : shapes(1)) {
        Product<Int8Weight> product(on, shape, random);
        set_exact_input(product, random);
        for (int64_t column = 0; column < shape.out; column++) {
            double step = 0;
            int64_t other = 0;  // neighbours sum to -127…127
            for (int64_t i = 0; i < shape.in; i++) {
                if (i % int8_group(on) == 0) step = std::ldexp(column % 2 ? -1.0 : 1.0, static_cast<int>(random.below(9)) - 6);
                if (i % 2 == 0) other = 0;
                int64_t least = std::max<int64_t>(-127, -127 - other), most = std::min<int64_t>(127, 127 - other);
                int64_t whole = i % int8_group(on) == 0 ? 127 : least + random.below(most - least + 1);
                other = whole;
                product.weight.set(column, i, static_cast<double>(whole) * step);
            }
        }
        product.run(found);
        Table weights(shape.out, shape.in, 1, [&](int64_t column, int64_t i) { return std::fabs(product.weight.at(column, i)); });
        product.compare(found, [&](int64_t row, int64_t column, double) {
            double magnitude = std::fabs(product.bias.at(column));
            for (int64_t i = 0; i < shape.in; i++)
                magnitude += weights(column, i) * (std::fabs(product.input(row, i)) + std::fabs(product.counted(row, i).least));
            return magnitude;
        });
    }
    return found;
}

// Any numbers. Errors are counted in standard deviations of what rounding to int8 adds.
Findings test_int8(const Subject& on) {
    Findings found(6);
    Random random(7);
    for (const Shape& shape : with_activations(shapes(1), EVENLY_ROUNDED)) {
        Product<Int8Weight> product(on, shape, random);
        if (shape.in > 5) {  // an outlier costs precision only in its group
            product.weight.set(0, 5, 30.0);
            product.set_input(0, shape.in - 1, 100.0);
        }
        if (shape.rows > 1)  // the greatest sums of neighbours
            for (int64_t i = 0; i < shape.in; i++) {
                product.weight.set(shape.out - 1, i, i / GROUP % 2 ? -1.0 : 1.0);
                product.set_input(1, i, i % GROUP ? 2.0 : 0.0);
            }
        product.run(found);
        int64_t size = int8_group(on);
        Table w_squares(shape.out, shape.in, size, [&](int64_t column, int64_t i) { return square(product.weight.at(column, i)); });
        Table x_squares(shape.rows, shape.in, size, [&](int64_t row, int64_t i) { return square(product.input(row, i)); });
        Table w_steps(shape.out, shape.in, size, [&](int64_t column, int64_t i) { return i % size ? 0 : product.weight.step(column, i); });
        product.compare(found, [&](int64_t row, int64_t column, double want) {
            double sum = square(2 * on.rounding() * want + 4e-6 * want);
            for (int64_t group = 0; group < ceil_div(shape.in, size); group++) {
                double x_step = product.counted(row, group * size).step;
                sum += square(x_step) * w_squares(column, group) + square(w_steps(column, group)) * x_squares(row, group);
            }
            return std::sqrt(sum / 12);
        });
    }
    return found;
}

// Groups without a range, and rows that hold NaN or infinity.
Findings test_int8_of_odd_rows(const Subject& on) {
    Findings found(1e-2);
    Random random(8);
    constexpr int64_t ROWS = 6, IN = 150, OUT = 37;
    Product<Int8Weight> product(on, {ROWS, IN, OUT}, random);
    for (int64_t i = 0; i < IN; i++) {
        product.set_input(0, i, 0.0);
        product.set_input(1, i, 3.0);
    }
    product.set_input(2, 70, std::nan(""));
    product.set_input(3, IN - 1, INFINITY);
    product.set_input(4, 0, -INFINITY);
    product.run(found);
    for (int64_t row = 0; row < ROWS; row++)
        for (int64_t column = 0; column < OUT; column++) {
            double got = product.output(row, column), magnitude = std::fabs(product.bias.at(column));
            for (int64_t i = 0; i < IN; i++) magnitude += std::fabs(product.input(row, i) * product.weight.at(column, i));
            if (row >= 2 && row <= 4)
                found.require(std::isnan(got), "lost what is no number");
            else
                found.compare(got, product.exact(row, column), magnitude);
        }
    return found;
}

// Rows of a packed weight are within half a step of the original.
Findings test_embedding_int8(const Subject& on) {
    Findings found(0.501);
    Random random(9);
    for (const Shape& shape : shapes(1)) {
        Int8Weight weight(on, shape, random);
        weight.pack();
        std::vector<int64_t> ids;
        for (int64_t row = 0; row < shape.rows; row++) ids.push_back(row * 29 % shape.out);
        Tensor out(on.dtype, shape.rows * shape.in);
        on.ops.embedding_int8(on.pool, on.dtype, ids.data(), static_cast<const int8_t*>(weight.packed()), weight.scales(), out.data(), shape.rows, shape.in);
        for (int64_t row = 0; row < shape.rows; row++)
            for (int64_t i = 0; i < shape.in; i++) {
                double want = weight.at(ids[row], i), step = weight.step(ids[row], i / int8_group(on) * int8_group(on));
                found.compare(out.at(row * shape.in + i), want, step + 2 * on.rounding() * (std::fabs(want) + step));
            }
        found.require_guards(out);
    }
    return found;
}

// Scales and minimums with which everything but the sums is exact.
Findings test_grouped_exactly(const Subject& on) {
    Findings found(1e-6 + on.rounding());
    Random random(10);
    for (const GroupedFormat& format : GROUPED_FORMATS)
        for (const Shape& shape : shapes(HALF)) {
            Product<GroupedWeight> product(on, shape, random, format);
            set_exact_input(product, random);
            for (int64_t column = 0; column < shape.out; column++) {
                int exponent = 0;
                for (int64_t i = 0; i < shape.in; i += format.group) {
                    // Powers of two so near that the sum of a group's weights has no more bits than fp16.
                    exponent = i % GROUP == 0 ? -static_cast<int>(random.below(5)) - 4 : format.bits == 4 && format.table.empty() ? exponent + 1 : exponent;
                    int minimum = column % 2 ? -8 : static_cast<int>(random.below(60)) - 30;
                    product.weight.set_group(column, i, fp16(1, exponent), fp16(minimum, exponent));
                }
            }
            product.run(found);
            Table parts(shape.out, shape.in, 1, [&](int64_t column, int64_t i) {
                return std::fabs(product.weight.scale(column, i) * product.weight.value(column, i)) + std::fabs(product.weight.minimum(column, i));
            });
            Table totals(shape.out, shape.in, GROUP, [&](int64_t column, int64_t i) { return product.weight.at(column, i); });
            product.compare(found, [&](int64_t row, int64_t column, double) {
                double magnitude = std::fabs(product.bias.at(column));
                for (int64_t i = 0; i < shape.in; i++) {
                    auto [step, least] = product.counted(row, i);
                    magnitude += parts(column, i) * (std::fabs(product.input(row, i)) + std::fabs(least) + 128 * step);
                    // Larger values have sums with more bits than fp16.
                    if (i % GROUP == 0 && std::fabs(totals(column, i / GROUP)) >= 2048 * product.weight.scale(column, i))
                        magnitude += std::fabs(totals(column, i / GROUP)) * 0x1p-11 * (std::fabs(least) + 128 * step) / found.bound;
                }
                return magnitude;
            });
        }
    return found;
}

// Any numbers. Errors are counted in standard deviations of the rounding errors: of activations to bytes, and to fp16 of the sum
// of weights that is multiplied by their least element.
Findings test_grouped(const Subject& on) {
    constexpr double ULP = 0x1p-10;
    Findings found(6);
    Random random(11);
    for (const GroupedFormat& format : GROUPED_FORMATS)
        for (const Shape& shape : with_activations(shapes(HALF), EVENLY_ROUNDED)) {
            Product<GroupedWeight> product(on, shape, random, format);
            product.set_input(0, shape.in - 1, 100.0);
            product.run(found);
            Table w_squares(shape.out, shape.in, GROUP, [&](int64_t column, int64_t i) { return square(product.weight.at(column, i)); });
            Table totals(shape.out, shape.in, GROUP, [&](int64_t column, int64_t i) { return product.weight.at(column, i); });
            product.compare(found, [&](int64_t row, int64_t column, double want) {
                double sum = square(2 * on.rounding() * want + 4e-6 * want);
                for (int64_t first = 0; first < shape.in; first += GROUP) {
                    auto [step, least] = product.counted(row, first);
                    sum += square(step) * w_squares(column, first / GROUP);
                    sum += square(ULP * totals(column, first / GROUP) * std::max(std::fabs(least), std::fabs(least + 128 * step)));
                }
                return std::sqrt(sum / 12);
            });
        }
    return found;
}

// Rows of a packed weight are the original's.
Findings test_embedding_grouped(const Subject& on) {
    Findings found(1e-6 + on.rounding());
    Random random(13);
    for (const GroupedFormat& format : GROUPED_FORMATS)
        for (const Shape& shape : shapes(HALF)) {
            GroupedWeight weight(on, shape, random, format);
            weight.pack();
            std::vector<int64_t> ids;
            for (int64_t row = 0; row < shape.rows; row++) ids.push_back(row * 29 % shape.out);
            Tensor out(on.dtype, shape.rows * shape.in);
            on.ops.embedding_grouped(on.pool, on.dtype, format.format, ids.data(), static_cast<const uint8_t*>(weight.packed()), out.data(), shape.rows, shape.in, shape.out);
            for (int64_t row = 0; row < shape.rows; row++)
                for (int64_t i = 0; i < shape.in; i++) {
                    double want = weight.at(ids[row], i), largest = std::fabs(want - weight.minimum(ids[row], i)) + std::fabs(weight.minimum(ids[row], i));
                    found.compare(out.at(row * shape.in + i), want, largest);
                }
            found.require_guards(out);
        }
    return found;
}

// Each weight is at most about half a step from what its code stands for, and groups of equal weights are exact.
Findings test_quantize_int4(const Subject& on) {
    constexpr int64_t SIZE = 32, GROUPS = 700;
    Findings found(0.75);
    Random random(19);
    Tensor weight(on.dtype, GROUPS * SIZE, random);
    for (int64_t i = 0; i < SIZE; i++) weight.set(3 * SIZE + i, 0.75);
    Room<uint8_t> values(GROUPS * SIZE / 2, 0);
    Room<uint16_t> scales(GROUPS, 1), minimums(GROUPS, 1);
    on.ops.quantize_int4(on.pool, on.dtype, weight.data(), values.data(), scales.data(), minimums.data(), GROUPS);
    for (int64_t group = 0; group < GROUPS; group++) {
        double scale = from_fp16(scales.data()[group]), minimum = from_fp16(minimums.data()[group]), low = INFINITY, high = -INFINITY;
        for (int64_t i = 0; i < SIZE; i++) low = std::min(low, weight.at(group * SIZE + i)), high = std::max(high, weight.at(group * SIZE + i));
        for (int64_t i = 0; i < SIZE; i++) {
            int both = values.data()[group * SIZE / 2 + i % (SIZE / 2)], code = i < SIZE / 2 ? both & 15 : both >> 4;
            double got = scale * code + minimum, want = weight.at(group * SIZE + i);
            // The range that has the least error may leave out the ends of the group's own.
            found.compare(std::clamp(got, low, high), std::clamp(want, minimum, minimum + 15 * scale), std::max(scale, 0x1p-10));
        }
    }
    found.require(values.has_whole_guards() && scales.has_whole_guards() && minimums.has_whole_guards(), "wrote beyond its output");
    return found;
}

Findings test_whole(const Subject& on) {
    Findings found(2e-6 + on.rounding());
    Random random(12);
    for (const Shape& shape : with_activations(shapes(1), FUNCTIONS)) {
        Product<WholeWeight> product(on, shape, random);
        product.run(found);
        product.compare(found, [&](int64_t row, int64_t column, double) {
            double magnitude = std::fabs(product.bias.at(column));
            for (int64_t i = 0; i < shape.in; i++) magnitude += std::fabs(product.input(row, i) * product.weight.at(column, i));
            return magnitude;
        });
    }
    return found;
}

namespace {

// The rows of several weights at once have the bits of each row alone with its weight. The experts that have no rows hold
// poison.
template <typename SomeWeight>
void check_experts(const Subject& on, Findings& found, Random& random, const Shape& shape, Activation activation) {
    constexpr int64_t COUNT = 5, ROWS = 23;
    const int32_t starts[COUNT + 1] = {0, 0, 3, 4, 4, ROWS};
    std::vector<int32_t> sources(ROWS);
    for (int32_t& source : sources) source = static_cast<int32_t>(random.below(shape.rows));
    Tensor x(on.dtype, shape.rows * shape.in * activation.width(), random), bias(on.dtype, COUNT * shape.out, random);
    std::vector<std::unique_ptr<SomeWeight>> weights;
    for (int64_t expert = 0; expert < COUNT; expert++) {
        weights.push_back(std::make_unique<SomeWeight>(on, shape, random));
        weights.back()->pack();
    }
    int64_t num_bytes = weights[0]->num_bytes(), num_scales = weights[0]->num_scales();
    Room<uint8_t> packed(COUNT * num_bytes, 0);
    Room<float> scales(COUNT * num_scales, 0);
    for (int64_t expert = 0; expert < COUNT; expert++)
        if (starts[expert] < starts[expert + 1]) {
            std::memcpy(packed.data() + expert * num_bytes, weights[expert]->packed(), num_bytes);
            if (num_scales) std::memcpy(scales.data() + expert * num_scales, weights[expert]->scales(), num_scales * sizeof(float));
        }
    Tensor out(on.dtype, ROWS * shape.out), one(on.dtype, shape.out);
    LinearArgs args{};
    args.x = x.data();
    args.weight = packed.data();
    args.scales = scales.data();
    args.bias = bias.data();
    args.out = out.data();
    args.out_dtype = on.dtype;
    args.rows = ROWS;
    args.in = shape.in;
    args.out_size = args.out_stride = shape.out;
    args.activation = activation;
    args.experts = {starts, sources.data(), COUNT, num_bytes, num_scales};
    weights[0]->multiply(on.pool, args);
    found.require_guards(out);
    args.experts = {};
    args.rows = 1;
    args.out = one.data();
    for (int64_t expert = 0; expert < COUNT; expert++)
        for (int64_t row = starts[expert]; row < starts[expert + 1]; row++) {
            args.x = x.data(sources[row] * shape.in * activation.width());
            args.weight = weights[expert]->packed();
            args.scales = weights[expert]->scales();
            args.bias = bias.data(expert * shape.out);
            weights[expert]->multiply(on.alone, args);
            found.require(one.has_bits_of(out, row * shape.out, shape.out), "a row of an expert has other bits than alone");
        }
}

}  // namespace

Findings test_experts(const Subject& on) {
    Findings found(0);
    Random random(13);
    for (const Shape& shape : {Shape{7, 64, 70}, Shape{1, 192, 33}, Shape{40, 96, 16}})
        for (Activation activation : {Activation{}, Activation{Function::silu, true, {}}}) {
            check_experts<WholeWeight>(on, found, random, shape, activation);
            check_experts<Int8Weight>(on, found, random, shape, activation);
            check_experts<GroupedWeight>(on, found, random, shape, activation);
        }
    return found;
}

Findings test_weigh_experts(const Subject& on) {
    Findings found(1e-6 + on.rounding());
    Random random(14);
    for (int64_t size : {1, 33, 64, 600})
        for (int64_t rows : {1, 9})
            for (int64_t chosen : {1, 3})
                for (int shared = 0; shared < 3; shared++) {  // none, as it is, weighed by a gate
                    Tensor x(on.dtype, rows * chosen * size, random), other(on.dtype, rows * size, random), out(on.dtype, rows * size);
                    std::vector<int32_t> places;
                    std::vector<float> weights, gates;
                    for (int64_t i = 0; i < rows * chosen; i++) {
                        places.push_back(static_cast<int32_t>(rows * chosen - 1 - i));
                        weights.push_back(static_cast<float>(random.normal()));
                    }
                    for (int64_t row = 0; row < rows; row++) gates.push_back(static_cast<float>(random.normal()));
                    on.ops.weigh_experts(on.pool, on.dtype,
                                         {x.data(), places.data(), weights.data(), shared ? other.data() : nullptr, shared == 2 ? gates.data() : nullptr,
                                          out.data(), rows, chosen, size});
                    for (int64_t row = 0; row < rows; row++)
                        for (int64_t i = 0; i < size; i++) {
                            double share = shared == 2 ? 1 / (1 + std::exp(-double{gates[row]})) : shared;
                            double sum = share * other.at(row * size + i), magnitude = std::fabs(sum);
                            for (int64_t choice = row * chosen; choice < (row + 1) * chosen; choice++) {
                                double term = weights[choice] * x.at(places[choice] * size + i);
                                sum += term;
                                magnitude += std::fabs(term);
                            }
                            found.compare(out.at(row * size + i), sum, magnitude);
                        }
                    found.require_guards(out);
                }
    return found;
}
