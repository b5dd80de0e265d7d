// Attention of one row over its own keys, in position order, in blocks cut at fixed positions.
//
// A block's result (largest score, sum of weights, weighted values) and the order in which blocks are merged depend on
// the row's positions alone; whether one thread runs all blocks of a row or several share them is schedule only.
#pragma once

#include <cmath>

#include "simd.h"
#include "team.h"

constexpr int64_t kBlock = 256;  // positions a block

/// p: q, k_pages, v_pages, sinks or null, out. n: query heads, key heads, D, 1 for bfloat16 pages, window (0: none),
/// row strides of q and out, 1 where position 0 is seen by itself alone. f: scale, softcap (0: none).
struct AttentionOp {
    const float *q, *sinks;
    const void *k_pages, *v_pages;
    float* out;
    int64_t heads, kv, dim, window, ldq, ldo, group, padded;
    bool half, skip_first;
    float scale, softcap;

    explicit AttentionOp(const Op& op)
        : q(op.at<float>(0)), sinks(op.at<float>(3)), k_pages(op.p[1]), v_pages(op.p[2]), out(op.at<float>(4)),
          heads(op.n[0]), kv(op.n[1]), dim(op.n[2]), window(op.n[4]), ldq(op.n[5]), ldo(op.n[6]),
          group(op.n[0] / op.n[1]), padded((op.n[2] + 15) / 16 * 16), half(op.n[3] != 0), skip_first(op.n[7] != 0),
          scale(float(op.f[0])),
          softcap(float(op.f[1])) {}

    /// Floats of one block's result: values, then largest score and sum, a head each.
    int64_t partial() const { return group * (padded + 2); }
    /// Floats that one thread works in: queries, scores, slots, a running and a fresh result.
    int64_t private_floats() const { return group * padded + group * kBlock + kBlock + 2 * partial() + 64; }

    static int64_t most_blocks(const Batch& batch) {
        int64_t most = 1;
        for (int64_t row = 0; row < batch.rows; ++row)
            if (batch.length[row] > most) most = batch.length[row];
        return (most + kBlock - 1) / kBlock;
    }
    bool split(const Batch& batch, int threads) const { return batch.rows * kv < 4 * threads; }
    /// One piece is a block of a row's key head, or all blocks of it where there are pieces enough without cutting.
    Plan plan(const Batch& batch, int threads) const {
        const int64_t tasks = batch.rows * kv, blocks = split(batch, threads) ? tasks * most_blocks(batch) : 0;
        const size_t bytes = round_up(size_t(blocks * partial()) * 4) +
                             size_t(threads) * round_up(size_t(private_floats()) * 4);
        const int64_t products = batch.rows * heads * most_blocks(batch) * kBlock * dim;
        if (!blocks) return Plan::rows(tasks, threads, products, bytes);
        return {{blocks, tasks}, {1, 1}, bytes, products};
    }
};

struct Work {
    float *queries, *scores, *running, *fresh;
    int32_t* slots;
};

inline Work work_at(const AttentionOp& op, float* p) {
    Work w;
    w.queries = p;
    w.scores = w.queries + op.group * op.padded;
    w.running = w.scores + op.group * kBlock;
    w.fresh = w.running + op.partial();
    w.slots = (int32_t*)(w.fresh + op.partial());
    return w;
}

/// Positions that a row sees: [begin, end).
inline Range seen(const AttentionOp& op, const Batch& batch, int64_t row) {
    const int64_t end = batch.length[row];
    const int64_t least = op.skip_first && end > 1 ? 1 : 0;
    return {op.window && end - least > op.window ? end - op.window : least, end};
}

inline void find_slots(const Batch& batch, int64_t row, Range at, int32_t* slots) {
    const int32_t* table = batch.tables + batch.request[row] * batch.tables_stride;
    const int32_t* tail = batch.tails + row * batch.tails_stride;
    const int64_t linear = batch.linear[row];
    for (int64_t x = at.begin; x < at.end; ++x)
        slots[x - at.begin] = x < linear ? int32_t(table[x / batch.block_size] * batch.block_size + x % batch.block_size)
                                         : tail[x - linear];
}

/// Scores of sixteen keys against one query.
template <class W, int C>
inline f32x16 score(const AttentionOp& op, const float* q, const W* keys, const int32_t* slots) {
    const int64_t stride = op.kv * op.dim, chunks = C ? C : op.padded / 16;
    f32x16 dots[16];
#pragma GCC unroll 16
    for (int lane = 0; lane < 16; ++lane) {
        const W* key = keys + slots[lane] * stride;
        f32x16 acc = splat(0.0f);
#pragma GCC unroll 8
        for (int64_t c = 0; c < chunks; ++c) {
            const f32x16 part = C ? load_wide(key + 16 * c) : load_part(key + 16 * c, op.dim - 16 * c);
            acc = fma(load<f32x16>(q + 16 * c), part, acc);
        }
        dots[lane] = acc;
    }
    const f32x16 s = sum16(dots) * splat(op.scale);
    return op.softcap != 0 ? splat(op.softcap) * tanh(s / splat(op.softcap)) : s;
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

/// out += weights times values of `count` keys, in their order.
template <class W, int C>
inline void add_values(const AttentionOp& op, const float* weights, const W* values, const int32_t* slots,
                       int64_t count, float* out) {
    const int64_t stride = op.kv * op.dim;
    if constexpr (C > 0) {
        f32x16 acc[C];
        for (int c = 0; c < C; ++c) acc[c] = load<f32x16>(out + 16 * c);
        for (int64_t i = 0; i < count; ++i) {
            const f32x16 p = splat(weights[i]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) acc[c] = fma(load_wide(values + slots[i] * stride + 16 * c), p, acc[c]);
        }
        for (int c = 0; c < C; ++c) store(out + 16 * c, acc[c]);
    } else {
        for (int64_t c = 0; c < op.padded; c += 16) {
            f32x16 acc = load<f32x16>(out + c);
            for (int64_t i = 0; i < count; ++i)
                acc = fma(load_part(values + slots[i] * stride + c, op.dim - c), splat(weights[i]), acc);
            store(out + c, acc);
        }
    }
}

/// One block of one row's key head, for all query heads that share it; keys and values are taken a few at a time for
/// every head in turn, so that they are read from the nearest cache.
template <class W, int C>
inline void attend(const AttentionOp& op, const Batch& batch, int64_t row, int64_t head, Range at, const Work& work,
                   float* result) {
    const int64_t count = at.end - at.begin, group = op.group;
    find_slots(batch, row, at, work.slots);
    // The last sixteen are filled up with repetitions of the last key, whose scores are then struck out.
    for (int64_t i = count; i < (count + 15) / 16 * 16; ++i) work.slots[i] = work.slots[count - 1];
    const W* keys = (const W*)op.k_pages + head * op.dim;
    const W* values = (const W*)op.v_pages + head * op.dim;
    float *top = result + group * op.padded, *sums = top + group;
    for (int64_t g = 0; g < group; ++g)
        for (int64_t c = 0; c < op.dim; c += 16)
            store(work.queries + g * op.padded + c,
                  load_floats(op.q + row * op.ldq + (head * group + g) * op.dim + c, op.dim - c));
    for (int64_t i = 0; i < count; i += 16)
        for (int64_t g = 0; g < group; ++g)
            store(work.scores + g * kBlock + i, score<W, C>(op, work.queries + g * op.padded, keys, work.slots + i));
    for (int64_t g = 0; g < group; ++g) sums[g] = soften(work.scores + g * kBlock, count, top + g);
    std::memset(result, 0, size_t(group * op.padded) * 4);
    for (int64_t i = 0; i < count; i += 32)
        for (int64_t g = 0; g < group; ++g)
            add_values<W, C>(op, work.scores + g * kBlock + i, values, work.slots + i, count - i < 32 ? count - i : 32,
                             result + g * op.padded);
}

/// running <- running + fresh, both rescaled to the larger of their largest scores.
inline void merge(const AttentionOp& op, float* running, const float* fresh) {
    for (int64_t g = 0; g < op.group; ++g) {
        float *top = running + op.group * op.padded + g, *total = top + op.group;
        const float other = fresh[op.group * op.padded + g], weight = fresh[op.group * op.padded + op.group + g];
        const float most = *top > other ? *top : other;
        const f32x16 a = exp(splat(*top - most)), b = exp(splat(other - most));
        *total = fma(splat(*total), a, splat(weight) * b).p[0][0];
        *top = most;
        for (int64_t c = 0; c < op.padded; c += 16) {
            float* o = running + g * op.padded + c;
            store(o, fma(load<f32x16>(o), a, load<f32x16>(fresh + g * op.padded + c) * b));
        }
    }
}

inline void finish(const AttentionOp& op, int64_t row, int64_t head, float* running) {
    for (int64_t g = 0; g < op.group; ++g) {
        const int64_t query = head * op.group + g;
        const float top = running[op.group * op.padded + g];
        float total = running[op.group * op.padded + op.group + g], shrink = 1.0f;
        if (op.sinks) {
            const float most = top > op.sinks[query] ? top : op.sinks[query];
            shrink = exp(splat(top - most)).p[0][0];
            total = total * shrink + exp(splat(op.sinks[query] - most)).p[0][0];
        }
        for (int64_t c = 0; c < op.dim; c += 16) {
            const f32x16 o = load<f32x16>(running + g * op.padded + c) * splat(shrink) / splat(total);
            store_floats(op.out + row * op.ldo + query * op.dim + c, o, op.dim - c);
        }
    }
}

template <class W, int C>
inline void run_attention(const AttentionOp& op, const Batch& batch, int phase, Range range, const Place& place) {
    const bool split = op.split(batch, place.threads);
    const int64_t most = split ? AttentionOp::most_blocks(batch) : 1, tasks = batch.rows * op.kv, size = op.partial();
    float* shared = (float*)place.scratch;
    const size_t before = round_up(size_t(split ? tasks * most * size : 0) * 4);
    const Work work =
        work_at(op, (float*)(place.scratch + before + place.thread * round_up(size_t(op.private_floats()) * 4)));
    auto block = [&](int64_t task, int64_t index, float* result) {
        const Range all = seen(op, batch, task / op.kv);
        const int64_t begin = index * kBlock > all.begin ? index * kBlock : all.begin;
        const int64_t end = (index + 1) * kBlock < all.end ? (index + 1) * kBlock : all.end;
        if (begin < end) attend<W, C>(op, batch, task / op.kv, task % op.kv, {begin, end}, work, result);
    };
    if (split && phase == 0) {
        for (int64_t piece = range.begin; piece < range.end; ++piece)
            block(piece / most, piece % most, shared + piece * size);
        return;
    }
    for (int64_t task = range.begin; task < range.end; ++task) {
        const Range all = seen(op, batch, task / op.kv);
        const int64_t first = all.begin / kBlock, last = (all.end - 1) / kBlock;
        for (int64_t index = first; index <= last; ++index) {
            float* to = index == first ? work.running : work.fresh;
            if (split)
                std::memcpy(to, shared + (task * most + index) * size, size_t(size) * 4);
            else
                block(task, index, to);
            if (index > first) merge(op, work.running, work.fresh);
        }
        finish(op, task / op.kv, task % op.kv, work.running);
    }
}

template <class W>
inline void attention_of(const AttentionOp& op, const Batch& batch, int phase, Range range, const Place& place) {
    if (op.dim == 64) return run_attention<W, 4>(op, batch, phase, range, place);
    if (op.dim == 128) return run_attention<W, 8>(op, batch, phase, range, place);
    run_attention<W, 0>(op, batch, phase, range, place);
}

inline void attention(const Op& o, const Batch& batch, int phase, Range range, const Place& place) {
    const AttentionOp op(o);
    if (op.half) return attention_of<uint16_t>(op, batch, phase, range, place);
    attention_of<float>(op, batch, phase, range, place);
}
