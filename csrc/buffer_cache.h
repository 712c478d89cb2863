// Keeps the host buffers of finished read jobs for the next job. Mapping and pinning a buffer takes longer than reading
// it full from a fast disk.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "host_buffer.h"

namespace mcore_ckpt {

// All methods may be called from any thread.
class BufferCache {
  public:
    // The buffers of one read job with 8 threads, two buffers for each and pieces of 16 MiB: 16 x (16 MiB + a page).
    static constexpr std::size_t MOST_IDLE_BYTES = std::size_t{257} << 20;

    // The cache of this process. A forked child begins with an empty one: it does not inherit pinned memory, and other
    // threads of the parent may have held the lock.
    static BufferCache& of_this_process();

    BufferCache();
    BufferCache(const BufferCache&) = delete;
    BufferCache& operator=(const BufferCache&) = delete;

    // A buffer of at least `nbytes` bytes with unspecified content, pinned for a GPU or for no device. It returns to
    // the cache when its last owner drops it. Throws what HostBuffer throws.
    std::shared_ptr<HostBuffer> take(std::size_t nbytes, int device);

    // Frees the buffers that nobody uses. Returns how many bytes they had.
    std::size_t free_idle();

  private:
    using Buffers = std::vector<std::unique_ptr<HostBuffer>>;

    std::unique_ptr<HostBuffer> find_idle(std::size_t nbytes, int device);
    std::unique_ptr<HostBuffer> remove(Buffers::iterator found);
    void put_back(std::unique_ptr<HostBuffer> buffer) noexcept;

    const pid_t process_;
    std::mutex mutex_;  // guards everything below
    Buffers idle_;      // the one that was used last is at the end
    std::size_t idle_bytes_ = 0;
};

}  // namespace mcore_ckpt
