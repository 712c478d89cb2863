// Copies within host memory, at the speed of memory.
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

// One copy. Large ones go past the cache: they take no room in it from what is needed again, and read nothing that they
// overwrite.
void copy_past_cache(void* destination, const void* source, std::size_t nbytes);

// Row k of `count`: `nbytes` bytes from `source + k * source_stride` to `destination + k * destination_stride`.
struct Grid {
    std::uint8_t* destination;
    std::size_t destination_stride;
    const std::uint8_t* source;
    std::size_t source_stride;
    std::size_t nbytes, count;
};

void copy_past_cache(const Grid& grid);

// Does all copies on up to `threads` threads, the caller's among them; each thread gets about the same number of bytes,
// whatever the sizes of the tensors. No destination may overlap any source.
void copy_host(const std::vector<Copy>& copies, int threads);

}  // namespace mcore_ckpt
