// One open file. Every failure says what was being done, where in the file, and the system's error.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace mcore_ckpt {

// What O_DIRECT wants offsets, sizes and addresses to be multiples of: a page serves all file systems seen so far.
constexpr std::size_t PAGE_BYTES = 4096;

constexpr std::uint64_t page_floor(std::uint64_t offset) { return offset / PAGE_BYTES * PAGE_BYTES; }
constexpr std::uint64_t page_ceil(std::uint64_t offset) { return page_floor(offset + PAGE_BYTES - 1); }

// Becomes Python's OSError(number, what(), path).
class FileError : public std::runtime_error {
  public:
    FileError(int number, const std::string& doing, const std::string& path, std::uint64_t offset);

    const int number;  // errno; ENODATA where the file ends too early
    const std::string path;
    const std::uint64_t offset;  // in bytes
};

// Reads and writes may come from several threads at once.
class File {
  public:
    // WRITE reads, too; it makes the file if it is not there, and cuts nothing off one that is.
    enum class Mode { READ, WRITE };

    // `direct`: past the page cache where there is a disk behind it and the file system can (some network file
    // systems cannot).
    File(const std::string& path, Mode mode, bool direct);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    const std::string& path() const { return path_; }

    // Whether offsets, sizes and addresses must be multiples of PAGE_BYTES. Turns false at the first write or read
    // that the file system refuses, which is then done again through the page cache.
    bool direct() const { return direct_.load(std::memory_order_acquire); }

    // Whether there is no disk behind it.
    bool in_memory() const { return in_memory_; }

    std::uint64_t size() const;

    // Finds out now whether there is space on the disk for `[offset, offset + nbytes)`, and keeps extents together. Not
    // all file systems can; then nothing happens.
    void reserve(std::uint64_t offset, std::uint64_t nbytes);

    void write(const void* data, std::size_t nbytes, std::uint64_t offset);

    // The pieces one after the other; changes `pieces` while it is at it.
    void write(std::vector<iovec>& pieces, std::uint64_t offset);

    // At least `least` bytes of `[offset, offset + nbytes)`: with O_DIRECT the last page of a file is asked for
    // whole. Returns how many there were.
    std::size_t read(void* data, std::size_t nbytes, std::uint64_t offset, std::size_t least) const;

    // Asks the page cache to begin writing what it has of `[offset, offset + nbytes)`, without waiting.
    void start_writeback(std::uint64_t offset, std::uint64_t nbytes);

    // Maps `[offset, offset + nbytes)`, for all who have it open, over what is at `address`. Says whether it could.
    bool map(void* address, std::size_t nbytes, std::uint64_t offset) const;

    void truncate(std::uint64_t size);

    // Waits until all bytes written so far, by any thread, are on the disk.
    void sync();

  private:
    bool worth_another_try(int number, bool was_direct) const;

    const std::string path_;
    int descriptor_ = -1;
    bool in_memory_ = false;
    mutable std::atomic<bool> direct_;
};

}  // namespace mcore_ckpt
