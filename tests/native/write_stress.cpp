// WriteJob without Python: random jobs, whose files are compared byte by byte. For scripts/sanitize.sh.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "crc32.h"
#include "device_copy.h"
#include "file_image.h"
#include "host_buffer.h"
#include "write_job.h"

using namespace mcore_ckpt;

// An event is a number that `arrived` must reach: stands in for the GPU.
namespace {
std::mutex arrival;
std::condition_variable arrivals;
std::uintptr_t arrived = 0;

// This event comes when later pieces of a job have been written, which they should not be, or after a while.
constexpr std::uintptr_t HELD_BACK = 1000000;
std::atomic<const WriteJob*> overtaking{nullptr};

void let_others_overtake() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
    while (overtaking.load()->progress() == 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
}

void arrive(std::uintptr_t event) {
    const std::lock_guard<std::mutex> lock(arrival);
    arrived = event;
    arrivals.notify_all();
}
}  // namespace

namespace mcore_ckpt {
void wait_for_event(std::uintptr_t event) {
    if (event == HELD_BACK) return let_others_overtake();
    std::unique_lock<std::mutex> lock(arrival);
    arrivals.wait(lock, [&] { return arrived >= event; });
}
void pin_memory(void*, std::size_t) {}
void unpin_memory(void*) noexcept {}
}  // namespace mcore_ckpt

namespace {

using Random = std::mt19937_64;
constexpr auto FOREVER = WriteJob::Clock::time_point::max();

void require(bool truth, const char* words) {
    if (truth) return;
    std::fprintf(stderr, "wrong: %s\n", words);
    std::exit(1);
}

std::uint64_t below(Random& random, std::uint64_t limit) { return random() % limit; }

// A file as it must be: `data` with the descriptors filled in, `image` without.
struct Expected {
    std::vector<std::uint64_t> offsets, sizes;
    std::vector<std::uint8_t> data;
    std::shared_ptr<const FileImage> image;

    explicit Expected(Random& random, std::uint64_t largest = 60000) {
        std::vector<std::int64_t> descriptors;
        std::vector<FileImage::Gap> gaps;
        const auto append = [&](std::size_t nbytes) {
            std::size_t at = data.size();
            data.resize(at + nbytes);
            for (; at < data.size(); at += sizeof(std::uint64_t)) {
                const std::uint64_t word = random();
                std::memcpy(&data[at], &word, std::min(sizeof word, data.size() - at));
            }
        };
        const auto gap = [&] {
            const std::size_t begin = data.size();
            append(4 + below(random, 60));
            gaps.emplace_back(begin, std::string(data.begin() + begin, data.end()));
        };
        gap();
        for (std::uint64_t left = below(random, 12); left != 0; --left) {
            offsets.push_back(data.size());
            sizes.push_back(below(random, 3) == 0 ? below(random, 200) : below(random, largest));
            append(sizes.back());
            descriptors.push_back(data.size());
            gap();
        }
        image = std::make_shared<FileImage>(offsets, sizes, descriptors, gaps, data.size(), 10000);
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            const std::uint32_t crc = crc32(data.data() + offsets[i], sizes[i], 0);
            put_descriptor(descriptors[i], crc, 0, data.size(), data.data());
        }
    }

    std::vector<const std::uint8_t*> sources() const {
        std::vector<const std::uint8_t*> found;
        for (const std::uint64_t offset : offsets) found.push_back(data.data() + offset);
        return found;
    }
};

// The slots arrive while the job is running; what is between them is 0.
void deliver(const Expected& expected, HostBuffer& buffer) {
    std::size_t event = 0;
    for (std::size_t i = 0; i < expected.offsets.size(); ++i) {
        std::copy_n(expected.data.data() + expected.offsets[i], expected.sizes[i], buffer.data() + expected.offsets[i]);
        arrive(++event);
    }
}

std::vector<std::uint8_t> contents(const std::string& path) {
    std::vector<std::uint8_t> bytes(std::filesystem::file_size(path));
    std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(bytes.data()), bytes.size());
    return bytes;
}

void check_file(const std::string& path, std::vector<std::uint8_t> data, const std::string& tail) {
    data.insert(data.end(), tail.begin(), tail.end());
    require(contents(path) == data, "the file has other bytes");
}

// Several files, each in two ranges that two jobs write; the patches and the tail come last.
void write_files(Random& random, const std::string& folder, std::size_t count, std::uint64_t largest,
                 std::size_t piece) {
    const bool direct = below(random, 2) == 0;
    std::vector<Expected> files;
    for (std::size_t i = 0; i < count; ++i) files.emplace_back(random, largest);
    WriteJob first(1 + below(random, 4), piece, direct), second(1 + below(random, 4), piece, direct);
    std::vector<std::uint64_t> cuts;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t end = files[i].data.size(), cut = page_floor(below(random, end + 1));
        const std::string path = folder + "/file" + std::to_string(i);
        cuts.push_back(cut);
        first.add_file({path, files[i].image, 0, cut, files[i].sources(), nullptr, {}});
        second.add_file({path, files[i].image, cut, end, files[i].sources(), nullptr, {}});
    }
    first.start();
    second.start();
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t end = files[i].data.size();
        const auto a = first.wait(i, FOREVER), b = second.wait(i, FOREVER);
        const auto blocks = files[i].image->join({0, cuts[i], end}, {*a, *b});
        const auto crcs = files[i].image->slot_crcs(blocks);
        require(files[i].image->file_crc(crcs) == crc32(files[i].data.data(), end, 0), "the CRC of a file");
        WriteJob::Patches patches;
        for (const auto& one : files[i].image->foreign_descriptors({0, cuts[i], end})) {
            patches.emplace_back(one.at, crcs[one.slot]);
        }
        if (cuts[i] != end) first.finish(i, std::nullopt, {});
        second.finish(i, "the end", patches);
        check_file(folder + "/file" + std::to_string(i), files[i].data, "the end");
    }
}

void write_small_files(Random& random, const std::string& folder) {
    write_files(random, folder, 1 + below(random, 4), 60000, PAGE_BYTES << below(random, 4));
}

// Large enough for huge pages, where the folder is in memory.
void write_a_large_file(Random& random, const std::string& folder) {
    write_files(random, folder, 1, std::uint64_t{3} << 20, HUGE_PAGE_BYTES);
}

void write_what_arrives(Random& random, const std::string& folder) {
    const Expected expected(random);
    HostBuffer buffer(expected.data.size());
    arrive(0);
    WriteJob job(3, PAGE_BYTES, below(random, 2) == 0);
    WriteJob::Range range{folder + "/file", expected.image, 0, expected.data.size(), {}, buffer.data(), {}};
    for (std::size_t i = 0; i < expected.offsets.size(); ++i) {
        range.ready.emplace_back(expected.offsets[i] + expected.sizes[i], i + 1);
    }
    job.add_file(range);
    job.start();
    require(job.times().first == 0, "all has arrived before it was sent");
    deliver(expected, buffer);
    job.wait(0, FOREVER);
    require((job.times().first > 0) == !expected.offsets.empty(), "when the last slot has arrived");
    job.finish(0, "", {});
    check_file(folder + "/file", expected.data, "");
}

// A tensor's first piece comes last: the piece that has its descriptor must wait for it.
void overtake(Random& random, const std::string& folder) {
    const std::uint64_t slot = PAGE_BYTES + 100, end = slot + 60;
    std::vector<std::uint8_t> data(end, 7);
    data[0] = static_cast<std::uint8_t>(random());
    const std::vector<FileImage::Gap> gaps{{slot, std::string(60, 7)}};
    const auto image = std::make_shared<FileImage>(std::vector<std::uint64_t>{0}, std::vector<std::uint64_t>{slot},
                                                   std::vector<std::int64_t>{static_cast<std::int64_t>(slot)}, gaps,
                                                   end, PAGE_BYTES);
    HostBuffer buffer(end);
    std::copy(data.begin(), data.end(), buffer.data());
    put_descriptor(slot, crc32(data.data(), slot, 0), 0, end, data.data());
    WriteJob job(2, PAGE_BYTES, false);
    overtaking = &job;
    job.add_file({folder + "/file", image, 0, end, {}, buffer.data(), {{PAGE_BYTES, HELD_BACK}, {end, 0}}});
    job.start();
    job.wait(0, FOREVER);
    job.finish(0, "", {});
    check_file(folder + "/file", data, "");
}

// Stopped at any time, by a cancel or by the destructor, while somebody is waiting; what has been waited for is there.
void stop_somewhere(Random& random, const std::string& folder) {
    const Expected expected(random);
    WriteJob job(3, PAGE_BYTES, false);
    for (int i = 0; i < 3; ++i) {
        const std::string path = folder + "/file" + std::to_string(i);
        job.add_file({path, expected.image, 0, expected.data.size(), expected.sources(), nullptr, {}});
    }
    job.start();
    std::thread waiting([&] {
        try {
            for (int i = 0; i < 3; ++i) {
                job.wait(i, FOREVER);
                job.finish(i, "", {});
                check_file(folder + "/file" + std::to_string(i), expected.data, "");
            }
        } catch (const std::runtime_error& error) {
            require(error.what() == std::string("cancelled") || std::strstr(error.what(), "closed"), error.what());
        }
    });
    for (std::uint64_t spins = below(random, 2000); spins != 0; --spins) job.progress();
    if (below(random, 2) == 0) job.cancel();
    job.close();
    waiting.join();
}

// The second of three files fails, at its opening or somewhere inside.
void fail_somewhere(Random& random, const std::string& folder) {
    const Expected expected(random);
    const bool missing = below(random, 2) == 0;
    WriteJob job(3, PAGE_BYTES, false);
    const std::uint64_t limit = std::uint64_t{1} << 20;
    rlimit before;
    getrlimit(RLIMIT_FSIZE, &before);
    const rlimit lower{limit, before.rlim_max};
    const std::string second = folder + (missing ? "/no folder/file" : "/file1");
    job.add_file({folder + "/file0", expected.image, 0, expected.data.size(), expected.sources(), nullptr, {}});
    if (missing) {
        job.add_file({second, expected.image, 0, expected.data.size(), expected.sources(), nullptr, {}});
    } else {
        const std::uint64_t size = limit + 8 * PAGE_BYTES;
        const std::vector<std::uint64_t> none;
        const std::vector<FileImage::Gap> gap{{0, std::string(size, 'x')}};
        const auto image = std::make_shared<FileImage>(none, none, std::vector<std::int64_t>(), gap, size, 4096);
        job.add_file({second, image, 0, size, {}, nullptr, {}});
    }
    job.add_file({folder + "/file2", expected.image, 0, expected.data.size(), expected.sources(), nullptr, {}});
    setrlimit(RLIMIT_FSIZE, &lower);
    job.start();
    job.wait(0, FOREVER);
    job.finish(0, "", {});
    check_file(folder + "/file0", expected.data, "");
    for (std::size_t file : {1, 2}) {
        try {
            job.wait(file, FOREVER);
            require(false, "the error is lost");
        } catch (const FileError& error) {
            require(error.number == (missing ? ENOENT : EFBIG) && error.path == second, error.what());
        }
    }
    setrlimit(RLIMIT_FSIZE, &before);
}

}  // namespace

// Arguments: a folder, seconds, a folder in memory.
int main(int, char** arguments) {
    std::signal(SIGXFSZ, SIG_IGN);
    const std::string folder = arguments[1];
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(arguments[2]));
    Random random(1);
    using Part = void (*)(Random&, const std::string&);
    const std::pair<Part, std::string> parts[] = {
        {write_small_files, folder}, {write_a_large_file, arguments[3]}, {write_what_arrives, folder},
        {overtake, folder},          {stop_somewhere, folder},           {fail_somewhere, folder},
    };
    std::size_t rounds = 0;
    for (; rounds < 4 || std::chrono::steady_clock::now() < until; ++rounds) {
        for (const auto& [part, place] : parts) {
            part(random, place);
            for (const auto& entry : std::filesystem::directory_iterator(place)) std::filesystem::remove(entry.path());
        }
    }
    std::printf("%zu rounds\n", rounds);
}
