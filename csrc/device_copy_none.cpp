// Stands in for device_copy.cu where there is no nvcc; setup.py says why in MCORE_CKPT_NO_CUDA_REASON.
#include <stdexcept>

#include "device_copy.h"

namespace mcore_ckpt {
namespace {

[[noreturn]] void refuse() {
    throw std::runtime_error(
        "mcore_ckpt cannot copy GPU tensors: it was built without CUDA, because " MCORE_CKPT_NO_CUDA_REASON
        "; install it again with nvcc at hand");
}

}  // namespace

const bool BUILT_WITH_CUDA = false;

void copy_to_host(const std::vector<Copy>&, std::uintptr_t) { refuse(); }
void copy_to_device(const std::vector<Copy>&, std::uintptr_t) { refuse(); }

}  // namespace mcore_ckpt
