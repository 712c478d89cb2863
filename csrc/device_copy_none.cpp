// Replaces the .cu files in a build without nvcc. setup.py defines MCORE_CKPT_NO_CUDA_REASON.
#include <stdexcept>

#include "device_copy.h"

namespace mcore_ckpt {
namespace {

[[noreturn]] void refuse() {
    throw std::runtime_error(
        "mcore_ckpt cannot copy GPU tensors: it was built without CUDA, because " MCORE_CKPT_NO_CUDA_REASON
        "; install it again with nvcc on the PATH");
}

}  // namespace

const bool BUILT_WITH_CUDA = false;

int device_of(const void*) { refuse(); }
void wait_for_device(int, double) { refuse(); }
std::uintptr_t side_stream(int) { refuse(); }
int numa_node_of(int) { refuse(); }
void pin_memory(void*, std::size_t, int) { refuse(); }
void unpin_memory(void*, int) noexcept {}

DeviceCalls::DeviceCalls(int) { refuse(); }
DeviceCalls::~DeviceCalls() = default;

void DestroyHandle::operator()(CUstream_st*) const noexcept {}
void DestroyHandle::operator()(CUevent_st*) const noexcept {}

HostToDeviceCopies::HostToDeviceCopies(int device, double seconds) : device_(device), seconds_(seconds) { refuse(); }
void HostToDeviceCopies::copy(void*, const void*, std::size_t) { refuse(); }
void HostToDeviceCopies::copy(const Grid&) { refuse(); }
void HostToDeviceCopies::record(int) { refuse(); }
void HostToDeviceCopies::wait(int) { refuse(); }
bool HostToDeviceCopies::settle() noexcept { return false; }

DeviceToHostCopies::DeviceToHostCopies() { refuse(); }
void DeviceToHostCopies::copy(void*, const void*, std::size_t) { refuse(); }
void DeviceToHostCopies::wait(int, double, const std::function<bool()>&) { refuse(); }
void keep_for_ever(std::vector<std::shared_ptr<HostBuffer>>) { refuse(); }

DeviceEvent::DeviceEvent(int device) : device_(device) { refuse(); }
DeviceEvent::~DeviceEvent() = default;
void DeviceEvent::record(CUstream_st*) { refuse(); }
bool DeviceEvent::happened() const { refuse(); }

// The constructor throws, so nobody has a copier whose other members could be called.
DeviceCopier::DeviceCopier(int device, std::uintptr_t) : device_(device), stream_(nullptr) { refuse(); }
DeviceCopier::~DeviceCopier() = default;
std::vector<DeviceCopier::Done> DeviceCopier::start(const std::shared_ptr<HostBuffer>&, const std::vector<ToBuffer>&,
                                                    std::uintptr_t, std::size_t) {
    refuse();
}
void DeviceCopier::hold(std::uintptr_t, double) { refuse(); }
bool DeviceCopier::done() { refuse(); }
void DeviceCopier::wait(double) { refuse(); }
void DeviceCopier::close(double) { refuse(); }

}  // namespace mcore_ckpt
