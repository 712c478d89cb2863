// Copies between host and GPU memory. A build without nvcc compiles device_copy_none.cpp instead of the .cu files;
// there, every function that needs a GPU throws.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
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

// The number of the GPU that a GPU address belongs to, asked inside DeviceCalls. Throws std::invalid_argument for host
// memory.
int device_of(const void* memory);

// A GPU has not done its work in time. Python sees it as DeviceStuck(device, seconds).
class DeviceStuck : public std::runtime_error {
  public:
    DeviceStuck(int number, double waited)
        : std::runtime_error("GPU " + std::to_string(number) + " has not done its work for " +
                             std::to_string(std::lround(waited)) + " s"),
          device(number),
          seconds(waited) {}

    const int device;
    const double seconds;
};

// Waits until the GPU has done all work that is queued on it. Throws DeviceStuck after so many seconds.
void wait_for_device(int device, double seconds);

// A stream for copies from this GPU, which is always the same one, and is never destroyed: torch records an event on it
// when it frees a tensor that was recorded on it, perhaps long after the copier is gone.
//
// It is none of torch's pool of 32 streams, of which NCCL and the training take some, too. When all have been taken,
// the pool begins again with the first one, and a collective or a graph capture would then share its stream with our
// copies.
std::uintptr_t side_stream(int device);

// The NUMA node whose memory is nearest to a GPU; -1 if the system does not tell.
int numa_node_of(int device);

// Makes host memory readable and writable for every GPU, from a thread that uses this GPU. unpin_memory() needs the
// same number. Pinned memory must be unpinned before it is unmapped.
void pin_memory(void* memory, std::size_t nbytes, int device);
void unpin_memory(void* memory, int device) noexcept;

// While the object exists, this thread may call CUDA for a GPU:
// - The GPU is the current one. A thread without a current GPU would initialize GPU 0 with most calls, which takes half
//   a GB of that GPU's memory.
// - The thread's capture mode is Relaxed. While any thread captures a CUDA graph in Global mode (torch's default, and
//   that of megatron's `CudaGraphManager`), calls that may be unsafe fail in all threads that have the default mode,
//   and make the capture invalid: cudaHostRegister, cudaEventQuery, cudaEventSynchronize, ... None of ours touches a
//   stream that is being captured.
class DeviceCalls {
  public:
    explicit DeviceCalls(int device);
    ~DeviceCalls();
    DeviceCalls(const DeviceCalls&) = delete;
    DeviceCalls& operator=(const DeviceCalls&) = delete;

  private:
    int previous_ = -1;  // -1: the destructor leaves the current GPU as it is
    int mode_ = 0;       // the thread's capture mode before
};

struct DestroyHandle {
    void operator()(CUstream_st* stream) const noexcept;
    void operator()(CUevent_st* event) const noexcept;
};
using StreamHandle = std::unique_ptr<CUstream_st, DestroyHandle>;
using EventHandle = std::unique_ptr<CUevent_st, DestroyHandle>;

// Copies from two pinned host buffers to the current GPU, on a stream of its own. Used by one thread, inside
// DeviceCalls.
class HostToDeviceCopies {
  public:
    // `seconds`: how long to wait for a copy.
    HostToDeviceCopies(int device, double seconds);
    HostToDeviceCopies(const HostToDeviceCopies&) = delete;
    HostToDeviceCopies& operator=(const HostToDeviceCopies&) = delete;

    void copy(void* device, const void* host, std::size_t nbytes);
    void copy(const Grid& grid);

    // Tells that all copies since the last record() were from buffer `buffer`, which is 0 or 1.
    void record(int buffer);

    // Waits until the copies from this buffer are done. Throws DeviceStuck if they take too long.
    void wait(int buffer);

    // Waits until all copies are over, also those after the last record(). Returns false if that takes too long. Then
    // the host buffers must stay (keep_for_ever).
    bool settle() noexcept;

  private:
    const int device_;
    const double seconds_;
    bool stuck_ = false;
    StreamHandle stream_;
    EventHandle copied_[2];
    std::size_t most_stride_ = 0;  // the largest stride of rows that the GPU copies in one call
};

// Copies from the current GPU to pinned host memory, on a stream of its own. Used by one thread, inside DeviceCalls.
class DeviceToHostCopies {
  public:
    DeviceToHostCopies();
    DeviceToHostCopies(const DeviceToHostCopies&) = delete;
    DeviceToHostCopies& operator=(const DeviceToHostCopies&) = delete;

    void copy(void* host, const void* device, std::size_t nbytes);

    // Waits until all copies are done. Throws DeviceStuck after so many seconds, or soon after `cancelled` has said
    // yes. Then the host memory must stay (keep_for_ever), because the GPU may still write to it.
    void wait(int device, double seconds, const std::function<bool()>& cancelled);

  private:
    StreamHandle stream_;
    EventHandle copied_;
};

// Keeps buffers that a GPU may still write to. They are never freed.
void keep_for_ever(std::vector<std::shared_ptr<HostBuffer>> buffers);

// A point in a stream of one GPU.
class DeviceEvent final : public Event {
  public:
    explicit DeviceEvent(int device);
    ~DeviceEvent() override;

    void record(CUstream_st* stream);
    bool happened() const override;
    int device() const override { return device_; }
    CUevent_st* handle() const { return handle_.get(); }

  private:
    const int device_;
    EventHandle handle_;
};

// Copies tensors from one GPU to pinned host memory, on a stream that the caller owns. All methods may be called from
// any thread, also at the same time.
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
    struct Run;

    // `stream` must exist as long as any tensor that is recorded on it (side_stream).
    DeviceCopier(int device, std::uintptr_t stream);
    // Does not wait. Buffers that copies may still write to stay in memory for ever.
    ~DeviceCopier();
    DeviceCopier(const DeviceCopier&) = delete;
    DeviceCopier& operator=(const DeviceCopier&) = delete;

    // Queues the copies behind the work that is queued on stream `after` now. The host does not wait for the GPU. The
    // copier keeps the buffer alive until the copies are done; the caller keeps the sources alive.
    //
    // All small copies come first, as kernels, and then the large ones, each for the copy engine. Megatron sets
    // CUDA_DEVICE_MAX_CONNECTIONS=1 (with tensor or context parallelism, before Blackwell), which puts the work of all
    // streams into one queue: behind a kernel that waits for a large copy, the training's kernels would wait, too.
    //
    // Returns an event after about every `group_bytes` bytes of large copies, and one at the end. The copier records an
    // event again only when nobody else holds it.
    //
    // Throws std::invalid_argument, before anything is queued, for a buffer that is not pinned, a destination that is
    // not inside the buffer or begins before the previous one ends, and a source of which any part is not on this GPU.
    std::vector<Done> start(const std::shared_ptr<HostBuffer>& buffer, const std::vector<ToBuffer>& copies,
                            std::uintptr_t after, std::size_t group_bytes);

    // Makes the work that is queued on `stream` from now on wait for the copies. If nothing is being copied, nothing
    // happens. The host does not wait, unless `stream` is being captured into a CUDA graph: work in a capture cannot
    // wait for an event outside of it. Then the host waits, for at most so many seconds (DeviceStuck).
    void hold(std::uintptr_t stream, double seconds);

    bool done();

    // Waits until the copies are done. Afterwards hold(), done() and wait() call CUDA no more. Throws DeviceStuck after
    // so many seconds.
    void wait(double seconds);

    // Waits as wait() does, then frees the events. If the copies are not done or have failed, it throws nevertheless
    // afterwards, and buffers that copies may still write to stay in memory for ever. hold(), done() and wait() throw
    // std::invalid_argument from then on; calls of them that are under way end as if the copier were open.
    void close(double seconds);

  private:
    void require_open() const;
    bool look_at_last();
    void keep_alive(const std::shared_ptr<HostBuffer>& buffer);
    const std::shared_ptr<DeviceEvent>& free_event(std::size_t number);
    std::vector<Done> queue(const std::vector<Run>& runs, std::size_t count, std::size_t group_bytes);
    void abandon() noexcept;

    const int device_;
    CUstream_st* const stream_;

    mutable std::mutex mutex_;  // guards everything below
    bool open_ = true;
    std::unique_ptr<DeviceEvent> after_;
    std::vector<std::shared_ptr<DeviceEvent>> events_;
    std::shared_ptr<DeviceEvent> last_;  // happens when all copies are done; nullptr if it is known to have happened
    std::vector<std::shared_ptr<HostBuffer>> in_flight_;  // buffers that copies may still write to
};

}  // namespace mcore_ckpt
