// Recordings of ops, which one call runs again.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "ops.h"

namespace pagoda {

// Ops hold addresses, so what they read and write must stay where it was.
class Recording {
public:
    explicit Recording(const Ops* instruction_set) : instruction_set_(instruction_set) {}

    void add(std::function<void()> op) { ops_.push_back(std::move(op)); }

    // Runs the ops. If they were recorded with another instruction set, does nothing and returns false.
    bool replay(const Ops* instruction_set) const {
        if (instruction_set != instruction_set_) return false;
        for (const auto& op : ops_) op();
        return true;
    }

private:
    const Ops* instruction_set_;
    std::vector<std::function<void()>> ops_;
};

// The recording that this thread's ops are added to, if any.
inline thread_local std::unique_ptr<Recording> open_recording;

}  // namespace pagoda
