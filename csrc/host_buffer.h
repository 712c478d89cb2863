// Host memory that file contents are staged in: large, aligned, and optionally pinned for copies to and from GPUs.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

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

// A buffer that begins on a huge page and consists of huge pages where the system has them. The constructor fetches all
// pages, so that no page fault comes later.
class HostBuffer {
  public:
    // `threads` threads fetch the pages. Throws OutOfMemory, or std::runtime_error with CUDA's message if pinning
    // fails.
    explicit HostBuffer(std::size_t nbytes, bool pinned = false, int threads = 1);
    // Maps memory without its pages: `fetch` brings them. `to_pin`: `pin` will be called.
    static std::unique_ptr<HostBuffer> reserve(std::size_t nbytes, bool to_pin);
    ~HostBuffer();
    HostBuffer(const HostBuffer&) = delete;
    HostBuffer& operator=(const HostBuffer&) = delete;

    std::uint8_t* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }
    bool pinned() const { return pinned_; }

    // Fetches the pages of the bytes [begin, begin + nbytes) on `threads` threads. Pages that are there already stay as
    // they are. Throws OutOfMemory, std::invalid_argument.
    void fetch(std::size_t begin, std::size_t nbytes, int threads);
    // Pins the whole buffer, all of whose pages should have been fetched. Throws std::runtime_error with CUDA's
    // message.
    void pin();

  private:
    struct Reserved {};
    HostBuffer(std::size_t nbytes, bool to_pin, Reserved);
    void map(bool to_pin);
    void unmap() noexcept;

    const std::size_t nbytes_;
    std::atomic<bool> pinned_{false};  // a thread may pin while another one asks
    const pid_t process_;
    std::uint8_t* data_ = nullptr;
    int device_ = -1;  // the GPU that was current when the memory was pinned
};

}  // namespace mcore_ckpt
