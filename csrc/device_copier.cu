// DeviceCopier with the CUDA runtime.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include "cuda_support.h"
#include "device_copy.h"
#include "gather.h"

namespace mcore_ckpt {
namespace {

// For a smaller copy the copy engine spends more time on starting than on copying.
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
    // The sources are read in stream order, after the work that the stream waits for.
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

// Queues copies together: the small ones as few kernels, the large ones as one batch.
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

// How far the GPU's address of pinned memory is from the host's address. It is 0 on all but a few machines.
std::ptrdiff_t mapping_of(const HostBuffer& buffer) {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, buffer.data()), "looking up host memory");
    if (attributes.type != cudaMemoryTypeHost || attributes.devicePointer == nullptr) {
        throw std::invalid_argument("CUDA does not know the pinned buffer to copy GPU tensors to");
    }
    return static_cast<std::uint8_t*>(attributes.devicePointer) - buffer.data();
}

// A copy to other memory would block the host, and a kernel that writes to other memory makes the GPU unusable for the
// whole process. So every destination is checked; inside one buffer this is arithmetic.
void check_destinations(const HostBuffer& buffer, const std::vector<DeviceCopier::ToBuffer>& copies) {
    if (!buffer.pinned()) {
        throw std::invalid_argument("the buffer to copy GPU tensors to is not pinned: make it with pinned=True");
    }
    std::size_t end = 0;
    for (std::size_t i = 0; i < copies.size(); ++i) {
        const auto& [offset, source, nbytes] = copies[i];
        if (nbytes == 0) continue;
        if (offset > buffer.nbytes() || nbytes > buffer.nbytes() - offset) {
            throw std::invalid_argument("copy " + std::to_string(i) + ": " + std::to_string(nbytes) +
                                        " bytes at offset " + std::to_string(offset) + " do not fit into a buffer of " +
                                        std::to_string(buffer.nbytes()) + " bytes");
        }
        if (offset < end) {
            throw std::invalid_argument("copy " + std::to_string(i) + " begins at offset " + std::to_string(offset) +
                                        ", before the copy before it ends at " + std::to_string(end) +
                                        ": sort the copies by offset");
        }
        end = offset + nbytes;
    }
}

struct Range {
    std::uintptr_t begin = 0, end = 0;
    bool has(std::uintptr_t address) const { return begin <= address && address < end; }
};

// The range of the allocation that an address belongs to, or nothing if the driver does not tell.
std::optional<Range> allocation_of(std::uintptr_t address) {
    using Function = CUresult (*)(unsigned, CUpointer_attribute*, void**, CUdeviceptr);
    static const auto get = reinterpret_cast<Function>(driver_function("cuPointerGetAttributes"));
    CUdeviceptr begin = 0;
    std::size_t nbytes = 0;
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
    void* values[] = {&begin, &nbytes};
    if (get == nullptr || get(2, attributes, values, address) != CUDA_SUCCESS) return {};
    const Range range{begin, begin + nbytes};
    return range.has(address) ? std::make_optional(range) : std::nullopt;
}

// Checks that sources are on one GPU. Asking the driver costs about as much as queueing a copy, so each allocation is
// asked for once: a training state has thousands of tensors, and torch puts small ones into common allocations of 2 MiB
// or more, which take 40 us to copy.
//
// No GPU has run this class yet, and its time has not been measured. On the fake CUDA of tests/native/fake_cuda, 10,000
// sources in 40 allocations need 40 look-ups.
class SourceCheck {
  public:
    explicit SourceCheck(int device) : device_(device) {}

    void require_on_device(std::size_t number, const void* source, std::size_t nbytes) {
        const auto begin = reinterpret_cast<std::uintptr_t>(source), end = begin + nbytes;
        if (source == nullptr || end < begin) refuse(number, "has no memory at its address");
        // A tensor in a virtual address range of several allocations is looked up once for each of them.
        for (std::uintptr_t at = begin; at < end; at = last_.end) {
            if (!last_.has(at)) last_ = find(number, at, end);
        }
    }

  private:
    Range find(std::size_t number, std::uintptr_t at, std::uintptr_t end) {
        const auto next = known_.upper_bound(at);
        if (next != known_.begin()) {
            const Range known{std::prev(next)->first, std::prev(next)->second};
            if (known.has(at)) return known;
        }
        look_up(number, at);
        auto range = allocation_of(at);
        if (!range) {
            look_up(number, end - 1);
            range = Range{at, end};
        }
        known_[range->begin] = range->end;
        return *range;
    }

    void look_up(std::size_t number, std::uintptr_t address) const {
        cudaPointerAttributes attributes{};
        check(cudaPointerGetAttributes(&attributes, reinterpret_cast<const void*>(address)),
              "looking up a tensor's GPU");
        if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
            refuse(number, "is not, or not all of it, in GPU memory");
        }
        if (attributes.device != device_) {
            refuse(number, "is on GPU " + std::to_string(attributes.device) + ", and this copier is for GPU " +
                               std::to_string(device_));
        }
    }

    [[noreturn]] static void refuse(std::size_t number, const std::string& why) {
        throw std::invalid_argument("copy " + std::to_string(number) + ": the tensor " + why);
    }

    const int device_;
    Range last_;
    std::map<std::uintptr_t, std::uintptr_t> known_;  // from the begin of each range to its end
};

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
        // Those who waited for the copies have already got the error.
    }
}

std::uintptr_t DeviceCopier::stream() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reinterpret_cast<std::uintptr_t>(stream_.get());
}

void DeviceCopier::require_open() const {
    if (!stream_) throw std::invalid_argument("the copier is closed");
}

bool DeviceCopier::last_is_done() const { return last_ == nullptr || last_->done(); }

void DeviceCopier::keep_alive(const std::shared_ptr<HostBuffer>& buffer) {
    if (last_is_done()) in_flight_.clear();
    if (std::find(in_flight_.begin(), in_flight_.end(), buffer) == in_flight_.end()) in_flight_.push_back(buffer);
}

// An event that nobody else holds, for group `number` of a start(). A job that still waits for the event of an earlier
// start() would otherwise wait for the new copies instead.
const std::shared_ptr<DeviceEvent>& DeviceCopier::free_event(std::size_t number) {
    if (number == events_.size()) {
        events_.push_back(std::make_shared<DeviceEvent>(device_));
    } else if (events_[number].use_count() > (events_[number] == last_ ? 2 : 1)) {
        events_[number] = std::make_shared<DeviceEvent>(device_);
    }
    return events_[number];
}

std::vector<DeviceCopier::Done> DeviceCopier::start(const std::shared_ptr<HostBuffer>& buffer,
                                                    const std::vector<ToBuffer>& copies, std::uintptr_t after,
                                                    std::size_t group_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    require_open();
    check_destinations(*buffer, copies);
    const CurrentDevice current(device_);
    SourceCheck sources(device_);
    bool any = false;
    for (std::size_t i = 0; i < copies.size(); ++i) {
        if (copies[i].nbytes == 0) continue;
        sources.require_on_device(i, copies[i].source, copies[i].nbytes);
        any = true;
    }
    if (!any) return {};
    const std::ptrdiff_t mapping = mapping_of(*buffer);

    check(cudaEventRecord(after_.get(), reinterpret_cast<cudaStream_t>(after)), "recording an event");
    check(cudaStreamWaitEvent(stream_.get(), after_.get(), 0), "making a stream wait");
    keep_alive(buffer);
    try {
        return queue(*buffer, copies, group_bytes, mapping);
    } catch (...) {
        // After an error nothing is in flight: the caller may free the tensors at once.
        if (cudaStreamSynchronize(stream_.get()) == cudaSuccess) in_flight_.clear();
        throw;
    }
}

std::vector<DeviceCopier::Done> DeviceCopier::queue(const HostBuffer& buffer, const std::vector<ToBuffer>& copies,
                                                    std::size_t group_bytes, std::ptrdiff_t mapping) {
    std::vector<Done> groups;
    Group group(stream_.get(), mapping);
    std::size_t nbytes = 0;
    for (std::size_t i = 0; i < copies.size(); ++i) {
        group.add({buffer.data() + copies[i].offset, copies[i].source, copies[i].nbytes});
        nbytes += copies[i].nbytes;
        if (nbytes < group_bytes && i + 1 < copies.size()) continue;
        group.queue();
        const auto& event = free_event(groups.size());
        event->record(stream_.get());
        groups.emplace_back(i + 1, event);
        last_ = event;
        nbytes = 0;
    }
    return groups;
}

void DeviceCopier::hold(std::uintptr_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    require_open();
    if (last_ == nullptr) return;
    const CurrentDevice current(device_);
    check(cudaStreamWaitEvent(reinterpret_cast<cudaStream_t>(stream), last_->handle(), 0), "making a stream wait");
}

bool DeviceCopier::done() {
    const std::lock_guard<std::mutex> lock(mutex_);
    require_open();
    return last_is_done();
}

void DeviceCopier::wait() {
    std::vector<std::shared_ptr<HostBuffer>> copied;  // freed after the lock is released, as that takes time
    std::shared_ptr<DeviceEvent> last;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        require_open();
        last = last_;
    }
    if (last == nullptr) return;
    // Without the lock, so that hold() does not wait for the GPU meanwhile.
    last->wait();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (last_ == last) copied.swap(in_flight_);
}

void DeviceCopier::close() {
    std::vector<std::shared_ptr<HostBuffer>> copied;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!stream_) return;
    const CurrentDevice current(device_);
    const cudaError_t finished = cudaStreamSynchronize(stream_.get());
    last_.reset();
    events_.clear();
    copied.swap(in_flight_);
    after_.reset();
    stream_.reset();
    check(finished, "copying");
}

}  // namespace mcore_ckpt
