// A program of operations run by one team of threads: one fork and join for the whole program, a barrier between steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

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

/// Threads that meet; it spins, since steps last microseconds, and yields where it was preempted.
class Barrier {
  public:
    void wait(int size) {
        if (size == 1) return;
        const unsigned now = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == now; ++spins) {
            if (spins > 20000) {
                std::this_thread::yield();
            } else {
#if defined(__x86_64__)
                _mm_pause();
#endif
            }
        }
    }

  private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> round_{0};
};

/// One thread's view of the team.
struct Worker {
    int id, size;
    Barrier* barrier;
    char* scratch;  // shared by the team, for one step

    void wait() const { barrier->wait(size); }
    /// This thread's contiguous share of `count` equal pieces.
    Range share(int64_t count) const { return {count * id / size, count * (id + 1) / size}; }
};

inline size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }
