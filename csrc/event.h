// Events that a thread can wait for, such as the end of a copy from a GPU.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace mcore_ckpt {

// Held by std::shared_ptr: whoever records an event and whoever waits for it keep it alive together.
class Event {
  public:
    Event() = default;
    virtual ~Event() = default;
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    // Whether the event has happened. Throws std::runtime_error if the work before it has failed.
    virtual bool happened() const = 0;

    // The GPU that does the work.
    virtual int device() const = 0;
};

using Clock = std::chrono::steady_clock;

// How long a thread sleeps between two looks at an event.
constexpr std::chrono::microseconds FIRST_PAUSE{20}, LONGEST_PAUSE{1000};

// Asks `over` until it says yes. Returns false at `deadline`. A thread never blocks inside CUDA for a GPU, because
// nothing could wake it up if the GPU hung.
template <typename Over>
bool poll_until(Clock::time_point deadline, Over over) {
    for (auto pause = FIRST_PAUSE;; pause = std::min(2 * pause, LONGEST_PAUSE)) {
        if (over()) return true;
        if (Clock::now() >= deadline) return false;
        std::this_thread::sleep_for(pause);
    }
}

constexpr double FOREVER_S = 1e9;

// The time in so many seconds, or in FOREVER_S, which is 31 years. A later time would overflow where a clock is turned
// into another one (std::future::wait_until of GCC 10).
inline Clock::time_point after_seconds(double seconds) {
    const std::chrono::duration<double> wait(seconds < FOREVER_S ? seconds : FOREVER_S);
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(wait);
}

}  // namespace mcore_ckpt
