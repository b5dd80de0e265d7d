// Sixteen float or int lanes on any CPU: AVX-512, AVX2, or the compiler's own 128-bit vectors (SSE2, NEON).
//
// Every operation is lane-wise or has one fixed order, so a result never depends on the tile that it is computed in.
// The unit is compiled with -ffp-contract=off: a fused multiply-add happens where `fma` is written and nowhere else.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define OUTRIDER_PATH "avx512"
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define OUTRIDER_PATH "avx2"
constexpr int kLanes = 8;
#else
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#define OUTRIDER_PATH "portable"
constexpr int kLanes = 4;
#endif

constexpr int kParts = 16 / kLanes;
typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef float vf4 __attribute__((vector_size(16)));

struct f32x16 {
    vf p[kParts];
};
struct i32x16 {
    vi p[kParts];
};

#define LANES(expression)                           \
    _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i) { \
        expression;                                 \
    }

template <class V>
inline V load(const void* from) {
    V r;
    LANES(std::memcpy(&r.p[i], static_cast<const char*>(from) + i * sizeof(r.p[0]), sizeof(r.p[0])))
    return r;
}
template <class V>
inline void store(void* to, V a) {
    LANES(std::memcpy(static_cast<char*>(to) + i * sizeof(a.p[0]), &a.p[i], sizeof(a.p[0])))
}
inline f32x16 splat(float x) {
    f32x16 r;
    LANES(r.p[i] = x - (vf){})
    return r;
}
inline i32x16 splat(int32_t x) {
    i32x16 r;
    LANES(r.p[i] = x - (vi){})
    return r;
}

#define BINARY(V, op)                        \
    inline V operator op(V a, V b) {         \
        LANES(a.p[i] = a.p[i] op b.p[i])     \
        return a;                            \
    }
BINARY(f32x16, +)
BINARY(f32x16, -)
BINARY(f32x16, *)
BINARY(f32x16, /)
BINARY(i32x16, +)
BINARY(i32x16, -)
BINARY(i32x16, *)
BINARY(i32x16, &)
BINARY(i32x16, |)
BINARY(i32x16, ^)
#undef BINARY
inline i32x16 operator<<(i32x16 a, int n) {
    LANES(a.p[i] = a.p[i] << n)
    return a;
}
inline i32x16 operator>>(i32x16 a, int n) {
    LANES(a.p[i] = a.p[i] >> n)
    return a;
}
inline i32x16 bits(f32x16 a) {
    i32x16 r;
    LANES(r.p[i] = (vi)a.p[i])
    return r;
}
inline f32x16 from_bits(i32x16 a) {
    f32x16 r;
    LANES(r.p[i] = (vf)a.p[i])
    return r;
}
inline f32x16 to_float(i32x16 a) {
    f32x16 r;
    LANES(r.p[i] = __builtin_convertvector(a.p[i], vf))
    return r;
}

/// a > b ? a : b, so a NaN in `b` is kept.
inline f32x16 max(f32x16 a, f32x16 b) {
    LANES(a.p[i] = a.p[i] > b.p[i] ? a.p[i] : b.p[i])
    return a;
}
inline f32x16 abs(f32x16 a) { return from_bits(bits(a) & splat(int32_t(0x7fffffff))); }

inline vf fma_part(vf a, vf b, vf c) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    LANES(a.p[i] = fma_part(a.p[i], b.p[i], c.p[i]))
    return a;
}
inline f32x16 fma(f32x16 a, float b, f32x16 c) { return fma(a, splat(b), c); }

/// Sum of the lanes as a halving tree.
inline float sum(f32x16 a) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return _mm512_reduce_add_ps((__m512)a.p[0]);
#endif
    float s[16];
    store(s, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) s[i] += s[i + half];
    return s[0];
}
/// Lane i of the result is the sum of a[i]'s lanes, in one order for every i.
inline f32x16 sum16(const f32x16 (&a)[16]) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    __m512 quads[4];  // in each 128-bit part: that part's sums of four vectors
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512 p = (__m512)a[4 * i].p[0], q = (__m512)a[4 * i + 1].p[0];
        const __m512 r = (__m512)a[4 * i + 2].p[0], s = (__m512)a[4 * i + 3].p[0];
        const __m512d u = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(p, q), _mm512_unpackhi_ps(p, q)));
        const __m512d v = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(r, s), _mm512_unpackhi_ps(r, s)));
        quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(u, v)), _mm512_castpd_ps(_mm512_unpackhi_pd(u, v)));
    }
    const __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88), _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
    const __m512 y = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88), _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd));
    f32x16 r;
    r.p[0] = (vf)_mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
    return r;
#else
    vf4 fours[16];  // the halving tree of `sum`, two vectors' last steps at a time
    for (int i = 0; i < 16; ++i) {
        vf4 s[4];
        store(s, a[i]);
        fours[i] = (s[0] + s[2]) + (s[1] + s[3]);
    }
    f32x16 r;
    for (int i = 0; i < 16; i += 4) {
        const vf4 p = fours[i], q = fours[i + 1], u = fours[i + 2], v = fours[i + 3];
        const vf4 x = (vf4){p[0], p[1], q[0], q[1]} + (vf4){p[2], p[3], q[2], q[3]};
        const vf4 y = (vf4){u[0], u[1], v[0], v[1]} + (vf4){u[2], u[3], v[2], v[3]};
        const vf4 sums = (vf4){x[0], x[2], y[0], y[2]} + (vf4){x[1], x[3], y[1], y[3]};
        std::memcpy((float*)&r + i, &sums, 16);
    }
    return r;
#endif
}
inline float largest(f32x16 a) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return _mm512_reduce_max_ps((__m512)a.p[0]);
#endif
    float s[16];
    store(s, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) s[i] = s[i] > s[i + half] ? s[i] : s[i + half];
    return s[0];
}
inline int32_t sum(i32x16 a) {
    int32_t s[16], total = 0;
    store(s, a);
    for (int i = 0; i < 16; ++i) total += s[i];
    return total;
}

/// The first `n` floats (all sixteen where n >= 16), zeros after them.
inline f32x16 load_floats(const float* from, int64_t n) {
    if (n >= 16) return load<f32x16>(from);
    float padded[16] = {};
    std::memcpy(padded, from, size_t(n) * 4);
    return load<f32x16>(padded);
}
inline void store_floats(float* to, f32x16 a, int64_t n) {
    if (n >= 16) return store(to, a);
    float padded[16];
    store(padded, a);
    std::memcpy(to, padded, size_t(n) * 4);
}

/// Sixteen bfloat16, widened.
inline f32x16 load_wide(const uint16_t* from) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    // One shuffle to the upper halves of the lanes, where widening and shifting would be two operations.
    const __m512i numbers = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i halves = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)from));
    f32x16 r;
    r.p[0] = (vf)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_slli_epi32(numbers, 16), halves);
    return r;
#else
    int32_t wide[16];
    for (int i = 0; i < 16; ++i) wide[i] = from[i];
    return from_bits(load<i32x16>(wide) << 16);
#endif
}
inline f32x16 load_wide(const float* from) { return load<f32x16>(from); }

inline float widen(float x) { return x; }
inline float widen(uint16_t x) {
    uint32_t b = uint32_t(x) << 16;
    float r;
    std::memcpy(&r, &b, 4);
    return r;
}
inline void narrow(float x, float* to) { *to = x; }
/// Round to nearest even, as PyTorch does; a NaN stays one.
inline void narrow(float x, uint16_t* to) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    *to = x != x ? uint16_t(0x7fc0) : uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
template <class W>
inline f32x16 load_part(const W* from, int64_t n) {
    if (n >= 16) return load_wide(from);
    W padded[16] = {};
    std::memcpy(padded, from, size_t(n) * sizeof(W));
    return load_wide(padded);
}

/// Sixteen finite IEEE halves, exactly: move the exponent and mantissa into place, then rebias by a power of two.
inline f32x16 load_half(const uint16_t* from) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    f32x16 r;
    r.p[0] = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
    return r;
#else
    int32_t wide[16];
    for (int i = 0; i < 16; ++i) wide[i] = from[i];
    i32x16 h = load<i32x16>(wide);
    f32x16 magnitude = from_bits((h & splat(int32_t(0x7fff))) << 13) * splat(0x1p112f);
    return from_bits(bits(magnitude) | ((h & splat(int32_t(0x8000))) << 16));
#endif
}

/// Lane i: acc + sum over j < 4 of (unsigned byte 4 i + j of w) * (signed byte j of x); exact in 32 bits.
/// `Narrow` promises that w holds no byte above 127, which AVX2 needs for its fast form.
template <bool Narrow>
inline i32x16 dot4(i32x16 acc, i32x16 w, int32_t x) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    acc.p[0] = (vi)_mm512_dpbusd_epi32((__m512i)acc.p[0], (__m512i)w.p[0], _mm512_set1_epi32(x));
#elif defined(__AVX2__) && defined(__FMA__)
    const i32x16 xs = splat(x);
    for (int i = 0; i < 16 / 8; ++i) {
        __m256i a, b, c;
        std::memcpy(&a, (const char*)&acc + 32 * i, 32);
        std::memcpy(&b, (const char*)&w + 32 * i, 32);
        std::memcpy(&c, (const char*)&xs + 32 * i, 32);
        if (Narrow) {
            a = _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_maddubs_epi16(b, c), _mm256_set1_epi16(1)));
        } else {  // 255 * 127 * 2 saturates maddubs: multiply even and odd bytes as 16-bit numbers
            __m256i even = _mm256_and_si256(b, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(b, 8);
            __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(c, 8), 8), x_odd = _mm256_srai_epi16(c, 8);
            a = _mm256_add_epi32(a, _mm256_add_epi32(_mm256_madd_epi16(even, x_even), _mm256_madd_epi16(odd, x_odd)));
        }
        std::memcpy((char*)&acc + 32 * i, &a, 32);
    }
#else
    const i32x16 byte = splat(int32_t(0xff));
    acc = acc + (w & byte) * splat(int32_t(int8_t(x)));
    acc = acc + ((w >> 8) & byte) * splat(int32_t(int8_t(x >> 8)));
    acc = acc + ((w >> 16) & byte) * splat(int32_t(int8_t(x >> 16)));
    acc = acc + ((w >> 24) & byte) * splat(int32_t(int8_t(x >> 24)));
#endif
    return acc;
}

/// e^x, relative error below 2e-7 on [-87, 88]; 0 below, e^88 above, and a NaN stays one.
inline f32x16 exp(f32x16 x) {
    const f32x16 low = splat(-87.0f), high = splat(88.0f), given = x;
    LANES(x.p[i] = x.p[i] < low.p[i] ? low.p[i] : x.p[i]; x.p[i] = x.p[i] > high.p[i] ? high.p[i] : x.p[i])
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, kept in the low bits
    f32x16 t = fma(x, splat(1.44269504f), magic);
    f32x16 n = t - magic;
    f32x16 r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.9875691500e-4f);  // Cephes expf
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    p = p * from_bits((bits(t) - bits(magic) + splat(int32_t(127))) << 23);
    LANES(p.p[i] = given.p[i] < low.p[i] ? (vf){} : p.p[i])
    return p;
}
inline f32x16 tanh(f32x16 x) { return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f)); }

/// Calls f with the compile-time constant that equals `count`, 1 <= count <= Most.
template <int Most, class F>
inline void with_constant(int count, F&& f) {
    if (count == Most) return f(std::integral_constant<int, Most>{});
    if constexpr (Most > 1) with_constant<Most - 1>(count, f);
}
