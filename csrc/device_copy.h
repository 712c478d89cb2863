// Copies between host and GPU memory. Without nvcc device_copy_none.cpp stands in: all that needs a GPU throws.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "host_copy.h"

struct CUevent_st;
struct CUstream_st;

namespace mcore_ckpt {

// Whatever fails throws std::runtime_error with CUDA's words, if nothing else is said.

extern const bool BUILT_WITH_CUDA;

// The GPU that has this memory. Throws std::invalid_argument if none has.
int device_of(const void* memory);

// The host waits for all that is queued on the GPU.
void wait_for_device(int device);

// The host waits for a DeviceEvent.
void wait_for_event(std::uintptr_t event);

// Lets every GPU read and write host memory directly.
void pin_memory(void* memory, std::size_t nbytes);
void unpin_memory(void* memory) noexcept;

// Makes a GPU the thread's current one for as long as it lives.
class CurrentDevice {
  public:
    explicit CurrentDevice(int device);
    ~CurrentDevice();
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

  private:
    int previous_ = -1;  // -1: stay
};

struct Destroy {
    void operator()(CUstream_st* stream) const noexcept;
    void operator()(CUevent_st* event) const noexcept;
};
using Stream = std::unique_ptr<CUstream_st, Destroy>;
using Event = std::unique_ptr<CUevent_st, Destroy>;

// Copies from two pinned host buffers to the current GPU, on a stream of its own. For one thread.
class Upload {
  public:
    Upload();
    ~Upload();  // waits for all copies
    Upload(const Upload&) = delete;
    Upload& operator=(const Upload&) = delete;

    void copy(void* device, const void* host, std::size_t nbytes);
    void copy(const Grid& grid);

    // The copies since the last record() were those from buffer `buffer` (0 or 1).
    void record(int buffer);

    // The host waits for the copies from this buffer, if there were any.
    void wait(int buffer);

  private:
    Stream stream_;
    Event copied_[2];
    std::size_t most_stride_ = 0;  // that the GPU copies rows with in one call
};

// An event knows its GPU: a thread that has none yet and waits for a bare cudaEvent_t would set up GPU 0, half a GB
// of its memory, whatever GPU the rank has.
struct DeviceEvent {
    int device;
    Event handle;
};

// Copies from a GPU to pinned host memory on a stream of its own. start() and close() are for one thread, the rest
// for all.
class DeviceCopier {
  public:
    using Done = std::pair<std::size_t, std::uintptr_t>;  // number of copies, DeviceEvent

    explicit DeviceCopier(int device);
    ~DeviceCopier();
    DeviceCopier(const DeviceCopier&) = delete;
    DeviceCopier& operator=(const DeviceCopier&) = delete;

    std::uintptr_t stream() const { return reinterpret_cast<std::uintptr_t>(stream_.get()); }

    // Queues the copies behind what is queued on stream `after` now; the host does not wait. The destinations ascend
    // through one pinned buffer. Returns, about every `group_bytes`, how many copies are done and the DeviceEvent
    // that tells when; the events belong to the copier and serve the next start() again. Throws std::invalid_argument
    // for memory of another kind.
    std::vector<Done> start(const std::vector<Copy>& copies, std::uintptr_t after, std::size_t group_bytes);

    // What is queued on `stream` from now on waits for the copies; the host does not.
    void hold(std::uintptr_t stream);

    bool done();
    void wait();

    // Waits. Streams and events are gone then.
    void close();

  private:
    void require_open() const;
    DeviceEvent& event(std::size_t number);
    std::vector<Done> queue(const std::vector<Copy>& copies, std::size_t group_bytes, std::ptrdiff_t mapping);

    const int device_;
    Stream stream_;
    Event after_;
    std::deque<DeviceEvent> events_;  // a deque: others have their addresses
    std::atomic<DeviceEvent*> last_{nullptr};
};

}  // namespace mcore_ckpt
