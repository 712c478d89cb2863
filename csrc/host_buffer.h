// Host memory for whole file images and for the pieces that are read and written.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

namespace mcore_ckpt {

constexpr std::size_t HUGE_PAGE_BYTES = std::size_t{2} << 20;

// Addresses that begin on a huge page, `nbytes` (whole pages) of them; to be given back by munmap. nullptr, and errno,
// where there are none.
std::uint8_t* map_anonymous(std::size_t nbytes, int protection);

// Becomes Python's MemoryError.
class OutOfMemory : public std::bad_alloc {
  public:
    OutOfMemory(std::size_t nbytes, int number);
    const char* what() const noexcept override { return words_.c_str(); }

  private:
    std::string words_;
};

// Begins on a huge page, is made of huge pages where the system gives them, and is there from the start: no page
// fault later.
class HostBuffer {
  public:
    // `threads` threads fetch the pages. Throws OutOfMemory, std::runtime_error in CUDA's words.
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
    // Pins the whole buffer, all of whose pages should have been fetched. Throws std::runtime_error with CUDA's message.
    void pin();

  private:
    struct Reserved {};
    HostBuffer(std::size_t nbytes, bool to_pin, Reserved);
    void map(bool to_pin);
    void unmap() noexcept;

    const std::size_t nbytes_;
    bool pinned_ = false;
    const pid_t process_;
    std::uint8_t* data_ = nullptr;
};

}  // namespace mcore_ckpt
