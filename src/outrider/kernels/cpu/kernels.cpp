// The native CPU kernels' door: runs a program of operations over one batch. Plain C, so that no torch header is needed.
//
// Each verb's contract is the protocol in kernels/base.py, its definition the twin in kernels/plain.py.
#include <cstdlib>
#include <thread>
#include <vector>

#include "attention.h"
#include "draw.h"
#include "linear.h"
#include "rows.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

enum Code : int64_t { kLinear, kLookup, kRmsNorm, kGated, kRotate, kAttention, kDraw, kNoise };

static size_t scratch_bytes(const Op& op, const Batch& batch, int threads) {
    if (op.code == kLinear) {
        const LinearOp linear(op);
        return linear.quantised() ? quantised_bytes(batch.rows, linear.k) : 0;
    }
    if (op.code == kAttention) return AttentionOp(op).scratch_bytes(batch, threads);
    if (op.code == kDraw) return size_t(batch.rows * draw_pieces(op.n[0])) * sizeof(Best);
    return 0;
}

static void step(const Op& op, const Batch& batch, const Worker& worker) {
    switch (op.code) {
        case kLinear: return LinearOp(op).run(batch, worker);
        case kLookup: return lookup(op, batch, worker);
        case kRmsNorm: return rms_norm(op, batch, worker);
        case kGated: return gated(op, batch, worker);
        case kRotate:
            return op.n[4] ? rotate_and_write<uint16_t>(op, batch, worker) : rotate_and_write<float>(op, batch, worker);
        case kAttention: return attention(op, batch, worker);
        case kDraw: return draw(op, batch, worker);
        case kNoise: return noise(op, batch, worker);
    }
}

static void work(const Op* ops, int64_t count, const Batch& batch, const Worker& worker) {
    for (int64_t i = 0; i < count; ++i) {
        if (i) worker.wait();
        step(ops[i], batch, worker);
    }
}

extern "C" {

/// Runs `count` operations in order over `batch`; 0, or 1 where memory ran out.
int outrider_run(const Op* ops, int64_t count, const Batch* batch, int threads) {
    size_t bytes = 64;
    for (int64_t i = 0; i < count; ++i) {
        const size_t needed = scratch_bytes(ops[i], *batch, threads);
        if (needed > bytes) bytes = needed;
    }
    char* scratch = static_cast<char*>(std::aligned_alloc(64, round_up(bytes)));
    if (!scratch) return 1;
    Barrier barrier;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
    work(ops, count, *batch, Worker{omp_get_thread_num(), omp_get_num_threads(), &barrier, scratch});
#else
    std::vector<std::thread> others;
    for (int id = 1; id < threads; ++id)
        others.emplace_back([=, &barrier] { work(ops, count, *batch, Worker{id, threads, &barrier, scratch}); });
    work(ops, count, *batch, Worker{0, threads, &barrier, scratch});
    for (std::thread& other : others) other.join();
#endif
    std::free(scratch);
    return 0;
}

/// "avx512", "avx2" or "portable", and whether one team of OpenMP threads is shared with the process.
const char* outrider_path() { return OUTRIDER_PATH; }
int outrider_openmp() {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}
}
