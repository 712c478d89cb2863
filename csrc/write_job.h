// Ranges of files on their way to the disk, on threads of their own: copied, checked and written piece by piece.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "file.h"
#include "file_image.h"
#include "huge_extent.h"

namespace mcore_ckpt {

// All methods may be called from any thread. The first error of a file ends the job for it and for all later files;
// whoever asks for one of these gets it. Threads live as long as the job: a pool would be gone in the child of a
// fork.
class WriteJob {
  public:
    using Clock = std::chrono::steady_clock;
    using Crcs = FileImage::Crcs;

    // The bytes [start, stop) of a file.
    struct Range {
        std::string path;
        std::shared_ptr<const FileImage> image;
        std::uint64_t start, stop;
        std::vector<const std::uint8_t*> sources;  // one for each slot, or none at all: then `buffer` has them in place
        std::uint8_t* buffer;                      // where the byte at `start` is
        // (offset, event), ascending: what is before the offset is in place when the event has happened.
        std::vector<std::pair<std::uint64_t, std::uintptr_t>> ready;
    };

    WriteJob(int threads, std::size_t piece_bytes, bool direct);
    ~WriteJob();
    WriteJob(const WriteJob&) = delete;
    WriteJob& operator=(const WriteJob&) = delete;

    // Returns the file's number. Throws std::invalid_argument.
    std::size_t add_file(Range range);

    // Throws std::system_error where the system grants no thread at all.
    void start();

    // The CRCs of the range's parts once they are written, nothing if that is not before `deadline`. Throws the
    // file's error, std::runtime_error("cancelled").
    std::optional<Crcs> wait(std::size_t file, Clock::time_point deadline);

    // Writes what is left of a file, makes it durable and closes it. With a tail, the file ends after it. `patches`:
    // (offset, CRC).
    using Patches = std::vector<std::pair<std::uint64_t, std::uint32_t>>;
    void finish(std::size_t file, const std::optional<std::string>& tail, const Patches& patches);

    std::uint64_t progress() const { return bytes_written_; }
    // Seconds from the start until the last byte was taken from the sources, or the last event had happened (0: there
    // are none), and until the last write.
    std::pair<double, double> times() const;

    void cancel();
    void close();

    // Whether this is a forked child, which has none of the threads, and locks that nobody will ever release: such a
    // job can only be left alone, not even be destroyed. Most methods throw std::runtime_error.
    bool forked() const;

  private:
    struct Target;
    struct Piece {
        Target* target;
        std::size_t number;
        std::uint64_t begin, end;
    };
    class Worker;
    using Lock = std::unique_lock<std::mutex>;

    void require_same_process() const;
    Target& at(std::size_t file) const;
    std::optional<Piece> take();
    std::size_t piece_bytes_of(const File& file) const;
    void open(Target& target);
    bool stopped(const Target& target) const;
    void throw_if_stopped(const Target& target) const;
    bool publish(const Piece& piece, Crcs crcs, bool copied, bool in_turn);
    void written(const Piece& piece, bool copied);
    void arrived(Target& target);
    void fail(const Target& target) noexcept;
    void work();
    void watch_events();
    double seconds() const;

    const int thread_count_;
    const std::size_t piece_bytes_;
    const bool direct_;
    const pid_t process_;

    mutable std::mutex mutex_;            // guards all below, and what says so in Target
    std::condition_variable changed_;     // for the threads of the job
    std::condition_variable file_ended_;  // for those who wait for a file
    std::vector<std::unique_ptr<Target>> targets_;
    std::size_t current_ = 0;  // the target whose pieces are being taken
    bool started_ = false;
    bool cancelled_ = false;
    std::exception_ptr error_;
    std::size_t failed_ = 0;  // the first file that it concerns
    double copied_seconds_ = 0, written_seconds_ = 0;
    Clock::time_point start_time_;
    std::atomic<std::uint64_t> bytes_written_{0};
    HugePageCredit huge_page_credit_;

    std::mutex joining_;
    std::vector<std::thread> threads_, watcher_;
};

}  // namespace mcore_ckpt
