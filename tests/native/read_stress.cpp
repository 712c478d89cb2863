// Runs random ReadJobs without Python, some of them with damaged or cut files or cancelled. scripts/sanitize.sh builds
// and runs it.
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "buffer_cache.h"
#include "crc32.h"
#include "file.h"
#include "read_job.h"

namespace {

using namespace mcore_ckpt;
using Bytes = std::vector<std::uint8_t>;

constexpr std::uint8_t POISON = 0xA5;

std::mt19937_64 generator;

std::size_t below(std::size_t bound) { return generator() % bound; }

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "read_stress: %s\n", what);
    std::exit(1);
}

struct Tensor {
    std::uint64_t offset;
    std::size_t nbytes;
    std::vector<std::uint32_t> crcs;
};

struct Stored {
    std::string path;
    Bytes bytes;
    std::vector<Tensor> tensors;
};

void store(const std::string& path, const Bytes& bytes) {
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Stored make_file(const std::string& path, std::size_t block_bytes) {
    Stored file{path, {}, {}};
    std::size_t end = below(5000);
    for (std::size_t i = 0; i < 12; ++i) {
        const std::size_t nbytes = below(2) ? below(300) : below(200'000);
        file.tensors.push_back({end, nbytes, {}});
        end += nbytes + (below(2) ? 0 : below(90'000));
    }
    file.bytes.resize(end);
    for (auto& byte : file.bytes) byte = static_cast<std::uint8_t>(generator());
    for (Tensor& tensor : file.tensors) {
        tensor.crcs = crc32_blocks(file.bytes.data() + tensor.offset, tensor.nbytes, block_bytes, 1);
    }
    store(path, file.bytes);
    return file;
}

struct Wanted {
    std::size_t file, tensor;
    ReadJob::Rows rows;
    std::weak_ptr<Bytes> destination;  // the job owns it
};

// Random rows of a random tensor. There are none if the tensor is too small for one.
Wanted make_read(const std::vector<Stored>& files) {
    Wanted read{below(files.size()), 0, {}, {}};
    const std::vector<Tensor>& tensors = files[read.file].tensors;
    read.tensor = below(tensors.size());
    const std::size_t nbytes = tensors[read.tensor].nbytes;
    ReadJob::Rows& rows = read.rows;
    rows.start = below(nbytes + 1);
    const std::size_t left = nbytes - rows.start;
    rows.nbytes = below(below(2) ? left + 1 : std::min<std::size_t>(left, 300) + 1);
    rows.source_stride = rows.nbytes + (below(4) ? below(below(2) ? 100 : 30'000) : 0);
    rows.destination_stride = rows.nbytes + (below(4) ? below(100) : 0);
    rows.count = rows.nbytes == 0 ? below(2) : 1 + below((left - rows.nbytes) / rows.source_stride + 1);
    const bool empty = rows.nbytes == 0 || rows.count == 0;
    const std::size_t space = empty ? 0 : (rows.count - 1) * rows.destination_stride + rows.nbytes;
    const auto destination = std::make_shared<Bytes>(space, POISON);
    rows.destination = destination->data();
    rows.owner = destination;
    read.destination = destination;
    return read;
}

// Checks that each byte is the file's, or, unless `all` is set, has not arrived.
void require_right_or_none(const std::vector<Wanted>& reads, const std::vector<Stored>& files, bool all) {
    for (const Wanted& read : reads) {
        const auto destination = read.destination.lock();
        require(destination != nullptr, "the job does not own its destinations");
        const Stored& file = files[read.file];
        const std::uint8_t* tensor = file.bytes.data() + file.tensors[read.tensor].offset;
        for (std::size_t i = 0; i < destination->size(); ++i) {
            const std::uint8_t got = (*destination)[i];
            const std::size_t row = i / read.rows.destination_stride, column = i % read.rows.destination_stride;
            const std::size_t at = read.rows.start + row * read.rows.source_stride + column;
            const std::uint8_t right = column < read.rows.nbytes ? tensor[at] : POISON;
            require(got == right || (!all && got == POISON), "a byte that is not the file's");
        }
    }
}

enum class Trouble { NONE, DAMAGE, CUT, CANCEL };

void one_round(const std::string& folder) {
    const std::size_t block_bytes = 1 + below(20'000);
    std::vector<Stored> files;
    for (std::size_t i = 0; i < 3; ++i) files.push_back(make_file(folder + "/" + std::to_string(i), block_bytes));

    std::vector<std::string> paths;
    for (const Stored& file : files) paths.push_back(file.path);
    const int threads = static_cast<int>(1 + below(6));
    ReadJob job(paths, {threads, below(200'000), block_bytes, below(2) == 0, false, FOREVER_S});
    const auto trouble = static_cast<Trouble>(below(4));
    std::vector<Wanted> reads(below(40));
    for (Wanted& read : reads) {
        read = make_read(files);
        const Tensor& tensor = files[read.file].tensors[read.tensor];
        // A read without CRCs would accept damaged bytes.
        const bool checked = trouble == Trouble::DAMAGE || below(4) != 0;
        const auto crcs = checked ? std::make_optional(tensor.crcs) : std::nullopt;
        job.add(read.file, tensor.offset, tensor.nbytes, crcs, read.rows);
        read.rows.owner = nullptr;
    }

    Stored& victim = files[below(files.size())];
    if (trouble == Trouble::DAMAGE) {
        Bytes damaged = victim.bytes;
        damaged[below(damaged.size())] ^= 1;
        store(victim.path, damaged);
    } else if (trouble == Trouble::CUT) {
        require(::truncate(victim.path.c_str(), below(victim.bytes.size())) == 0, "truncate");
    }
    std::thread canceller;
    if (trouble == Trouble::CANCEL) canceller = std::thread([&job] { job.cancel(); });

    bool done = false;
    try {
        job.run();
        done = true;
    } catch (const DamagedBlock& error) {
        require(trouble == Trouble::DAMAGE, error.what());
    } catch (const FileError& error) {
        require(trouble == Trouble::CUT && error.number == ENODATA, error.what());
    } catch (const std::runtime_error& error) {
        require(trouble == Trouble::CANCEL && std::string(error.what()) == "cancelled", error.what());
    }
    if (canceller.joinable()) canceller.join();
    require(done || trouble != Trouble::NONE, "the job failed for no reason");
    require_right_or_none(reads, files, done);
}

void buffers_are_used_again() {
    constexpr std::size_t MEBIBYTE = std::size_t{1} << 20;
    BufferCache& cache = BufferCache::of_this_process();
    cache.free_idle();
    const std::uint8_t* first = cache.take(3 * MEBIBYTE, HostBuffer::NO_DEVICE)->data();
    require(cache.take(2 * MEBIBYTE, HostBuffer::NO_DEVICE)->data() == first, "a larger buffer is not used again");
    {
        const auto one = cache.take(MEBIBYTE, HostBuffer::NO_DEVICE),
                   other = cache.take(MEBIBYTE, HostBuffer::NO_DEVICE);
        require(one->data() == first && other->data() != first, "two owners have the same buffer");
    }
    require(cache.free_idle() == 4 * MEBIBYTE && cache.free_idle() == 0, "the idle buffers");
    for (std::size_t size = 1; size < 40; ++size) cache.take(size * MEBIBYTE, HostBuffer::NO_DEVICE);
    require(cache.free_idle() == 39 * MEBIBYTE, "jobs of growing sizes fill the cache");
}

void idle_buffers_are_bounded() {
    BufferCache& cache = BufferCache::of_this_process();
    std::vector<std::shared_ptr<HostBuffer>> buffers;
    while (buffers.size() < 5) buffers.push_back(cache.take(BufferCache::MOST_IDLE_BYTES / 4, HostBuffer::NO_DEVICE));
    buffers.clear();
    require(cache.free_idle() == BufferCache::MOST_IDLE_BYTES / 4 * 4, "the bound");
    cache.take(BufferCache::MOST_IDLE_BYTES + 1, HostBuffer::NO_DEVICE);
    require(cache.free_idle() == 0, "a buffer beyond the bound");
}

// The child has a cache of its own, also while another thread of the parent holds the lock of the parent's cache.
void a_forked_child_begins_with_an_empty_cache() {
    BufferCache& cache = BufferCache::of_this_process();
    auto kept = cache.take(1, HostBuffer::NO_DEVICE);
    cache.take(PAGE_BYTES, HostBuffer::NO_DEVICE);
    std::atomic<bool> stop{false};
    std::thread busy([&] {
        while (!stop) cache.take(PAGE_BYTES, HostBuffer::NO_DEVICE);
    });
    for (int i = 0; i < 20; ++i) {
        const pid_t child = ::fork();
        if (child == 0) {
            BufferCache& own = BufferCache::of_this_process();
            const bool empty = own.free_idle() == 0;
            own.take(PAGE_BYTES, HostBuffer::NO_DEVICE);
            kept.reset();
            ::_exit(empty && own.free_idle() == PAGE_BYTES ? 0 : 1);
        }
        int status = 0;
        require(::waitpid(child, &status, 0) == child && status == 0, "the cache of a forked child");
    }
    stop = true;
    busy.join();
}

}  // namespace

// Arguments: a folder, seconds.
int main(int, char** arguments) {
    buffers_are_used_again();
    idle_buffers_are_bounded();
    a_forked_child_begins_with_an_empty_cache();
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(arguments[2]));
    std::size_t rounds = 0;
    for (; rounds < 4 || std::chrono::steady_clock::now() < until; ++rounds) one_round(arguments[1]);
    std::printf("%zu rounds\n", rounds);
}
