// An event that a thread can wait for, such as the end of a copy from a GPU.
#pragma once

namespace mcore_ckpt {

// Held by std::shared_ptr: whoever records an event and whoever waits for it keep it alive together.
class Event {
  public:
    Event() = default;
    virtual ~Event() = default;
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    // Blocks until the event has happened. Throws std::runtime_error if the work before it has failed.
    virtual void wait() const = 0;
};

}  // namespace mcore_ckpt
