// Copies, write jobs, read jobs and the gather kernel on the emulated CUDA, with random delays, in random sizes. Every
// byte is compared. For the sanitizers: stress FOLDER ROUNDS.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda_support.h"
#include "device_copy.h"
#include "file_layout.h"
#include "gather.h"
#include "host_buffer.h"
#include "read_job.h"
#include "write_job.h"

extern "C" void emulated_set_device(int device);
extern "C" std::size_t emulated_report(char* text, std::size_t size);

namespace {

using namespace mcore_ckpt;
using Bytes = std::vector<std::uint8_t>;

constexpr int DEVICE = 2;  // not 0, the GPU of a thread that does not choose one
constexpr std::size_t BLOCK = 10'000;

#define REQUIRE(condition)                                                         \
    if (!(condition)) {                                                            \
        std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition); \
        std::exit(1);                                                              \
    }

Bytes random_bytes(std::mt19937_64& random, std::size_t nbytes) {
    Bytes bytes(nbytes);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    return bytes;
}

// A tensor that ends where its memory ends, so that AddressSanitizer sees a read beyond it.
struct Tensor {
    Tensor(std::mt19937_64& random, std::size_t nbytes)
        : skip(random() % 33), memory(random_bytes(random, skip + nbytes)) {}
    std::uint8_t* data() { return memory.data() + skip; }
    std::size_t nbytes() const { return memory.size() - skip; }

    std::size_t skip;
    Bytes memory;
};

std::vector<Tensor> random_tensors(std::mt19937_64& random) {
    std::vector<Tensor> tensors;
    const std::size_t count = 1 + random() % 200;
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t sizes[] = {1,      random() % 40 + 1, random() % 4096 + 1, 16'384, 65'535,
                                     65'536, random() % 90'000};
        tensors.emplace_back(random, sizes[random() % (i % 10 == 0 ? 7 : 4)]);
    }
    return tensors;
}

// A file with the tensors one after the other.
struct Image {
    explicit Image(std::vector<Tensor>& tensors) {
        std::vector<std::uint64_t> offsets, sizes;
        for (auto& tensor : tensors) {
            offsets.push_back(bytes.size());
            sizes.push_back(tensor.nbytes());
            copies.push_back({bytes.size(), tensor.data(), tensor.nbytes()});
            bytes.insert(bytes.end(), tensor.data(), tensor.data() + tensor.nbytes());
        }
        layout = std::make_shared<FileLayout>(offsets, sizes, std::vector<std::int64_t>(sizes.size(), -1),
                                              std::vector<FileLayout::Gap>(), bytes.size(), BLOCK);
    }

    bool is_in(const std::string& path) const {
        std::ifstream file(path, std::ios::binary);
        return Bytes{std::istreambuf_iterator<char>(file), {}} == bytes;
    }

    Bytes bytes;
    std::vector<DeviceCopier::ToBuffer> copies;
    std::shared_ptr<FileLayout> layout;
};

void finish(WriteJob& job) {
    job.start();
    REQUIRE(job.wait(0, Clock::time_point::max()));
    job.finish(0, "", {});
    job.close();
}

// A lazy save: the training changes its tensors while they are written, after hold().
void write_while_training(DeviceCopier& copier, std::mt19937_64& random, const std::string& path) {
    auto tensors = random_tensors(random);
    const Image image(tensors);
    const std::size_t space = image.bytes.size() + 1;
    std::shared_ptr<HostBuffer> buffer = HostBuffer::reserve(space, DEVICE, HostBuffer::ANY_NODE);
    buffer->pin(random() % space);
    buffer->pin(space);
    WriteJob::Range range{path, image.layout, 0, image.bytes.size()};
    for (auto& [count, event] : copier.start(buffer, image.copies, 0, 50'000)) {
        const bool last = count == image.copies.size();
        range.ready.emplace_back(last ? image.bytes.size() : image.copies[count].offset, event);
    }
    range.buffer = std::move(buffer);
    WriteJob job(3, PAGE_BYTES, false, FOREVER_S);
    job.add_file(std::move(range));
    std::thread writing([&] { finish(job); });
    copier.hold(0, FOREVER_S);
    for (auto& tensor : tensors) std::memset(tensor.data(), 0xEE, tensor.nbytes());
    writing.join();
    copier.wait(FOREVER_S);
    REQUIRE(image.is_in(path));
}

// A synchronous save, with half of the tensors in host memory, and a load of what it has written.
void write_and_read(std::mt19937_64& random, const std::string& path) {
    auto tensors = random_tensors(random);
    const Image image(tensors);
    WriteJob::Range range{path, image.layout, 0, image.bytes.size()};
    range.device = DEVICE;
    for (auto& tensor : tensors) {
        range.sources.push_back(tensor.data());
        range.on_device.push_back(random() % 2 == 0);
    }
    WriteJob job(4, 4 * PAGE_BYTES, false, FOREVER_S);
    job.add_file(std::move(range));
    finish(job);
    REQUIRE(image.is_in(path));

    Bytes loaded(image.bytes.size());
    ReadJob read({path}, {3, 50'000, BLOCK, true, true, FOREVER_S});
    read.add(0, 0, loaded.size(), {}, {0, loaded.size(), 1, 0, loaded.data(), 0, DEVICE});
    read.run();
    REQUIRE(loaded == image.bytes);
}

// The kernel writes the rows, and nothing between them.
void gather_rows(std::mt19937_64& random) {
    GatherTable table{};
    const std::size_t count = 1 + random() % GatherTable::ROWS;
    std::vector<Tensor> rows;
    std::vector<std::size_t> starts;
    std::size_t end = random() % 33;
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t sizes[] = {1, random() % 40 + 1, random() % 4096 + 1, 16'383, 16'385, 32'768, 65'535};
        rows.emplace_back(random, sizes[random() % 7]);
        starts.push_back(end);
        end += rows.back().nbytes() + random() % 40;
    }
    const std::shared_ptr<HostBuffer> to = std::make_shared<HostBuffer>(end, DEVICE);
    std::memset(to->data(), 0xA5, end);
    Bytes expected(end, 0xA5);
    for (std::size_t i = 0; i < count; ++i) {
        table.rows[i] = {to->data() + starts[i], rows[i].data(), rows[i].nbytes()};
        std::memcpy(expected.data() + starts[i], rows[i].data(), rows[i].nbytes());
    }
    table.count = count;
    const auto stream = reinterpret_cast<cudaStream_t>(side_stream(DEVICE));
    REQUIRE(launch_gather(table, stream) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    REQUIRE(std::memcmp(to->data(), expected.data(), end) == 0);
}

// A process that has not used a GPU does not initialize it by waiting for it.
void waiting_makes_no_context() {
    wait_for_device(DEVICE + 1, 1.0);
    std::string report(1 << 16, ' ');
    emulated_report(report.data(), report.size());
    REQUIRE(report.find("context " + std::to_string(DEVICE + 1)) == std::string::npos);
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) return 2;
    const std::string path = std::string(arguments[1]) + "/file";
    emulated_set_device(DEVICE);
    waiting_makes_no_context();
    std::mt19937_64 random(7);
    DeviceCopier copier(DEVICE, side_stream(DEVICE));
    for (int round = 0; round < std::atoi(arguments[2]); ++round) {
        write_while_training(copier, random, path);
        write_and_read(random, path);
        if (round % 10 == 0) gather_rows(random);
    }
    copier.close(FOREVER_S);
    return 0;
}
