// The small verbs of a layer, row by row: norm, gated activation, rotation and the write into pages, gather.
#pragma once

#include <cmath>

#include "simd.h"
#include "team.h"

/// x * rsqrt(mean(x^2) + eps) * weight over `n` numbers; `out` may be `x`.
inline void norm_row(const float* x, const float* weight, float eps, int64_t n, float* out) {
    f32x16 squares = splat(0.0f);
    for (int64_t i = 0; i < n; i += 16) {
        const f32x16 a = load_floats(x + i, n - i);
        squares = fma(a, a, squares);
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / float(n) + eps);
    for (int64_t i = 0; i < n; i += 16) {
        const f32x16 a = load_floats(x + i, n - i) * splat(scale);
        store_floats(out + i, a * load_floats(weight + i, n - i), n - i);
    }
}

/// p: x, weight, out. n: H, row strides of x and out. f: eps.
inline void rms_norm(const Op& op, const Batch&, Range rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row)
        norm_row(op.at<float>(0) + row * op.n[1], op.at<float>(1), float(op.f[0]), op.n[0],
                 op.at<float>(2) + row * op.n[2]);
}

/// p: gate_up, out. n: I, row strides of gate_up and out, 1 for gelu (tanh form), else silu.
/// A piece is 256 numbers of a row.
inline int64_t gated_pieces(const Op& op) { return (op.n[0] + 255) / 256; }

inline void gated(const Op& op, const Batch&, Range range) {
    const int64_t size = op.n[0], pieces = gated_pieces(op);
    for (int64_t piece = range.begin; piece < range.end; ++piece) {
        const int64_t row = piece / pieces, begin = piece % pieces * 256;
        const int64_t end = begin + 256 < size ? begin + 256 : size;
        const float* gate = op.at<float>(0) + row * op.n[1];
        for (int64_t i = begin; i < end; i += 16) {
            const f32x16 g = load_floats(gate + i, size - i), up = load_floats(gate + size + i, size - i);
            f32x16 y;
            if (op.n[3]) {
                const f32x16 inner = splat(0.7978845608f) * fma(splat(0.044715f) * g * g, g, g);
                y = splat(0.5f) * g * (splat(1.0f) + tanh(inner));
            } else {
                y = g / (splat(1.0f) + exp(splat(0.0f) - g));
            }
            store_floats(op.at<float>(1) + row * op.n[2] + i, y * up, size - i);
        }
    }
}

/// Rotate one head by halves: (a, b) -> (a cos - b sin, b cos + a sin); what lies past 2 * half stays.
inline void rotate(const float* x, const float* cos, const float* sin, int64_t half, int64_t dim, float* out) {
    for (int64_t i = 0; i < half; i += 16) {
        const int64_t left = half - i;
        const f32x16 c = load_floats(cos + i, left), s = load_floats(sin + i, left);
        const f32x16 a = load_floats(x + i, left), b = load_floats(x + half + i, left);
        store_floats(out + i, a * c - b * s, left);
        store_floats(out + half + i, b * c + a * s, left);
    }
    for (int64_t i = 2 * half; i < dim; ++i) out[i] = x[i];
}

/// p: qkv, cos, sin, k_pages, v_pages, q out, q_norm or null, k_norm or null.
/// n: query heads, key heads, D, D_rot / 2, 1 for bfloat16 pages, row strides of qkv and q. f: eps of the norms.
template <class W>
inline void rotate_and_write(const Op& op, const Batch& batch, Range rows) {
    const int64_t heads = op.n[0], kv = op.n[1], dim = op.n[2], half = op.n[3];
    float normed[1024], turned[1024];  // head_dim is at most 1024, which native.py checks
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        const float* x = op.at<float>(0) + row * op.n[5];
        const float* cos = op.at<float>(1) + batch.positions[row] * half;
        const float* sin = op.at<float>(2) + batch.positions[row] * half;
        const int64_t slot = batch.slots[row];
        for (int64_t head = 0; head < heads + kv; ++head) {
            const float* weight = op.at<float>(head < heads ? 6 : 7);
            const float* from = x + head * dim;
            if (weight) {
                norm_row(from, weight, float(op.f[0]), dim, normed);
                from = normed;
            }
            if (head < heads) {
                rotate(from, cos, sin, half, dim, op.at<float>(5) + row * op.n[6] + head * dim);
            } else if (slot >= 0) {
                rotate(from, cos, sin, half, dim, turned);
                W* key = op.at<W>(3) + (slot * kv + head - heads) * dim;
                for (int64_t i = 0; i < dim; ++i) narrow(turned[i], key + i);
            }
        }
        if (slot < 0) continue;
        const float* from = x + (heads + kv) * dim;
        W* value = op.at<W>(4) + slot * kv * dim;
        for (int64_t i = 0; i < kv * dim; ++i) narrow(from[i], value + i);
    }
}
