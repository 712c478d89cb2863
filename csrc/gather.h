// Makes many small copies from GPU memory with one kernel. A copy of its own costs the host and the copy engine some
// microseconds each time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace mcore_ckpt {

// The table is passed as the kernel's parameter (at most 4 KiB), so the caller may change or free it after the launch.
struct GatherTable {
    struct Row {
        void* destination;  // the GPU's address of pinned host memory
        const void* source;
        std::size_t nbytes;
    };
    static constexpr std::size_t ROWS = 160;

    Row rows[ROWS];
    std::size_t count = 0;
};

// Queues the copies. Addresses may have any alignment.
cudaError_t launch_gather(const GatherTable& table, cudaStream_t stream);

}  // namespace mcore_ckpt
