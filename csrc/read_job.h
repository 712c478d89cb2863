// Reads ranges of files into memory. Every block that has a CRC is checked before a byte of it goes where it is wanted.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace mcore_ckpt {

// Becomes Python's DamagedBlock(read, offset, nbytes).
class DamagedBlock : public std::runtime_error {
  public:
    DamagedBlock(std::size_t read, std::uint64_t offset, std::size_t nbytes);

    const std::size_t read;  // the number that add() gave
    const std::uint64_t offset;
    const std::size_t nbytes;
};

// A job runs once.
class ReadJob {
  public:
    struct Settings {
        int threads;
        std::size_t piece_bytes;  // what one pread asks for at most, if that is not less than a block
        std::size_t block_bytes;
        bool direct;  // past the page cache
        bool pinned;  // whether destinations may be GPU memory
    };

    ReadJob(std::vector<std::string> paths, const Settings& settings);

    // Row k of `count` is the `nbytes` bytes of a tensor from byte `start + k * source_stride` on; it goes to
    // `destination + k * destination_stride`. A single row has no use for strides.
    struct Rows {
        std::size_t start, nbytes, count;
        std::size_t source_stride;
        std::uint8_t* destination;
        std::size_t destination_stride;
        bool on_device;
    };

    // A stored tensor: bytes [offset, offset + nbytes) of a file, with a CRC for each block, or nullopt where the file
    // has none. Returns the number of the read. Throws std::invalid_argument for what cannot be meant, such as rows
    // that overlap.
    std::size_t add(std::size_t file, std::uint64_t offset, std::size_t nbytes,
                    const std::optional<std::vector<std::uint32_t>>& crcs, Rows rows);

    // Returns when all is read. Throws the first error that any thread has met: FileError, DamagedBlock, what pinning
    // or uploading throws; std::runtime_error("cancelled") after cancel(). Nothing is in flight any more then,
    // either.
    void run();

    std::uint64_t progress() const { return bytes_read_; }
    void cancel() { cancelled_ = true; }
    std::size_t scratch_bytes() const;

  private:
    // A block that holds a byte of a row. Which rows those are is found out when it is there: there may be thousands in
    // each of thousands of blocks.
    struct Slice {
        std::size_t file;
        std::uint64_t offset;
        std::size_t nbytes;
        std::optional<std::uint32_t> crc;
        std::size_t read;
        std::size_t start;  // in the tensor
    };
    // Slices [first, last), and the bytes of the file that hold their blocks.
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
    const std::size_t most_bytes_;  // of a piece, in whole pages

    std::vector<Rows> reads_;
    std::vector<Slice> slices_;
    std::vector<Piece> pieces_;
    std::size_t buffer_bytes_ = 0;  // of the largest piece, in whole pages
    int device_ = -1;  // the GPU of all destinations that are on one

    std::atomic<bool> started_{false};
    std::atomic<bool> cancelled_{false};
    std::atomic<bool> failed_{false};
    std::atomic<std::size_t> next_piece_{0};
    std::atomic<std::uint64_t> bytes_read_{0};
    std::mutex error_mutex_;
    std::exception_ptr error_;
};

}  // namespace mcore_ckpt
