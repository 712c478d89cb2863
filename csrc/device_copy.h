// Copies between host and GPU memory.
#pragma once

#include <cstdint>
#include <vector>

#include "host_copy.h"

namespace mcore_ckpt {

extern const bool BUILT_WITH_CUDA;

// Queue all copies on `stream` (a cudaStream_t as a number) and wait for the stream, so for what was queued on it before, too.
// Throws std::runtime_error with CUDA's words; nothing is in flight any more then.
void copy_to_host(const std::vector<Copy>& copies, std::uintptr_t stream);
void copy_to_device(const std::vector<Copy>& copies, std::uintptr_t stream);

}  // namespace mcore_ckpt
