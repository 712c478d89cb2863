// What the files that call CUDA share.
#pragma once

#include <cuda_runtime_api.h>

#include "device_copy.h"

namespace mcore_ckpt {

// Throws std::runtime_error with CUDA's words.
void check(cudaError_t error, const char* doing);

Stream make_stream();

// Flags besides cudaEventDisableTiming.
Event make_event(unsigned flags);

}  // namespace mcore_ckpt
