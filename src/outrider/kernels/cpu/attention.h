// Attention of rows over their own keys, in position order, in blocks cut at fixed positions.
//
// A block's result (largest score, sum of weights, weighted values) and the order in which blocks are merged depend on
// the row's positions alone; which rows are taken together and which thread runs a block is schedule only.
#pragma once

#include "simd.h"
#include "team.h"
#include "tiles.h"

constexpr int64_t kQueries = 12;  // queries that are taken through a block together, or a few more to make whole rows

/// p: q, k_pages, v_pages, sinks or null, out. n: query heads, key heads, D, 1 for bfloat16 pages, window (0: none),
/// row strides of q and out, 1 where position 0 is seen by itself alone. f: scale, softcap (0: none).
struct AttentionOp : Head {
    const float *q, *sinks;
    const void *k_pages, *v_pages;
    float* out;
    int64_t heads, kv, window, ldq, ldo, group;
    bool half, skip_first;
    int threads;
    // Rows taken together, such groups times key heads, and blocks that each is cut into where those are too few.
    int64_t rows, tasks, blocks;

    AttentionOp(const Op& op, const Batch& batch, int threads)
        : Head{op.n[2], (op.n[2] + 15) / 16 * 16, op.n[1] * op.n[2], float(op.f[0]), float(op.f[1])},
          q(op.at<float>(0)), sinks(op.at<float>(3)), k_pages(op.p[1]), v_pages(op.p[2]), out(op.at<float>(4)),
          heads(op.n[0]), kv(op.n[1]), window(op.n[4]), ldq(op.n[5]), ldo(op.n[6]), group(op.n[0] / op.n[1]),
          half(op.n[3] != 0), skip_first(op.n[7] != 0), threads(threads) {
        // Rows together save work only while every thread has some.
        for (rows = (kQueries + group - 1) / group;; rows = (rows + 1) / 2) {
            tasks = (batch.rows + rows - 1) / rows * kv;
            blocks = tasks < 4 * threads ? most_blocks(batch) : 0;
            if (rows == 1 || tasks * (blocks ? blocks : 1) >= 2 * threads) break;
        }
    }

    int64_t queries() const { return rows * group; }
    /// Floats of one block's result: values, then largest score and sum, a query each.
    int64_t partial() const { return (queries() * (padded + 2) + 15) / 16 * 16; }
    /// Floats that one thread works in: queries, scores, slots, a running and a fresh result.
    int64_t private_floats() const { return queries() * (padded + kBlock) + rows * kBlock + 2 * partial(); }

    static int64_t most_blocks(const Batch& batch) {
        int64_t most = 1;
        for (int64_t row = 0; row < batch.rows; ++row)
            if (batch.length[row] > most) most = batch.length[row];
        return (most + kBlock - 1) / kBlock;
    }
    /// Floats of all blocks' results, where other threads than those that made them merge them.
    int64_t shared_floats() const { return tasks * blocks * partial(); }
    /// One piece is a block of some rows' key head, or all blocks of it where there are pieces enough without cutting.
    Plan plan(const Batch& batch) const {
        const size_t bytes = size_t(shared_floats() + threads * private_floats()) * 4;
        const int64_t products = batch.rows * heads * most_blocks(batch) * kBlock * dim;
        if (!blocks) return Plan::rows(tasks, threads, products, bytes);
        return {{tasks * blocks, tasks}, {1, 1}, bytes, products};
    }
};

struct Work {
    float *queries, *scores, *running, *fresh;
    int32_t* slots;

    Work(const AttentionOp& op, const Place& place) {
        queries = (float*)(place.scratch + size_t(op.shared_floats()) * 4) + place.thread * op.private_floats();
        scores = queries + op.queries() * op.padded;
        running = scores + op.queries() * kBlock;
        fresh = running + op.partial();
        slots = (int32_t*)(fresh + op.partial());
    }
};

/// Positions that a row sees: [begin, end).
inline Range seen(const AttentionOp& op, const Batch& batch, int64_t row) {
    const int64_t end = batch.length[row];
    const int64_t least = op.skip_first && end > 1 ? 1 : 0;
    return {op.window && end - least > op.window ? end - op.window : least, end};
}

/// Those of its blocks: [first, last + 1).
inline Range blocks_of(Range seen) { return {seen.begin / kBlock, (seen.end - 1) / kBlock + 1}; }
/// Those of them that lie in a block; none may.
inline Range within(Range seen, int64_t block) {
    const int64_t begin = block * kBlock > seen.begin ? block * kBlock : seen.begin;
    const int64_t end = (block + 1) * kBlock < seen.end ? (block + 1) * kBlock : seen.end;
    return {begin, begin < end ? end : begin};
}

inline void find_slots(const Batch& batch, int64_t row, Range at, int32_t* slots) {
    const int32_t* table = batch.tables + batch.request[row] * batch.tables_stride;
    const int32_t* tail = batch.tails + row * batch.tails_stride;
    const int64_t linear = batch.linear[row], size = batch.block_size, end = linear < at.end ? linear : at.end;
    int64_t x = at.begin;
    for (int64_t index = x / size; x < end; ++index) {  // by whole blocks: a division for each key is not cheap
        const int64_t stop = (index + 1) * size < end ? (index + 1) * size : end;
        const int64_t shift = (table[index] - index) * size;
        for (; x < stop; ++x) slots[x - at.begin] = int32_t(x + shift);
    }
    for (; x < at.end; ++x) slots[x - at.begin] = tail[x - linear];
}

/// Leading slots, of `count`, that two rows have in common.
inline int64_t shared(const int32_t* a, const int32_t* b, int64_t count) {
    int64_t i = 0;
    while (i < count && a[i] == b[i]) ++i;
    return i;
}

/// One block of some rows' key head, for all query heads that share it. Keys and values are taken a few at a time for
/// every query in turn, and together for rows that stand side by side and whose slots are the same so far.
template <class W>
inline void attend(const AttentionOp& op, const Batch& batch, Range rows, int64_t head, int64_t block, const Work& work,
                   float* result) {
    const int64_t num_rows = rows.end - rows.begin, group = op.group;
    int64_t count[kQueries], same[kQueries], longest = 0;  // same: leading slots that a row shares with the next one
    for (int64_t r = 0; r < num_rows; ++r) {
        const Range at = within(seen(op, batch, rows.begin + r), block);
        int32_t* slots = work.slots + r * kBlock;
        count[r] = at.end - at.begin;
        find_slots(batch, rows.begin + r, at, slots);
        // The last sixteen are filled up with repetitions of the last key, whose scores are then struck out.
        for (int64_t i = count[r]; i < (count[r] + 15) / 16 * 16; ++i) slots[i] = slots[count[r] - 1];
        if (r) same[r - 1] = shared(slots - kBlock, slots, count[r] < count[r - 1] ? count[r] : count[r - 1]);
        if (count[r] > longest) longest = count[r];
        for (int64_t g = 0; g < group; ++g)
            for (int64_t c = 0; c < op.dim; c += 16)
                store(work.queries + (r * group + g) * op.padded + c,
                      load_floats(op.q + (rows.begin + r) * op.ldq + (head * group + g) * op.dim + c, op.dim - c));
    }
    same[num_rows - 1] = 0;
    // Calls f(first row, last row + 1, first key, keys) for rows that have their next `step` keys in common.
    auto each_run = [&](int64_t step, auto&& f) {
        for (int64_t i = 0; i < longest; i += step)
            for (int64_t r = 0, next; r < num_rows; r = next) {
                for (next = r + 1; same[next - 1] >= i + step;) ++next;
                if (i < count[r]) f(r, next, i, count[r] - i < step ? count[r] - i : step);
            }
    };
    const W* keys = (const W*)op.k_pages + head * op.dim;
    const W* values = (const W*)op.v_pages + head * op.dim;
    float *top = result + op.queries() * op.padded, *sums = top + op.queries();
    each_run(16, [&](int64_t r, int64_t next, int64_t i, int64_t) {
        const int32_t* slots = work.slots + r * kBlock + i;
        if (i + 16 < count[r]) ask<3>(op, keys, slots + 16);
        ask<2>(op, values, slots);
        each_tile(r * group, next * group, [&](auto size, int64_t first) {
            score<W, size()>(op, work.queries + first * op.padded, keys, slots, work.scores + first * kBlock + i);
        });
    });
    for (int64_t query = 0; query < num_rows * group; ++query)
        sums[query] = soften(work.scores + query * kBlock, count[query / group], top + query);
    std::memset(result, 0, size_t(num_rows * group * op.padded) * 4);
    each_run(32, [&](int64_t r, int64_t next, int64_t i, int64_t some) {
        each_tile(r * group, next * group, [&](auto size, int64_t first) {
            add_values<W, size()>(op, work.scores + first * kBlock + i, values, work.slots + r * kBlock + i, some,
                                  result + first * op.padded);
        });
    });
}

/// running <- running + fresh for a row's queries, both rescaled to the larger of their largest scores.
inline void merge(const AttentionOp& op, float* running, const float* fresh, Range queries) {
    const int64_t tops = op.queries() * op.padded, sums = tops + op.queries();
    for (int64_t query = queries.begin; query < queries.end; ++query) {
        float *top = running + tops + query, *total = running + sums + query;
        const float other = fresh[tops + query], weight = fresh[sums + query];
        const float most = *top > other ? *top : other;
        const f32x16 a = exp(splat(*top - most)), b = exp(splat(other - most));
        *total = fma(splat(*total), a, splat(weight) * b).p[0][0];
        *top = most;
        for (int64_t c = 0; c < op.padded; c += 16) {
            float* o = running + query * op.padded + c;
            store(o, fma(load<f32x16>(o), a, load<f32x16>(fresh + query * op.padded + c) * b));
        }
    }
}

/// running <- fresh for a row's queries.
inline void start(const AttentionOp& op, float* running, const float* fresh, Range queries) {
    auto copy = [&](int64_t from, int64_t n) { std::memcpy(running + from, fresh + from, size_t(n) * 4); };
    const int64_t n = queries.end - queries.begin, tops = op.queries() * op.padded;
    copy(queries.begin * op.padded, n * op.padded);
    copy(tops + queries.begin, n);
    copy(tops + op.queries() + queries.begin, n);
}

inline void finish(const AttentionOp& op, int64_t row, int64_t head, const float* running, int64_t first) {
    for (int64_t g = 0; g < op.group; ++g) {
        const int64_t head_of_query = head * op.group + g;
        const float top = running[op.queries() * op.padded + first + g];
        float total = running[op.queries() * (op.padded + 1) + first + g], shrink = 1.0f;
        if (op.sinks) {
            const float sink = op.sinks[head_of_query], most = top > sink ? top : sink;
            shrink = exp(splat(top - most)).p[0][0];
            total = total * shrink + exp(splat(sink - most)).p[0][0];
        }
        for (int64_t c = 0; c < op.dim; c += 16) {
            const f32x16 o = load<f32x16>(running + (first + g) * op.padded + c) * splat(shrink) / splat(total);
            store_floats(op.out + row * op.ldo + head_of_query * op.dim + c, o, op.dim - c);
        }
    }
}

template <class W>
inline void run_attention(const AttentionOp& op, const Batch& batch, int phase, Range range, const Place& place) {
    const Work work(op, place);
    float* results = (float*)place.scratch;
    auto rows_of = [&](int64_t group) {
        const int64_t end = (group + 1) * op.rows;
        return Range{group * op.rows, end < batch.rows ? end : batch.rows};
    };
    if (op.blocks && phase == 0) {  // a block's key heads one after another, as they lie in memory
        for (int64_t piece = range.begin; piece < range.end; ++piece) {
            const int64_t block = piece / op.kv % op.blocks, group = piece / op.kv / op.blocks;
            attend<W>(op, batch, rows_of(group), piece % op.kv, block, work, results + piece * op.partial());
        }
        return;
    }
    for (int64_t task = range.begin; task < range.end; ++task) {
        const int64_t group = task / op.kv, head = task % op.kv;
        const Range rows = rows_of(group);
        Range blocks = blocks_of(seen(op, batch, rows.begin));
        for (int64_t row = rows.begin + 1; row < rows.end; ++row) {
            const Range own = blocks_of(seen(op, batch, row));
            if (own.begin < blocks.begin) blocks.begin = own.begin;
            if (own.end > blocks.end) blocks.end = own.end;
        }
        for (int64_t block = blocks.begin; block < blocks.end; ++block) {
            float* fresh = work.fresh;
            if (op.blocks)
                fresh = results + ((group * op.blocks + block) * op.kv + head) * op.partial();
            else
                attend<W>(op, batch, rows, head, block, work, fresh);
            for (int64_t row = rows.begin; row < rows.end; ++row) {
                const Range own = blocks_of(seen(op, batch, row));
                const Range queries{(row - rows.begin) * op.group, (row - rows.begin + 1) * op.group};
                if (block == own.begin) start(op, work.running, fresh, queries);
                if (block > own.begin && block < own.end) merge(op, work.running, fresh, queries);
            }
        }
        for (int64_t row = rows.begin; row < rows.end; ++row)
            finish(op, row, head, work.running, (row - rows.begin) * op.group);
    }
}

inline void attention(const Op& o, const Batch& batch, int phase, Range range, const Place& place) {
    const AttentionOp op(o, batch, place.threads);
    if (op.half) return run_attention<uint16_t>(op, batch, phase, range, place);
    run_attention<float>(op, batch, phase, range, place);
}
