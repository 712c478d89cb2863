// Maps extents of a file in memory, and asks the system to make them huge pages.
#include "huge_extent.h"

#include <sys/mman.h>

#include <algorithm>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; the headers may be older than the kernel
#endif

namespace mcore_ckpt {
namespace {

using Clock = std::chrono::steady_clock;

// The time that a huge page saves. A huge page that is found faster adds the rest to the credit.
constexpr HugePageCredit::Duration SAVED = std::chrono::microseconds(500);
// The cost of a failure, in addition to its time: a system without huge pages fails quickly, every time.
constexpr HugePageCredit::Duration FAILURE = std::chrono::milliseconds(5);

}  // namespace

void HugePageCredit::spend(Duration time, bool found) {
    const Duration change = (found ? SAVED : -FAILURE) - time;
    std::int64_t before = nanoseconds_;
    while (before > 0 && !nanoseconds_.compare_exchange_weak(before, std::min(before + change.count(), MOST.count()))) {
    }
}

HugeExtent::~HugeExtent() {
    if (window_ != nullptr) ::munmap(window_, BYTES);
}

std::uint8_t* HugeExtent::map(File& file, std::uint64_t offset) {
    if (!credit_.left()) return nullptr;
    const auto begin = Clock::now();
    const bool found = find_huge_page(file, offset);
    credit_.spend(Clock::now() - begin, found);
    return found ? window_ : nullptr;
}

bool HugeExtent::find_huge_page(File& file, std::uint64_t offset) {
    if (window_ == nullptr) window_ = map_anonymous(BYTES, PROT_NONE);
    if (window_ == nullptr) return false;
    // The system does not collapse an extent without any page, so write one. Writing the last byte also makes the file
    // long enough; ftruncate could cut it, if another process has made it longer meanwhile.
    file.write("", 1, offset + BYTES - 1);
    // After MADV_COLLAPSE all pages exist. A store to a missing page would kill the process when memory is full.
    return file.map(window_, BYTES, offset) && ::madvise(window_, BYTES, MADV_COLLAPSE) == 0;
}

}  // namespace mcore_ckpt
