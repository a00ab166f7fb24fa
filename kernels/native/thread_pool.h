// Threads that share the parts of one op at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "older_symbols.h"

namespace pagoda {

// Parts are handed out one by one, so that a thread that loses its core to another process delays at most one part. Between
// the ops of a step a worker spins for SPIN_NS, about the time between two ops; then it sleeps.
class ThreadPool {
public:
    static constexpr int64_t SPIN_NS = 50'000;

    ~ThreadPool() { resize(1); }

    // Sets the number of threads, the caller's included. Must not be called while an op runs.
    void resize(int num_threads);

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls body(part) for each part, on any thread, and returns when all are done. One caller at a time; body must not throw.
    template <typename Body>
    void run(int num_parts, const Body& body) {
        if (num_parts == 1 || workers_.empty()) {
            for (int part = 0; part < num_parts; part++) body(part);
            return;
        }
        run_parts(num_parts, [](const void* body, int part) { (*static_cast<const Body*>(body))(part); }, &body);
    }

private:
    using Call = void (*)(const void* body, int part);

    void run_parts(int num_parts, Call call, const void* body);
    bool work();  // runs one part if one is left
    void serve();

    // A job's number (16 bits), its number of parts (24) and the next part (24) in one word, so that a late worker cannot
    // mistake a part of one job for a part of another.
    std::atomic<uint64_t> job_{0};
    std::atomic<int> done_{0};
    Call call_ = nullptr;
    const void* body_ = nullptr;

    std::vector<std::thread> workers_;
    std::atomic<bool> stopping_{false};
    std::atomic<int> sleeping_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

}  // namespace pagoda
