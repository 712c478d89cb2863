// GPU memory, events and copies to the GPU, with the CUDA runtime.
#include "device_copy.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda_support.h"

namespace mcore_ckpt {
namespace {

// Whether this thread has used a GPU. If it has not, cudaGetDevice only returns CUDA's default.
bool thread_has_context() {
    using Function = int (*)(void**);
    static const auto current_context = reinterpret_cast<Function>(driver_function("cuCtxGetCurrent"));
    void* context = nullptr;
    return current_context != nullptr && current_context(&context) == 0 && context != nullptr;
}

std::size_t most_stride() {
    int device = 0, bytes = 0;
    check(cudaGetDevice(&device), "asking for the current GPU");
    check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxPitch, device), "asking a GPU for its largest pitch");
    return static_cast<std::size_t>(bytes);
}

}  // namespace

const bool BUILT_WITH_CUDA = true;

void check(cudaError_t error, const char* doing) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // clears the error, which the next CUDA call of this thread would report again otherwise
    throw std::runtime_error(std::string("CUDA failed ") + doing + ": " + cudaGetErrorString(error));
}

int device_of(const void* memory) {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, memory), "looking up a tensor's GPU");
    if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
        throw std::invalid_argument("a tensor to copy from or to a GPU is not in GPU memory");
    }
    return attributes.device;
}

void wait_for_device(int device) {
    const CurrentDevice current(device);
    check(cudaDeviceSynchronize(), "waiting for the GPU");
}

int pin_memory(void* memory, std::size_t nbytes) {
    int device = 0;
    check(cudaGetDevice(&device), "asking for the current GPU");
    check(cudaHostRegister(memory, nbytes, cudaHostRegisterPortable | cudaHostRegisterMapped), "pinning memory");
    return device;
}

void unpin_memory(void* memory, int device) noexcept {
    try {
        const CurrentDevice current(device);
        check(cudaHostUnregister(memory), "unpinning memory");
    } catch (const std::exception&) {
        // This fails only at the end of the process, when the driver is already gone. The system unpins the memory.
    }
}

CurrentDevice::CurrentDevice(int device) {
    int previous = 0;
    check(cudaGetDevice(&previous), "asking for the current GPU");
    if (previous == device && thread_has_context()) return;
    // A thread that has not used a GPU keeps this one: setting GPU 0 again would initialize it (see DeviceEvent).
    if (thread_has_context()) previous_ = previous;
    check(cudaSetDevice(device), "choosing a GPU");
}

CurrentDevice::~CurrentDevice() {
    if (previous_ >= 0) cudaSetDevice(previous_);
}

void DestroyHandle::operator()(CUstream_st* stream) const noexcept { cudaStreamDestroy(stream); }
void DestroyHandle::operator()(CUevent_st* event) const noexcept { cudaEventDestroy(event); }

StreamHandle make_stream() {
    cudaStream_t stream = nullptr;
    // A non-blocking stream does not wait for the default stream, and the default stream does not wait for it.
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    return StreamHandle(stream);
}

EventHandle make_event(unsigned flags) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | flags), "making an event");
    return EventHandle(event);
}

HostToDeviceCopies::HostToDeviceCopies()
    : stream_(make_stream()),
      copied_{make_event(cudaEventBlockingSync), make_event(cudaEventBlockingSync)},
      most_stride_(most_stride()) {}

HostToDeviceCopies::~HostToDeviceCopies() { cudaStreamSynchronize(stream_.get()); }

void HostToDeviceCopies::copy(void* device, const void* host, std::size_t nbytes) {
    check(cudaMemcpyAsync(device, host, nbytes, cudaMemcpyHostToDevice, stream_.get()), "queueing a copy to the GPU");
}

void HostToDeviceCopies::copy(const Grid& grid) {
    if (grid.count > 1 && std::max(grid.destination_stride, grid.source_stride) <= most_stride_) {
        const cudaError_t error =
            cudaMemcpy2DAsync(grid.destination, grid.destination_stride, grid.source, grid.source_stride, grid.nbytes,
                              grid.count, cudaMemcpyHostToDevice, stream_.get());
        if (error == cudaSuccess) return;
        cudaGetLastError();  // an error that concerns more than this one call comes again in the copies below
    }
    for (std::size_t row = 0; row < grid.count; ++row) {
        copy(grid.destination + row * grid.destination_stride, grid.source + row * grid.source_stride, grid.nbytes);
    }
}

void HostToDeviceCopies::record(int buffer) {
    check(cudaEventRecord(copied_[buffer].get(), stream_.get()), "recording an event");
}

void HostToDeviceCopies::wait(int buffer) {
    check(cudaEventSynchronize(copied_[buffer].get()), "waiting for a copy to the GPU");
}

DeviceEvent::DeviceEvent(int device) : device_(device) {
    const CurrentDevice current(device_);
    handle_ = make_event(cudaEventBlockingSync);
}

DeviceEvent::~DeviceEvent() {
    // The last owner may be a thread that has not used a GPU, and destroying the event there would initialize GPU 0.
    try {
        const CurrentDevice current(device_);
        handle_.reset();
    } catch (const std::exception&) {
        // The driver is gone, or this is a forked child. The process frees the event when it ends.
        static_cast<void>(handle_.release());
    }
}

void DeviceEvent::record(CUstream_st* stream) { check(cudaEventRecord(handle_.get(), stream), "recording an event"); }

bool DeviceEvent::done() const {
    const CurrentDevice current(device_);
    const cudaError_t state = cudaEventQuery(handle_.get());
    if (state == cudaErrorNotReady) {
        cudaGetLastError();  // clears the state, which other code of this thread would take for an error
        return false;
    }
    check(state, "copying");
    return true;
}

void DeviceEvent::wait() const {
    const CurrentDevice current(device_);
    check(cudaEventSynchronize(handle_.get()), "waiting for a copy");
}

}  // namespace mcore_ckpt
