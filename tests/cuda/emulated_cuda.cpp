// A CUDA in host memory that is really asynchronous: the CUDA runtime and driver as far as csrc/ uses them.
//
// Each stream is a thread that does its work in order, each piece after a random delay (EMULATED_DELAY_US). The default
// stream is the training's thread itself: what it does is in stream order there, and a default stream that waits for an
// event blocks that thread. So a training on the CPU is the training stream. All host memory that is not pinned counts
// as memory of the process's GPU (emulated_set_device).
//
// It reports what a GPU would do: calls that CUDA forbids while a thread captures a graph in Global mode, contexts made
// by threads that chose no GPU, the use of destroyed streams, copies that are not between pinned memory and the GPU,
// memory that is unpinned while a copy needs it, copies that never end, errors that stay. It cannot show bandwidth,
// hardware queues, locks in the driver, or torch's own allocator.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_keywords.h"
#include "cuda_support.h"

thread_local emulated_cuda::Index emulated_thread, emulated_block, emulated_grid;

namespace {

using Lock = std::unique_lock<std::mutex>;

[[noreturn]] void misuse(const char* what) {
    std::fprintf(stderr, "emulated CUDA: %s\n", what);
    std::abort();
}

unsigned longest_delay() {
    static const char* text = std::getenv("EMULATED_DELAY_US");
    return text != nullptr ? static_cast<unsigned>(std::atoi(text)) : 2000;
}

std::atomic<bool> stuck{false};        // streams do nothing more, as behind a collective that never ends
std::atomic<int> copies_to_fault{-1};  // after so many copies the GPU has a fault
std::atomic<bool> faulty{false};       // all calls fail, as after an illegal address

// How much of its work a stream has done. It outlives the stream.
struct Progress {
    std::mutex mutex;
    std::condition_variable changed;
    std::uint64_t done = 0;

    void wait(std::uint64_t until) {
        Lock lock(mutex);
        changed.wait(lock, [&] { return done >= until; });
    }
    bool reached(std::uint64_t until) {
        const Lock lock(mutex);
        return done >= until;
    }
};

}  // namespace

struct CUstream_st {
    CUstream_st() : thread_([this] { run(); }) {}
    ~CUstream_st() {
        {
            const Lock lock(mutex_);
            ended_ = true;
            changed_.notify_all();
        }
        thread_.join();
    }

    void push(std::function<void()> work) {
        const Lock lock(mutex_);
        work_.push_back(std::move(work));
        ++queued_;
        changed_.notify_all();
    }

    std::uint64_t queued() {
        const Lock lock(mutex_);
        return queued_;
    }

    const std::shared_ptr<Progress> progress = std::make_shared<Progress>();

  private:
    void run() {
        std::mt19937 random(reinterpret_cast<std::uintptr_t>(this) ^ std::random_device{}());
        for (;;) {
            std::function<void()> work;
            {
                Lock lock(mutex_);
                changed_.wait(lock, [&] { return ended_ || !work_.empty(); });
                if (work_.empty()) return;
                work = std::move(work_.front());
                work_.pop_front();
            }
            if (const unsigned most = longest_delay()) {
                std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
            }
            while (stuck) std::this_thread::sleep_for(std::chrono::milliseconds(10));
            work();
            const Lock lock(progress->mutex);
            ++progress->done;
            progress->changed.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;
    std::uint64_t queued_ = 0;
    bool ended_ = false;
    std::thread thread_;
};

struct CUevent_st {
    std::mutex mutex;
    std::shared_ptr<Progress> progress;  // nullptr: has happened
    std::uint64_t until = 0;

    std::pair<std::shared_ptr<Progress>, std::uint64_t> point() {
        const Lock lock(mutex);
        return {progress, until};
    }
};

namespace {

// Never freed: threads of the process may use them to its very end.
auto& tables_mutex = *new std::mutex;
auto& streams = *new std::set<CUstream_st*>;
auto& dead_streams = *new std::set<CUstream_st*>;
auto& pinned = *new std::map<std::uintptr_t, std::size_t>;
auto& in_flight = *new std::multimap<std::uintptr_t, std::size_t>;  // host memory that copies still use

auto& log_mutex = *new std::mutex;
auto& contexts = *new std::map<int, std::string>;      // by GPU: the call that made the context
auto& calls_seen = *new std::map<std::string, long>;   // "thread call" -> how often
auto& unsafe_seen = *new std::map<std::string, long>;  // calls that have broken a capture

thread_local int current_device = 0;
thread_local bool has_context = false;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
std::atomic<int> process_device{0};
std::atomic<bool> capturing{false}, invalidated{false};
std::thread::id capturing_thread;
std::thread::id training_thread = std::this_thread::get_id();
std::atomic<long> held_us{0};

bool is_training_thread() { return std::this_thread::get_id() == training_thread; }

void make_context(const char* by) {
    has_context = true;
    const Lock lock(log_mutex);
    contexts.emplace(current_device, by);
}

void count(const char* call) {
    const Lock lock(log_mutex);
    ++calls_seen[std::string(is_training_thread() ? "training " : "ours ") + call];
}

// CUDA's rule (cudaThreadExchangeStreamCaptureMode): while a thread captures in Global mode, calls that may be unsafe
// fail in every thread whose mode is not Relaxed, and make the capture invalid. `whole_device`: the call concerns all
// streams of the device, so that no mode allows it.
bool breaks_capture(const char* call, bool whole_device = false) {
    if (!capturing || (capture_mode == cudaStreamCaptureModeRelaxed && !whole_device)) return false;
    invalidated = true;
    const Lock lock(log_mutex);
    ++unsafe_seen[call];
    return true;
}

// What a call that may be unsafe during a capture returns before it does anything.
cudaError_t unsafe_call(const char* call, bool whole_device = false) {
    count(call);
    if (!has_context) make_context(call);
    if (breaks_capture(call, whole_device)) return cudaErrorStreamCaptureUnsupported;
    return faulty ? cudaErrorIllegalAddress : cudaSuccess;
}

cudaError_t safe_call(const char* call) {
    count(call);
    if (!has_context) make_context(call);
    return faulty ? cudaErrorIllegalAddress : cudaSuccess;
}

CUstream_st* known(cudaStream_t stream) {
    const Lock lock(tables_mutex);
    if (streams.count(stream) == 0) {
        misuse(dead_streams.count(stream) != 0 ? "use of a stream that was destroyed" : "use of an unknown stream");
    }
    return stream;
}

// Whether memory is in one piece of pinned memory. Needs the mutex.
bool is_in_piece(std::uintptr_t begin, std::size_t nbytes) {
    auto next = pinned.upper_bound(begin);
    if (next == pinned.begin()) return false;
    --next;
    return begin + nbytes <= next->first + next->second;
}

bool touches_pinned(std::uintptr_t begin, std::size_t nbytes) {
    const auto next = pinned.lower_bound(begin + nbytes);
    return next != pinned.begin() && std::prev(next)->first + std::prev(next)->second > begin;
}

// What was queued on the streams, in order: k for a kernel, c for a copy.
std::string queued;

void note_queued(char what) {
    const Lock lock(log_mutex);
    queued += what;
}

// Queues a copy between one piece of pinned memory and the GPU.
void queue_copy(CUstream_st* stream, void* destination, const void* source, std::size_t nbytes) {
    note_queued('c');
    const auto to = reinterpret_cast<std::uintptr_t>(destination), from = reinterpret_cast<std::uintptr_t>(source);
    std::uintptr_t host = 0;
    {
        const Lock lock(tables_mutex);
        const bool to_host = touches_pinned(to, nbytes), from_host = touches_pinned(from, nbytes);
        if (to_host == from_host) misuse("a copy that is not between pinned memory and the GPU");
        host = to_host ? to : from;
        if (!is_in_piece(host, nbytes)) misuse("a copy across the edge of a piece of pinned memory");
        in_flight.emplace(host, nbytes);
    }
    stream->push([=] {
        if (copies_to_fault >= 0 && copies_to_fault-- == 0) faulty = true;
        if (!faulty) std::memcpy(destination, source, nbytes);
        const Lock lock(tables_mutex);
        in_flight.erase(in_flight.find(host));
    });
}

}  // namespace

cudaError_t emulated_cuda::launch(cudaStream_t stream, std::function<void()> kernel) {
    if (const auto error = safe_call("kernel")) return error;
    note_queued('k');
    known(stream)->push(std::move(kernel));
    return cudaSuccess;
}

// What the tests ask and set.
#define EXPORTED extern "C" __attribute__((visibility("default")))

// The calling thread is the training's, and this is its GPU.
EXPORTED void emulated_set_device(int device) {
    training_thread = std::this_thread::get_id();
    current_device = device;
    process_device = device;
    make_context("the training");
}
// The calling thread begins or ends to capture a graph in Global mode.
EXPORTED void emulated_capture(int on) {
    invalidated = false;
    capturing_thread = std::this_thread::get_id();
    capturing = on != 0;
}
EXPORTED int emulated_invalidated() { return invalidated; }
EXPORTED void emulated_stick(int on) { stuck = on != 0; }
EXPORTED void emulated_fault_after(int copies) { copies_to_fault = copies; }
EXPORTED long emulated_held_us() { return held_us; }
EXPORTED int emulated_is_pinned(void* memory) {
    const Lock lock(tables_mutex);
    return is_in_piece(reinterpret_cast<std::uintptr_t>(memory), 1);
}
EXPORTED int emulated_stream_is_dead(void* stream) {
    const Lock lock(tables_mutex);
    return streams.count(static_cast<CUstream_st*>(stream)) == 0;
}
EXPORTED std::size_t emulated_pinned_bytes() {
    const Lock lock(tables_mutex);
    std::size_t sum = 0;
    for (const auto& [begin, nbytes] : pinned) sum += nbytes;
    return sum;
}
// Writes a line for each thing that was seen: "call THREAD NAME COUNT", "context GPU CALL", "unsafe NAME COUNT".
EXPORTED std::size_t emulated_report(char* text, std::size_t size) {
    const Lock lock(log_mutex);
    std::string all;
    for (const auto& [call, times] : calls_seen) all += "call " + call + " " + std::to_string(times) + "\n";
    for (const auto& [device, by] : contexts) all += "context " + std::to_string(device) + " " + by + "\n";
    for (const auto& [call, times] : unsafe_seen) all += "unsafe " + call + " " + std::to_string(times) + "\n";
    std::snprintf(text, size, "%s", all.c_str());
    return all.size();
}

// Writes what has been queued since the last call.
EXPORTED std::size_t emulated_queued(char* text, std::size_t size) {
    const Lock lock(log_mutex);
    std::snprintf(text, size, "%s", queued.c_str());
    return std::exchange(queued, std::string()).size();
}

static void wait_for_all_streams() {
    std::vector<std::pair<std::shared_ptr<Progress>, std::uint64_t>> all;
    {
        const Lock lock(tables_mutex);
        for (auto* stream : streams) all.emplace_back(stream->progress, stream->queued());
    }
    for (auto& [progress, until] : all) progress->wait(until);
}

extern "C" {

cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaErrorStreamCaptureUnsupported:
            return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureIsolation:
            return "dependency created on uncaptured work in another stream";
        case cudaErrorIllegalAddress:
            return "an illegal memory access was encountered";
        default:
            return "emulated error";
    }
}

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
    make_context("cudaSetDevice");
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = 0x7fffffff;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* address, int size, int device) {
    std::snprintf(address, size, "0000:00:%02X.0", device);
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    if (!has_context) misuse("a thread changes its capture mode before it has chosen a GPU");
    std::swap(*mode, capture_mode);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    if (const auto error = unsafe_call("cudaDeviceSynchronize", true)) return error;
    wait_for_all_streams();
    return faulty ? cudaErrorIllegalAddress : cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    if (const auto error = safe_call("cudaPointerGetAttributes")) return error;
    *attributes = {};
    attributes->type = emulated_is_pinned(const_cast<void*>(pointer)) != 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
    attributes->device = process_device;
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void* memory, size_t nbytes, unsigned) {
    if (const auto error = unsafe_call("cudaHostRegister")) return error;
    const Lock lock(tables_mutex);
    const auto begin = reinterpret_cast<std::uintptr_t>(memory);
    if (touches_pinned(begin, nbytes)) misuse("memory is pinned twice");
    pinned[begin] = nbytes;
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* memory) {
    if (const auto error = unsafe_call("cudaHostUnregister")) return error;
    Lock lock(tables_mutex);
    const auto found = pinned.find(reinterpret_cast<std::uintptr_t>(memory));
    if (found == pinned.end()) misuse("memory that was not pinned is unpinned");
    for (const auto& [begin, nbytes] : in_flight) {
        if (begin < found->first + found->second && begin + nbytes > found->first) {
            misuse("memory is unpinned while a copy needs it");
        }
    }
    lock.unlock();
    wait_for_all_streams();  // as the driver does, whatever they do (seen on an H200)
    lock.lock();
    pinned.erase(found);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    if (const auto error = unsafe_call("cudaStreamCreateWithFlags")) return error;
    auto* made = new CUstream_st;
    const Lock lock(tables_mutex);
    streams.insert(*stream = made);
    dead_streams.erase(made);
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    known(stream);
    {
        const Lock lock(tables_mutex);
        streams.erase(stream);
        dead_streams.insert(stream);
    }
    if (stuck) {  // CUDA frees it when its work is done
        return cudaSuccess;
    }
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (const auto error = unsafe_call("cudaStreamSynchronize")) return error;
    if (stream != nullptr) known(stream)->progress->wait(stream->queued());
    return faulty ? cudaErrorIllegalAddress : cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (const auto error = unsafe_call("cudaStreamQuery")) return error;
    return known(stream)->progress->reached(stream->queued()) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    const bool is_captured = capturing && stream == nullptr;
    *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    if (const auto error = safe_call("cudaEventCreateWithFlags")) return error;
    *event = new CUevent_st;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (!has_context) make_context("cudaEventDestroy");
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (const auto error = safe_call("cudaEventRecord")) return error;
    std::shared_ptr<Progress> progress;
    std::uint64_t until = 0;
    if (stream != nullptr) progress = known(stream)->progress, until = stream->queued();
    const Lock lock(event->mutex);
    event->progress = progress;
    event->until = until;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (const auto error = safe_call("cudaStreamWaitEvent")) return error;
    const auto [progress, until] = event->point();
    if (stream != nullptr) {
        known(stream)->push([progress = progress, until = until] {
            if (progress) progress->wait(until);
        });
        return cudaSuccess;
    }
    if (capturing && std::this_thread::get_id() == capturing_thread) {
        invalidated = true;
        const Lock lock(log_mutex);
        ++unsafe_seen["cudaStreamWaitEvent"];
        return cudaErrorStreamCaptureIsolation;
    }
    const auto begin = std::chrono::steady_clock::now();
    if (progress) progress->wait(until);
    const auto held = std::chrono::steady_clock::now() - begin;
    held_us += std::chrono::duration_cast<std::chrono::microseconds>(held).count();
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (const auto error = unsafe_call("cudaEventSynchronize")) return error;
    const auto [progress, until] = event->point();
    if (progress) progress->wait(until);
    return faulty ? cudaErrorIllegalAddress : cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (const auto error = unsafe_call("cudaEventQuery")) return error;
    const auto [progress, until] = event->point();
    return !progress || progress->reached(until) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
    if (const auto error = safe_call("cudaMemcpyAsync")) return error;
    queue_copy(known(stream), destination, source, nbytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* destination, size_t destination_pitch, const void* source, size_t source_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
    if (const auto error = safe_call("cudaMemcpy2DAsync")) return error;
    for (size_t row = 0; row < height; ++row) {
        queue_copy(known(stream), static_cast<char*>(destination) + row * destination_pitch,
                   static_cast<const char*>(source) + row * source_pitch, width);
    }
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void* const* destinations, const void* const* sources, const size_t* sizes,
                                 size_t count, cudaMemcpyAttributes*, size_t*, size_t, cudaStream_t stream) {
#elif CUDART_VERSION >= 12080
cudaError_t cudaMemcpyBatchAsync(void** destinations, void** sources, size_t* sizes, size_t count,
                                 cudaMemcpyAttributes*, size_t*, size_t, size_t*, cudaStream_t stream) {
#endif
#if CUDART_VERSION >= 12080
    if (const auto error = safe_call("cudaMemcpyBatchAsync")) return error;
    for (size_t i = 0; i < count; ++i) queue_copy(known(stream), destinations[i], sources[i], sizes[i]);
    return cudaSuccess;
}
#endif

}  // extern "C"

namespace {

// Segments as those of torch's allocator.
CUresult pointer_attributes(unsigned number, CUpointer_attribute* which, void** values, CUdeviceptr pointer) {
    constexpr std::uintptr_t SEGMENT_BYTES = std::uintptr_t{2} << 20;
    count("cuPointerGetAttributes");
    for (unsigned i = 0; i < number; ++i) {
        if (which[i] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) {
            *static_cast<CUdeviceptr*>(values[i]) = pointer / SEGMENT_BYTES * SEGMENT_BYTES;
        } else {
            *static_cast<std::size_t*>(values[i]) = SEGMENT_BYTES;
        }
    }
    return CUDA_SUCCESS;
}

int current_context(void** context) {
    static int any;
    *context = has_context ? &any : nullptr;
    return 0;
}

int context_state(int device, unsigned*, int* active) {
    const Lock lock(log_mutex);
    *active = contexts.count(device) != 0 ? 1 : 0;
    return 0;
}

}  // namespace

// Replaces cuda_driver.cu.
void* mcore_ckpt::driver_function(const char* name) {
    if (std::strcmp(name, "cuPointerGetAttributes") == 0) return reinterpret_cast<void*>(&pointer_attributes);
    if (std::strcmp(name, "cuCtxGetCurrent") == 0) return reinterpret_cast<void*>(&current_context);
    if (std::strcmp(name, "cuDevicePrimaryCtxGetState") == 0) return reinterpret_cast<void*>(&context_state);
    return nullptr;
}
