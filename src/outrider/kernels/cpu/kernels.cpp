// The native CPU kernels' door: runs a program of operations over one batch. Plain C, so that no torch header is needed.
//
// Each verb's contract is the protocol in kernels/base.py, its definition the twin in kernels/plain.py.
#include <cstdlib>
#include <thread>
#include <vector>

#include "attention.h"
#include "draw.h"
#include "linear.h"
#include "rank.h"
#include "rows.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

enum Code : int64_t { kLinear, kLookup, kRmsNorm, kGated, kRotate, kAttention, kDraw, kNoise, kRank };

static Plan plan(const Op& op, const Batch& batch, int threads) {
    switch (op.code) {
        case kLinear: return LinearOp(op).plan(batch, threads);
        case kGated: return Plan::rows(batch.rows * gated_pieces(op), threads, batch.rows * op.n[0] * 8);
        case kAttention: return AttentionOp(op, batch, threads).plan(batch);
        case kDraw: return draw_plan(op, batch);
        case kNoise: return Plan::rows(batch.rows * ((op.n[0] + 63) / 64), threads, batch.rows * op.n[0] * 16);
        case kRank: return rank_plan(op, batch);
        case kLookup: return Plan::rows(batch.rows, threads, batch.rows * op.n[1] * 4);
        case kRmsNorm: return Plan::rows(batch.rows, threads, batch.rows * op.n[0] * 2);
        default: return Plan::rows(batch.rows, threads, batch.rows * (op.n[0] + 2 * op.n[1]) * op.n[2] * 4);
    }
}

static void run(const Op& op, const Batch& batch, int phase, Range range, const Place& place) {
    switch (op.code) {
        case kLinear: return LinearOp(op).run(batch, phase, range, place);
        case kLookup: return lookup(op, batch, range);
        case kRmsNorm: return rms_norm(op, batch, range);
        case kGated: return gated(op, batch, range);
        case kRotate:
            return op.n[4] ? rotate_and_write<uint16_t>(op, batch, range) : rotate_and_write<float>(op, batch, range);
        case kAttention: return attention(op, batch, phase, range, place);
        case kDraw: return draw(op, phase, range, place);
        case kNoise: return noise(op, range);
        case kRank: return rank(op, batch, phase, range, place);
    }
}

extern "C" {

/// Runs `count` operations in order over `batch`; 0, or 1 where memory ran out.
int outrider_run(const Op* ops, int64_t count, const Batch* batch, int threads) {
    std::vector<Phase> phases;
    phases.reserve(size_t(2 * count));
    size_t bytes = 64;
    int64_t products = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Plan cut = plan(ops[i], *batch, threads);
        for (int phase = 0; phase < 2; ++phase)
            if (cut.pieces[phase]) phases.emplace_back(ops + i, phase, cut.pieces[phase], cut.grain[phase]);
        if (cut.scratch > bytes) bytes = cut.scratch;
        products += cut.work;
    }
    const int team = products < kAlone ? 1 : threads;
    char* scratch = static_cast<char*>(std::aligned_alloc(64, round_up(bytes)));
    if (!scratch) return 1;
    auto member = [&](int thread) {
        const Place place{thread, threads, scratch};
        work(phases, thread, [&](const Op& op, int phase, Range range) { run(op, *batch, phase, range, place); });
    };
#if defined(_OPENMP)
#pragma omp parallel num_threads(team)
    member(omp_get_thread_num());
#else
    std::vector<std::thread> others;
    for (int thread = 1; thread < team; ++thread) others.emplace_back(member, thread);
    member(0);
    for (std::thread& other : others) other.join();
#endif
    std::free(scratch);
    return 0;
}

/// The instruction set that was compiled: "avx512", "avx2" or "portable".
const char* outrider_path() { return OUTRIDER_PATH; }
}
