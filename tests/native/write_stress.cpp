// Runs random WriteJobs without Python and compares their files byte by byte. scripts/sanitize.sh builds and runs it.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
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
#include "event.h"
#include "file_layout.h"
#include "host_buffer.h"
#include "write_job.h"

using namespace mcore_ckpt;

namespace {

std::mutex arrival;
std::uintptr_t arrived = 0;

// Replaces an event of a GPU: it happens when `arrived` reaches its number.
class NumberedEvent final : public Event {
  public:
    explicit NumberedEvent(std::uintptr_t number) : number_(number) {}
    bool happened() const override {
        const std::lock_guard<std::mutex> lock(arrival);
        return arrived >= number_;
    }
    int device() const override { return 0; }

  private:
    const std::uintptr_t number_;
};

// Happens when a later piece of a job has been written, which is an error, or after 20 ms.
class HeldBackEvent final : public Event {
  public:
    explicit HeldBackEvent(const WriteJob& job) : job_(job) {}
    bool happened() const override { return job_.progress() != 0 || Clock::now() >= until_; }
    int device() const override { return 0; }

  private:
    const WriteJob& job_;
    const Clock::time_point until_ = Clock::now() + std::chrono::milliseconds(20);
};

void arrive(std::uintptr_t event) {
    const std::lock_guard<std::mutex> lock(arrival);
    arrived = event;
}

using Random = std::mt19937_64;
constexpr auto FOREVER = WriteJob::Clock::time_point::max();

void require(bool truth, const char* words) {
    if (truth) return;
    std::fprintf(stderr, "wrong: %s\n", words);
    std::exit(1);
}

std::uint64_t below(Random& random, std::uint64_t limit) { return random() % limit; }

// The expected contents of a file. `data` has the descriptors filled in, `layout` does not.
struct Expected {
    std::vector<std::uint64_t> offsets, sizes;
    std::vector<std::uint8_t> data;
    std::shared_ptr<const FileLayout> layout;

    explicit Expected(Random& random, std::uint64_t largest = 60000) {
        std::vector<std::int64_t> descriptors;
        std::vector<FileLayout::Gap> gaps;
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
        layout = std::make_shared<FileLayout>(offsets, sizes, descriptors, gaps, data.size(), 10000);
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

// Copies the slots into the buffer while the job is running. The gaps stay 0.
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

// Writes several files. Each consists of two ranges that two jobs write; the patches and the tail come last.
void write_files(Random& random, const std::string& folder, std::size_t count, std::uint64_t largest,
                 std::size_t piece) {
    const bool direct = below(random, 2) == 0;
    std::vector<Expected> files;
    for (std::size_t i = 0; i < count; ++i) files.emplace_back(random, largest);
    WriteJob first(1 + below(random, 4), piece, direct, FOREVER_S);
    WriteJob second(1 + below(random, 4), piece, direct, FOREVER_S);
    std::vector<std::uint64_t> cuts;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t end = files[i].data.size(), cut = page_floor(below(random, end + 1));
        const std::string path = folder + "/file" + std::to_string(i);
        cuts.push_back(cut);
        first.add_file({path, files[i].layout, 0, cut, files[i].sources()});
        second.add_file({path, files[i].layout, cut, end, files[i].sources()});
    }
    first.start();
    second.start();
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t end = files[i].data.size();
        const auto a = first.wait(i, FOREVER), b = second.wait(i, FOREVER);
        const auto blocks = files[i].layout->join({0, cuts[i], end}, {*a, *b});
        const auto crcs = files[i].layout->slot_crcs(blocks);
        require(files[i].layout->file_crc(crcs) == crc32(files[i].data.data(), end, 0), "the CRC of a file");
        WriteJob::Patches patches;
        for (const auto& one : files[i].layout->foreign_descriptors({0, cuts[i], end})) {
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

// A file that is large enough for huge pages, if the folder is in memory.
void write_a_large_file(Random& random, const std::string& folder) {
    write_files(random, folder, 1, std::uint64_t{3} << 20, HUGE_PAGE_BYTES);
}

void write_what_arrives(Random& random, const std::string& folder) {
    const Expected expected(random);
    const auto buffer = std::make_shared<HostBuffer>(expected.data.size());
    arrive(0);
    WriteJob job(3, PAGE_BYTES, below(random, 2) == 0, FOREVER_S);
    WriteJob::Range range{folder + "/file", expected.layout, 0, expected.data.size()};
    range.buffer = buffer;
    for (std::size_t i = 0; i < expected.offsets.size(); ++i) {
        range.ready.emplace_back(expected.offsets[i] + expected.sizes[i], std::make_shared<NumberedEvent>(i + 1));
    }
    job.add_file(range);
    job.start();
    require(job.times().first == 0, "all has arrived before it was sent");
    deliver(expected, *buffer);
    job.wait(0, FOREVER);
    require((job.times().first > 0) == !expected.offsets.empty(), "when the last slot has arrived");
    job.finish(0, "", {});
    check_file(folder + "/file", expected.data, "");
}

// The first piece of a tensor arrives last. The piece that contains the tensor's descriptor must wait for it.
void overtake(Random& random, const std::string& folder) {
    const std::uint64_t slot = PAGE_BYTES + 100, end = slot + 60;
    std::vector<std::uint8_t> data(end, 7);
    data[0] = static_cast<std::uint8_t>(random());
    const std::vector<FileLayout::Gap> gaps{{slot, std::string(60, 7)}};
    const auto layout =
        std::make_shared<FileLayout>(std::vector<std::uint64_t>{0}, std::vector<std::uint64_t>{slot},
                                     std::vector<std::int64_t>{static_cast<std::int64_t>(slot)}, gaps, end, PAGE_BYTES);
    const auto buffer = std::make_shared<HostBuffer>(end);
    std::copy(data.begin(), data.end(), buffer->data());
    put_descriptor(slot, crc32(data.data(), slot, 0), 0, end, data.data());
    WriteJob job(2, PAGE_BYTES, false, FOREVER_S);
    WriteJob::Range range{folder + "/file", layout, 0, end};
    range.buffer = buffer;
    range.ready = {{PAGE_BYTES, std::make_shared<HeldBackEvent>(job)}, {end, std::make_shared<NumberedEvent>(0)}};
    job.add_file(range);
    job.start();
    job.wait(0, FOREVER);
    job.finish(0, "", {});
    check_file(folder + "/file", data, "");
}

// Stops a job at a random time, by cancel() or close(), while another thread waits. The files that it waited for are
// complete.
void stop_somewhere(Random& random, const std::string& folder) {
    const Expected expected(random);
    WriteJob job(3, PAGE_BYTES, false, FOREVER_S);
    for (int i = 0; i < 3; ++i) {
        const std::string path = folder + "/file" + std::to_string(i);
        job.add_file({path, expected.layout, 0, expected.data.size(), expected.sources()});
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

// The second of three files fails, when it is opened or somewhere inside it.
void fail_somewhere(Random& random, const std::string& folder) {
    const Expected expected(random);
    const bool missing = below(random, 2) == 0;
    WriteJob job(3, PAGE_BYTES, false, FOREVER_S);
    const std::uint64_t limit = std::uint64_t{1} << 20;
    rlimit before;
    getrlimit(RLIMIT_FSIZE, &before);
    const rlimit lower{limit, before.rlim_max};
    const std::string second = folder + (missing ? "/no folder/file" : "/file1");
    job.add_file({folder + "/file0", expected.layout, 0, expected.data.size(), expected.sources()});
    if (missing) {
        job.add_file({second, expected.layout, 0, expected.data.size(), expected.sources()});
    } else {
        const std::uint64_t size = limit + 8 * PAGE_BYTES;
        const std::vector<std::uint64_t> none;
        const std::vector<FileLayout::Gap> gap{{0, std::string(size, 'x')}};
        const auto layout = std::make_shared<FileLayout>(none, none, std::vector<std::int64_t>(), gap, size, 4096);
        job.add_file({second, layout, 0, size});
    }
    job.add_file({folder + "/file2", expected.layout, 0, expected.data.size(), expected.sources()});
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

// The caller drops everything that a job was given right after its start, and the job still writes the right bytes.
// After close() the job holds nothing any more.
void drop_all_that_a_job_uses(Random& random, const std::string& folder) {
    auto expected = std::make_unique<Expected>(random);
    const std::uint64_t end = expected->data.size();
    const std::vector<std::uint8_t> data = expected->data;
    auto buffer = std::make_shared<HostBuffer>(PAGE_BYTES + end);
    auto event = std::make_shared<NumberedEvent>(1);
    auto owner = std::make_shared<std::vector<std::uint8_t>>(expected->data);
    const std::weak_ptr<void> dropped[] = {buffer, event, owner};
    arrive(0);

    WriteJob job(2, PAGE_BYTES, below(random, 2) == 0, FOREVER_S);
    WriteJob::Range in_place{folder + "/file0", expected->layout, 0, end};
    in_place.buffer = buffer;
    in_place.buffer_offset = PAGE_BYTES;
    in_place.ready = {{end, event}};
    job.add_file(std::move(in_place));
    WriteJob::Range from_sources{folder + "/file1", expected->layout, 0, end};
    for (const std::uint64_t offset : expected->offsets) from_sources.sources.push_back(owner->data() + offset);
    from_sources.sources_owner = owner;
    job.add_file(std::move(from_sources));
    job.start();
    for (std::size_t i = 0; i < expected->offsets.size(); ++i) {
        std::uint8_t* slot = buffer->data() + PAGE_BYTES + expected->offsets[i];
        std::copy_n(expected->data.data() + expected->offsets[i], expected->sizes[i], slot);
    }
    expected.reset();
    buffer.reset();
    event.reset();
    owner.reset();
    arrive(1);
    for (const std::size_t file : {0, 1}) {
        job.wait(file, FOREVER);
        job.finish(file, "", {});
        check_file(folder + "/file" + std::to_string(file), data, "");
    }
    for (const auto& one : dropped) require(!one.expired(), "the job does not own what it uses");
    job.close();
    for (const auto& one : dropped) require(one.expired(), "a closed job keeps memory");
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
        {write_small_files, folder},        {write_a_large_file, arguments[3]},
        {write_what_arrives, folder},       {overtake, folder},
        {stop_somewhere, folder},           {fail_somewhere, folder},
        {drop_all_that_a_job_uses, folder},
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
