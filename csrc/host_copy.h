// Copies within host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mcore_ckpt {

struct Copy {
    void* destination;
    const void* source;
    std::size_t nbytes;
};

// Makes one copy. A large one bypasses the cache, so that it does not evict data that is needed again and does not read
// the lines that it overwrites.
void copy_past_cache(void* destination, const void* source, std::size_t nbytes);

// `count` rows: row k is `nbytes` bytes from `source + k * source_stride` to `destination + k * destination_stride`.
struct Grid {
    std::uint8_t* destination;
    std::size_t destination_stride;
    const std::uint8_t* source;
    std::size_t source_stride;
    std::size_t nbytes, count;
};

void copy_past_cache(const Grid& grid);

// Makes all copies on up to `threads` threads, including the caller's. Each thread copies about the same number of
// bytes, whatever the sizes of the tensors. No destination may overlap any source.
void copy_host(const std::vector<Copy>& copies, int threads);

}  // namespace mcore_ckpt
