#include "thread_pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagoda {
namespace {

using Clock = std::chrono::steady_clock;

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr uint64_t NEXT_MASK = 0xffffff;
constexpr int NEXT_BITS = 24, PARTS_BITS = 24;

bool has_part(uint64_t job) { return (job & NEXT_MASK) < (job >> NEXT_BITS & NEXT_MASK); }

}  // namespace

void ThreadPool::resize(int num_threads) {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
    for (int i = 1; i < num_threads; i++) workers_.emplace_back([this] { serve(); });
}

void ThreadPool::run_parts(int num_parts, Call call, const void* body) {
    call_ = call;
    body_ = body;
    done_.store(0, std::memory_order_relaxed);
    uint64_t number = (job_.load(std::memory_order_relaxed) >> (NEXT_BITS + PARTS_BITS)) + 1;
    job_.store((number << PARTS_BITS | static_cast<uint64_t>(num_parts)) << NEXT_BITS);
    if (sleeping_.load() > 0) {
        { std::lock_guard lock(mutex_); }  // a worker that has raised sleeping_ waits by now
        wake_.notify_all();
    }
    while (work()) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) < num_parts; spins++) {
        if (spins < 2000)
            pause();
        else
            std::this_thread::yield();  // the thread with the last part may be waiting for this core
    }
}

bool ThreadPool::work() {
    if (!has_part(job_.load(std::memory_order_relaxed))) return false;
    uint64_t job = job_.fetch_add(1, std::memory_order_acq_rel);
    if (!has_part(job)) return false;
    call_(body_, static_cast<int>(job & NEXT_MASK));  // neither changes until this part is done
    done_.fetch_add(1, std::memory_order_release);
    return true;
}

void ThreadPool::serve() {
    auto idle_since = Clock::now();
    while (!stopping_.load(std::memory_order_relaxed)) {
        if (work()) {
            while (work()) {
            }
            idle_since = Clock::now();
        }
        for (int i = 0; i < 32 && !has_part(job_.load(std::memory_order_relaxed)); i++) pause();
        if (has_part(job_.load(std::memory_order_relaxed))) continue;
        std::this_thread::yield();  // to any process that needs the core
        if (Clock::now() - idle_since < std::chrono::nanoseconds(SPIN_NS)) continue;
        std::unique_lock lock(mutex_);
        sleeping_.fetch_add(1);
        // A job published before sleeping_ rose is seen here; a later publisher sees the sleeper and notifies it.
        wake_.wait(lock, [&] { return stopping_ || has_part(job_.load()); });
        sleeping_.fetch_sub(1);
        lock.unlock();
        idle_since = Clock::now();
    }
}

}  // namespace pagoda
