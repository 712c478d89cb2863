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

bool is_small(const Copy& copy) { return copy.nbytes < GATHER_BELOW_BYTES; }

// Queues small copies as few kernels.
class Gathers {
  public:
    explicit Gathers(cudaStream_t stream) : stream_(stream) {}

    // `mapping`: how far the GPU's address of the destination is from the host's.
    void add(const Copy& copy, std::ptrdiff_t mapping) {
        table_.rows[table_.count++] = {static_cast<char*>(copy.destination) + mapping, copy.source, copy.nbytes};
        if (table_.count == GatherTable::ROWS) launch();
    }

    void launch() {
        if (table_.count != 0) check(launch_gather(table_, stream_), "starting a kernel that copies");
        table_.count = 0;
    }

  private:
    const cudaStream_t stream_;
    GatherTable table_;
};

// How far the GPU's address of pinned memory is from the host's address. It is 0 on all but a few machines.
std::ptrdiff_t mapping_of(const std::uint8_t* memory) {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, memory), "looking up host memory");
    if (attributes.type != cudaMemoryTypeHost || attributes.devicePointer == nullptr) {
        throw std::invalid_argument("CUDA does not know the pinned buffer to copy GPU tensors to");
    }
    return static_cast<const std::uint8_t*>(attributes.devicePointer) - memory;
}

// Whether a stream is being captured into a CUDA graph.
bool is_captured(cudaStream_t stream) {
    auto status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(stream, &status);
    if (error == cudaErrorStreamCaptureImplicit) {  // the default stream, and another one that it waits for
        cudaGetLastError();
        return true;
    }
    check(error, "asking whether a stream is being captured");
    return status != cudaStreamCaptureStatusNone;
}

// A copy to other memory would block the host, and a kernel that writes to other memory makes the GPU unusable for the
// whole process. So every destination is checked; inside one buffer this is arithmetic.
void check_destinations(const HostBuffer& buffer, const std::vector<DeviceCopier::ToBuffer>& copies) {
    const std::size_t pinned = buffer.pinned_bytes();
    if (pinned == 0) {
        throw std::invalid_argument("the buffer to copy GPU tensors to is not pinned: make it for a device");
    }
    std::size_t end = 0;
    for (std::size_t i = 0; i < copies.size(); ++i) {
        const auto& [offset, source, nbytes] = copies[i];
        if (nbytes == 0) continue;
        if (offset > pinned || nbytes > pinned - offset) {
            throw std::invalid_argument("copy " + std::to_string(i) + ": " + std::to_string(nbytes) +
                                        " bytes at offset " + std::to_string(offset) + " do not fit into the " +
                                        std::to_string(pinned) + " pinned bytes of a buffer");
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
// Its time on a GPU has not been measured. On the fake CUDA of tests/native/fake_cuda, 10,000 sources in 40 allocations
// need 40 look-ups.
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

void wait_for(const DeviceEvent& event, double seconds) {
    if (poll_until(after_seconds(seconds), [&] { return event.happened(); })) return;
    throw DeviceStuck(event.device(), seconds);
}

// How long a start() that has failed waits until nothing is in flight.
constexpr double SETTLES_S = 10;

}  // namespace

// A copy, or the part of one that goes to one piece of pinned memory.
struct DeviceCopier::Run {
    std::size_t number;  // of the copy
    Copy copy;
    std::ptrdiff_t mapping;
};

namespace {

// Cuts the copies where pieces of pinned memory meet: CUDA refuses a copy to two of them.
std::vector<DeviceCopier::Run> cut_at_pieces(const HostBuffer& buffer,
                                             const std::vector<DeviceCopier::ToBuffer>& copies) {
    std::vector<DeviceCopier::Run> runs;
    std::size_t piece_end = 0;
    std::ptrdiff_t mapping = 0;
    for (std::size_t i = 0; i < copies.size(); ++i) {
        auto [offset, source, left] = copies[i];
        while (left != 0) {
            if (offset >= piece_end) {
                piece_end = buffer.piece_end(offset);
                mapping = mapping_of(buffer.data() + offset);
            }
            const std::size_t nbytes = std::min(left, piece_end - offset);
            runs.push_back({i, {buffer.data() + offset, source, nbytes}, mapping});
            offset += nbytes, left -= nbytes;
            source = static_cast<const std::uint8_t*>(source) + nbytes;
        }
    }
    return runs;
}

}  // namespace

DeviceCopier::DeviceCopier(int device, std::uintptr_t stream)
    : device_(device), stream_(reinterpret_cast<cudaStream_t>(stream)) {
    if (stream == 0) throw std::invalid_argument("copies on the default stream would hold the training up");
}

DeviceCopier::~DeviceCopier() {
    bool done = false;
    try {
        done = !open_ || look_at_last();
    } catch (const std::exception&) {
        // Those who waited for the copies have already got the error.
    }
    if (!done) abandon();
}

void DeviceCopier::require_open() const {
    if (!open_) throw std::invalid_argument("the copier is closed");
}

// Whether all copies are done.
bool DeviceCopier::look_at_last() {
    if (last_ != nullptr && last_->happened()) last_.reset();
    return last_ == nullptr;
}

void DeviceCopier::keep_alive(const std::shared_ptr<HostBuffer>& buffer) {
    if (look_at_last()) in_flight_.clear();
    if (std::find(in_flight_.begin(), in_flight_.end(), buffer) == in_flight_.end()) in_flight_.push_back(buffer);
}

void DeviceCopier::abandon() noexcept {
    try {
        keep_for_ever(std::move(in_flight_));
    } catch (const std::bad_alloc&) {
        // The process has no memory left, and is about to end.
    }
    in_flight_.clear();
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
    const DeviceCalls calls(device_);
    SourceCheck sources(device_);
    for (std::size_t i = 0; i < copies.size(); ++i) {
        if (copies[i].nbytes != 0) sources.require_on_device(i, copies[i].source, copies[i].nbytes);
    }
    const auto runs = cut_at_pieces(*buffer, copies);
    if (runs.empty()) return {};

    if (after_ == nullptr) after_ = std::make_unique<DeviceEvent>(device_);
    after_->record(reinterpret_cast<cudaStream_t>(after));
    check(cudaStreamWaitEvent(stream_, after_->handle(), 0), "making a stream wait");
    keep_alive(buffer);
    try {
        return queue(runs, copies.size(), group_bytes);
    } catch (...) {
        const auto settled = [&] { return cudaStreamQuery(stream_) != cudaErrorNotReady; };
        if (poll_until(after_seconds(SETTLES_S), settled) && cudaStreamQuery(stream_) == cudaSuccess) {
            in_flight_.clear();
        } else {
            abandon();
        }
        cudaGetLastError();
        throw;
    }
}

std::vector<DeviceCopier::Done> DeviceCopier::queue(const std::vector<Run>& runs, std::size_t count,
                                                    std::size_t group_bytes) {
    Gathers gathers(stream_);
    for (const Run& run : runs) {
        if (is_small(run.copy)) gathers.add(run.copy, run.mapping);
    }
    gathers.launch();

    std::vector<Done> groups;
    std::vector<Copy> large;
    std::size_t nbytes = 0;
    const auto end_group = [&](std::size_t done) {
        if (!large.empty()) copy_large(large, stream_);
        large.clear();
        nbytes = 0;
        const auto& event = free_event(groups.size());
        event->record(stream_);
        groups.emplace_back(done, event);
        last_ = event;
    };
    for (const Run& run : runs) {
        if (is_small(run.copy)) continue;
        if (nbytes >= group_bytes) end_group(run.number);
        large.push_back(run.copy);
        nbytes += run.copy.nbytes;
    }
    end_group(count);
    return groups;
}

void DeviceCopier::hold(std::uintptr_t stream, double seconds) {
    std::shared_ptr<DeviceEvent> last;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        require_open();
        if (look_at_last()) return;
        const DeviceCalls calls(device_);
        if (!is_captured(reinterpret_cast<cudaStream_t>(stream))) {
            check(cudaStreamWaitEvent(reinterpret_cast<cudaStream_t>(stream), last_->handle(), 0),
                  "making a stream wait");
            return;
        }
        last = last_;
    }
    wait_for(*last, seconds);
}

bool DeviceCopier::done() {
    const std::lock_guard<std::mutex> lock(mutex_);
    require_open();
    return look_at_last();
}

void DeviceCopier::wait(double seconds) {
    std::vector<std::shared_ptr<HostBuffer>> copied;  // freed after the lock is released, as that takes time
    std::shared_ptr<DeviceEvent> last;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        require_open();
        last = last_;
    }
    if (last != nullptr) wait_for(*last, seconds);  // without the lock, so that hold() does not wait meanwhile
    const std::lock_guard<std::mutex> lock(mutex_);
    if (last_ != last) return;  // there are new copies
    last_.reset();
    copied.swap(in_flight_);
}

void DeviceCopier::close(double seconds) {
    std::vector<std::shared_ptr<HostBuffer>> copied;
    std::shared_ptr<DeviceEvent> last;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!std::exchange(open_, false)) return;
        last = last_;
    }
    std::exception_ptr error;
    try {
        if (last != nullptr) wait_for(*last, seconds);
    } catch (const std::exception&) {
        error = std::current_exception();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error) abandon();
    copied.swap(in_flight_);
    last_.reset();
    events_.clear();
    after_.reset();
    if (error) std::rethrow_exception(error);
}

}  // namespace mcore_ckpt
