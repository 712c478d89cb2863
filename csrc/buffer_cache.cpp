// The buffer cache of a process.
#include "buffer_cache.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <new>
#include <utility>

namespace mcore_ckpt {

BufferCache& BufferCache::of_this_process() {
    // Never freed: at the end of the process the GPU driver, which unpinning needs, may be gone before static objects.
    static std::atomic<BufferCache*> cache{nullptr};
    BufferCache* found = cache.load();
    while (found == nullptr || found->process_ != ::getpid()) {
        auto made = std::make_unique<BufferCache>();
        if (cache.compare_exchange_strong(found, made.get())) return *made.release();
    }
    return *found;
}

BufferCache::BufferCache() : process_(::getpid()) {}

std::shared_ptr<HostBuffer> BufferCache::take(std::size_t nbytes, int device) {
    std::unique_ptr<HostBuffer> buffer = find_idle(nbytes, device);
    if (!buffer) {
        try {
            buffer = std::make_unique<HostBuffer>(nbytes, device);
        } catch (const std::exception&) {
            // Idle buffers of the other kind, or of other sizes, may be what the memory is missing.
            if (free_idle() == 0) throw;
            buffer = std::make_unique<HostBuffer>(nbytes, device);
        }
    }
    const auto give_back = [this](HostBuffer* used) { put_back(std::unique_ptr<HostBuffer>(used)); };
    return std::shared_ptr<HostBuffer>(buffer.release(), give_back);
}

// The smallest idle buffer that is large enough. If there is none, the largest that is too small is freed: the new
// buffer replaces it, so that jobs of growing sizes do not fill the cache with buffers that are too small.
std::unique_ptr<HostBuffer> BufferCache::find_idle(std::size_t nbytes, int device) {
    std::unique_ptr<HostBuffer> replaced;  // freed after the lock is released, as that takes time
    const std::lock_guard<std::mutex> lock(mutex_);
    auto fits = idle_.end(), too_small = idle_.end();
    for (auto one = idle_.begin(); one != idle_.end(); ++one) {
        if ((*one)->device() != device) continue;
        if ((*one)->nbytes() >= nbytes) {
            if (fits == idle_.end() || (*one)->nbytes() < (*fits)->nbytes()) fits = one;
        } else if (too_small == idle_.end() || (*one)->nbytes() > (*too_small)->nbytes()) {
            too_small = one;
        }
    }
    if (fits != idle_.end()) return remove(fits);
    if (too_small != idle_.end()) replaced = remove(too_small);
    return nullptr;
}

std::unique_ptr<HostBuffer> BufferCache::remove(Buffers::iterator found) {
    std::unique_ptr<HostBuffer> removed = std::move(*found);
    idle_.erase(found);
    idle_bytes_ -= removed->nbytes();
    return removed;
}

void BufferCache::put_back(std::unique_ptr<HostBuffer> buffer) noexcept {
    // A forked child cannot use the buffers of its parent, nor its lock. Destroying a buffer there does nothing.
    if (process_ != ::getpid()) return;
    Buffers freed;
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
        idle_.reserve(idle_.size() + 1);
        freed.reserve(idle_.size() + 1);
    } catch (const std::bad_alloc&) {
        return;
    }
    idle_bytes_ += buffer->nbytes();
    idle_.push_back(std::move(buffer));
    while (idle_bytes_ > MOST_IDLE_BYTES) freed.push_back(remove(idle_.begin()));
}

std::size_t BufferCache::free_idle() {
    Buffers freed;
    const std::lock_guard<std::mutex> lock(mutex_);
    freed.swap(idle_);
    return std::exchange(idle_bytes_, 0);
}

}  // namespace mcore_ckpt
