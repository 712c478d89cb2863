// Tests DeviceCopier, HostToDeviceCopies, ReadJob and WriteJob on the fake CUDA, which does everything as late as
// possible. Mostly they test order and ownership.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "buffer_cache.h"
#include "crc32.h"
#include "device_copy.h"
#include "fake_cuda.h"
#include "file_layout.h"
#include "host_buffer.h"
#include "read_job.h"
#include "write_job.h"

namespace {

using namespace mcore_ckpt;
using Bytes = std::vector<std::uint8_t>;

constexpr int DEVICE = 1;  // not 0, the GPU of a thread that does not choose one

#define REQUIRE(condition) \
    if (!(condition)) fail_at(__LINE__, #condition)

[[noreturn]] void fail_at(int line, const char* condition) {
    std::fprintf(stderr, "line %d: %s does not hold\n", line, condition);
    std::exit(1);
}

template <typename Error, typename Call>
std::string thrown_by(Call call) {
    try {
        call();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

std::shared_ptr<HostBuffer> pinned(std::size_t nbytes) {
    auto buffer = std::make_shared<HostBuffer>(nbytes, DEVICE);
    std::memset(buffer->data(), 0xA5, nbytes);
    return buffer;
}

// Tensors of these sizes on the GPU, and a place for each in a pinned buffer.
struct State {
    explicit State(std::vector<std::size_t> nbytes) : sizes(std::move(nbytes)), host(pinned(total() + 1)) {
        std::size_t offset = 0;
        for (const std::size_t size : sizes) {
            auto* tensor = static_cast<std::uint8_t*>(fake_cuda::device_malloc(DEVICE, size + 1));
            std::memset(tensor, 0, size);
            tensors.push_back(tensor);
            copies.push_back({offset, tensor, size});
            offset += size;
        }
    }
    ~State() {
        for (std::uint8_t* tensor : tensors) fake_cuda::device_free(tensor);
    }

    std::size_t total() const {
        std::size_t sum = 0;
        for (const std::size_t size : sizes) sum += size;
        return sum;
    }

    void fill(cudaStream_t stream, std::uint8_t value) {
        fake_cuda::queue(stream, [this, value] {
            for (std::size_t i = 0; i < sizes.size(); ++i) std::memset(tensors[i], value, sizes[i]);
        });
    }

    bool arrived(std::uint8_t value, std::size_t first = 0, std::size_t last = SIZE_MAX) const {
        for (std::size_t i = first; i < copies.size() && i < last; ++i) {
            const std::uint8_t* bytes = host->data() + copies[i].offset;
            for (std::size_t k = 0; k < sizes[i]; ++k) {
                if (bytes[k] != value) return false;
            }
        }
        return true;
    }

    std::vector<std::size_t> sizes;
    std::shared_ptr<HostBuffer> host;
    std::vector<std::uint8_t*> tensors;
    std::vector<DeviceCopier::ToBuffer> copies;
};

std::vector<std::size_t> many_sizes() {
    std::vector<std::size_t> sizes(500, 40);
    sizes.insert(sizes.end(), {0, 100'000, 65'536, 65'535, 1, 0});
    return sizes;
}

void wait_for(const DeviceEvent& event) {
    REQUIRE(poll_until(Clock::time_point::max(), [&] { return event.happened(); }));
}

// A stream that its owner outlives, as one of torch's pool.
struct TrainingStream {
    TrainingStream() {
        cudaSetDevice(DEVICE);
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    }
    ~TrainingStream() {
        cudaStreamSynchronize(stream);
        cudaStreamDestroy(stream);
    }
    std::uintptr_t number() const { return reinterpret_cast<std::uintptr_t>(stream); }

    cudaStream_t stream = nullptr;
};

void copies_see_what_was_queued_before_and_not_what_comes_after_hold() {
    State state(many_sizes());
    const TrainingStream training;
    const TrainingStream own;
    DeviceCopier copier(DEVICE, own.number());
    for (std::uint8_t round = 1; round < 20; ++round) {
        state.fill(training.stream, round);
        copier.start(state.host, state.copies, training.number(), 1 << 20);
        REQUIRE(!copier.done());
        copier.hold(training.number(), FOREVER_S);
        state.fill(training.stream, 99);
        // The training stream would overtake without hold(), and the copies without `after`. So wait for each in turn.
        if (round % 2 == 0) cudaStreamSynchronize(training.stream);
        copier.wait(FOREVER_S);
        REQUIRE(copier.done());
        REQUIRE(state.arrived(round));
    }
}

void without_hold_the_fake_shows_the_fault() {
    State state({100});
    const TrainingStream training;
    const TrainingStream own;
    DeviceCopier copier(DEVICE, own.number());
    state.fill(training.stream, 1);
    copier.start(state.host, state.copies, training.number(), 1);
    state.fill(training.stream, 2);
    cudaStreamSynchronize(training.stream);
    copier.wait(FOREVER_S);
    REQUIRE(state.arrived(2));
}

void the_default_stream_is_a_stream_too() {
    State state(many_sizes());
    cudaSetDevice(DEVICE);
    const TrainingStream own;
    DeviceCopier copier(DEVICE, own.number());
    state.fill(nullptr, 3);
    copier.start(state.host, state.copies, 0, 1 << 20);
    copier.hold(0, FOREVER_S);
    state.fill(nullptr, 4);
    cudaStreamSynchronize(nullptr);
    copier.wait(FOREVER_S);
    REQUIRE(state.arrived(3));
}

// The small copies come first, so the first event tells of all that are before the second group of large ones.
void each_group_has_an_event() {
    std::vector<std::size_t> sizes(10, 40);
    for (int large = 0; large < 6; ++large) sizes.insert(sizes.end(), {70'000, 1});
    State state(sizes);
    const TrainingStream training;
    const TrainingStream own;
    DeviceCopier copier(DEVICE, own.number());
    state.fill(training.stream, 7);
    auto groups = copier.start(state.host, state.copies, training.number(), 100'000);
    REQUIRE(groups.size() == 3);
    REQUIRE(groups[0].first == 14 && groups[1].first == 18 && groups[2].first == state.copies.size());
    std::size_t before = 0;
    for (const auto& [count, event] : groups) {
        REQUIRE(!copier.done());
        std::thread([&event = event] { wait_for(*event); }).join();  // a thread that has chosen no GPU
        REQUIRE(state.arrived(7, before, count));
        REQUIRE(count == state.copies.size() || !state.arrived(7, count, count + 1));
        before = count;
    }
    REQUIRE(copier.done());
    const int handles = fake_cuda::handles();
    groups.clear();
    REQUIRE(copier.start(state.host, state.copies, training.number(), 100'000).size() == 3);
    REQUIRE(fake_cuda::handles() == handles);
    copier.wait(FOREVER_S);
}

// Somebody who still waits for an event of the first start() must not wait for the copies of the second.
void an_event_that_somebody_holds_is_not_recorded_again() {
    State state(many_sizes());
    const TrainingStream training;
    const TrainingStream own;
    DeviceCopier copier(DEVICE, own.number());
    const auto first = copier.start(state.host, state.copies, training.number(), 4000);
    state.fill(training.stream, 9);
    copier.start(state.host, state.copies, training.number(), 4000);
    for (const auto& group : first) wait_for(*group.second);
    REQUIRE(!copier.done());
    REQUIRE(state.arrived(0));
    copier.wait(FOREVER_S);
    REQUIRE(state.arrived(9));
}

void the_copier_keeps_the_buffer_until_the_copies_are_done() {
    State state(many_sizes());
    const TrainingStream training;
    const TrainingStream own;
    DeviceCopier copier(DEVICE, own.number());
    const std::weak_ptr<HostBuffer> first = state.host;
    copier.start(state.host, state.copies, training.number(), 4000);
    state.host = pinned(state.total() + 1);
    const std::weak_ptr<HostBuffer> second = state.host;
    copier.start(state.host, state.copies, training.number(), 4000);
    state.host.reset();  // the fake ends the program if memory is unpinned while a copy needs it
    REQUIRE(!first.expired() && !second.expired());
    copier.wait(FOREVER_S);
    REQUIRE(first.expired() && second.expired());

    state.host = pinned(state.total() + 1);
    copier.start(state.host, state.copies, training.number(), 4000);
    copier.wait(FOREVER_S);
    const std::weak_ptr<HostBuffer> waited_for = state.host;
    state.host.reset();
    REQUIRE(waited_for.expired());

    state.host = pinned(state.total() + 1);
    const std::weak_ptr<HostBuffer> closed = state.host;
    copier.start(state.host, state.copies, training.number(), 4000);
    state.host.reset();
    copier.close(FOREVER_S);
    REQUIRE(closed.expired());
}

// Other threads hold, ask and wait while the copier is closed: each of their calls succeeds or says that it is closed.
void closing_does_not_race() {
    State state({100, 100'000});
    for (int round = 0; round < 50; ++round) {
        const TrainingStream training;
        const TrainingStream own;
        DeviceCopier copier(DEVICE, own.number());
        std::atomic<int> waiting{0};
        const auto until_closed = [&](auto call) {
            return std::thread([&copier, &waiting, call] {
                ++waiting;
                try {
                    for (;;) call();
                } catch (const std::invalid_argument& error) {
                    REQUIRE(error.what() == std::string("the copier is closed"));
                }
            });
        };
        std::thread others[] = {
            until_closed([&] { copier.hold(training.number(), FOREVER_S); }),
            until_closed([&] { copier.done(); }),
            until_closed([&] { copier.wait(FOREVER_S); }),
            until_closed([&] { copier.start(state.host, state.copies, training.number(), 1000); }),
        };
        while (waiting != 4) std::this_thread::yield();
        copier.start(state.host, state.copies, training.number(), 1000);
        copier.close(FOREVER_S);
        for (auto& other : others) other.join();
    }
}

void small_ones_are_gathered_and_large_ones_go_in_one_call() {
    State state(many_sizes());
    const TrainingStream training;
    const TrainingStream own;
    DeviceCopier copier(DEVICE, own.number());
    const auto before = fake_cuda::calls();
    copier.start(state.host, state.copies, training.number(), SIZE_MAX);
    const auto after = fake_cuda::calls();
    REQUIRE(after.gathers - before.gathers == 4);
#if CUDART_VERSION >= 12080
    REQUIRE(after.batches - before.batches == 1 && after.copies == before.copies);
#else
    REQUIRE(after.copies - before.copies == 2);
#endif
}

void closing_waits() {
    State state(many_sizes());
    const TrainingStream training;
    const int handles = fake_cuda::handles();
    {
        const TrainingStream own;
        DeviceCopier copier(DEVICE, own.number());
        state.fill(training.stream, 5);
        copier.start(state.host, state.copies, training.number(), 1000);
        copier.close(FOREVER_S);
        REQUIRE(state.arrived(5));
        copier.close(FOREVER_S);
        REQUIRE(thrown_by<std::invalid_argument>([&] { copier.done(); }) == "the copier is closed");
    }
    {
        const TrainingStream own;
        DeviceCopier copier(DEVICE, own.number());
        state.fill(training.stream, 6);
        copier.start(state.host, state.copies, training.number(), 1000);
    }
    REQUIRE(fake_cuda::handles() == handles);
}

// A GPU that does nothing is waited for with a deadline. What it may still write to is never freed.
void a_stuck_gpu_has_a_deadline() {
    State state(many_sizes());
    const TrainingStream training, own;
    fake_cuda::stick(true);
    for (const bool close : {true, false}) {
        std::weak_ptr<HostBuffer> buffer;
        {
            DeviceCopier copier(DEVICE, own.number());
            copier.start(state.host, state.copies, training.number(), 1000);
            buffer = state.host;
            state.host = pinned(state.total() + 1);
            const std::string stuck = "GPU 1 has not done its work for 0 s";
            REQUIRE(thrown_by<DeviceStuck>([&] { copier.wait(0.01); }) == stuck);
            if (close) REQUIRE(thrown_by<DeviceStuck>([&] { copier.close(0.01); }) == stuck);
        }
        REQUIRE(!buffer.expired());
    }
    fake_cuda::stick(false);
    cudaStreamSynchronize(own.stream);
}

// CUDA refuses a copy to two pieces of pinned memory.
void copies_are_cut_where_pieces_of_pinned_memory_meet() {
    State state({10'000, 300'000, 5'000, 100});
    const TrainingStream training, own;
    DeviceCopier copier(DEVICE, own.number());
    state.host = HostBuffer::reserve(state.total() + 100'000, DEVICE, HostBuffer::ANY_NODE);
    for (const std::size_t end : {PAGE_BYTES, 9 * PAGE_BYTES, 60 * PAGE_BYTES, state.total()}) state.host->pin(end);
    state.fill(training.stream, 13);
    const auto groups = copier.start(state.host, state.copies, training.number(), 100'000);
    copier.wait(FOREVER_S);
    REQUIRE(state.arrived(13));
    REQUIRE(groups.back().first == state.copies.size());
    REQUIRE(thrown_by<std::invalid_argument>([&] {
                copier.start(state.host, {{state.host->pinned_bytes() - 1, state.tensors[0], 2}}, 0, 1);
            }).find("do not fit into the") != std::string::npos);
}

// Every copy is checked, also one between good ones, and nothing is queued if one is bad.
void every_copy_is_checked() {
    State state({100, 100, 100});
    const TrainingStream training;
    const TrainingStream own;
    DeviceCopier copier(DEVICE, own.number());
    auto* large = static_cast<std::uint8_t*>(fake_cuda::device_malloc(DEVICE, 100));
    auto* elsewhere = static_cast<std::uint8_t*>(fake_cuda::device_malloc(DEVICE + 1, 100));
    Bytes host(100);
    const auto before = fake_cuda::calls();
    const auto start = [&](std::size_t number, const DeviceCopier::ToBuffer& bad) {
        std::vector<DeviceCopier::ToBuffer> copies = state.copies;
        copies[number] = bad;
        return thrown_by<std::invalid_argument>([&] { copier.start(state.host, copies, training.number(), 1); });
    };
    for (const std::size_t i : {0, 1, 2}) {
        const std::string copy = "copy " + std::to_string(i) + ": ";
        const std::size_t offset = state.copies[i].offset;
        const std::string not_there = copy + "the tensor is not, or not all of it, in GPU memory";
        REQUIRE(start(i, {offset, host.data(), 100}) == not_there);
        REQUIRE(start(i, {offset, large + 50, 51}) == not_there);
        REQUIRE(start(i, {offset, elsewhere, 100}) == copy + "the tensor is on GPU 2, and this copier is for GPU 1");
        REQUIRE(start(i, {offset, nullptr, 100}) == copy + "the tensor has no memory at its address");
        const std::string too_small = "do not fit into the 301 pinned bytes of a buffer";
        REQUIRE(start(i, {offset, large, SIZE_MAX}).find(too_small) != std::string::npos);
        REQUIRE(start(i, {202, large, 100}) == copy + "100 bytes at offset 202 " + too_small);
        REQUIRE(start(i, {SIZE_MAX - 10, large, 100}).find("do not fit") != std::string::npos);
    }
    REQUIRE(start(1, {99, large, 100}) ==
            "copy 1 begins at offset 99, before the copy before it ends at 100: sort the copies by offset");
    REQUIRE(start(1, {150, large, 100}).find("copy 2 begins at offset 200, before") == 0);

    const auto pageable = std::make_shared<HostBuffer>(1000);
    REQUIRE(thrown_by<std::invalid_argument>([&] { copier.start(pageable, state.copies, 0, 1); }) ==
            "the buffer to copy GPU tensors to is not pinned: make it for a device");
    const auto after = fake_cuda::calls();
    REQUIRE(after.batches == before.batches && after.copies == before.copies && after.gathers == before.gathers);
    REQUIRE(copier.start(state.host, {}, 0, 1).empty());
    REQUIRE(copier.start(state.host, {{0, nullptr, 0}}, 0, 1).empty());
    REQUIRE(copier.done());
    copier.wait(FOREVER_S);
    copier.hold(0, FOREVER_S);
    fake_cuda::device_free(large);
    fake_cuda::device_free(elsewhere);
}

void a_tensor_may_be_in_several_allocations_of_one_gpu() {
    State state({100'000});
    const TrainingStream training;
    const TrainingStream own;
    DeviceCopier copier(DEVICE, own.number());
    state.fill(training.stream, 11);
    fake_cuda::split(state.tensors[0], 60'000, DEVICE);
    copier.start(state.host, state.copies, training.number(), 1);
    copier.wait(FOREVER_S);
    REQUIRE(state.arrived(11));
    fake_cuda::join(state.tensors[0], 60'000);

    fake_cuda::split(state.tensors[0], 60'000, DEVICE + 1);
    REQUIRE(thrown_by<std::invalid_argument>([&] { copier.start(state.host, state.copies, training.number(), 1); }) ==
            "copy 0: the tensor is on GPU 2, and this copier is for GPU 1");
    fake_cuda::join(state.tensors[0], 60'000);
}

// 10,000 tensors in 40 allocations, in no order. Without the driver's function both ends of each tensor are looked up.
void each_allocation_is_looked_up_once() {
    constexpr std::size_t ALLOCATIONS = 40, TENSORS = 250, NBYTES = 64;
    std::vector<std::uint8_t*> memory;
    for (std::size_t i = 0; i < ALLOCATIONS; ++i) {
        memory.push_back(static_cast<std::uint8_t*>(fake_cuda::device_malloc(DEVICE, TENSORS * NBYTES)));
        std::memset(memory.back(), static_cast<int>(i), TENSORS * NBYTES);
    }
    const auto host = pinned(ALLOCATIONS * TENSORS * NBYTES);
    std::vector<DeviceCopier::ToBuffer> copies;
    for (std::size_t i = 0; i < ALLOCATIONS * TENSORS; ++i) {
        copies.push_back({i * NBYTES, memory[i % ALLOCATIONS] + i / ALLOCATIONS * NBYTES, NBYTES});
    }
    const TrainingStream training;
    const TrainingStream own;
    DeviceCopier copier(DEVICE, own.number());
    const auto looks = [&] {
        const int before = fake_cuda::calls().looks;
        copier.start(host, copies, training.number(), SIZE_MAX);
        return fake_cuda::calls().looks - before;
    };
    REQUIRE(looks() == static_cast<int>(ALLOCATIONS) + 1);  // and the buffer
    fake_cuda::fail("cuPointerGetAttributes", 0);
    REQUIRE(looks() == 2 * static_cast<int>(copies.size()) + 1);
    fake_cuda::fail(nullptr, 0);
    copier.wait(FOREVER_S);
    for (std::size_t i = 0; i < host->nbytes(); ++i) REQUIRE(host->data()[i] == i / NBYTES % ALLOCATIONS);
    for (std::uint8_t* allocation : memory) fake_cuda::device_free(allocation);
}

struct Stored {
    explicit Stored(const std::string& folder) : path(folder + "/file"), bytes(3'000'000) {
        for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 2654435761u >> 13);
        crcs = crc32_blocks(bytes.data(), bytes.size(), BLOCK, 1);
        std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }

    void add(ReadJob& job, const ReadJob::Rows& rows) const { job.add(0, 0, bytes.size(), crcs, rows); }

    static constexpr std::size_t BLOCK = 10'000;
    std::string path;
    Bytes bytes;
    std::vector<std::uint32_t> crcs;
};

// Training drops the buffer, the copier and the events right after the start of the job.
void a_write_job_owns_what_it_writes_from(const std::string& folder) {
    constexpr std::size_t TENSOR = 50'000, COUNT = 20, END = TENSOR * COUNT;
    State state(std::vector<std::size_t>(COUNT, TENSOR));
    const TrainingStream training;
    std::vector<std::uint64_t> offsets, sizes(COUNT, TENSOR);
    for (const auto& copy : state.copies) offsets.push_back(copy.offset);
    const auto layout = std::make_shared<FileLayout>(offsets, sizes, std::vector<std::int64_t>(COUNT, -1),
                                                     std::vector<FileLayout::Gap>(), END, Stored::BLOCK);
    for (const bool close : {false, true}) {
        state.fill(training.stream, 12);
        const TrainingStream own;
        auto copier = std::make_unique<DeviceCopier>(DEVICE, own.number());
        WriteJob::Range range{folder + "/written", layout, 0, END};
        for (auto& [count, event] : copier->start(state.host, state.copies, training.number(), 3 * TENSOR)) {
            range.ready.emplace_back(count * TENSOR, std::move(event));
        }
        range.buffer = std::move(state.host);
        WriteJob job(2, PAGE_BYTES, false, FOREVER_S);
        job.add_file(std::move(range));
        job.start();
        if (close) copier->close(FOREVER_S);
        copier.reset();
        job.wait(0, WriteJob::Clock::time_point::max());
        job.finish(0, "", {});
        job.close();
        std::ifstream file(folder + "/written", std::ios::binary);
        const Bytes written{std::istreambuf_iterator<char>(file), {}};
        REQUIRE(written == Bytes(END, 12));
        state.host = pinned(END + 1);
    }
}

// The event of the second file fails at once, while nearly all of the first one is still to be written.
void files_before_a_failed_one_are_written(const std::string& folder) {
    constexpr std::size_t NBYTES = 500 * PAGE_BYTES;
    State state({NBYTES});
    const TrainingStream training, own;
    DeviceCopier copier(DEVICE, own.number());
    const auto layout = std::make_shared<FileLayout>(std::vector<std::uint64_t>{0}, std::vector<std::uint64_t>{NBYTES},
                                                     std::vector<std::int64_t>{-1}, std::vector<FileLayout::Gap>(),
                                                     NBYTES, Stored::BLOCK);
    const Bytes host(NBYTES, 9);
    WriteJob::Range first{folder + "/first", layout, 0, NBYTES}, second{folder + "/second", layout, 0, NBYTES};
    first.sources = {host.data()};
    second.ready.emplace_back(NBYTES, copier.start(state.host, state.copies, training.number(), 1)[0].second);
    second.buffer = state.host;
    WriteJob job(1, PAGE_BYTES, false, FOREVER_S);
    job.add_file(std::move(first));
    job.add_file(std::move(second));
    fake_cuda::fail("cudaEventQuery", 0);
    job.start();
    const std::string said = thrown_by<std::runtime_error>([&] { job.wait(1, Clock::time_point::max()); });
    REQUIRE(said.find("as the test wants") != std::string::npos);
    REQUIRE(job.wait(0, Clock::time_point::max()));
    fake_cuda::fail(nullptr, 0);
    job.close();
    copier.wait(FOREVER_S);
}

void after_a_failure_nothing_is_in_flight() {
    State state(many_sizes());
    const TrainingStream training;
    for (const char* call : {"launch_gather", "cudaMemcpyBatchAsync", "cudaMemcpyAsync", "cudaEventRecord"}) {
        const TrainingStream own;
        DeviceCopier copier(DEVICE, own.number());
        state.fill(training.stream, 8);
        fake_cuda::fail(call, 1);
        const std::string said =
            thrown_by<std::runtime_error>([&] { copier.start(state.host, state.copies, training.number(), 10'000); });
        fake_cuda::fail(nullptr, 0);
        if (said.empty()) continue;  // the function is called once only, or never with this version of CUDA
        REQUIRE(said.find("as the test wants") != std::string::npos);
        REQUIRE(state.arrived(8, 0, 1));
    }
    const int handles = fake_cuda::handles();
    fake_cuda::fail("cudaEventCreateWithFlags", 1);
    REQUIRE(!thrown_by<std::runtime_error>([] { const HostToDeviceCopies copies(DEVICE, 1.0); }).empty());
    fake_cuda::fail(nullptr, 0);
    REQUIRE(fake_cuda::handles() == handles);
}

// Reads half of a tensor to the GPU and half to the host. A buffer that is filled again too early gives wrong bytes.
void reads_arrive_on_the_gpu(const std::string& folder) {
    const Stored stored(folder);
    const std::size_t half = stored.bytes.size() / 2 + 77;
    auto* tensor = static_cast<std::uint8_t*>(fake_cuda::device_malloc(DEVICE, half));
    Bytes rest(stored.bytes.size() - half);
    const int handles = fake_cuda::handles();
    for (int threads = 1; threads < 5; ++threads) {
        cudaSetDevice(DEVICE);
        fake_cuda::queue(nullptr, [=] { std::memset(tensor, 0, half); });  // earlier work that writes to the memory
        ReadJob job({stored.path}, {threads, 50'000, Stored::BLOCK, true, true, FOREVER_S});
        stored.add(job, {0, half, 1, 0, tensor, 0, DEVICE});
        stored.add(job, {half, rest.size(), 1, 0, rest.data(), 0, HostBuffer::NO_DEVICE});
        job.run();
        cudaStreamSynchronize(nullptr);  // the earlier work would come now, if the job had not waited for it
        REQUIRE(std::memcmp(tensor, stored.bytes.data(), half) == 0);
        REQUIRE(std::memcmp(rest.data(), stored.bytes.data() + half, rest.size()) == 0);
    }
    REQUIRE(fake_cuda::handles() <= handles + 1);  // the default stream, made above
    fake_cuda::device_free(tensor);
}

// Reads `count` rows to the GPU, each `stride` bytes after the last, checks them, and returns the calls of CUDA.
fake_cuda::Calls read_rows(const Stored& stored, std::size_t nbytes, std::size_t count, std::size_t stride) {
    constexpr std::size_t START = 7, SOURCE_STRIDE = 900;
    const std::size_t all = (count - 1) * stride + nbytes;
    auto* tensor = static_cast<std::uint8_t*>(fake_cuda::device_malloc(DEVICE, all));
    Bytes expected(all, 0xA5);
    std::memset(tensor, 0xA5, all);
    for (std::size_t row = 0; row < count; ++row) {
        std::memcpy(expected.data() + row * stride, stored.bytes.data() + START + row * SOURCE_STRIDE, nbytes);
    }
    ReadJob job({stored.path}, {2, 50'000, Stored::BLOCK, true, true, FOREVER_S});
    stored.add(job, {START, nbytes, count, SOURCE_STRIDE, tensor, stride, DEVICE});
    const auto before = fake_cuda::calls();
    job.run();
    const auto after = fake_cuda::calls();
    REQUIRE(std::memcmp(tensor, expected.data(), all) == 0);
    fake_cuda::device_free(tensor);
    return {0, after.copies - before.copies, after.copies_of_rows - before.copies_of_rows, 0, 0, 0};
}

// The 100 rows are in nine blocks. The end of a block cuts seven of them.
void rows_of_a_block_go_to_the_gpu_in_one_call(const std::string& folder) {
    const Stored stored(folder);
    const auto calls = read_rows(stored, 700, 100, 1000);
    REQUIRE(calls.copies_of_rows == 9 && calls.copies == 14);

    const int rows_one_by_one = 93 + 14;
    REQUIRE(read_rows(stored, 700, 100, fake_cuda::MAX_PITCH).copies_of_rows == 9);
    const auto too_far_apart = read_rows(stored, 700, 100, fake_cuda::MAX_PITCH + 1);
    REQUIRE(too_far_apart.copies_of_rows == 0 && too_far_apart.copies == rows_one_by_one);
    for (const int before : {0, 3}) {
        fake_cuda::fail("cudaMemcpy2DAsync", before);
        const auto refused = read_rows(stored, 700, 100, 1000);
        fake_cuda::fail(nullptr, 0);
        REQUIRE(refused.copies_of_rows == before && refused.copies > 14);
    }
}

void failed_copies_to_the_gpu_are_reported(const std::string& folder) {
    const Stored stored(folder);
    auto* tensor = static_cast<std::uint8_t*>(fake_cuda::device_malloc(DEVICE, stored.bytes.size()));
    for (const char* call : {"cudaHostRegister", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags",
                             "cudaMemcpyAsync", "cudaEventRecord", "cudaEventQuery"}) {
        for (const int before : {0, 1, 3}) {
            ReadJob job({stored.path}, {2, 50'000, Stored::BLOCK, true, true, FOREVER_S});
            stored.add(job, {0, stored.bytes.size(), 1, 0, tensor, 0, DEVICE});
            BufferCache::of_this_process().free_idle();  // so that the job pins buffers
            fake_cuda::fail(call, before);
            const std::string said = thrown_by<std::runtime_error>([&] { job.run(); });
            fake_cuda::fail(nullptr, 0);
            if (said.empty()) {
                REQUIRE(before != 0 && std::memcmp(tensor, stored.bytes.data(), stored.bytes.size()) == 0);
            } else {
                REQUIRE(said.find("as the test wants") != std::string::npos);
            }
        }
    }
    // A job of one piece waits twice: before its buffer is filled, and at the end. The second wait fails.
    ReadJob job({stored.path}, {1, 4 * Stored::BLOCK, Stored::BLOCK, true, true, FOREVER_S});
    stored.add(job, {0, 1, 1, 0, tensor, 0, DEVICE});
    fake_cuda::fail("cudaEventQuery", 1);
    REQUIRE(!thrown_by<std::runtime_error>([&] { job.run(); }).empty());
    fake_cuda::fail(nullptr, 0);
    fake_cuda::device_free(tensor);
}

// Every job pins no more than it has threads, two buffers for each, and after the first job nothing is pinned.
void pinned_buffers_are_used_again(const std::string& folder) {
    const Stored stored(folder);
    auto* tensor = static_cast<std::uint8_t*>(fake_cuda::device_malloc(DEVICE, stored.bytes.size()));
    BufferCache::of_this_process().free_idle();
    const int before = fake_cuda::calls().pins;
    for (int jobs = 0; jobs < 5; ++jobs) {
        ReadJob job({stored.path}, {3, 50'000, Stored::BLOCK, true, true, FOREVER_S});
        stored.add(job, {0, stored.bytes.size(), 1, 0, tensor, 0, DEVICE});
        job.run();
        REQUIRE(fake_cuda::calls().pins - before <= 6);
    }
    REQUIRE(std::memcmp(tensor, stored.bytes.data(), stored.bytes.size()) == 0);
    const int pins = fake_cuda::calls().pins - before;
    REQUIRE(pins >= 2);
    // A buffer has whole pages, and one more for a block that does not begin on a page.
    REQUIRE(BufferCache::of_this_process().free_idle() <= pins * (page_ceil(50'000) + PAGE_BYTES));
    fake_cuda::device_free(tensor);
}

void gpu_destinations_are_checked() {
    void* here = fake_cuda::device_malloc(DEVICE, 10);
    void* there = fake_cuda::device_malloc(DEVICE + 1, 10);
    Bytes host(10);
    ReadJob job({"/nowhere"}, {1, 4096, 4096, true, true, FOREVER_S});
    const auto add = [&](void* destination, int device = DEVICE) {
        auto* bytes = static_cast<std::uint8_t*>(destination);
        return thrown_by<std::invalid_argument>(
            [&] { job.add(0, 0, 10, std::vector<std::uint32_t>{1}, {0, 10, 1, 0, bytes, 0, device}); });
    };
    REQUIRE(add(host.data()) == "a tensor to copy from or to a GPU is not in GPU memory");
    REQUIRE(add(here).empty());
    REQUIRE(add(there) == "a tensor of GPU 1 is on GPU 2");
    REQUIRE(add(there, DEVICE + 1) == "destinations on several GPUs: make a job for each");
    fake_cuda::device_free(here);
    fake_cuda::device_free(there);
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 2) return 2;
    copies_see_what_was_queued_before_and_not_what_comes_after_hold();
    without_hold_the_fake_shows_the_fault();
    the_default_stream_is_a_stream_too();
    each_group_has_an_event();
    an_event_that_somebody_holds_is_not_recorded_again();
    the_copier_keeps_the_buffer_until_the_copies_are_done();
    closing_does_not_race();
    small_ones_are_gathered_and_large_ones_go_in_one_call();
    closing_waits();
    a_stuck_gpu_has_a_deadline();
    copies_are_cut_where_pieces_of_pinned_memory_meet();
    every_copy_is_checked();
    a_tensor_may_be_in_several_allocations_of_one_gpu();
    each_allocation_is_looked_up_once();
    a_write_job_owns_what_it_writes_from(arguments[1]);
    files_before_a_failed_one_are_written(arguments[1]);
    after_a_failure_nothing_is_in_flight();
    reads_arrive_on_the_gpu(arguments[1]);
    rows_of_a_block_go_to_the_gpu_in_one_call(arguments[1]);
    failed_copies_to_the_gpu_are_reported(arguments[1]);
    pinned_buffers_are_used_again(arguments[1]);
    gpu_destinations_are_checked();
    return 0;
}
