// Many small copies from GPU memory in one kernel: each alone would cost the host and the copy engine some
// microseconds.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace mcore_ckpt {

// Travels as the kernel's parameter (at most 4 KiB), so that it may be changed or freed right after the launch.
struct GatherTable {
    struct Row {
        void* destination;  // as the GPU sees it
        const void* source;
        std::size_t nbytes;
    };
    static constexpr std::size_t ROWS = 160;

    Row rows[ROWS];
    std::size_t count = 0;
};

// Queues the copies; addresses may have any alignment.
cudaError_t launch_gather(const GatherTable& table, cudaStream_t stream);

}  // namespace mcore_ckpt
