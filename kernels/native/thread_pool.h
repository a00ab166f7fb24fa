// Threads that share out the parts of one op at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pagoda {

// Parts are handed out one by one, so that a thread whose core another process has taken holds up one part at most.
// Between the ops of a step a worker spins for SPIN_NS, which is what lies between two ops; then it sleeps.
class ThreadPool {
public:
    static constexpr int64_t SPIN_NS = 50'000;

    ~ThreadPool() { resize(1); }

    // The caller's thread counts. Not while an op runs.
    void resize(int num_threads);

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls body(part) for each part, on any thread; returns when all are done. One caller at a time. Parts must not throw.
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
    bool work();  // on one part, if one is left
    void serve();

    // A job's number (16 bits), how many parts it has (24) and which is next (24), in one word: a late worker cannot
    // take a part of one job for that of another.
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
