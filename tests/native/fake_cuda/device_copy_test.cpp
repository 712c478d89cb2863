// What DeviceCopier, Upload and ReadJob promise about order, against a GPU that does everything as late as it may.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "crc32.h"
#include "device_copy.h"
#include "fake_cuda.h"
#include "read_job.h"

namespace {

using namespace mcore_ckpt;
using Bytes = std::vector<std::uint8_t>;

constexpr int DEVICE = 1;  // not 0, which a thread gets that forgets to choose

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

struct Pinned {
    explicit Pinned(std::size_t nbytes) : bytes(nbytes, 0xA5) { pin_memory(bytes.data(), bytes.size()); }
    ~Pinned() { unpin_memory(bytes.data()); }

    Bytes bytes;
};

// Tensors of these sizes on the GPU, and a place for each in pinned memory.
struct State {
    explicit State(std::vector<std::size_t> nbytes) : sizes(std::move(nbytes)), host(total() + 1) {
        std::size_t offset = 0;
        for (const std::size_t size : sizes) {
            auto* tensor = static_cast<std::uint8_t*>(fake_cuda::device_malloc(DEVICE, size + 1));
            std::memset(tensor, 0, size);
            tensors.push_back(tensor);
            copies.push_back({host.bytes.data() + offset, tensor, size});
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
            const auto* bytes = static_cast<const std::uint8_t*>(copies[i].destination);
            for (std::size_t k = 0; k < sizes[i]; ++k) {
                if (bytes[k] != value) return false;
            }
        }
        return true;
    }

    std::vector<std::size_t> sizes;
    Pinned host;
    std::vector<std::uint8_t*> tensors;
    std::vector<Copy> copies;
};

std::vector<std::size_t> many_sizes() {
    std::vector<std::size_t> sizes(500, 40);
    sizes.insert(sizes.end(), {0, 100'000, 65'536, 65'535, 1, 0});
    return sizes;
}

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
    DeviceCopier copier(DEVICE);
    for (std::uint8_t round = 1; round < 20; ++round) {
        state.fill(training.stream, round);
        copier.start(state.copies, training.number(), 1 << 20);
        REQUIRE(!copier.done());
        copier.hold(training.number());
        state.fill(training.stream, 99);
        // Alternately, who waits: the training stream would overtake without hold(), the copies without `after`.
        if (round % 2 == 0) cudaStreamSynchronize(training.stream);
        copier.wait();
        REQUIRE(copier.done());
        REQUIRE(state.arrived(round));
    }
}

void without_hold_the_fake_shows_the_fault() {
    State state({100});
    const TrainingStream training;
    DeviceCopier copier(DEVICE);
    state.fill(training.stream, 1);
    copier.start(state.copies, training.number(), 1);
    state.fill(training.stream, 2);
    cudaStreamSynchronize(training.stream);
    copier.wait();
    REQUIRE(state.arrived(2));
}

void the_default_stream_is_a_stream_too() {
    State state(many_sizes());
    cudaSetDevice(DEVICE);
    DeviceCopier copier(DEVICE);
    state.fill(nullptr, 3);
    copier.start(state.copies, 0, 1 << 20);
    copier.hold(0);
    state.fill(nullptr, 4);
    cudaStreamSynchronize(nullptr);
    copier.wait();
    REQUIRE(state.arrived(3));
}

void each_group_has_an_event() {
    State state(many_sizes());
    const TrainingStream training;
    DeviceCopier copier(DEVICE);
    state.fill(training.stream, 7);
    const auto groups = copier.start(state.copies, training.number(), 4000);
    REQUIRE(groups.size() == 9);
    REQUIRE(groups.front().first == 100 && groups.back().first == state.copies.size());
    std::size_t before = 0;
    for (const auto& [count, event] : groups) {
        REQUIRE(!copier.done());
        std::thread([event = event] { wait_for_event(event); }).join();  // a thread that has chosen no GPU
        REQUIRE(state.arrived(7, before, count));
        REQUIRE(count == state.copies.size() || !state.arrived(7, count));
        before = count;
    }
    REQUIRE(copier.done());
    const int handles = fake_cuda::handles();
    REQUIRE(copier.start(state.copies, training.number(), 4000) == groups);
    REQUIRE(fake_cuda::handles() == handles);
}

void small_ones_are_gathered_and_large_ones_go_in_one_call() {
    State state(many_sizes());
    const TrainingStream training;
    DeviceCopier copier(DEVICE);
    const auto before = fake_cuda::calls();
    copier.start(state.copies, training.number(), SIZE_MAX);
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
        DeviceCopier copier(DEVICE);
        state.fill(training.stream, 5);
        copier.start(state.copies, training.number(), 1000);
        copier.close();
        REQUIRE(state.arrived(5));
        copier.close();
        REQUIRE(thrown_by<std::invalid_argument>([&] { copier.done(); }) == "the copier is closed");
    }
    {
        DeviceCopier copier(DEVICE);
        state.fill(training.stream, 6);
        copier.start(state.copies, training.number(), 1000);
    }
    REQUIRE(state.arrived(6));
    REQUIRE(fake_cuda::handles() == handles);
}

void memory_of_the_wrong_kind_is_refused() {
    State state({100, 100});
    Bytes pageable(300);
    DeviceCopier copier(DEVICE);
    const auto start = [&](const std::vector<Copy>& copies) {
        return thrown_by<std::invalid_argument>([&] { copier.start(copies, 0, 1); });
    };
    cudaSetDevice(DEVICE);
    REQUIRE(start({{pageable.data(), state.tensors[0], 100}}) == "memory to copy GPU tensors to is not pinned");
    REQUIRE(start({state.copies[0], {pageable.data(), state.tensors[0], 100}}) ==
            "memory to copy GPU tensors to is not pinned");
    REQUIRE(start({{state.copies[0].destination, pageable.data(), 100}}) ==
            "a tensor to copy from or to a GPU is not in GPU memory");
    void* elsewhere = fake_cuda::device_malloc(DEVICE + 1, 100);
    REQUIRE(start({{state.copies[0].destination, elsewhere, 100}}) == "a tensor to copy is on another GPU");
    fake_cuda::device_free(elsewhere);
    REQUIRE(copier.start({}, 0, 1).empty() && copier.start({{nullptr, nullptr, 0}}, 0, 1).empty());
    REQUIRE(copier.done());
    copier.wait();
    copier.hold(0);
}

void after_a_failure_nothing_is_in_flight() {
    State state(many_sizes());
    const TrainingStream training;
    for (const char* call : {"launch_gather", "cudaMemcpyBatchAsync", "cudaMemcpyAsync", "cudaEventRecord"}) {
        DeviceCopier copier(DEVICE);
        state.fill(training.stream, 8);
        fake_cuda::fail(call, 1);
        const std::string said =
            thrown_by<std::runtime_error>([&] { copier.start(state.copies, training.number(), 10'000); });
        fake_cuda::fail(nullptr, 0);
        if (said.empty()) continue;  // made once only, or not at all with this CUDA
        REQUIRE(said.find("as the test wants") != std::string::npos);
        REQUIRE(state.arrived(8, 0, 1));
    }
    const int handles = fake_cuda::handles();
    fake_cuda::fail("cudaEventCreateWithFlags", 0);
    REQUIRE(!thrown_by<std::runtime_error>([] { DeviceCopier copier(DEVICE); }).empty());
    fake_cuda::fail("cudaEventCreateWithFlags", 1);
    REQUIRE(!thrown_by<std::runtime_error>([] { Upload upload; }).empty());
    fake_cuda::fail(nullptr, 0);
    REQUIRE(fake_cuda::handles() == handles);
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

// Half to the GPU and half to the host. Buffers that are filled again too early would bring wrong bytes.
void reads_arrive_on_the_gpu(const std::string& folder) {
    const Stored stored(folder);
    const std::size_t half = stored.bytes.size() / 2 + 77;
    auto* tensor = static_cast<std::uint8_t*>(fake_cuda::device_malloc(DEVICE, half));
    Bytes rest(stored.bytes.size() - half);
    const int handles = fake_cuda::handles();
    for (int threads = 1; threads < 5; ++threads) {
        cudaSetDevice(DEVICE);
        fake_cuda::queue(nullptr, [=] { std::memset(tensor, 0, half); });  // an earlier user of that memory
        ReadJob job({stored.path}, {threads, 50'000, Stored::BLOCK, true, true});
        stored.add(job, {0, half, 1, 0, tensor, 0, true});
        stored.add(job, {half, rest.size(), 1, 0, rest.data(), 0, false});
        job.run();
        cudaStreamSynchronize(nullptr);  // too late for that user, had the job not waited
        REQUIRE(std::memcmp(tensor, stored.bytes.data(), half) == 0);
        REQUIRE(std::memcmp(rest.data(), stored.bytes.data() + half, rest.size()) == 0);
    }
    REQUIRE(fake_cuda::handles() <= handles + 1);  // the default stream, made above
    fake_cuda::device_free(tensor);
}

// Returns what the reading of `count` rows, one `stride` after the other, has called, if they arrive.
fake_cuda::Calls read_rows(const Stored& stored, std::size_t nbytes, std::size_t count, std::size_t stride) {
    constexpr std::size_t START = 7, SOURCE_STRIDE = 900;
    const std::size_t all = (count - 1) * stride + nbytes;
    auto* tensor = static_cast<std::uint8_t*>(fake_cuda::device_malloc(DEVICE, all));
    Bytes expected(all, 0xA5);
    std::memset(tensor, 0xA5, all);
    for (std::size_t row = 0; row < count; ++row) {
        std::memcpy(expected.data() + row * stride, stored.bytes.data() + START + row * SOURCE_STRIDE, nbytes);
    }
    ReadJob job({stored.path}, {2, 50'000, Stored::BLOCK, true, true});
    stored.add(job, {START, nbytes, count, SOURCE_STRIDE, tensor, stride, true});
    const auto before = fake_cuda::calls();
    job.run();
    const auto after = fake_cuda::calls();
    REQUIRE(std::memcmp(tensor, expected.data(), all) == 0);
    fake_cuda::device_free(tensor);
    return {0, after.copies - before.copies, after.copies_of_rows - before.copies_of_rows, 0};
}

// Of the 100 rows, in nine blocks, seven are cut by the end of a block.
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

void failed_uploads_are_told(const std::string& folder) {
    const Stored stored(folder);
    auto* tensor = static_cast<std::uint8_t*>(fake_cuda::device_malloc(DEVICE, stored.bytes.size()));
    for (const char* call : {"cudaHostRegister", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags",
                             "cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize"}) {
        for (const int before : {0, 1, 3}) {
            ReadJob job({stored.path}, {2, 50'000, Stored::BLOCK, true, true});
            stored.add(job, {0, stored.bytes.size(), 1, 0, tensor, 0, true});
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
    // One piece: once before its buffer is filled, and then only at the end.
    ReadJob job({stored.path}, {1, 4 * Stored::BLOCK, Stored::BLOCK, true, true});
    stored.add(job, {0, 1, 1, 0, tensor, 0, true});
    fake_cuda::fail("cudaEventSynchronize", 1);
    REQUIRE(!thrown_by<std::runtime_error>([&] { job.run(); }).empty());
    fake_cuda::fail(nullptr, 0);
    fake_cuda::device_free(tensor);
}

void gpu_destinations_are_checked() {
    void* here = fake_cuda::device_malloc(DEVICE, 10);
    void* there = fake_cuda::device_malloc(DEVICE + 1, 10);
    Bytes host(10);
    ReadJob job({"/nowhere"}, {1, 4096, 4096, true, true});
    const auto add = [&](void* destination) {
        auto* bytes = static_cast<std::uint8_t*>(destination);
        return thrown_by<std::invalid_argument>([&] { job.add(0, 0, 10, std::vector<std::uint32_t>{1}, {0, 10, 1, 0, bytes, 0, true}); });
    };
    REQUIRE(add(host.data()) == "a tensor to copy from or to a GPU is not in GPU memory");
    REQUIRE(add(here).empty());
    REQUIRE(add(there) == "destinations on several GPUs");
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
    small_ones_are_gathered_and_large_ones_go_in_one_call();
    closing_waits();
    memory_of_the_wrong_kind_is_refused();
    after_a_failure_nothing_is_in_flight();
    reads_arrive_on_the_gpu(arguments[1]);
    rows_of_a_block_go_to_the_gpu_in_one_call(arguments[1]);
    failed_uploads_are_told(arguments[1]);
    gpu_destinations_are_checked();
    return 0;
}
