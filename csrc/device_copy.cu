#include "device_copy.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda_support.h"

namespace mcore_ckpt {
namespace {

// Where it is not, "the thread's current GPU" is only CUDA's default.
bool thread_has_context() {
    // Part of the driver, which the static runtime has loaded by now; not to be linked, since import must work without.
    using Function = int (*)(void**);
    static const auto current_context = [] {
        void* driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        return driver == nullptr ? nullptr : reinterpret_cast<Function>(::dlsym(driver, "cuCtxGetCurrent"));
    }();
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
    cudaGetLastError();  // else the next CUDA call of this thread, someone else's, reports this error again
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

void wait_for_event(std::uintptr_t number) {
    const auto* event = reinterpret_cast<const DeviceEvent*>(number);
    const CurrentDevice current(event->device);
    check(cudaEventSynchronize(event->handle.get()), "waiting for a copy");
}

void pin_memory(void* memory, std::size_t nbytes) {
    check(cudaHostRegister(memory, nbytes, cudaHostRegisterPortable | cudaHostRegisterMapped), "pinning memory");
}

void unpin_memory(void* memory) noexcept {
    // It fails only where the driver is gone already, at the end of the process.
    if (cudaHostUnregister(memory) != cudaSuccess) cudaGetLastError();
}

CurrentDevice::CurrentDevice(int device) {
    int previous = 0;
    check(cudaGetDevice(&previous), "asking for the current GPU");
    if (previous == device && thread_has_context()) return;
    // A thread that has not used a GPU stays on this one: "back" would be GPU 0, and would set it up (DeviceEvent).
    if (thread_has_context()) previous_ = previous;
    check(cudaSetDevice(device), "choosing a GPU");
}

CurrentDevice::~CurrentDevice() {
    if (previous_ >= 0) cudaSetDevice(previous_);
}

void Destroy::operator()(CUstream_st* stream) const noexcept { cudaStreamDestroy(stream); }
void Destroy::operator()(CUevent_st* event) const noexcept { cudaEventDestroy(event); }

Stream make_stream() {
    cudaStream_t stream = nullptr;
    // Not blocking: waits for nothing that is queued on the default stream, nor is it waited for.
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    return Stream(stream);
}

Event make_event(unsigned flags) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | flags), "making an event");
    return Event(event);
}

Upload::Upload()
    : stream_(make_stream()),
      copied_{make_event(cudaEventBlockingSync), make_event(cudaEventBlockingSync)},
      most_stride_(most_stride()) {}

Upload::~Upload() { cudaStreamSynchronize(stream_.get()); }

void Upload::copy(void* device, const void* host, std::size_t nbytes) {
    check(cudaMemcpyAsync(device, host, nbytes, cudaMemcpyHostToDevice, stream_.get()), "queueing an upload");
}

void Upload::copy(const Grid& grid) {
    if (grid.count > 1 && std::max(grid.destination_stride, grid.source_stride) <= most_stride_) {
        const cudaError_t error =
            cudaMemcpy2DAsync(grid.destination, grid.destination_stride, grid.source, grid.source_stride, grid.nbytes,
                              grid.count, cudaMemcpyHostToDevice, stream_.get());
        if (error == cudaSuccess) return;
        cudaGetLastError();  // what is wrong with more than this one call, the copies below say again
    }
    for (std::size_t row = 0; row < grid.count; ++row) {
        copy(grid.destination + row * grid.destination_stride, grid.source + row * grid.source_stride, grid.nbytes);
    }
}

void Upload::record(int buffer) { check(cudaEventRecord(copied_[buffer].get(), stream_.get()), "recording an event"); }

void Upload::wait(int buffer) { check(cudaEventSynchronize(copied_[buffer].get()), "waiting for an upload"); }

}  // namespace mcore_ckpt
