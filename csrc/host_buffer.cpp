// Maps, fetches and pins host memory.
#include "host_buffer.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "device_copy.h"
#include "file.h"
#include "parallel.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; the headers may be older than the kernel
#endif

namespace mcore_ckpt {
namespace {

// How many bytes a thread fetches at a time.
constexpr std::size_t SHARE_BYTES = std::size_t{32} << 20;

// Returns 0, or errno.
int fetch_pages(std::uint8_t* data, std::size_t nbytes) {
    while (::madvise(data, nbytes, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINTR || errno == EAGAIN) continue;
        if (errno != EINVAL) return errno;
        // The kernel is older than MADV_POPULATE_WRITE: touch each page. A lack of memory then ends the process, as
        // for any other memory.
        for (std::size_t at = 0; at < nbytes; at += PAGE_BYTES) static_cast<volatile std::uint8_t*>(data)[at] = 0;
        return 0;
    }
    return 0;
}

// Pinned memory that has lost its buffer, and is given back to the system.
struct PinnedMemory {
    // How long a buffer that is destroyed waits for one piece, in seconds.
    static constexpr int MOST_S = 10;

    std::uint8_t* const data;
    const std::size_t nbytes;
    const int device;
    const std::vector<std::size_t> piece_ends;
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t unpinned = 0;  // how many pieces; guarded by mutex
    bool is_free = false;      // guarded by mutex
    bool is_given_up = false;  // guarded by mutex

    // How many are still pinned although their owners wait no more.
    static inline std::atomic<int> given_up{0};

    PinnedMemory(std::uint8_t* from, std::size_t size, int gpu, std::vector<std::size_t> ends)
        : data(from), nbytes(size), device(gpu), piece_ends(std::move(ends)) {}

    void free() noexcept {
        std::size_t begin = 0;
        for (const std::size_t end : piece_ends) {
            unpin_memory(data + begin, device);
            begin = end;
            const std::lock_guard<std::mutex> lock(mutex);
            ++unpinned;
            changed.notify_all();
        }
        ::munmap(data, nbytes);
        const std::lock_guard<std::mutex> lock(mutex);
        is_free = true;
        if (is_given_up) --given_up;
        changed.notify_all();
    }

    // Waits until the memory is free, but no longer if no piece is unpinned for MOST_S, and not at all while other
    // memory is waited for in vain.
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!is_free) {
            const std::size_t before = unpinned;
            const auto advances = [&] { return is_free || unpinned != before; };
            if (changed.wait_for(lock, std::chrono::seconds(given_up == 0 ? MOST_S : 0), advances)) continue;
            is_given_up = true;
            ++given_up;
            return;
        }
    }
};

// Asks for pages of a NUMA node, and takes those of others if it has none left. It is only a wish: a container may
// forbid the call. libnuma would be one more dependency for one call.
void prefer_node(std::uint8_t* data, std::size_t nbytes, int node) {
    constexpr int PREFERRED = 1;  // MPOL_PREFERRED of <linux/mempolicy.h>
    constexpr int BITS = 8 * sizeof(unsigned long);
    std::vector<unsigned long> nodes(node / BITS + 1, 0);
    nodes[node / BITS] = 1UL << node % BITS;
    // The kernel takes one bit less than it is told.
    ::syscall(SYS_mbind, data, nbytes, PREFERRED, nodes.data(), nodes.size() * BITS + 1, 0);
}

}  // namespace

std::uint8_t* map_anonymous(std::size_t nbytes, int protection) {
    void* found = ::mmap(nullptr, nbytes + HUGE_PAGE_BYTES, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return nullptr;
    auto* begin = static_cast<std::uint8_t*>(found);
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(begin) % HUGE_PAGE_BYTES;
    if (head != 0) ::munmap(begin, head);
    ::munmap(begin + head + nbytes, HUGE_PAGE_BYTES - head);
    return begin + head;
}

OutOfMemory::OutOfMemory(std::size_t nbytes, int number)
    : words_("no " + std::to_string(nbytes) + " bytes of host memory: " + std::generic_category().message(number)) {}

HostBuffer::HostBuffer(std::size_t nbytes, int device, int numa_node, Reserved)
    : nbytes_(nbytes), device_(device), process_(::getpid()) {
    if (nbytes == 0) throw std::invalid_argument("a buffer of 0 bytes");
    map(numa_node);
}

// The destructor runs if fetching or pinning fails, because the other constructor has completed by then.
HostBuffer::HostBuffer(std::size_t nbytes, int device, int threads) : HostBuffer(nbytes, device, ANY_NODE, Reserved{}) {
    fetch(0, nbytes, threads);
    if (device != NO_DEVICE) pin(nbytes);
}

std::unique_ptr<HostBuffer> HostBuffer::reserve(std::size_t nbytes, int device, int numa_node) {
    return std::unique_ptr<HostBuffer>(new HostBuffer(nbytes, device, numa_node, Reserved{}));
}

HostBuffer::~HostBuffer() {
    // A forked child does not inherit pinned memory, so other memory may be at its addresses.
    if (::getpid() != process_) return;
    const std::size_t size = page_ceil(nbytes_);
    if (piece_ends_.empty()) {
        ::munmap(data_, size);
        return;
    }
    // The driver does not unpin memory before the GPU has done all of its work, also work that does not use the memory
    // (seen on an H200, driver 580). If the GPU hangs, the thread is left behind until the process ends.
    std::shared_ptr<PinnedMemory> memory;
    try {
        memory = std::make_shared<PinnedMemory>(data_, size, device_, piece_ends_);
        std::thread([memory] { memory->free(); }).detach();
    } catch (const std::exception&) {
        return;  // The system grants no thread or no memory. Here the memory could not be unpinned without a deadline.
    }
    memory->wait();
}

void HostBuffer::map(int numa_node) {
    if (nbytes_ > std::numeric_limits<std::size_t>::max() / 2) throw OutOfMemory(nbytes_, ENOMEM);
    const std::size_t size = page_ceil(nbytes_);
    data_ = map_anonymous(size, PROT_READ | PROT_WRITE);
    if (data_ == nullptr) throw OutOfMemory(nbytes_, errno);
    ::madvise(data_, size, MADV_HUGEPAGE);
    if (numa_node != ANY_NODE) prefer_node(data_, size, numa_node);
    // After a fork the parent's next write to a page would give the parent a new page, while the GPU still uses the
    // old.
    if (device_ != NO_DEVICE) ::madvise(data_, size, MADV_DONTFORK);
}

std::size_t HostBuffer::pinned_bytes() const { return std::min(pinned_end(), nbytes_); }

std::size_t HostBuffer::piece_end(std::size_t offset) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::upper_bound(piece_ends_.begin(), piece_ends_.end(), offset);
    if (found == piece_ends_.end()) throw std::invalid_argument("memory that is not pinned");
    return *found;
}

void HostBuffer::fetch(std::size_t begin, std::size_t nbytes, int threads) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1, not " + std::to_string(threads));
    if (begin > nbytes_ || nbytes > nbytes_ - begin) {
        throw std::invalid_argument("a buffer of " + std::to_string(nbytes_) + " bytes has no " +
                                    std::to_string(nbytes) + " bytes from " + std::to_string(begin));
    }
    const std::size_t first = begin / PAGE_BYTES * PAGE_BYTES, end = page_ceil(begin + nbytes);
    std::atomic<std::size_t> next{first};
    std::atomic<int> error{0};
    const std::size_t shares = (end - first) / SHARE_BYTES + 1;
    run_on_threads(static_cast<int>(std::min<std::size_t>(threads, shares)), [&] {
        for (std::size_t at = next.fetch_add(SHARE_BYTES); at < end && error == 0; at = next.fetch_add(SHARE_BYTES)) {
            const int number = fetch_pages(data_ + at, std::min(SHARE_BYTES, end - at));
            if (number != 0) error = number;
        }
    });
    if (error != 0) throw OutOfMemory(nbytes, error);
}

void HostBuffer::pin(std::size_t nbytes) {
    if (device_ == NO_DEVICE) throw std::invalid_argument("a buffer that is for no device cannot be pinned");
    if (nbytes > nbytes_) {
        throw std::invalid_argument("a buffer of " + std::to_string(nbytes_) + " bytes has no " +
                                    std::to_string(nbytes) + " bytes to pin");
    }
    const std::size_t wanted = page_ceil(nbytes);
    for (std::size_t begin = pinned_end(); begin < wanted; begin = pinned_end()) {
        const std::size_t end = std::min(wanted, begin + PIN_BYTES);
        pin_memory(data_ + begin, end - begin, device_);
        const std::lock_guard<std::mutex> lock(mutex_);
        piece_ends_.push_back(end);
    }
}

std::size_t HostBuffer::pinned_end() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return piece_ends_.empty() ? 0 : piece_ends_.back();
}

}  // namespace mcore_ckpt
