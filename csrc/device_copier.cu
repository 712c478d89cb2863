#include <cuda_runtime_api.h>

#include <stdexcept>

#include "cuda_support.h"
#include "device_copy.h"
#include "gather.h"

namespace mcore_ckpt {
namespace {

// Below this the copy engine spends more time on starting a copy than on its bytes.
constexpr std::size_t GATHER_BELOW_BYTES = std::size_t{64} << 10;

void copy_each(const std::vector<Copy>& copies, cudaStream_t stream) {
    for (const Copy& copy : copies) {
        check(cudaMemcpyAsync(copy.destination, copy.source, copy.nbytes, cudaMemcpyDeviceToHost, stream),
              "queueing a copy");
    }
}

#if CUDART_VERSION >= 12080

bool driver_has_batches() {
    static const bool has = [] {
        int version = 0;
        check(cudaDriverGetVersion(&version), "asking for the driver's version");
        return version >= 12080;
    }();
    return has;
}

void copy_in_one_call(const std::vector<Copy>& copies, cudaStream_t stream) {
    std::vector<void*> destinations, sources;
    std::vector<std::size_t> sizes;
    for (const Copy& copy : copies) {
        destinations.push_back(copy.destination);
        sources.push_back(const_cast<void*>(copy.source));
        sizes.push_back(copy.nbytes);
    }
    cudaMemcpyAttributes attributes{};
    // Neither at once nor at any time: behind what the stream waits for.
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;
#if CUDART_VERSION >= 13000
    check(cudaMemcpyBatchAsync(destinations.data(), sources.data(), sizes.data(), sizes.size(), &attributes, &first, 1,
                               stream),
          "queueing copies");
#else
    std::size_t failed = 0;
    check(cudaMemcpyBatchAsync(destinations.data(), sources.data(), sizes.data(), sizes.size(), &attributes, &first, 1,
                               &failed, stream),
          "queueing copies");
#endif
}

void copy_large(const std::vector<Copy>& copies, cudaStream_t stream) {
    if (driver_has_batches()) {
        copy_in_one_call(copies, stream);
    } else {
        copy_each(copies, stream);
    }
}

#else

void copy_large(const std::vector<Copy>& copies, cudaStream_t stream) { copy_each(copies, stream); }

#endif

// Copies that are queued together.
class Group {
  public:
    Group(cudaStream_t stream, std::ptrdiff_t mapping) : stream_(stream), mapping_(mapping) {}

    void add(const Copy& copy) {
        if (copy.nbytes >= GATHER_BELOW_BYTES) {
            large_.push_back(copy);
        } else if (copy.nbytes != 0) {
            small_.rows[small_.count++] = {static_cast<char*>(copy.destination) + mapping_, copy.source, copy.nbytes};
            if (small_.count == GatherTable::ROWS) gather();
        }
    }

    void queue() {
        if (small_.count != 0) gather();
        if (!large_.empty()) copy_large(large_, stream_);
        large_.clear();
    }

  private:
    void gather() {
        check(launch_gather(small_, stream_), "starting a kernel that copies");
        small_.count = 0;
    }

    const cudaStream_t stream_;
    const std::ptrdiff_t mapping_;
    GatherTable small_;
    std::vector<Copy> large_;
};

// How far from its host address the GPU sees pinned memory: 0 on all but a few machines.
std::ptrdiff_t mapping_at(const char* host) {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, host), "looking up host memory");
    // Into other memory a copy would block the host, and a kernel would kill the whole process's use of the GPU.
    if (attributes.type != cudaMemoryTypeHost || attributes.devicePointer == nullptr) {
        throw std::invalid_argument("memory to copy GPU tensors to is not pinned");
    }
    return static_cast<char*>(attributes.devicePointer) - host;
}

// Only both ends are looked at: a look costs as much as queueing a copy.
std::ptrdiff_t mapping_of(const Copy& first, const Copy& last) {
    const std::ptrdiff_t mapping = mapping_at(static_cast<char*>(first.destination));
    if (mapping_at(static_cast<char*>(last.destination) + last.nbytes - 1) != mapping) {
        throw std::invalid_argument("memory to copy GPU tensors to is not one pinned buffer");
    }
    return mapping;
}

}  // namespace

DeviceCopier::DeviceCopier(int device) : device_(device) {
    const CurrentDevice current(device_);
    stream_ = make_stream();
    after_ = make_event(0);
}

DeviceCopier::~DeviceCopier() {
    try {
        close();
    } catch (const std::exception&) {
        // Whoever waited for the copies has been told.
    }
}

void DeviceCopier::require_open() const {
    if (!stream_) throw std::invalid_argument("the copier is closed");
}

DeviceEvent& DeviceCopier::event(std::size_t number) {
    while (events_.size() <= number) events_.push_back({device_, make_event(cudaEventBlockingSync)});
    return events_[number];
}

std::vector<DeviceCopier::Done> DeviceCopier::start(const std::vector<Copy>& copies, std::uintptr_t after,
                                                    std::size_t group_bytes) {
    require_open();
    const CurrentDevice current(device_);
    const Copy *first = nullptr, *last = nullptr;
    for (const Copy& copy : copies) {
        if (copy.nbytes == 0) continue;
        if (first == nullptr) first = &copy;
        last = &copy;
    }
    if (first == nullptr) return {};
    if (device_of(first->source) != device_) throw std::invalid_argument("a tensor to copy is on another GPU");
    const std::ptrdiff_t mapping = mapping_of(*first, *last);

    check(cudaEventRecord(after_.get(), reinterpret_cast<cudaStream_t>(after)), "recording an event");
    check(cudaStreamWaitEvent(stream_.get(), after_.get(), 0), "making a stream wait");
    try {
        return queue(copies, group_bytes, mapping);
    } catch (...) {
        // The caller takes it that nothing has been queued.
        cudaStreamSynchronize(stream_.get());
        throw;
    }
}

std::vector<DeviceCopier::Done> DeviceCopier::queue(const std::vector<Copy>& copies, std::size_t group_bytes,
                                                    std::ptrdiff_t mapping) {
    std::vector<Done> groups;
    Group group(stream_.get(), mapping);
    std::size_t nbytes = 0;
    for (std::size_t i = 0; i < copies.size(); ++i) {
        group.add(copies[i]);
        nbytes += copies[i].nbytes;
        if (nbytes < group_bytes && i + 1 < copies.size()) continue;
        group.queue();
        DeviceEvent& queued = event(groups.size());
        check(cudaEventRecord(queued.handle.get(), stream_.get()), "recording an event");
        groups.emplace_back(i + 1, reinterpret_cast<std::uintptr_t>(&queued));
        last_ = &queued;
        nbytes = 0;
    }
    return groups;
}

void DeviceCopier::hold(std::uintptr_t stream) {
    require_open();
    const DeviceEvent* last = last_;
    if (last == nullptr) return;
    const CurrentDevice current(device_);
    check(cudaStreamWaitEvent(reinterpret_cast<cudaStream_t>(stream), last->handle.get(), 0), "making a stream wait");
}

bool DeviceCopier::done() {
    require_open();
    const DeviceEvent* last = last_;
    if (last == nullptr) return true;
    const CurrentDevice current(device_);
    const cudaError_t state = cudaEventQuery(last->handle.get());
    if (state == cudaErrorNotReady) {
        cudaGetLastError();  // else others take it for an error of theirs
        return false;
    }
    check(state, "copying");
    return true;
}

void DeviceCopier::wait() {
    require_open();
    const DeviceEvent* last = last_;
    if (last != nullptr) wait_for_event(reinterpret_cast<std::uintptr_t>(last));
}

void DeviceCopier::close() {
    if (!stream_) return;
    const CurrentDevice current(device_);
    const cudaError_t finished = cudaStreamSynchronize(stream_.get());
    last_ = nullptr;
    events_.clear();
    after_.reset();
    stream_.reset();
    check(finished, "copying");
}

}  // namespace mcore_ckpt
