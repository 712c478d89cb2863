// Reads ranges of files into memory. A block that has a CRC is checked before any byte of it is copied to a
// destination.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "call_log.h"
#include "event.h"
#include "host_buffer.h"

namespace mcore_ckpt {

// Python sees it as DamagedBlock(read, offset, nbytes).
class DamagedBlock : public std::runtime_error {
  public:
    DamagedBlock(std::size_t read, std::uint64_t offset, std::size_t nbytes);

    const std::size_t read;  // the number that add() gave
    const std::uint64_t offset;
    const std::size_t nbytes;
};

// A list of reads that is run once.
class ReadJob {
  public:
    struct Settings {
        int threads;
        std::size_t piece_bytes;  // the most that one pread asks for; at least a block is read at once
        std::size_t block_bytes;
        bool direct;            // bypass the page cache
        bool pinned;            // destinations may be in GPU memory
        double device_seconds;  // how long to wait for their GPU: for what is queued on it, and for each copy
    };

    ReadJob(std::vector<std::string> paths, const Settings& settings);

    // `count` rows of a tensor. Row k is the `nbytes` bytes from byte `start + k * source_stride` of the tensor on, and
    // is copied to `destination + k * destination_stride`. The strides of a single row are ignored.
    struct Rows {
        std::size_t start, nbytes, count;
        std::size_t source_stride;
        std::uint8_t* destination;
        std::size_t destination_stride;
        int device = HostBuffer::NO_DEVICE;           // the GPU of the destination; or it is in host memory
        std::shared_ptr<const void> owner = nullptr;  // keeps the destination alive; nullptr if the caller does
    };

    // Adds a read of rows of a stored tensor, which is bytes [offset, offset + nbytes) of a file. `crcs` has a CRC for
    // each block of the tensor; it is nullopt if the file has none. Returns the number of the read. Throws
    // std::invalid_argument for arguments that contradict each other, such as rows that overlap.
    std::size_t add(std::size_t file, std::uint64_t offset, std::size_t nbytes,
                    const std::optional<std::vector<std::uint32_t>>& crcs, Rows rows);

    // Returns when all rows have arrived. Throws the first error of any thread: FileError, DamagedBlock, an error of
    // pinning or of a copy to the GPU, DeviceStuck; or std::runtime_error("cancelled") after cancel(). Unless the GPU
    // hangs, nothing is in flight any more when it throws.
    void run();

    std::uint64_t progress() const { return bytes_read_; }
    // The call to the system that has lasted longest, of those that are under way.
    std::optional<CallLog::Longest> longest_call() const { return calls_.longest(); }
    void cancel() { cancelled_ = true; }
    std::size_t scratch_bytes() const;

  private:
    // A block that holds a byte of a row. The rows in it are computed when the block has been read, because there may
    // be thousands of rows in each of thousands of blocks.
    struct Slice {
        std::size_t file;
        std::uint64_t offset;
        std::size_t nbytes;
        std::optional<std::uint32_t> crc;
        std::size_t read;
        std::size_t start;  // in the tensor
    };
    // Slices [first, last), and the range of the file that holds their blocks.
    struct Piece {
        std::size_t file;
        std::uint64_t start, stop;
        std::size_t first, last;
    };
    class Lane;

    void refuse(std::size_t file, std::uint64_t offset, std::size_t nbytes, const std::optional<std::size_t>& crcs,
                const Rows& rows);
    void cut_into_pieces();
    void work() noexcept;
    void fail(std::exception_ptr error);

    const std::vector<std::string> paths_;
    const Settings settings_;
    CallLog calls_;
    const std::size_t most_bytes_;  // the size of the largest piece allowed, in whole pages

    std::vector<Rows> reads_;
    std::vector<Slice> slices_;
    std::vector<Piece> pieces_;
    std::size_t buffer_bytes_ = 0;        // the size of the largest piece, in whole pages
    int device_ = HostBuffer::NO_DEVICE;  // the GPU of the destinations; or all are in host memory

    std::atomic<bool> started_{false};
    std::atomic<bool> cancelled_{false};
    std::atomic<bool> failed_{false};
    std::atomic<std::size_t> next_piece_{0};
    std::atomic<std::uint64_t> bytes_read_{0};
    std::mutex error_mutex_;
    std::exception_ptr error_;
};

}  // namespace mcore_ckpt
