#include "device_copy.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace mcore_ckpt {
namespace {

void check(cudaError_t error, const char* doing) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // else the next CUDA call of this thread, someone else's, reports this error again
    throw std::runtime_error(std::string("CUDA failed ") + doing + ": " + cudaGetErrorString(error));
}

// Makes the GPU that owns `memory` the thread's current one. A writer thread starts out with GPU 0, whatever the rank's GPU
// is, and the default streams (0, 1, 2) are those of the current one: the copy would not wait for the rank's kernels.
class OnDeviceOf {
  public:
    explicit OnDeviceOf(const void* memory) {
        check(cudaGetDevice(&previous_), "asking for the current GPU");
        cudaPointerAttributes attributes{};
        check(cudaPointerGetAttributes(&attributes, memory), "looking up a tensor's GPU");
        if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
            throw std::runtime_error("a tensor to copy from or to a GPU is not in GPU memory");
        }
        check(cudaSetDevice(attributes.device), "choosing the tensor's GPU");
    }
    ~OnDeviceOf() { cudaSetDevice(previous_); }
    OnDeviceOf(const OnDeviceOf&) = delete;
    OnDeviceOf& operator=(const OnDeviceOf&) = delete;

  private:
    int previous_ = 0;
};

void copy_all(const std::vector<Copy>& copies, std::uintptr_t stream_number, cudaMemcpyKind kind) {
    const auto stream = reinterpret_cast<cudaStream_t>(stream_number);
    const Copy* first = nullptr;
    for (const Copy& copy : copies) {
        if (copy.nbytes != 0 && first == nullptr) first = &copy;
    }
    if (first == nullptr) return;
    const OnDeviceOf device(kind == cudaMemcpyDeviceToHost ? first->source : first->destination);
    cudaError_t queued = cudaSuccess;
    for (const Copy& copy : copies) {
        if (copy.nbytes == 0) continue;
        queued = cudaMemcpyAsync(copy.destination, copy.source, copy.nbytes, kind, stream);
        if (queued != cudaSuccess) break;
    }
    // Also after a failure: the caller frees or reuses the memory that earlier copies are still using.
    const cudaError_t finished = cudaStreamSynchronize(stream);
    check(queued, "queueing a copy");
    check(finished, "copying");
}

}  // namespace

const bool BUILT_WITH_CUDA = true;

void copy_to_host(const std::vector<Copy>& copies, std::uintptr_t stream) {
    copy_all(copies, stream, cudaMemcpyDeviceToHost);
}

void copy_to_device(const std::vector<Copy>& copies, std::uintptr_t stream) {
    copy_all(copies, stream, cudaMemcpyHostToDevice);
}

}  // namespace mcore_ckpt
