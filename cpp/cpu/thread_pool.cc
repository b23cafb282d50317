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
#include <system_error>
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

struct Job {
    std::int64_t count = 0;
    int parts = 1;
    RangeBody body = nullptr;
    void* context = nullptr;

    void run_part(int part) const {
        const std::int64_t begin = count * part / parts;
        const std::int64_t end = count * (part + 1) / parts;
        if (begin < end) body(context, begin, end);
    }
};

class Pool {
   public:
    // False where another thread has the pool.
    bool try_run(Job job) {
        const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        if (!lock.owns_lock()) return false;
        grow(job.parts - 1);
        job.parts = std::min<int>(job.parts, static_cast<int>(workers_.size()) + 1);
        job_ = job;
        error_ = nullptr;
        unfinished_.store(job.parts - 1, std::memory_order_relaxed);
        for (int i = 0; i < job.parts - 1; ++i) {
            workers_[static_cast<std::size_t>(i)].ticket.fetch_add(1, std::memory_order_release);
            workers_[static_cast<std::size_t>(i)].ticket.notify_one();
        }
        std::exception_ptr own_error;
        try {
            job_.run_part(0);
        } catch (...) {
            own_error = std::current_exception();
        }
        const auto done = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
        if (!spin_until(done)) {
            for (int left = unfinished_.load(std::memory_order_acquire); left != 0;
                 left = unfinished_.load(std::memory_order_acquire)) {
                unfinished_.wait(left, std::memory_order_acquire);
            }
        }
        if (own_error) std::rethrow_exception(own_error);
        if (error_) std::rethrow_exception(error_);
        return true;
    }

   private:
    struct alignas(64) Worker {
        std::atomic<std::uint32_t> ticket{0};  // one more than before: a job is there
    };

    // Starts workers up to `wanted`; fewer where the system refuses a thread.
    void grow(int wanted) {
        while (static_cast<int>(workers_.size()) < wanted) {
            workers_.emplace_back();
            // Signals belong to the threads of the application (Python's handlers run in its main thread).
            sigset_t all;
            sigset_t before;
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &before);
            bool started = true;
            try {
                const int index = static_cast<int>(workers_.size());
                std::thread([this, index, &ticket = workers_.back().ticket] { work(index, ticket); }).detach();
            } catch (const std::system_error&) {
                workers_.pop_back();
                started = false;
            }
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            if (!started) return;
        }
    }

    void work(int index, std::atomic<std::uint32_t>& ticket) {
        for (std::uint32_t seen = 0;; ++seen) {
            if (!spin_until([&] { return ticket.load(std::memory_order_acquire) != seen; })) {
                ticket.wait(seen, std::memory_order_acquire);
            }
            try {
                const DefaultFloatingPoint scope;
                job_.run_part(index);
            } catch (...) {
                const std::lock_guard<std::mutex> lock(error_mutex_);
                error_ = std::current_exception();
            }
            // The caller may return, and start the next job, as soon as this reaches zero.
            if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_one();
        }
    }

    std::mutex mutex_;
    std::deque<Worker> workers_;  // a deque: a worker keeps a reference to its element while others are added
    Job job_;
    alignas(64) std::atomic<int> unfinished_{0};
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

thread_local bool inside_parallel_for = false;

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
