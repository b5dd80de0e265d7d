// The keyed draw: argmax of logit / temperature + Gumbel noise from Philox4x32-10, as defined in kernels/noise.py.
#pragma once

#include <cmath>

#include "simd.h"
#include "team.h"

#if defined(__FMA__) || defined(__aarch64__)
inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
inline double fused(double a, double b, double c) { return a * b + c; }
#endif

constexpr int64_t kPiece = 4096;  // tokens that one thread scans at a time

/// Lanes of 64 bits of which the low halves count: the form in which CPUs multiply 32-bit numbers to 64 bits.
typedef uint64_t vq __attribute__((vector_size(4 * kLanes)));

inline vq product(vq a, uint32_t b) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (vq)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__) && defined(__FMA__)
    return (vq)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
    return (vq)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
    return (a & 0xffffffffu) * b;
#endif
}

/// The four words of each of 16 counters (first + i, c1, c2, c3), counter by counter. Salmon et al., SC 2011.
inline void philox(uint32_t first, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key, uint32_t (&out)[64]) {
    constexpr int lanes = kLanes / 2, parts = 16 / lanes;
    vq a[parts], b[parts], c[parts], d[parts];
    for (int p = 0; p < parts; ++p)
        for (int i = 0; i < lanes; ++i) {
            a[p][i] = uint32_t(first + p * lanes + i);
            b[p][i] = c1;
            c[p][i] = c2;
            d[p][i] = c3;
        }
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 8
        for (int p = 0; p < parts; ++p) {
            const vq x = product(a[p], 0xD2511F53u), y = product(c[p], 0xCD9E8D57u);
            a[p] = (y >> 32) ^ b[p] ^ k0;
            b[p] = y;
            c[p] = (x >> 32) ^ d[p] ^ k1;
            d[p] = x;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int p = 0; p < parts; ++p)
        for (int i = 0; i < lanes; ++i) {
            uint32_t* words = out + 4 * (p * lanes + i);
            words[0] = uint32_t(a[p][i]);
            words[1] = uint32_t(b[p][i]);
            words[2] = uint32_t(c[p][i]);
            words[3] = uint32_t(d[p][i]);
        }
}

/// Natural logarithm of a positive normal double, within 1 ulp or so (the reduction and polynomial of fdlibm's log).
inline double log_positive(double x) {
    int64_t b;
    std::memcpy(&b, &x, 8);
    const int64_t e = (b - 0x3fe6a09e667f3bcd) >> 52;  // so that the mantissa lies in [sqrt(1/2), sqrt(2))
    const int64_t reduced = b - (e << 52), shifted = e + 0x4338000000000000;
    double m, k;
    std::memcpy(&m, &reduced, 8);
    std::memcpy(&k, &shifted, 8);
    k -= 6755399441055744.0;  // 1.5 * 2^52, whose low bits hold e
    const double f = m - 1.0, s = f / (2.0 + f), z = s * s;
    double r = 1.479819860511658591e-01;
    r = fused(r, z, 1.531383769920937332e-01);
    r = fused(r, z, 1.818357216161805012e-01);
    r = fused(r, z, 2.222219843214978396e-01);
    r = fused(r, z, 2.857142874366239149e-01);
    r = fused(r, z, 3.999999999940941908e-01);
    r = fused(r, z, 6.666666666666735130e-01) * z;
    const double square = 0.5 * f * f;
    return k * 6.93147180369123816490e-01 - ((square - (s * (square + r) + k * 1.90821492927058770002e-10)) - f);
}

/// Gumbel noise of 64 tokens, 64 * block first.
inline void gumbel(uint32_t block, uint32_t position, uint32_t sample, uint32_t stream, uint64_t seed,
                   double (&g)[64]) {
    uint32_t words[64];
    philox(block * 16, position, sample, stream, seed, words);
    for (int i = 0; i < 64; ++i) g[i] = (double(words[i]) + 0.5) * 0x1p-32;
    for (int i = 0; i < 64; ++i) g[i] = -log_positive(-log_positive(g[i]));
}

/// The best of a piece; token -1 where all are -inf or any is NaN.
struct Best {
    double value;
    int64_t token;
    bool nan;

    void offer(double v, int64_t t) {
        if (v > value) {
            value = v;
            token = t;
        }
    }
};

inline Best best_plain(const float* logits, int64_t begin, int64_t end) {
    f32x16 best = splat(-INFINITY);
    i32x16 at = splat(int32_t(-1)), nan = splat(int32_t(0));
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) {
        const f32x16 x = load<f32x16>(logits + i);
        const i32x16 here = splat(int32_t(i));
        for (int p = 0; p < kParts; ++p) {
            at.p[p] = x.p[p] > best.p[p] ? here.p[p] : at.p[p];
            nan.p[p] |= x.p[p] != x.p[p];
        }
        best = max(x, best);
    }
    Best result{-INFINITY, -1, sum(nan) != 0};
    for (int lane = 0; lane < 16; ++lane) {
        const double value = best.p[lane / kLanes][lane % kLanes];
        const int64_t start = at.p[lane / kLanes][lane % kLanes], token = start + lane;
        if (start < 0) continue;
        if (value > result.value || (value == result.value && token < result.token)) {
            result.value = value;
            result.token = token;
        }
    }
    for (; i < end; ++i) {
        result.nan |= logits[i] != logits[i];
        result.offer(logits[i], i);
    }
    return result;
}

inline Best best_noisy(const float* logits, int64_t begin, int64_t end, double temperature, uint64_t seed,
                       uint32_t sample, uint32_t position) {
    Best result{-INFINITY, -1, false};
    for (int64_t i = begin; i < end; i += 64) {
        double g[64];
        gumbel(uint32_t(i / 64), position, sample, 0, seed, g);
        const int count = int(end - i < 64 ? end - i : 64);
        int better = 0;
        for (int j = 0; j < count; ++j) {
            g[j] = double(logits[i + j]) / temperature + g[j];
            better |= !(g[j] <= result.value);  // larger, or NaN
        }
        if (!better) continue;
        for (int j = 0; j < count; ++j) {
            result.nan |= logits[i + j] != logits[i + j];
            result.offer(g[j], i + j);
        }
    }
    return result;
}

inline int64_t draw_pieces(int64_t vocab) { return (vocab + kPiece - 1) / kPiece; }

/// p: logits, temperature, seeds, samples, positions, out (int64). n: V, row stride of logits.
inline void draw(const Op& op, int phase, Range range, const Place& place) {
    const int64_t vocab = op.n[0], pieces = draw_pieces(vocab);
    Best* found = (Best*)place.scratch;
    if (phase == 0) {
        for (int64_t piece = range.begin; piece < range.end; ++piece) {
            const int64_t row = piece / pieces, begin = piece % pieces * kPiece;
            const int64_t end = begin + kPiece < vocab ? begin + kPiece : vocab;
            const float* logits = op.at<float>(0) + row * op.n[1];
            const float temperature = op.at<float>(1)[row];
            found[piece] = temperature == 0.0f
                               ? best_plain(logits, begin, end)
                               : best_noisy(logits, begin, end, temperature, uint64_t(op.at<int64_t>(2)[row]),
                                            uint32_t(op.at<int32_t>(3)[row]), uint32_t(op.at<int32_t>(4)[row]));
        }
        return;
    }
    for (int64_t row = range.begin; row < range.end; ++row) {
        Best best{-INFINITY, -1, false};
        for (int64_t piece = 0; piece < pieces; ++piece) {
            const Best& other = found[row * pieces + piece];
            best.nan |= other.nan;
            best.offer(other.value, other.token);
        }
        op.at<int64_t>(5)[row] = best.nan ? -1 : best.token;
    }
}

inline Plan draw_plan(const Op& op, const Batch& batch) {
    const int64_t pieces = batch.rows * draw_pieces(op.n[0]);
    return {{pieces, batch.rows}, {1, batch.rows}, size_t(pieces) * sizeof(Best), batch.rows * op.n[0] * 16};
}

/// p: seeds, samples, positions, out (T, V) float64. n: V, stream. A piece is 64 tokens of a row.
inline void noise(const Op& op, Range range) {
    const int64_t vocab = op.n[0], blocks = (vocab + 63) / 64;
    for (int64_t piece = range.begin; piece < range.end; ++piece) {
        const int64_t row = piece / blocks, block = piece % blocks;
        double g[64];
        gumbel(uint32_t(block), uint32_t(op.at<int32_t>(2)[row]), uint32_t(op.at<int32_t>(1)[row]), uint32_t(op.n[1]),
               uint64_t(op.at<int64_t>(0)[row]), g);
        const int64_t left = vocab - block * 64;
        std::memcpy(op.at<double>(3) + row * vocab + block * 64, g, size_t(left < 64 ? left : 64) * 8);
    }
}
