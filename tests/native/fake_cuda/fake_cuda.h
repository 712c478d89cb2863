// Replaces CUDA by GPUs that do everything as late as possible. Queued work is done only when somebody waits for it (or
// asks for it again and again), and then only this work and the work that it must wait for. So work that streams and
// events do not order gives wrong results, always. tests/cuda emulates a CUDA that is asynchronous, for whole
// trainings; this one stays for tests of single calls, which it can also make fail.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace fake_cuda {

void* device_malloc(int device, std::size_t nbytes);
void device_free(void* memory);

// Makes the bytes from `at` on an allocation of their own, on a GPU: two allocations at neighbouring addresses, as
// virtual memory management makes them. Must be undone by join() before device_free().
void split(void* memory, std::size_t at, int device);
void join(void* memory, std::size_t at);

// Queues a kernel.
void queue(cudaStream_t stream, std::function<void()> kernel);

// Makes calls of this name fail, after `calls` more calls. nullptr: no call fails.
void fail(const char* name, int calls);

// Streams do nothing more, whoever waits, as behind a collective that never ends.
void stick(bool on);

// The number of streams and events that exist.
int handles();

// The largest stride that cudaMemcpy2DAsync accepts.
constexpr int MAX_PITCH = 20'000;

// How many calls there were of cudaMemcpyBatchAsync, cudaMemcpyAsync, cudaMemcpy2DAsync, the gather kernel,
// cudaHostRegister and cudaPointerGetAttributes.
struct Calls {
    int batches, copies, copies_of_rows, gathers, pins, looks;
};
Calls calls();

}  // namespace fake_cuda
