// Copies between host and GPU memory. A build without nvcc compiles device_copy_none.cpp instead of the .cu files;
// there, every function that needs a GPU throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "event.h"
#include "host_buffer.h"
#include "host_copy.h"

struct CUevent_st;
struct CUstream_st;

namespace mcore_ckpt {

// Unless a comment says otherwise, a failed call throws std::runtime_error with CUDA's message.

extern const bool BUILT_WITH_CUDA;

// The number of the GPU that a GPU address belongs to. Throws std::invalid_argument for host memory.
int device_of(const void* memory);

// Blocks the host until the GPU has done all work that is queued on it.
void wait_for_device(int device);

// Makes host memory readable and writable for every GPU. Returns the GPU that is current now, which unpin_memory()
// needs: a thread without a current GPU that unpins memory would initialize GPU 0 (see DeviceEvent). Pinned memory must
// be unpinned before it is unmapped.
int pin_memory(void* memory, std::size_t nbytes);
void unpin_memory(void* memory, int device) noexcept;

// Makes a GPU the current one of this thread until the object is destroyed.
class CurrentDevice {
  public:
    explicit CurrentDevice(int device);
    ~CurrentDevice();
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

  private:
    int previous_ = -1;  // -1: the destructor changes nothing
};

struct DestroyHandle {
    void operator()(CUstream_st* stream) const noexcept;
    void operator()(CUevent_st* event) const noexcept;
};
using StreamHandle = std::unique_ptr<CUstream_st, DestroyHandle>;
using EventHandle = std::unique_ptr<CUevent_st, DestroyHandle>;

// Copies from two pinned host buffers to the current GPU, on a stream of its own. Used by one thread.
class HostToDeviceCopies {
  public:
    HostToDeviceCopies();
    ~HostToDeviceCopies();  // waits for all copies
    HostToDeviceCopies(const HostToDeviceCopies&) = delete;
    HostToDeviceCopies& operator=(const HostToDeviceCopies&) = delete;

    void copy(void* device, const void* host, std::size_t nbytes);
    void copy(const Grid& grid);

    // Tells that all copies since the last record() were from buffer `buffer`, which is 0 or 1.
    void record(int buffer);

    // Blocks the host until the copies from this buffer are done.
    void wait(int buffer);

  private:
    StreamHandle stream_;
    EventHandle copied_[2];
    std::size_t most_stride_ = 0;  // the largest stride of rows that the GPU copies in one call
};

// A point in a stream of one GPU. An event stores its GPU, because a thread that has no current GPU and waits for a
// bare cudaEvent_t would initialize GPU 0, which takes half a GB of that GPU's memory.
class DeviceEvent final : public Event {
  public:
    explicit DeviceEvent(int device);
    ~DeviceEvent() override;

    void record(CUstream_st* stream);
    bool done() const;
    void wait() const override;
    CUevent_st* handle() const { return handle_.get(); }

  private:
    const int device_;
    EventHandle handle_;
};

// Copies tensors from one GPU to pinned host memory, on a stream of its own. All methods may be called from any thread,
// also at the same time.
class DeviceCopier {
  public:
    // `nbytes` bytes from GPU address `source` to byte `offset` of the buffer.
    struct ToBuffer {
        std::size_t offset;
        const void* source;
        std::size_t nbytes;
    };
    // How many copies are done when the event has happened.
    using Done = std::pair<std::size_t, std::shared_ptr<DeviceEvent>>;

    explicit DeviceCopier(int device);
    ~DeviceCopier();
    DeviceCopier(const DeviceCopier&) = delete;
    DeviceCopier& operator=(const DeviceCopier&) = delete;

    // 0 after close().
    std::uintptr_t stream() const;

    // Queues the copies behind the work that is queued on stream `after` now. The host does not wait for the GPU. The
    // copier keeps the buffer alive until the copies are done; the caller keeps the sources alive.
    //
    // Returns an event after about every `group_bytes` bytes. The copier records an event again only when nobody else
    // holds it.
    //
    // Throws std::invalid_argument, before anything is queued, for a buffer that is not pinned, a destination that is
    // not inside the buffer or begins before the previous one ends, and a source of which any part is not on this GPU.
    std::vector<Done> start(const std::shared_ptr<HostBuffer>& buffer, const std::vector<ToBuffer>& copies,
                            std::uintptr_t after, std::size_t group_bytes);

    // Makes the work that is queued on `stream` from now on wait for the copies. The host does not wait.
    void hold(std::uintptr_t stream);

    bool done();
    void wait();

    // Waits for the copies, then frees the stream and the events. hold(), done() and wait() throw
    // std::invalid_argument from then on; calls of them that are under way end as if the copier were open.
    void close();

  private:
    void require_open() const;
    bool last_is_done() const;
    void keep_alive(const std::shared_ptr<HostBuffer>& buffer);
    const std::shared_ptr<DeviceEvent>& free_event(std::size_t number);
    std::vector<Done> queue(const HostBuffer& buffer, const std::vector<ToBuffer>& copies, std::size_t group_bytes,
                            std::ptrdiff_t mapping);

    const int device_;

    mutable std::mutex mutex_;  // guards everything below
    StreamHandle stream_;
    EventHandle after_;
    std::vector<std::shared_ptr<DeviceEvent>> events_;
    std::shared_ptr<DeviceEvent> last_;                   // happens when all copies are done
    std::vector<std::shared_ptr<HostBuffer>> in_flight_;  // buffers that copies may still write to
};

}  // namespace mcore_ckpt
