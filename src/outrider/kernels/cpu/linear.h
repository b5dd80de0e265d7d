// y = x @ w.T (+ bias) (+ residual): float32, bfloat16, and 4- and 8-bit weights against int8 activations.
//
// Weights lie in tiles of 16 outputs. Each (row, output) is one accumulator that runs over k in order, in every row
// tile; a larger tile only reads the weights less often.
#pragma once

#include "simd.h"
#include "team.h"

enum Kind : int64_t { kFloat32, kBfloat16, kQ4, kQ8 };

constexpr int64_t kGroup = 32;                          // weights that share a scale, as in GGUF's Q4_0, Q4_1, Q8_0
constexpr int64_t kQ4Bytes = 16 * kGroup / 2 + 2 * 32;  // 16 outputs x 32 nibbles, 16 scales, 16 minima (halves)

inline int64_t q8_tile_bytes(int64_t groups) { return int64_t(round_up(size_t(groups * (16 * kGroup + 32)))); }

/// How 32 activations were rounded to int8, in halves of 16: x ~ scale * value + centre.
///
/// The centre halves the error where one outlier leads its neighbours, which is what activations look like; with halves
/// it is a quarter, and on SmolLM2-135M the divergence from exact activations falls from 3.5e-3 to 0.7e-3.
struct Rounding {
    float scale[2], centre[2];
    float total;        // sum of the 32 rounded activations, which meets the minimum of 4-bit weights
    int32_t offset[2];  // -128 * sum of values, which takes back the +128 of stored 8-bit weights
    int32_t unused;
};

struct Quantised {
    int8_t* values;      // (T, K)
    Rounding* rounding;  // (T, K / 32)
};

inline size_t quantised_bytes(int64_t rows, int64_t k) {
    return round_up(size_t(rows * k)) + size_t(rows * k / kGroup) * sizeof(Rounding);
}

inline Quantised quantised_at(char* p, int64_t rows, int64_t k) {
    return {(int8_t*)p, (Rounding*)(p + round_up(size_t(rows * k)))};
}

inline void quantise_row(const float* x, int64_t k, int64_t row, const Quantised& q) {
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    int8_t* values = q.values + row * k;
    Rounding* rounding = q.rounding + row * (k / kGroup);
    for (int64_t g = 0; g < k / kGroup; ++g) {
        float total = 0.0f;
        for (int half = 0; half < 2; ++half) {
            const f32x16 a = load<f32x16>(x + g * kGroup + 16 * half);
            const float high = largest(a), low = -largest(splat(0.0f) - a);
            // A NaN or infinity must reach the result, so the centre carries it.
            const float centre = (high + low) * 0.5f + sum(a * splat(0.0f)), reach = (high - low) * 0.5f;
            const float inverse = reach > 0 ? 127.0f / reach : 0.0f;
            const i32x16 value = bits((a - splat(centre)) * splat(inverse) + magic) - bits(magic);
            int32_t wide[16];
            store(wide, value);
            for (int i = 0; i < 16; ++i) values[g * kGroup + 16 * half + i] = int8_t(wide[i]);
            const int32_t whole = sum(value);
            rounding[g].scale[half] = reach / 127.0f;
            rounding[g].centre[half] = centre;
            rounding[g].offset[half] = -128 * whole;
            total += reach / 127.0f * float(whole) + 16.0f * centre;
        }
        rounding[g].total = total;
    }
}

inline int32_t quad(const int8_t* x) {
    int32_t r;
    std::memcpy(&r, x, 4);
    return r;
}

/// Products of one group with one row: exact integer dots, then the rounding undone.
inline f32x16 restore(const i32x16 (&dot)[2], const f32x16 (&sums)[2], const Rounding& by) {
    f32x16 t = to_float(dot[0]) * splat(by.scale[0]);
    t = fma(to_float(dot[1]), by.scale[1], t);
    t = fma(sums[0], by.centre[0], t);
    return fma(sums[1], by.centre[1], t);
}

constexpr int32_t kOnes = 0x01010101;
constexpr int64_t kAhead = 2048;  // bytes to prefetch ahead: hardware prefetchers stop at every 4 KiB page

/// One tile of 4-bit weights against R rows; `acc[r]` += row r.
template <int R>
inline void q4_tile(const uint8_t* w, const Quantised& q, int64_t row, int64_t k, f32x16 (&acc)[R]) {
    const int64_t groups = k / kGroup;
    const i32x16 mask = splat(int32_t(0x0f0f0f0f)), zero = splat(int32_t(0));
    const int8_t* x = q.values + row * k;
    const Rounding* rounding = q.rounding + row * groups;
    for (int64_t g = 0; g < groups; ++g, w += kQ4Bytes, x += kGroup, ++rounding) {
        i32x16 dot[R][2], ones[2] = {zero, zero};
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) dot[r][0] = dot[r][1] = zero;
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const i32x16 both = load<i32x16>(w + 64 * j);
            __builtin_prefetch(w + kAhead + 80 * j);
            const i32x16 low = both & mask, high = (both >> 4) & mask;
            ones[0] = dot4<true>(ones[0], low, kOnes);
            ones[1] = dot4<true>(ones[1], high, kOnes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                dot[r][0] = dot4<true>(dot[r][0], low, quad(x + r * k + 4 * j));
                dot[r][1] = dot4<true>(dot[r][1], high, quad(x + r * k + 16 + 4 * j));
            }
        }
        const f32x16 d = load_half((const uint16_t*)(w + 256)), m = load_half((const uint16_t*)(w + 288));
        const f32x16 sums[2] = {to_float(ones[0]), to_float(ones[1])};
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Rounding& by = rounding[r * groups];
            acc[r] = fma(restore(dot[r], sums, by), d, acc[r]);
            acc[r] = fma(m, by.total, acc[r]);
        }
    }
}

/// One tile of 8-bit weights (stored + 128) against R rows.
template <int R>
inline void q8_tile(const uint8_t* w, const Quantised& q, int64_t row, int64_t k, f32x16 (&acc)[R]) {
    const int64_t groups = k / kGroup;
    const uint16_t* d16 = (const uint16_t*)(w + groups * 16 * kGroup);
    const i32x16 shift = splat(int32_t(-128 * 16));
    const int8_t* x = q.values + row * k;
    const Rounding* rounding = q.rounding + row * groups;
    for (int64_t g = 0; g < groups; ++g, w += 16 * kGroup, x += kGroup, d16 += 16, ++rounding) {
        i32x16 dot[R][2], ones[2] = {shift, shift};
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            for (int half = 0; half < 2; ++half) dot[r][half] = splat(rounding[r * groups].offset[half]);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const i32x16 b = load<i32x16>(w + 64 * j);
            __builtin_prefetch(w + kAhead + 64 * j);
            ones[j / 4] = dot4<false>(ones[j / 4], b, kOnes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) dot[r][j / 4] = dot4<false>(dot[r][j / 4], b, quad(x + r * k + 4 * j));
        }
        const f32x16 d = load_half(d16), sums[2] = {to_float(ones[0]), to_float(ones[1])};
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r] = fma(restore(dot[r], sums, rounding[r * groups]), d, acc[r]);
    }
}

/// J tiles of float weights against R rows of x.
template <class W, int R, int J>
inline void float_tiles(const W* w, const float* x, int64_t ldx, int64_t k, f32x16 (&acc)[R][J]) {
    for (int64_t i = 0; i < k; ++i) {
        f32x16 b[J];
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) b[j] = load_wide(w + (j * k + i) * 16);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const f32x16 a = splat(x[r * ldx + i]);
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j) acc[r][j] = fma(a, b[j], acc[r][j]);
        }
    }
}

/// p: x, weights, bias or null, residual or null, out. n: kind, K, N, and the row strides of x, residual and out.
struct LinearOp {
    const float* x;
    const char* weights;
    const float *bias, *residual;
    float* out;
    int64_t kind, k, n, ldx, ldr, ldo;

    explicit LinearOp(const Op& op)
        : x(op.at<float>(0)), weights(op.at<char>(1)), bias(op.at<float>(2)), residual(op.at<float>(3)),
          out(op.at<float>(4)), kind(op.n[0]), k(op.n[1]), n(op.n[2]), ldx(op.n[3]), ldr(op.n[4]), ldo(op.n[5]) {}

    bool quantised() const { return kind == kQ4 || kind == kQ8; }

    void finish(f32x16 acc, int64_t row, int64_t tile) const {
        const int64_t at = tile * 16, left = n - at;
        if (bias) acc = acc + load_floats(bias + at, left);
        if (residual) acc = acc + load_floats(residual + row * ldr + at, left);
        store_floats(out + row * ldo + at, acc, left);
    }

    template <class W>
    void float_range(int64_t rows, Range tiles) const {
        constexpr int most = kLanes == 16 ? 6 : 4;  // R x J accumulators within the registers
        for (int64_t t = tiles.begin; t < tiles.end;) {
            int wide = int(tiles.end - t < 4 ? tiles.end - t : 4);
            if (kLanes < 16 && rows > 1) wide = 1;
            with_constant<4>(wide, [&](auto j) {
                constexpr int J = decltype(j)::value;
                for (int64_t row = 0; row < rows;) {
                    const int tall = int(rows - row < most ? rows - row : most);
                    with_constant<most>(tall, [&](auto r) {
                        constexpr int R = decltype(r)::value;
                        f32x16 acc[R][J] = {};
                        float_tiles<W, R, J>((const W*)weights + t * k * 16, x + row * ldx, ldx, k, acc);
                        for (int a = 0; a < R; ++a)
                            for (int b = 0; b < J; ++b) finish(acc[a][b], row + a, t + b);
                    });
                    row += tall;
                }
            });
            t += wide;
        }
    }

    void quantised_range(int64_t rows, Range tiles, const Quantised& q) const {
        constexpr int most = kLanes == 16 ? 8 : 2;
        const int64_t groups = k / kGroup, bytes = kind == kQ4 ? groups * kQ4Bytes : q8_tile_bytes(groups);
        for (int64_t t = tiles.begin; t < tiles.end; ++t) {
            const uint8_t* w = (const uint8_t*)weights + t * bytes;
            for (int64_t row = 0; row < rows;) {
                const int tall = int(rows - row < most ? rows - row : most);
                with_constant<most>(tall, [&](auto r) {
                    constexpr int R = decltype(r)::value;
                    f32x16 acc[R] = {};
                    if (kind == kQ4)
                        q4_tile<R>(w, q, row, k, acc);
                    else
                        q8_tile<R>(w, q, row, k, acc);
                    for (int a = 0; a < R; ++a) finish(acc[a], row + a, t);
                });
                row += tall;
            }
        }
    }

    Plan plan(const Batch& batch, int threads) const {
        const int64_t rows = batch.rows, tiles = (n + 15) / 16, products = rows * n * k;
        int64_t grain = Plan::spread(tiles, threads, products);
        if (grain < 2) grain = 2;
        if (!quantised()) return {{tiles, 0}, {grain, 1}, 0, products};
        return {{rows, tiles}, {Plan::spread(rows, threads, rows * k * 8), grain}, quantised_bytes(rows, k), products};
    }

    void run(const Batch& batch, int phase, Range range, const Place& place) const {
        if (kind == kFloat32) return float_range<float>(batch.rows, range);
        if (kind == kBfloat16) return float_range<uint16_t>(batch.rows, range);
        const Quantised q = quantised_at(place.scratch, batch.rows, k);
        if (phase == 1) return quantised_range(batch.rows, range, q);
        for (int64_t row = range.begin; row < range.end; ++row) quantise_row(x + row * ldx, k, row, q);
    }
};

/// Row `index` of a packed weight, exactly as its file defines it. p: weights, out. n: kind, K, N, row stride of out.
inline void lookup_row(int64_t kind, const char* weights, int64_t k, int64_t index, float* out) {
    const int64_t tile = index / 16, lane = index % 16, groups = k / kGroup;
    if (kind == kFloat32 || kind == kBfloat16) {
        for (int64_t i = 0; i < k; ++i) {
            const int64_t at = (tile * k + i) * 16 + lane;
            out[i] = kind == kFloat32 ? ((const float*)weights)[at] : widen(((const uint16_t*)weights)[at]);
        }
        return;
    }
    for (int64_t g = 0; g < groups; ++g) {
        float d[16], m[16];
        if (kind == kQ4) {
            const uint8_t* w = (const uint8_t*)weights + (tile * groups + g) * kQ4Bytes;
            store(d, load_half((const uint16_t*)(w + 256)));
            store(m, load_half((const uint16_t*)(w + 288)));
            for (int64_t i = 0; i < kGroup; ++i) {
                const int byte = w[(i % 16) / 4 * 64 + lane * 4 + i % 4];
                out[g * kGroup + i] = d[lane] * float(i < 16 ? byte & 15 : byte >> 4) + m[lane];
            }
        } else {
            const uint8_t* w = (const uint8_t*)weights + tile * q8_tile_bytes(groups);
            store(d, load_half((const uint16_t*)(w + groups * 16 * kGroup + g * 32)));
            for (int64_t i = 0; i < kGroup; ++i)
                out[g * kGroup + i] = d[lane] * float(int(w[g * 16 * kGroup + i / 4 * 64 + lane * 4 + i % 4]) - 128);
        }
    }
}

inline void lookup(const Op& op, const Batch& batch, Range rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row)
        lookup_row(op.n[0], op.at<char>(0), op.n[1], batch.tokens[row], op.at<float>(1) + row * op.n[3]);
}
