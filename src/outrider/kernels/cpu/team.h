// A program of operations run by one team of threads: one fork and join for the whole program.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/// One verb with its operands; which field means what is written beside each verb. Mirrored in native.py.
struct Op {
    int64_t code;
    int64_t n[8];
    double f[4];
    void* p[8];

    template <class T>
    T* at(int i) const {
        return static_cast<T*>(p[i]);
    }
};

/// The rows of one pass (see kernels/base.py, KeyIndex). Mirrored in native.py.
struct Batch {
    int64_t rows;
    const int64_t* tokens;
    const int32_t *positions, *slots;
    const int32_t *tables, *request, *linear, *tails, *length;
    int64_t tables_stride, tails_stride, block_size;
};

struct Range {
    int64_t begin, end;
};

inline size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

/// Work below which waking a second thread costs more than it brings; how many threads run changes no bit.
constexpr int64_t kAlone = 1 << 18;
/// The least work of one share, about two microseconds.
constexpr int64_t kShare = 1 << 14;

/// How one operation is cut: one phase or two, each of independent pieces that are handed out `grain` at a time.
struct Plan {
    int64_t pieces[2];
    int64_t grain[2];
    size_t scratch;  // bytes shared by its phases
    int64_t work;    // roughly, in multiply-adds

    static Plan rows(int64_t count, int threads, int64_t work, size_t scratch = 0) {
        return {{count, 0}, {spread(count, threads, work), 1}, scratch, work};
    }
    /// Pieces to hand out at a time: several shares a thread, so that a late or slow one leaves its part to the others,
    /// but none so small that handing it out costs more than doing it.
    static int64_t spread(int64_t count, int threads, int64_t work) {
        const int64_t fair = count / (int64_t(threads) * 8), least = (count * kShare + work) / (work + 1);
        const int64_t grain = fair > least ? fair : least;
        return grain > 1 ? grain : 1;
    }
};

/// Where a piece runs: the thread's number and the memory that an operation's phases share.
struct Place {
    int thread, threads;
    char* scratch;
};

/// One phase of a running program.
struct alignas(64) Phase {
    std::atomic<int64_t> next{0}, done{0};
    int64_t pieces, grain;
    const Op* op;
    int index;

    Phase(const Op* op, int index, int64_t pieces, int64_t grain)
        : pieces(pieces), grain(grain), op(op), index(index) {}
    Phase(const Phase& other) : Phase(other.op, other.index, other.pieces, other.grain) {}
};

/// Works through the phases in order beside the other threads of a team; what is one share is thread 0's.
///
/// A phase is over when its pieces are done, not when every thread has met: a thread that the system has put to sleep
/// delays the others only while it holds a piece.
template <class Run>
void work(std::vector<Phase>& phases, int thread, Run&& run) {
    for (Phase& phase : phases) {
        const bool mine = thread == 0 || phase.pieces > phase.grain;
        while (mine && phase.next.load(std::memory_order_relaxed) < phase.pieces) {
            const int64_t begin = phase.next.fetch_add(phase.grain, std::memory_order_relaxed);
            if (begin >= phase.pieces) break;
            const int64_t end = begin + phase.grain < phase.pieces ? begin + phase.grain : phase.pieces;
            run(*phase.op, phase.index, Range{begin, end});
            phase.done.fetch_add(end - begin, std::memory_order_release);
        }
        for (int spins = 0; phase.done.load(std::memory_order_acquire) < phase.pieces; ++spins) {
            if (spins > 4000) {
                std::this_thread::yield();
            } else {
#if defined(__x86_64__)
                _mm_pause();
#endif
            }
        }
    }
}
