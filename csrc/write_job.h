// Writes ranges of files on threads of its own. Each piece of a file is copied, checked and written by one thread.
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

#include "call_log.h"
#include "event.h"
#include "file.h"
#include "file_layout.h"
#include "host_buffer.h"
#include "huge_extent.h"

namespace mcore_ckpt {

// All methods may be called from any thread. The first error of a file ends the job for this file and all later ones,
// and is thrown to each caller that asks for one of them. A job starts its own threads, because the threads of a pool
// would not exist in a forked child.
class WriteJob {
  public:
    using Clock = mcore_ckpt::Clock;
    using Crcs = FileLayout::Crcs;

    // The bytes [start, stop) of a file. The job keeps the owner, the buffer and the events alive until it is closed.
    struct Range {
        std::string path;
        std::shared_ptr<const FileLayout> layout;
        std::uint64_t start, stop;

        // Without a buffer: the address of the bytes of each slot, and what owns them (nullptr if the caller does).
        std::vector<const std::uint8_t*> sources = {};
        std::shared_ptr<const void> sources_owner = nullptr;
        // If some of these slots are on a GPU: which GPU, and which slots. Their bytes are copied piece by piece, so
        // that the job needs pinned memory for a piece of each thread, whatever the size of the range. All work that
        // writes to them must be done.
        int device = HostBuffer::NO_DEVICE;
        std::vector<bool> on_device = {};

        // With a buffer: all slots are in place in it, and the byte at `start` of the file is at `buffer_offset`.
        std::shared_ptr<HostBuffer> buffer = nullptr;
        std::size_t buffer_offset = 0;
        // Ascending (offset, event): the slots before the offset are in place when the event has happened.
        std::vector<std::pair<std::uint64_t, std::shared_ptr<const Event>>> ready = {};
    };

    // `device_seconds`: how long the job waits for a GPU that does nothing; then the files that need its bytes fail
    // with DeviceStuck.
    WriteJob(int threads, std::size_t piece_bytes, bool direct, double device_seconds);
    ~WriteJob();
    WriteJob(const WriteJob&) = delete;
    WriteJob& operator=(const WriteJob&) = delete;

    // Returns the file's number. Throws std::invalid_argument.
    std::size_t add_file(Range range);

    // Throws std::system_error where the system grants no thread at all.
    void start();

    // Waits until the range is written and returns the CRCs of its parts, or nullopt at `deadline`. Throws the file's
    // error, or std::runtime_error("cancelled").
    std::optional<Crcs> wait(std::size_t file, Clock::time_point deadline);

    // Writes the rest of a file, makes the file durable and closes it. The file ends after the tail, if there is one.
    // `patches` are (offset, CRC): descriptors that other writers could not fill in.
    using Patches = std::vector<std::pair<std::uint64_t, std::uint32_t>>;
    void finish(std::size_t file, const std::optional<std::string>& tail, const Patches& patches);

    std::uint64_t progress() const { return bytes_written_; }
    // Seconds from the start until the last byte was copied from the sources or the last event had happened, and until
    // the last write. The first is 0 if there are neither sources nor events.
    std::pair<double, double> times() const;

    // Makes the job wait for a GPU for at most so many seconds from now on.
    void limit_device_wait(double seconds) { device_seconds_ = seconds; }

    // The call to the system that has lasted longest, of those that are under way.
    std::optional<CallLog::Longest> longest_call() const { return calls_.longest(); }

    void cancel();
    // Cancels the job, waits for its threads, closes its files, and drops the buffers, owners and events.
    void close();

    // Whether this process is a forked child of the one that made the job. The child has none of the threads, and locks
    // may be held for ever. So the job must not be used or destroyed; most methods throw std::runtime_error.
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
    void arrived(Target& target, std::uint64_t before);
    bool wait_for_bytes(const Target& target, std::uint64_t end);
    bool wait_for_event(const Event& event, const Target& target);
    void fail(const Target& target) noexcept;
    void work();
    void watch_events();
    double seconds() const;

    const int thread_count_;
    const std::size_t piece_bytes_;
    const bool direct_;
    const pid_t process_;
    CallLog calls_;

    mutable std::mutex mutex_;            // guards the members below, and those of Target that say so
    std::condition_variable changed_;     // for the threads of the job
    std::condition_variable file_ended_;  // for callers that wait for a file
    std::vector<std::unique_ptr<Target>> targets_;
    std::size_t current_ = 0;  // the target whose pieces are being taken
    bool started_ = false;
    bool cancelled_ = false;
    std::exception_ptr error_;
    std::size_t failed_ = 0;  // the first file that the error concerns
    double copied_seconds_ = 0, written_seconds_ = 0;
    Clock::time_point start_time_;
    std::atomic<std::uint64_t> bytes_written_{0};
    std::atomic<double> device_seconds_;
    HugePageCredit huge_page_credit_;

    std::mutex joining_;
    std::vector<std::thread> threads_, watcher_;
};

}  // namespace mcore_ckpt
