// Stands in for device_copy.cu and device_copier.cu where there is no nvcc; setup.py says why in
// MCORE_CKPT_NO_CUDA_REASON.
#include "device_copy.h"

#include <stdexcept>

namespace mcore_ckpt {
namespace {

[[noreturn]] void refuse() {
    throw std::runtime_error(
        "mcore_ckpt cannot copy GPU tensors: it was built without CUDA, because " MCORE_CKPT_NO_CUDA_REASON
        "; install it again with nvcc at hand");
}

}  // namespace

const bool BUILT_WITH_CUDA = false;

int device_of(const void*) { refuse(); }
void wait_for_device(int) { refuse(); }
void wait_for_event(std::uintptr_t) { refuse(); }
void pin_memory(void*, std::size_t) { refuse(); }
void unpin_memory(void*) noexcept {}

CurrentDevice::CurrentDevice(int) { refuse(); }
CurrentDevice::~CurrentDevice() = default;

void Destroy::operator()(CUstream_st*) const noexcept {}
void Destroy::operator()(CUevent_st*) const noexcept {}

Upload::Upload() { refuse(); }
Upload::~Upload() = default;
void Upload::copy(void*, const void*, std::size_t) { refuse(); }
void Upload::copy(const Grid&) { refuse(); }
void Upload::record(int) { refuse(); }
void Upload::wait(int) { refuse(); }

// Nobody gets a copier whose other members could be called.
DeviceCopier::DeviceCopier(int device) : device_(device) { refuse(); }
DeviceCopier::~DeviceCopier() = default;
std::vector<DeviceCopier::Done> DeviceCopier::start(const std::vector<Copy>&, std::uintptr_t, std::size_t) {
    refuse();
}
void DeviceCopier::hold(std::uintptr_t) { refuse(); }
bool DeviceCopier::done() { refuse(); }
void DeviceCopier::wait() { refuse(); }
void DeviceCopier::close() { refuse(); }

}  // namespace mcore_ckpt
