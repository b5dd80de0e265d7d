// The best few of every row under the keyed noise of draw.h, and the mass of its law: what a drafter ranks its guesses by.
#pragma once

#include "draw.h"

constexpr int kMostRanked = 32;
constexpr int64_t kStrip = 2048;  // columns that one thread scans at a time, of every row

/// The best `count` scores of a strip of one row, best first, ties by column; and the strip's mass below its largest.
struct Ranked {
    double score[kMostRanked];
    int64_t column[kMostRanked];
    double top, mass;
    bool nan;

    void clear(int count) {
        for (int i = 0; i < count; ++i) {
            score[i] = -INFINITY;
            column[i] = -1;
        }
        top = -INFINITY;
        mass = 0.0;
        nan = false;
    }
    /// Columns come in rising order, so that an equal one goes behind.
    void offer(int count, double s, int64_t c) {
        if (!(s > score[count - 1])) return;
        int i = count - 1;
        for (; i > 0 && s > score[i - 1]; --i) {
            score[i] = score[i - 1];
            column[i] = column[i - 1];
        }
        score[i] = s;
        column[i] = c;
    }
};

inline void rank_plain(const float* logits, int64_t begin, int64_t end, int count, Ranked& found) {
    for (int64_t i = begin; i < end; i += 64) {
        const int64_t stop = end < i + 64 ? end : i + 64;
        f32x16 most = splat(-INFINITY);
        i32x16 nan = splat(int32_t(0));
        int64_t j = i;
        for (; j + 16 <= stop; j += 16) {
            const f32x16 x = load<f32x16>(logits + j);
            LANES(nan.p[i] |= x.p[i] != x.p[i])
            most = max(x, most);
        }
        bool better = largest(most) > found.score[count - 1] || j < stop;
        found.nan |= sum(nan) != 0;
        for (j = i; better && j < stop; ++j) {
            found.nan |= logits[j] != logits[j];
            found.offer(count, logits[j], j);
        }
    }
    found.top = found.score[0];
    if (found.nan || found.top == -INFINITY) return;
    const f32x16 top = splat(float(found.top));
    f32x16 mass = splat(0.0f);
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) mass = mass + exp(load<f32x16>(logits + i) - top);
    found.mass = sum(mass);
    for (; i < end; ++i) found.mass += std::exp(double(logits[i]) - found.top);
}

/// Where scores are larger, every one is computed: the bound by which others are passed over would lose its digits.
constexpr double kBounded = 1e6;

/// The noise words of columns [begin, end) of a row; ids: the token of each column, or null.
inline void noise_words(const int64_t* ids, int64_t begin, int64_t end, uint32_t position, uint32_t sample,
                        uint64_t seed, uint32_t* words) {
    uint32_t made[64];
    uint64_t block = ~uint64_t(0);
    for (int64_t i = begin; i < end; ++i) {
        const uint64_t token = uint64_t(ids ? ids[i] : i);
        if (token / 64 != block) {
            block = token / 64;
            philox(uint32_t(block * 16), position, sample, 0, seed, made);
        }
        words[i - begin] = made[token % 64];
    }
}

/// Columns [begin, end) of one row; `words[i - begin]` is the noise of column i.
///
/// With u the uniform, -log(-log(u)) >= d implies 1 - u <= e^-d, which costs one exponential and no logarithm: all
/// but the few that may enter are passed over by it, sixteen at a time.
inline void rank_noisy(const float* logits, int64_t begin, int64_t end, const uint32_t* words, float temperature,
                       int count, Ranked& found) {
    const double inverse = 1.0 / temperature;
    for (int64_t i = begin; i < end; i += 16) {
        const int some = int(end - i < 16 ? end - i : 16);
        const double last = found.score[count - 1];
        int32_t enters[16];
        store(enters, splat(int32_t(1)));
        if (some == 16 && std::fabs(last) < kBounded) {
            float lead[16];
            for (int j = 0; j < 16; ++j) lead[j] = float(double(logits[i + j]) * inverse - last);
            const f32x16 bound = exp(load<f32x16>(lead)) * splat(1.001f);
            // The upper 24 bits of 1 - u, which a float holds: rounded down, so that the bound stays one.
            const i32x16 above = (load<i32x16>(words + (i - begin)) ^ splat(int32_t(-1))) >> 8 & splat(int32_t(0xffffff));
            const f32x16 rest = to_float(above) * splat(0x1p-24f);
            i32x16 may;
            LANES(may.p[i] = ~(rest.p[i] > bound.p[i]))  // or the bound is NaN
            if (!sum(may)) continue;
            store(enters, may);
        }
        for (int j = 0; j < some; ++j) {
            if (!enters[j]) continue;
            const double u = (double(words[i - begin + j]) + 0.5) * 0x1p-32;
            const double score = double(logits[i + j]) / temperature - log_positive(-log_positive(u));
            found.nan |= score != score;
            found.offer(count, score, i + j);
        }
    }
}

inline int64_t strips(int64_t columns) { return (columns + kStrip - 1) / kStrip; }

/// p: logits, temperature, seeds, samples, positions, ids or null, scores (double), columns (int64); mass (double) lies
/// behind the scores. n: columns, row stride of logits, count.
inline void rank(const Op& op, const Batch& batch, int phase, Range range, const Place& place) {
    const int64_t columns = op.n[0], rows = batch.rows;
    const int count = int(op.n[2]);
    const int64_t* ids = op.at<int64_t>(5);
    Ranked* found = (Ranked*)place.scratch;
    if (phase == 0) {
        for (int64_t strip = range.begin; strip < range.end; ++strip) {
            const int64_t begin = strip * kStrip, end = begin + kStrip < columns ? begin + kStrip : columns;
            uint32_t words[kStrip];
            int64_t made = -1;  // the row whose noise `words` is; the nodes of one level share theirs
            for (int64_t row = 0; row < rows; ++row) {
                Ranked& own = found[strip * rows + row];
                own.clear(count);
                const float* logits = op.at<float>(0) + row * op.n[1];
                const float temperature = op.at<float>(1)[row];
                if (temperature == 0.0f) {
                    rank_plain(logits, begin, end, count, own);
                    continue;
                }
                const int64_t* seeds = op.at<int64_t>(2);
                const int32_t *samples = op.at<int32_t>(3), *positions = op.at<int32_t>(4);
                if (made < 0 || seeds[made] != seeds[row] || samples[made] != samples[row] ||
                    positions[made] != positions[row]) {
                    noise_words(ids, begin, end, uint32_t(positions[row]), uint32_t(samples[row]),
                                uint64_t(seeds[row]), words);
                    made = row;
                }
                rank_noisy(logits, begin, end, words, temperature, count, own);
            }
        }
        return;
    }
    for (int64_t row = range.begin; row < range.end; ++row) {
        Ranked best;
        best.clear(count);
        for (int64_t strip = 0; strip < strips(columns); ++strip) {
            const Ranked& other = found[strip * rows + row];
            best.nan |= other.nan;
            for (int i = 0; i < count && other.column[i] >= 0; ++i) best.offer(count, other.score[i], other.column[i]);
        }
        double mass = 0.0;
        for (int64_t strip = 0; strip < strips(columns); ++strip) {
            const Ranked& other = found[strip * rows + row];
            if (other.mass > 0.0) mass += other.mass * std::exp(other.top - best.score[0]);
        }
        for (int i = 0; i < count; ++i) {
            op.at<double>(6)[row * count + i] = best.nan ? NAN : best.score[i];
            op.at<int64_t>(7)[row * count + i] = best.nan ? -1 : best.column[i];
        }
        op.at<double>(6)[rows * count + row] = mass > 0.0 ? best.score[0] + std::log(mass) : 0.0;
    }
}

inline Plan rank_plan(const Op& op, const Batch& batch) {
    const int64_t pieces = strips(op.n[0]);
    int64_t work = 0;
    for (int64_t row = 0; row < batch.rows; ++row) work += op.n[0] * (op.at<float>(1)[row] == 0.0f ? 4 : 20);
    return {{pieces, batch.rows}, {1, batch.rows}, size_t(pieces * batch.rows) * sizeof(Ranked), work};
}
