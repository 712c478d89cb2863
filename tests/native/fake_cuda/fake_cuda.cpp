// The CUDA runtime, the driver and the kernel, as far as the extension uses them, in host memory.
#include "fake_cuda.h"

#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "cuda_support.h"
#include "gather.h"

struct CUstream_st {
    int device;
    struct Step {
        std::function<void()> kernel;
        CUstream_st* awaited = nullptr;  // the step waits until this stream has done `until` steps
        std::uint64_t until = 0;
        const void* host = nullptr;  // memory that must stay pinned until the step is done
        std::size_t nbytes = 0;
    };
    std::deque<Step> steps;
    std::uint64_t queued = 0, done = 0;
};

struct CUevent_st {
    int device;
    CUstream_st* stream = nullptr;
    std::uint64_t until = 0;
    int asked = 0;  // how often, since it was recorded
};

namespace {

// Somebody who asks so often for an event waits for it.
constexpr int ASKED_BY_WAITING = 4;

std::recursive_mutex everything;
using Lock = std::lock_guard<std::recursive_mutex>;

struct Memory {
    int device;  // -1: pinned host memory
    std::size_t nbytes;
    int pinned_on;  // the GPU that was current when host memory was pinned
};
std::map<std::uintptr_t, Memory> memories;
std::map<CUstream_st*, bool> streams;
std::set<CUevent_st*> events;
fake_cuda::Calls counted{};
std::string failing;
bool is_stuck = false;
int calls_before_failing = 0;
thread_local int current_device = 0;

[[noreturn]] void misuse(const char* what) {
    std::fprintf(stderr, "fake CUDA: %s\n", what);
    std::abort();
}

void require(bool holds, const char* what) {
    if (!holds) misuse(what);
}

bool fails(const char* name) { return failing == name && calls_before_failing-- <= 0; }

using Found = std::map<std::uintptr_t, Memory>::const_iterator;

Found find(std::uintptr_t address) {
    auto next = memories.upper_bound(address);
    if (next == memories.begin()) return memories.end();
    --next;
    return address < next->first + next->second.nbytes ? next : memories.end();
}

// The memory that a range begins in, or nullptr unless all of the range is in memory of the same GPU or the host.
const Memory* find(const void* memory, std::size_t nbytes = 1) {
    const auto begin = reinterpret_cast<std::uintptr_t>(memory);
    const Found first = find(begin);
    Found next = first;
    while (next != memories.end() && next->second.device == first->second.device) {
        const std::uintptr_t end = next->first + next->second.nbytes;
        if (begin + nbytes <= end) return &first->second;
        next = find(end);
    }
    return nullptr;
}

CUstream_st* default_stream() {
    static auto& made = *new std::map<int, CUstream_st*>;  // never freed, as the default streams of a process
    CUstream_st*& stream = made[current_device];
    if (stream == nullptr) streams[stream = new CUstream_st{current_device, {}}] = true;
    return stream;
}

CUstream_st* resolve(cudaStream_t stream) {
    CUstream_st* known = stream == nullptr ? default_stream() : stream;
    require(streams.count(known) == 1, "a stream that does not exist");
    return known;
}

void run_until(CUstream_st* stream, std::uint64_t until) {
    while (stream->done < until && !is_stuck) {
        CUstream_st::Step step = std::move(stream->steps.front());
        stream->steps.pop_front();
        if (step.awaited != nullptr && streams.count(step.awaited) == 1) run_until(step.awaited, step.until);
        if (step.kernel) step.kernel();
        ++stream->done;
    }
}

void push(CUstream_st* stream, CUstream_st::Step step) {
    stream->steps.push_back(std::move(step));
    ++stream->queued;
}

void queue_copy(CUstream_st* stream, void* destination, const void* source, std::size_t nbytes) {
    const Memory *to = find(destination, nbytes), *from = find(source, nbytes);
    require(to != nullptr && from != nullptr, "a copy from or to memory that is neither pinned nor a GPU's");
    require((to->device < 0) != (from->device < 0), "a copy that is not between host and GPU");
    const void* host = to->device < 0 ? destination : source;
    push(stream, {[=] { std::memcpy(destination, source, nbytes); }, nullptr, 0, host, nbytes});
}

}  // namespace

namespace fake_cuda {

void* device_malloc(int device, std::size_t nbytes) {
    const Lock lock(everything);
    void* memory = std::malloc(nbytes);
    memories[reinterpret_cast<std::uintptr_t>(memory)] = {device, nbytes, 0};
    return memory;
}

void device_free(void* memory) {
    const Lock lock(everything);
    memories.erase(reinterpret_cast<std::uintptr_t>(memory));
    std::free(memory);
}

void split(void* memory, std::size_t at, int device) {
    const Lock lock(everything);
    const auto begin = reinterpret_cast<std::uintptr_t>(memory);
    Memory& whole = memories.at(begin);
    memories[begin + at] = {device, whole.nbytes - at, 0};
    whole.nbytes = at;
}

void join(void* memory, std::size_t at) {
    const Lock lock(everything);
    const auto begin = reinterpret_cast<std::uintptr_t>(memory);
    memories.at(begin).nbytes += memories.at(begin + at).nbytes;
    memories.erase(begin + at);
}

void queue(cudaStream_t stream, std::function<void()> kernel) {
    const Lock lock(everything);
    push(resolve(stream), {std::move(kernel), nullptr, 0, nullptr, 0});
}

void fail(const char* name, int calls_before) {
    const Lock lock(everything);
    failing = name == nullptr ? "" : name;
    calls_before_failing = calls_before;
}

void stick(bool on) {
    const Lock lock(everything);
    is_stuck = on;
}

int handles() {
    const Lock lock(everything);
    return static_cast<int>(streams.size() + events.size());
}

Calls calls() {
    const Lock lock(everything);
    return counted;
}

}  // namespace fake_cuda

extern "C" {

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "as the test wants"; }

cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    require(attribute == cudaDevAttrMaxPitch, "a question that this GPU cannot answer");
    *value = fake_cuda::MAX_PITCH;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    const Lock lock(everything);
    for (const auto& [stream, exists] : streams) {
        if (stream->device == current_device) run_until(stream, stream->queued);
    }
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    const Lock lock(everything);
    ++counted.looks;
    const Memory* memory = find(pointer);
    *attributes = {};
    attributes->type = memory == nullptr    ? cudaMemoryTypeUnregistered
                       : memory->device < 0 ? cudaMemoryTypeHost
                                            : cudaMemoryTypeDevice;
    attributes->device = memory == nullptr || memory->device < 0 ? 0 : memory->device;
    attributes->devicePointer = memory == nullptr ? nullptr : const_cast<void*>(pointer);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void* memory, size_t nbytes, unsigned) {
    const Lock lock(everything);
    if (fails("cudaHostRegister")) return cudaErrorMemoryAllocation;
    ++counted.pins;
    memories[reinterpret_cast<std::uintptr_t>(memory)] = {-1, nbytes, current_device};
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* memory) {
    const Lock lock(everything);
    const auto found = memories.find(reinterpret_cast<std::uintptr_t>(memory));
    require(found != memories.end() && found->second.device < 0, "memory to unpin was never pinned");
    require(found->second.pinned_on == current_device, "memory is unpinned on another GPU");
    const auto start = found->first, stop = start + found->second.nbytes;
    for (const auto& [stream, exists] : streams) {
        for (const auto& step : stream->steps) {
            const auto host = reinterpret_cast<std::uintptr_t>(step.host);
            require(host + step.nbytes <= start || host >= stop, "memory is unpinned while a copy needs it");
        }
    }
    memories.erase(found);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    const Lock lock(everything);
    require(flags == cudaStreamNonBlocking, "a stream that waits for the default stream");
    if (fails("cudaStreamCreateWithFlags")) return cudaErrorMemoryAllocation;
    streams[*stream = new CUstream_st{current_device, {}}] = true;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const Lock lock(everything);
    require(resolve(stream)->steps.empty(), "a stream is destroyed that has work left");
    for (CUevent_st* event : events) {
        if (event->stream == stream) event->stream = nullptr;  // all that it was recorded behind is done
    }
    streams.erase(stream);
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const Lock lock(everything);
    run_until(resolve(stream), resolve(stream)->queued);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    const Lock lock(everything);
    run_until(resolve(stream), resolve(stream)->queued);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    thread_local cudaStreamCaptureMode own = cudaStreamCaptureModeGlobal;
    std::swap(*mode, own);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char*, int, int) { return cudaErrorInvalidDevice; }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    const Lock lock(everything);
    require(events.count(event) == 1, "a stream waits for an event that does not exist");
    push(resolve(stream), {nullptr, event->stream, event->until, nullptr, 0});
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    const Lock lock(everything);
    require((flags & cudaEventDisableTiming) != 0, "an event that takes the time");
    if (fails("cudaEventCreateWithFlags")) return cudaErrorMemoryAllocation;
    events.insert(*event = new CUevent_st{current_device});
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    const Lock lock(everything);
    require(events.erase(event) == 1, "an event that does not exist is destroyed");
    require(event->device == current_device, "an event is destroyed on another GPU");
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const Lock lock(everything);
    CUstream_st* recorded = resolve(stream);
    require(event->device == recorded->device, "an event and a stream of different GPUs");
    if (fails("cudaEventRecord")) return cudaErrorUnknown;
    event->stream = recorded;
    event->until = recorded->queued;
    event->asked = 0;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const Lock lock(everything);
    require(events.count(event) == 1, "somebody waits for an event that does not exist");
    if (event->stream != nullptr) run_until(event->stream, event->until);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    const Lock lock(everything);
    require(events.count(event) == 1, "somebody asks for an event that does not exist");
    if (fails("cudaEventQuery")) return cudaErrorUnknown;
    if (++event->asked >= ASKED_BY_WAITING && event->stream != nullptr) run_until(event->stream, event->until);
    return event->stream == nullptr || event->stream->done >= event->until ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
    const Lock lock(everything);
    if (fails("cudaMemcpyAsync")) return cudaErrorUnknown;
    ++counted.copies;
    queue_copy(resolve(stream), destination, source, nbytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* destination, size_t destination_pitch, const void* source, size_t source_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
    const Lock lock(everything);
    require(width <= destination_pitch && width <= source_pitch, "rows that overlap");
    require(destination_pitch <= fake_cuda::MAX_PITCH && source_pitch <= fake_cuda::MAX_PITCH, "too large a pitch");
    if (fails("cudaMemcpy2DAsync")) return cudaErrorInvalidPitchValue;
    ++counted.copies_of_rows;
    for (size_t row = 0; row < height; ++row) {
        queue_copy(resolve(stream), static_cast<char*>(destination) + row * destination_pitch,
                   static_cast<const char*>(source) + row * source_pitch, width);
    }
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void* const* destinations, const void* const* sources, const size_t* sizes,
                                 size_t count, cudaMemcpyAttributes* attributes, size_t* first, size_t kinds,
                                 cudaStream_t stream) {
#elif CUDART_VERSION >= 12080
cudaError_t cudaMemcpyBatchAsync(void** destinations, void** sources, size_t* sizes, size_t count,
                                 cudaMemcpyAttributes* attributes, size_t* first, size_t kinds, size_t*,
                                 cudaStream_t stream) {
#endif
#if CUDART_VERSION >= 12080
    const Lock lock(everything);
    if (fails("cudaMemcpyBatchAsync")) return cudaErrorUnknown;
    require(count != 0 && kinds == 1 && *first == 0, "attributes that do not fit the batch");
    require(attributes->srcAccessOrder == cudaMemcpySrcAccessOrderStream, "a batch that does not keep to its stream");
    require(stream != nullptr, "a batch on the default stream");
    ++counted.batches;
    for (size_t i = 0; i < count; ++i) queue_copy(resolve(stream), destinations[i], sources[i], sizes[i]);
    return cudaSuccess;
}
#endif

}  // extern "C"

namespace {

// Replaces the driver's function of this name.
CUresult get_pointer_attributes(unsigned count, CUpointer_attribute* attributes, void** values, CUdeviceptr pointer) {
    const Lock lock(everything);
    if (fails("cuPointerGetAttributes")) return CUDA_ERROR_NOT_SUPPORTED;
    const Found found = find(pointer);
    for (unsigned i = 0; i < count; ++i) {
        if (attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) {
            *static_cast<CUdeviceptr*>(values[i]) = found == memories.end() ? 0 : found->first;
        } else {
            require(attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE, "a question that this driver cannot answer");
            *static_cast<std::size_t*>(values[i]) = found == memories.end() ? 0 : found->second.nbytes;
        }
    }
    return CUDA_SUCCESS;
}

}  // namespace

// Replaces cuda_driver.cu.
void* mcore_ckpt::driver_function(const char* name) {
    if (std::string(name) == "cuPointerGetAttributes") return reinterpret_cast<void*>(&get_pointer_attributes);
    return nullptr;
}

// Replaces gather.cu.
cudaError_t mcore_ckpt::launch_gather(const GatherTable& table, cudaStream_t stream) {
    const Lock lock(everything);
    if (fails("launch_gather")) return cudaErrorUnknown;
    require(current_device == resolve(stream)->device, "a kernel is started on another GPU's stream");
    ++counted.gathers;
    for (std::size_t i = 0; i < table.count; ++i) {
        queue_copy(resolve(stream), table.rows[i].destination, table.rows[i].source, table.rows[i].nbytes);
    }
    return cudaSuccess;
}
