// Files in memory (tmpfs), written by storing into huge pages. The system's own way, page by page, costs several times
// what the copy costs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "file.h"
#include "host_buffer.h"

namespace mcore_ckpt {

// What the search for huge pages may still cost all threads of a job. Where memory is fragmented the system makes room
// for each by moving other pages, which costs more than it saves.
class HugePageCredit {
  public:
    using Duration = std::chrono::nanoseconds;

    bool left() const { return nanoseconds_ > 0; }
    void spend(Duration time, bool found);

  private:
    static constexpr Duration MOST = std::chrono::milliseconds(20);

    std::atomic<std::int64_t> nanoseconds_{MOST.count()};
};

// One extent of a file at a time, for one thread.
class HugeExtent {
  public:
    static constexpr std::size_t BYTES = HUGE_PAGE_BYTES;

    explicit HugeExtent(HugePageCredit& credit) : credit_(credit) {}
    ~HugeExtent();
    HugeExtent(const HugeExtent&) = delete;
    HugeExtent& operator=(const HugeExtent&) = delete;

    // Where to store what `[offset, offset + BYTES)` of a file in memory is to be, until the next call; `offset` is a
    // multiple of BYTES. nullptr: it is to be written like other files. Throws FileError where the file cannot grow.
    std::uint8_t* map(File& file, std::uint64_t offset);

  private:
    bool find_huge_page(File& file, std::uint64_t offset);

    HugePageCredit& credit_;
    std::uint8_t* window_ = nullptr;
};

}  // namespace mcore_ckpt
