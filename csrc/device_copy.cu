// GPU memory, events and copies to the GPU, with the CUDA runtime.
#include "device_copy.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

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

// Whether this process has used the GPU. To wait for one that it has not would initialize it, which takes half a GB of
// its memory.
bool is_in_use(int device) {
    using Function = int (*)(int, unsigned*, int*);
    static const auto state_of = reinterpret_cast<Function>(driver_function("cuDevicePrimaryCtxGetState"));
    unsigned flags = 0;
    int active = 0;
    if (state_of == nullptr) return true;
    constexpr int NOT_INITIALIZED = 3;  // CUDA_ERROR_NOT_INITIALIZED of cuda.h: no thread has used any GPU
    const int status = state_of(device, &flags, &active);
    return status != NOT_INITIALIZED && (status != 0 || active != 0);
}

// What the user can do about an error that concerns the installation.
const char* advice_for(cudaError_t error) {
    switch (error) {
        case cudaErrorInsufficientDriver:
            return ": the driver is older than the CUDA that mcore_ckpt was built with: update the driver, or install "
                   "mcore_ckpt again with an older nvcc on the PATH";
        case cudaErrorNoKernelImageForDevice:
        case cudaErrorInvalidPtx:
        case cudaErrorUnsupportedPtxVersion:
            return ": mcore_ckpt was built for other GPUs: install it again with a newer nvcc on the PATH";
        default:
            return "";
    }
}

// How long a job that has been cancelled, or that hangs, waits for the copies that are under way.
constexpr double SETTLES_S = 1;

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
    throw std::runtime_error(std::string("CUDA failed ") + doing + ": " + cudaGetErrorString(error) +
                             advice_for(error));
}

int device_of(const void* memory) {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, memory), "looking up a tensor's GPU");
    if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
        throw std::invalid_argument("a tensor to copy from or to a GPU is not in GPU memory");
    }
    return attributes.device;
}

void wait_for_device(int device, double seconds) {
    if (!is_in_use(device)) return;
    // cudaDeviceSynchronize has no deadline. If the GPU hangs, the thread is left behind until the process ends.
    auto done = std::make_shared<std::promise<cudaError_t>>();
    auto result = done->get_future();
    std::thread([device, done] {
        try {
            const DeviceCalls calls(device);
            done->set_value(cudaDeviceSynchronize());
        } catch (...) {
            done->set_exception(std::current_exception());
        }
    }).detach();
    if (result.wait_until(after_seconds(seconds)) != std::future_status::ready) throw DeviceStuck(device, seconds);
    check(result.get(), "waiting for the GPU");
}

std::uintptr_t side_stream(int device) {
    static std::mutex mutex;
    static auto& streams = *new std::map<int, CUstream_st*>;
    const std::lock_guard<std::mutex> lock(mutex);
    CUstream_st*& stream = streams[device];
    if (stream == nullptr) {
        const DeviceCalls calls(device);
        stream = make_stream().release();
    }
    return reinterpret_cast<std::uintptr_t>(stream);
}

int numa_node_of(int device) {
    char address[32] = {};
    if (cudaDeviceGetPCIBusId(address, sizeof(address), device) != cudaSuccess) {
        cudaGetLastError();
        return -1;
    }
    std::string name(address);
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char letter) { return std::tolower(letter); });
    std::ifstream file("/sys/bus/pci/devices/" + name + "/numa_node");
    int node = -1;
    return file >> node ? node : -1;
}

void pin_memory(void* memory, std::size_t nbytes, int device) {
    const DeviceCalls calls(device);
    check(cudaHostRegister(memory, nbytes, cudaHostRegisterPortable | cudaHostRegisterMapped), "pinning memory");
}

void unpin_memory(void* memory, int device) noexcept {
    try {
        const DeviceCalls calls(device);
        check(cudaHostUnregister(memory), "unpinning memory");
    } catch (const std::exception&) {
        // This fails only at the end of the process, when the driver is already gone. The system unpins the memory.
    }
}

DeviceCalls::DeviceCalls(int device) {
    int previous = 0;
    check(cudaGetDevice(&previous), "asking for the current GPU");
    if (previous != device || !thread_has_context()) {
        // A thread that has not used a GPU keeps this one: setting GPU 0 again would initialize it.
        if (thread_has_context()) previous_ = previous;
        check(cudaSetDevice(device), "choosing a GPU");
    }
    auto mode = cudaStreamCaptureModeRelaxed;
    check(cudaThreadExchangeStreamCaptureMode(&mode), "choosing the mode of stream captures");
    mode_ = mode;
}

DeviceCalls::~DeviceCalls() {
    auto mode = static_cast<cudaStreamCaptureMode>(mode_);
    cudaThreadExchangeStreamCaptureMode(&mode);
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

bool has_happened(CUevent_st* event, const char* doing) {
    const cudaError_t state = cudaEventQuery(event);
    if (state == cudaErrorNotReady) {
        cudaGetLastError();  // clears the state, which other code of this thread would take for an error
        return false;
    }
    check(state, doing);
    return true;
}

EventHandle make_event() {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    return EventHandle(event);
}

HostToDeviceCopies::HostToDeviceCopies(int device, double seconds)
    : device_(device),
      seconds_(seconds),
      stream_(make_stream()),
      copied_{make_event(), make_event()},
      most_stride_(most_stride()) {}

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
    const auto copied = [&] { return has_happened(copied_[buffer].get(), "copying to the GPU"); };
    stuck_ = !poll_until(after_seconds(seconds_), copied);
    if (stuck_) throw DeviceStuck(device_, seconds_);
}

bool HostToDeviceCopies::settle() noexcept {
    // Any other error than this one ends all copies.
    const auto over = [&] { return cudaStreamQuery(stream_.get()) != cudaErrorNotReady; };
    const bool settled = poll_until(after_seconds(stuck_ ? SETTLES_S : seconds_), over);
    cudaGetLastError();  // clears the state, which other code of this thread would take for an error
    if (!settled) static_cast<void>(stream_.release());
    return settled;
}

DeviceToHostCopies::DeviceToHostCopies() : stream_(make_stream()), copied_(make_event()) {}

void DeviceToHostCopies::copy(void* host, const void* device, std::size_t nbytes) {
    check(cudaMemcpyAsync(host, device, nbytes, cudaMemcpyDeviceToHost, stream_.get()), "queueing a copy");
}

void DeviceToHostCopies::wait(int device, double seconds, const std::function<bool()>& cancelled) {
    check(cudaEventRecord(copied_.get(), stream_.get()), "recording an event");
    const auto started = Clock::now();
    const auto copied = [&] { return has_happened(copied_.get(), "copying"); };
    poll_until(after_seconds(seconds), [&] { return copied() || cancelled(); });
    // If nothing is wrong with the GPU, the rest of a piece arrives in a moment.
    if (poll_until(after_seconds(cancelled() ? SETTLES_S : 0), copied)) return;
    throw DeviceStuck(device, std::chrono::duration<double>(Clock::now() - started).count());
}

void keep_for_ever(std::vector<std::shared_ptr<HostBuffer>> buffers) {
    static std::mutex mutex;
    static auto& kept = *new std::vector<std::shared_ptr<HostBuffer>>;
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto& buffer : buffers) kept.push_back(std::move(buffer));
}

DeviceEvent::DeviceEvent(int device) : device_(device) {
    const DeviceCalls calls(device_);
    handle_ = make_event();
}

DeviceEvent::~DeviceEvent() {
    // The last owner may be a thread that has not used a GPU, and destroying the event there would initialize GPU 0.
    try {
        const DeviceCalls calls(device_);
        handle_.reset();
    } catch (const std::exception&) {
        // The driver is gone, or this is a forked child. The process frees the event when it ends.
        static_cast<void>(handle_.release());
    }
}

void DeviceEvent::record(CUstream_st* stream) { check(cudaEventRecord(handle_.get(), stream), "recording an event"); }

bool DeviceEvent::happened() const {
    const DeviceCalls calls(device_);
    return has_happened(handle_.get(), "copying");
}

}  // namespace mcore_ckpt
