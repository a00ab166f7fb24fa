// Ops that are kept while they run, so that one call runs them again.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "ops.h"

namespace pagoda {

// Ops hold addresses by value: what they read and write must stay where it was.
class Recording {
public:
    explicit Recording(const Ops* instruction_set) : instruction_set_(instruction_set) {}

    void add(std::function<void()> op) { ops_.push_back(std::move(op)); }

    // False, and nothing has run, if its ops were chosen for another instruction set than the one in use.
    bool replay(const Ops* instruction_set) const {
        if (instruction_set != instruction_set_) return false;
        for (const auto& op : ops_) op();
        return true;
    }

private:
    const Ops* instruction_set_;
    std::vector<std::function<void()>> ops_;
};

// What the ops of this thread are added to; null: nothing.
inline thread_local std::unique_ptr<Recording> open_recording;

}  // namespace pagoda
