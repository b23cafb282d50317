// The threads of the CPU backend: an own pool and not OpenMP. Decoding calls a layer every few microseconds, so
// the workers spin for a while between calls; the pool must work in a child of fork(), where libgomp hangs; and
// the wheel must not bring a second OpenMP runtime beside the one of torch.
//
// One job runs at a time. A caller that finds the pool taken (another Python thread is inside) does its whole job
// itself: that is right, as no result depends on the partition, and it can't deadlock.
#include "cpu/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace fp4linear::cpu {
namespace {

// About 30 us of `pause` on Zen 4 and on Skylake-X (40 to 140 cycles each): longer than the gap between two
// calls from Python, short against a scheduler's time slice.
constexpr int spins_before_sleep = 1500;

void relax() {
#if defined(__SSE2__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class Ready>
bool spin_until(const Ready& ready) {
    for (int i = 0; i < spins_before_sleep; ++i) {
        if (ready()) return true;
        relax();
    }
    return ready();
}

// A caller may have set flush-to-zero or another rounding (torch.set_flush_denormal); results must not depend on
// which thread ran a part.
class DefaultFloatingPoint {
   public:
#if defined(__SSE2__)
    DefaultFloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }  // reset value: nearest, no flush, masked
    ~DefaultFloatingPoint() { _mm_setcsr(saved_); }

   private:
    unsigned saved_;
#else
    DefaultFloatingPoint() = default;
    ~DefaultFloatingPoint() {}
#endif
   public:
    DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
    DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;
};

thread_local bool inside_parallel_for = false;  // a body that calls parallel_for runs it alone

class AllSignalsBlocked {
   public:
    AllSignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    AllSignalsBlocked(const AllSignalsBlocked&) = delete;
    AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

   private:
    sigset_t before_;
};

struct Job {
    std::int64_t count = 0;
    int parts = 1;
    RangeBody body = nullptr;
    void* context = nullptr;
};

// Thread i owns the i-th contiguous part of the range, so that repeated calls find its data in its own cache, and takes
// it in pieces; who is done takes pieces of the others, so that a descheduled thread delays only its piece.
class Pool {
   public:
    // False where another thread has the pool.
    bool try_run(Job job) {
        const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        if (!lock.owns_lock()) return false;
        grow(job.parts);
        job.parts = std::min<int>(job.parts, static_cast<int>(slots_.size()));
        job_ = job;
        error_ = nullptr;
        for (int i = 0; i < job.parts; ++i) {
            Slot& slot = slots_[static_cast<std::size_t>(i)];
            const std::int64_t begin = job.count * i / job.parts;
            slot.end = job.count * (i + 1) / job.parts;
            slot.piece = std::max<std::int64_t>(1, (slot.end - begin) / pieces_a_part);
            slot.next.store(begin, std::memory_order_relaxed);
        }
        for (int i = 1; i < job.parts; ++i) {
            slots_[static_cast<std::size_t>(i)].state.store(posted, std::memory_order_release);
            slots_[static_cast<std::size_t>(i)].state.notify_one();
        }
        take_pieces(0);
        for (int i = 1; i < job.parts; ++i) wait_or_revoke(slots_[static_cast<std::size_t>(i)].state);
        if (error_) std::rethrow_exception(error_);
        return true;
    }

   private:
    // The last piece is what the others wait for: of 16, 4096x14336 at M = 1 took 1273 us, of 64 1230 (2 threads,
    // cold).
    static constexpr std::int64_t pieces_a_part = 64;

    // A worker's state. The caller posts; the worker runs and goes back to idle; the caller takes back what no worker
    // has begun (one that sleeps needs up to 50 us to wake, and others have done its part by then).
    enum : int { idle, posted, running };

    struct alignas(64) Slot {
        std::atomic<int> state{idle};  // unused in slot 0, the caller's
        std::atomic<std::int64_t> next{0};
        std::int64_t end = 0;
        std::int64_t piece = 1;
    };

    static void wait_or_revoke(std::atomic<int>& state) {
        int seen = posted;
        if (state.compare_exchange_strong(seen, idle, std::memory_order_acq_rel)) return;
        if (spin_until([&] { return state.load(std::memory_order_acquire) != running; })) return;
        state.wait(running, std::memory_order_acquire);
    }

    void take_pieces(int own) {
        try {
            for (int i = 0; i < job_.parts; ++i) {
                Slot& slot = slots_[static_cast<std::size_t>((own + i) % job_.parts)];
                for (;;) {
                    const std::int64_t begin = slot.next.fetch_add(slot.piece, std::memory_order_relaxed);
                    if (begin >= slot.end) break;
                    job_.body(job_.context, begin, std::min(begin + slot.piece, slot.end));
                }
            }
        } catch (...) {
            const std::lock_guard<std::mutex> lock(error_mutex_);
            error_ = std::current_exception();
        }
    }

    // Makes slots for `wanted` threads, the caller's included; fewer where there is no memory for one, or the system
    // refuses it.
    void grow(int wanted) {
        if (slots_.empty()) slots_.emplace_back();
        if (static_cast<int>(slots_.size()) >= wanted) return;
        // Signals belong to the threads of the application (Python's handlers run in its main thread).
        const AllSignalsBlocked blocked;
        while (static_cast<int>(slots_.size()) < wanted) {
            bool added = false;
            try {
                Slot& slot = slots_.emplace_back();
                added = true;
                const int index = static_cast<int>(slots_.size()) - 1;
                std::thread([this, index, &slot] { work(index, slot.state); }).detach();
            } catch (const std::exception&) {  // std::system_error, std::bad_alloc
                if (added) slots_.pop_back();
                return;
            }
        }
    }

    [[noreturn]] void work(int index, std::atomic<int>& state) {
        inside_parallel_for = true;
        for (;;) {
            if (!spin_until([&] { return state.load(std::memory_order_acquire) == posted; })) {
                state.wait(idle, std::memory_order_acquire);
            }
            int seen = posted;
            if (!state.compare_exchange_strong(seen, running, std::memory_order_acq_rel)) continue;
            {
                const DefaultFloatingPoint scope;
                take_pieces(index);
            }
            state.store(idle, std::memory_order_release);
            state.notify_one();
        }
    }

    std::mutex mutex_;
    std::deque<Slot> slots_;  // a deque: a worker keeps a reference to its slot while others are added
    Job job_;
    std::mutex error_mutex_;
    std::exception_ptr error_;
};

// Never destroyed: its workers are parked in it when the process exits. A child of fork() has none of the
// workers, and perhaps a locked mutex, so it forgets the pool and makes another at its first call.
std::atomic<Pool*> current_pool{nullptr};
std::once_flag fork_handler_set;

Pool& pool() {
    Pool* existing = current_pool.load(std::memory_order_acquire);
    if (existing != nullptr) return *existing;
    std::call_once(fork_handler_set, [] {
        pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr, std::memory_order_relaxed); });
    });
    Pool* fresh = new Pool;
    if (!current_pool.compare_exchange_strong(existing, fresh, std::memory_order_acq_rel)) {
        delete fresh;  // it has no workers yet
        return *existing;
    }
    return *fresh;
}

}  // namespace

void parallel_for(std::int64_t count, int threads, RangeBody body, void* context) {
    if (count <= 0) return;
    const DefaultFloatingPoint scope;
    const Job job{count, static_cast<int>(std::clamp<std::int64_t>(threads, 1, count)), body, context};
    if (job.parts > 1 && !inside_parallel_for) {
        struct Inside {
            Inside() { inside_parallel_for = true; }
            ~Inside() { inside_parallel_for = false; }
        } inside;
        if (pool().try_run(job)) return;
    }
    body(context, 0, count);
}

}  // namespace fp4linear::cpu
