// Scores and values of a few queries that share their keys: each key or value is brought and widened once for all.
//
// Whatever the tile, a query's score is one chain over its key's chunks, its values are summed key by key in order.
#pragma once

#include <cmath>

#include "simd.h"

constexpr int64_t kBlock = 256;  // positions a block, and floats from one query's scores to the next one's
constexpr int kTile = 6;         // queries of a tile
// Keys that a tile of scores takes at once, and chunks of sixteen columns that one of values does: by the registers.
constexpr int kKeys = kLanes == 16 ? 4 : 1, kChunks = kKeys;

/// How keys, values and queries lie: elements of one, rounded up to chunks, and from a slot's to the next one's.
struct Head {
    int64_t dim, padded, stride;
    float scale, softcap;
};

#define EACH(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < count; ++i)

/// Calls f(size, first) for tiles of [begin, end), as equal as they can be.
template <class F>
inline void each_tile(int64_t begin, int64_t end, F&& f) {
    for (int64_t tiles = (end - begin + kTile - 1) / kTile; tiles > 0; --tiles) {
        const int64_t size = (end - begin + tiles - 1) / tiles;
        with_constant<kTile>(int(size), [&](auto constant) { f(constant, begin); });
        begin += size;
    }
}

/// Asks for sixteen slots' keys or values before they are wanted: nothing foresees where the next slots lie.
template <int Nearness, class W>
inline void ask(const Head& head, const W* from, const int32_t* slots) {
    for (int i = 0; i < 16; ++i)
        for (int64_t c = 0; c < head.dim; c += int64_t(64 / sizeof(W)))
            __builtin_prefetch(from + slots[i] * head.stride + c, 0, Nearness);
}

/// Scores of sixteen keys against T queries.
template <class W, int T>
inline void score(const Head& head, const float* q, const W* keys, const int32_t* slots, float* scores) {
    f32x16 dots[T][16];
    for (int lane = 0; lane < 16; lane += kKeys) {
        f32x16 acc[T][kKeys], key[kKeys];
        EACH(t, T) EACH(k, kKeys) acc[t][k] = splat(0.0f);
        auto add_chunk = [&](int64_t c, auto&& widened) {
            EACH(k, kKeys) key[k] = widened(keys + slots[lane + k] * head.stride + c);
            EACH(t, T) {
                const f32x16 x = load<f32x16>(q + t * head.padded + c);
                EACH(k, kKeys) acc[t][k] = fma(x, key[k], acc[t][k]);
            }
        };
        int64_t c = 0;
        for (; c + 16 <= head.dim; c += 16) add_chunk(c, [](const W* at) { return load_wide(at); });
        if (c < head.dim) add_chunk(c, [&](const W* at) { return load_part(at, head.dim - c); });
        EACH(t, T) EACH(k, kKeys) dots[t][lane + k] = acc[t][k];
    }
    for (int t = 0; t < T; ++t) {
        const f32x16 s = sum16(dots[t]) * splat(head.scale);
        store(scores + t * kBlock, head.softcap != 0 ? splat(head.softcap) * tanh(s / splat(head.softcap)) : s);
    }
}

/// Scores to weights in place; returns their sum and leaves the largest score in `top`.
inline float soften(float* scores, int64_t count, float* top) {
    f32x16 best = splat(-INFINITY), total = splat(0.0f);
    for (int64_t i = count; i < (count + 15) / 16 * 16; ++i) scores[i] = -INFINITY;
    for (int64_t i = 0; i < count; i += 16) best = max(load<f32x16>(scores + i), best);
    *top = largest(best);
    for (int64_t i = 0; i < count; i += 16) {
        const f32x16 p = exp(load<f32x16>(scores + i) - splat(*top));
        total = total + p;
        store(scores + i, p);
    }
    return sum(total);
}

/// `add_values` for C chunks; where C is 1, for the first `width` columns.
template <class W, int T, int C>
inline void add_chunks(const Head& head, const float* weights, const W* values, const int32_t* slots, int64_t count,
                       int64_t width, float* out) {
    f32x16 acc[T][C], value[C];
    EACH(t, T) EACH(c, C) acc[t][c] = load<f32x16>(out + t * head.padded + 16 * c);
    for (int64_t i = 0; i < count; ++i) {
        const W* at = values + slots[i] * head.stride;
        EACH(c, C) value[c] = C > 1 ? load_wide(at + 16 * c) : load_part(at, width);
        EACH(t, T) {
            const f32x16 p = splat(weights[t * kBlock + i]);
            EACH(c, C) acc[t][c] = fma(value[c], p, acc[t][c]);
        }
    }
    EACH(t, T) EACH(c, C) store(out + t * head.padded + 16 * c, acc[t][c]);
}

/// out += weights times values of `count` keys, in their order, for T queries.
template <class W, int T>
inline void add_values(const Head& head, const float* weights, const W* values, const int32_t* slots, int64_t count,
                       float* out) {
    int64_t c = 0;
    for (; c + 16 * kChunks <= head.dim; c += 16 * kChunks)
        add_chunks<W, T, kChunks>(head, weights, values + c, slots, count, 16 * kChunks, out + c);
    for (; c < head.dim; c += 16)
        add_chunks<W, T, 1>(head, weights, values + c, slots, count, head.dim - c, out + c);
}
#undef EACH
