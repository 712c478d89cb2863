// Helpers that only the files that call CUDA use.
#pragma once

#include <cuda_runtime_api.h>

#include "device_copy.h"

namespace mcore_ckpt {

// Throws std::runtime_error with CUDA's message if a call has failed.
void check(cudaError_t error, const char* doing);

// The address of a function of the GPU driver, or nullptr if the driver does not have it or is not loaded yet.
void* driver_function(const char* name);

StreamHandle make_stream();

// Makes an event on the current GPU.
EventHandle make_event();

// Whether an event has happened. Throws std::runtime_error with CUDA's message if the work before it has failed.
bool has_happened(CUevent_st* event, const char* doing);

}  // namespace mcore_ckpt
