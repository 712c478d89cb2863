// One open file. Each error tells what was being done, at which byte of which file, and the system's message.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "call_log.h"

namespace mcore_ckpt {

// O_DIRECT requires offsets, sizes and addresses to be multiples of a block. A page is enough for all file systems seen
// so far.
constexpr std::size_t PAGE_BYTES = 4096;

constexpr std::uint64_t page_floor(std::uint64_t offset) { return offset / PAGE_BYTES * PAGE_BYTES; }
constexpr std::uint64_t page_ceil(std::uint64_t offset) { return page_floor(offset + PAGE_BYTES - 1); }

// Python sees it as OSError(number, what(), path).
class FileError : public std::runtime_error {
  public:
    FileError(int number, const std::string& doing, const std::string& path, std::uint64_t offset);

    const int number;  // errno; ENODATA if the file ends too early
    const std::string path;
    const std::uint64_t offset;  // in bytes
};

// Several threads may read and write at the same time.
class File {
  public:
    // WRITE also allows to read. It creates the file if there is none, and keeps the bytes of an existing one.
    enum class Mode { READ, WRITE };

    // `direct`: bypass the page cache if the file is on a disk and the file system supports it. Some network file
    // systems do not. `calls`: notes each call to the system; it must outlive the file.
    File(const std::string& path, Mode mode, bool direct, CallLog* calls = nullptr);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    const std::string& path() const { return path_; }

    // Whether offsets, sizes and addresses must be multiples of PAGE_BYTES. It becomes false at the first read or write
    // that the file system refuses; this one is then repeated through the page cache.
    bool direct() const { return direct_.load(std::memory_order_acquire); }

    // Whether the file is on a file system in memory, without a disk.
    bool in_memory() const { return in_memory_; }

    std::uint64_t size() const;

    // Reserves disk space for `[offset, offset + nbytes)`, so that a full disk is found now and extents stay together.
    // Does nothing on a file system that cannot reserve space.
    void reserve(std::uint64_t offset, std::uint64_t nbytes);

    void write(const void* data, std::size_t nbytes, std::uint64_t offset);

    // Writes the pieces one after the other. Changes `pieces`.
    void write(std::vector<iovec>& pieces, std::uint64_t offset);

    // Reads `[offset, offset + nbytes)` or, if the file ends earlier, at least `least` bytes of it: O_DIRECT requires
    // to ask for the whole last page of a file. Returns the number of bytes read.
    std::size_t read(void* data, std::size_t nbytes, std::uint64_t offset, std::size_t least) const;

    // Asks the system to begin writing `[offset, offset + nbytes)` from the page cache to the disk. Does not wait.
    void start_writeback(std::uint64_t offset, std::uint64_t nbytes);

    // Maps `[offset, offset + nbytes)`, shared, at `address`, and replaces what was mapped there. Returns whether it
    // succeeded.
    bool map(void* address, std::size_t nbytes, std::uint64_t offset) const;

    void truncate(std::uint64_t size);

    // Waits until all bytes that any thread has written are on the disk.
    void sync();

  private:
    bool worth_another_try(int number, bool was_direct) const;
    bool open_again_without_direct() const;

    const std::string path_;
    CallLog* const calls_;
    int descriptor_ = -1;
    bool in_memory_ = false;
    mutable std::atomic<bool> direct_;
};

}  // namespace mcore_ckpt
