// Writes files in memory (tmpfs) by copying into huge pages that are mapped from the file. A write by system call
// allocates page by page, which takes several times as long as the copy.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "file.h"
#include "host_buffer.h"

namespace mcore_ckpt {

// The time that all threads of a job together may still spend on the search for huge pages. In fragmented memory the
// system moves other pages to make space for a huge page, which takes longer than the huge page saves.
class HugePageCredit {
  public:
    using Duration = std::chrono::nanoseconds;

    bool left() const { return nanoseconds_ > 0; }
    void spend(Duration time, bool found);

  private:
    static constexpr Duration MOST = std::chrono::milliseconds(20);

    std::atomic<std::int64_t> nanoseconds_{MOST.count()};
};

// Maps one extent of a file at a time. Used by one thread.
class HugeExtent {
  public:
    static constexpr std::size_t BYTES = HUGE_PAGE_BYTES;

    explicit HugeExtent(HugePageCredit& credit) : credit_(credit) {}
    ~HugeExtent();
    HugeExtent(const HugeExtent&) = delete;
    HugeExtent& operator=(const HugeExtent&) = delete;

    // Maps `[offset, offset + BYTES)` of a file in memory, where `offset` is a multiple of BYTES, until the next call.
    // Returns nullptr if there is no huge page to be had quickly; the caller then writes as to other files. Throws
    // FileError if the file cannot grow.
    std::uint8_t* map(File& file, std::uint64_t offset);

  private:
    bool find_huge_page(File& file, std::uint64_t offset);

    HugePageCredit& credit_;
    std::uint8_t* window_ = nullptr;
};

}  // namespace mcore_ckpt
