// A GPU that does everything as late as it may: what is queued on a stream happens only when somebody waits for it,
// and nothing else happens with it than what it must wait for itself. What is not ordered by streams and events comes
// out wrong.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace fake_cuda {

void* device_malloc(int device, std::size_t nbytes);
void device_free(void* memory);

// A kernel of the test's.
void queue(cudaStream_t stream, std::function<void()> kernel);

// Calls of this name fail from now on, after `calls` more; nullptr: none does.
void fail(const char* name, int calls);

// Streams and events that exist.
int handles();

// The largest stride that cudaMemcpy2DAsync takes.
constexpr int MAX_PITCH = 20'000;

// How many cudaMemcpyBatchAsync, cudaMemcpyAsync, cudaMemcpy2DAsync and gather kernels there were.
struct Calls {
    int batches, copies, copies_of_rows, gathers;
};
Calls calls();

}  // namespace fake_cuda
