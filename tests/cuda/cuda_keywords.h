// Lets g++ compile gather.cu: CUDA's keywords mean nothing, and the built-in variables are ordinary ones.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <functional>

#undef __global__
#undef __device__
#undef __grid_constant__
#define __global__
#define __device__
#define __grid_constant__

namespace emulated_cuda {

struct Index {
    unsigned x = 0;
};

// Queues `kernel`, which runs all blocks and threads one after the other.
cudaError_t launch(cudaStream_t stream, std::function<void()> kernel);

}  // namespace emulated_cuda

extern thread_local emulated_cuda::Index emulated_thread, emulated_block, emulated_grid;
#define threadIdx emulated_thread
#define blockIdx emulated_block
#define gridDim emulated_grid

// scripts/emulated_cuda.sh turns `kernel<<<blocks, threads, 0, stream>>>(argument)` into this.
#define EMULATED_LAUNCH(kernel, blocks, threads, stream, argument)                                        \
    emulated_cuda::launch(stream, [copied = argument] {                                                   \
        emulated_grid.x = blocks;                                                                         \
        for (emulated_block.x = 0; emulated_block.x < blocks; ++emulated_block.x) {                       \
            for (emulated_thread.x = 0; emulated_thread.x < threads; ++emulated_thread.x) kernel(copied); \
        }                                                                                                 \
    })
