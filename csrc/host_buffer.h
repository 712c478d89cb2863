// Host memory that file contents are staged in: large, aligned, and optionally pinned for copies to and from GPUs.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

namespace mcore_ckpt {

constexpr std::size_t HUGE_PAGE_BYTES = std::size_t{2} << 20;

// Maps `nbytes` bytes (whole pages) at an address that is a multiple of a huge page. The caller unmaps them with
// munmap. Returns nullptr, and sets errno, if the system has no memory.
std::uint8_t* map_anonymous(std::size_t nbytes, int protection);

// Python sees it as MemoryError.
class OutOfMemory : public std::bad_alloc {
  public:
    OutOfMemory(std::size_t nbytes, int number);
    const char* what() const noexcept override { return words_.c_str(); }

  private:
    std::string words_;
};

// A buffer that begins on a huge page and consists of huge pages where the system has them.
class HostBuffer {
  public:
    static constexpr int NO_DEVICE = -1, ANY_NODE = -1;

    // How much is pinned in one call. The driver and the kernel hold locks meanwhile, which the training needs, too.
    static constexpr std::size_t PIN_BYTES = std::size_t{256} << 20;

    // Fetches all pages on `threads` threads, so that no page fault comes later. For a GPU, the buffer is pinned.
    // Throws OutOfMemory, or std::runtime_error with CUDA's message if pinning fails.
    explicit HostBuffer(std::size_t nbytes, int device = NO_DEVICE, int threads = 1);
    // Maps memory without its pages: `fetch` brings them, and `pin` pins them for the GPU. The pages come from the NUMA
    // node, if it has any left.
    static std::unique_ptr<HostBuffer> reserve(std::size_t nbytes, int device, int numa_node);
    // Waits for the driver to unpin the memory, but not for ever (see host_buffer.cpp).
    ~HostBuffer();
    HostBuffer(const HostBuffer&) = delete;
    HostBuffer& operator=(const HostBuffer&) = delete;

    std::uint8_t* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }
    int device() const { return device_; }

    // How many bytes from the beginning are pinned.
    std::size_t pinned_bytes() const;
    // The end of the piece of pinned memory that the byte at `offset` is in. No copy may go across it.
    std::size_t piece_end(std::size_t offset) const;

    // Fetches the pages of the bytes [begin, begin + nbytes) on `threads` threads. Pages that are there already stay as
    // they are. Throws OutOfMemory, std::invalid_argument.
    void fetch(std::size_t begin, std::size_t nbytes, int threads);
    // Pins the first `nbytes` bytes, whose pages should have been fetched, in pieces of at most PIN_BYTES. Throws
    // std::runtime_error with CUDA's message, std::invalid_argument.
    void pin(std::size_t nbytes);

  private:
    struct Reserved {};
    HostBuffer(std::size_t nbytes, int device, int numa_node, Reserved);
    std::size_t pinned_end() const;
    void map(int numa_node);

    const std::size_t nbytes_;
    const int device_;
    const pid_t process_;
    std::uint8_t* data_ = nullptr;
    mutable std::mutex mutex_;             // a thread may pin while another one asks
    std::vector<std::size_t> piece_ends_;  // of pinned memory, ascending; guarded by mutex_
};

}  // namespace mcore_ckpt
