// Copies within host memory, at the speed of memory.
#pragma once

#include <cstddef>
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

// Does all copies on up to `threads` threads, the caller's among them; each thread gets about the same number of bytes,
// whatever the sizes of the tensors. No destination may overlap any source.
void copy_host(const std::vector<Copy>& copies, int threads);

}  // namespace mcore_ckpt
