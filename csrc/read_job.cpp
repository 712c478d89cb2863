// Reads the pieces of a job on several threads, checks their blocks and copies the rows.
#include "read_job.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

#include "buffer_cache.h"
#include "crc32.h"
#include "device_copy.h"
#include "file.h"
#include "host_buffer.h"
#include "host_copy.h"
#include "parallel.h"

namespace mcore_ckpt {
namespace {

// Two blocks with a gap of at most this size are read at once: reading the gap takes less time than a second call.
constexpr std::size_t GAP_BYTES = std::size_t{64} << 10;

std::string range(std::uint64_t start, std::uint64_t stop) {
    return "[" + std::to_string(start) + ", " + std::to_string(stop) + ")";
}

std::string words(const ReadJob::Rows& rows) {
    const std::string nbytes = std::to_string(rows.nbytes) + " bytes from byte " + std::to_string(rows.start) + " on";
    return rows.count == 1 ? nbytes : std::to_string(rows.count) + " rows of " + nbytes;
}

// Whether the last row ends at most `limit` bytes after the first begins.
bool fit(const ReadJob::Rows& rows, std::size_t stride, std::size_t limit) {
    return rows.nbytes <= limit && (rows.count == 1 || rows.count - 1 <= (limit - rows.nbytes) / stride);
}

// The number of rows that begin before byte `at` of the tensor.
std::size_t begun(const ReadJob::Rows& rows, std::size_t at) {
    if (at <= rows.start) return 0;
    return std::min(rows.count, (at - rows.start - 1) / rows.source_stride + 1);
}

// The number of rows that end at byte `at` or before it.
std::size_t ended(const ReadJob::Rows& rows, std::size_t at) {
    if (at - std::min(at, rows.start) < rows.nbytes) return 0;
    return std::min(rows.count, (at - rows.start - rows.nbytes) / rows.source_stride + 1);
}

}  // namespace

DamagedBlock::DamagedBlock(std::size_t number, std::uint64_t at, std::size_t size)
    : std::runtime_error("bytes " + range(at, at + size) + " have a wrong CRC"),
      read(number),
      offset(at),
      nbytes(size) {}

// The file, the buffers and the stream of one thread. The destructor waits for the copies to the GPU. Then it destroys
// the members from the last to the first: it gives the buffers back that the copies read, and leaves the GPU.
class ReadJob::Lane {
  public:
    explicit Lane(ReadJob& job) : job_(job) {
        const bool to_device = job.device_ >= 0;
        if (to_device) device_.emplace(job.device_);
        auto& cache = BufferCache::of_this_process();
        buffers_[0] = cache.take(job.buffer_bytes_, job.device_);
        if (to_device) buffers_[1] = cache.take(job.buffer_bytes_, job.device_);
        if (to_device) copies_.emplace(job.device_, job.settings_.device_seconds);
    }

    ~Lane() {
        if (copies_ && !copies_->settle()) keep_for_ever({buffers_[0], buffers_[1]});
    }
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    void read(const Piece& piece) {
        if (!file_ || file_number_ != piece.file) {
            file_.emplace(job_.paths_[piece.file], File::Mode::READ, job_.settings_.direct, &job_.calls_);
            file_number_ = piece.file;
        }
        if (copies_) copies_->wait(buffer_);
        const std::uint64_t start = page_floor(piece.start);
        std::uint8_t* data = buffers_[buffer_]->data();
        job_.bytes_read_ += file_->read(data, page_ceil(piece.stop) - start, start, piece.stop - start);
        // A job that was given up, because a read did not return, must change nothing when it returns after all.
        if (job_.cancelled_) return;
        for (std::size_t i = piece.first; i < piece.last;) i = deliver(i, piece.last, data - start);
        if (copies_) {
            copies_->record(buffer_);
            buffer_ = 1 - buffer_;
        }
    }

    // Waits for the copies to the GPU: they may fail after they were queued.
    void finish() {
        if (!copies_) return;
        copies_->wait(0);
        copies_->wait(1);
    }

  private:
    // Checks the block of slice `first`, and copies the rows that are in it to this slice's destination and to those of
    // the following slices of the same block. Returns the first slice of another block.
    std::size_t deliver(std::size_t first, std::size_t last, const std::uint8_t* file_start) {
        const Slice& block = job_.slices_[first];
        const std::uint8_t* data = file_start + block.offset;
        std::size_t end = first + 1;
        while (end < last && job_.slices_[end].offset == block.offset && job_.slices_[end].nbytes == block.nbytes) {
            ++end;
        }
        // Check for all slices before copying for any: one read may have the CRC of a block that another reads without.
        check(first, end, data);
        for (std::size_t i = first; i < end; ++i) {
            const Slice& slice = job_.slices_[i];
            copy_rows(job_.reads_[slice.read], data, slice.start, slice.start + slice.nbytes);
        }
        return end;
    }

    // Compares the CRC of a block with those of slices [first, end), which all are of this block.
    void check(std::size_t first, std::size_t end, const std::uint8_t* data) {
        std::optional<std::uint32_t> found;
        for (std::size_t i = first; i < end; ++i) {
            const Slice& slice = job_.slices_[i];
            if (!slice.crc) continue;
            if (!found) found = crc32(data, slice.nbytes, 0);
            if (*slice.crc != *found) throw DamagedBlock(slice.read, slice.offset, slice.nbytes);
        }
    }

    // Copies the parts of rows that are in a block, which is bytes [start, stop) of the tensor. The block's limits may
    // cut the first and the last of these rows.
    void copy_rows(const Rows& rows, const std::uint8_t* block, std::size_t start, std::size_t stop) {
        const std::size_t begin = ended(rows, start), end = begun(rows, stop);
        const std::size_t whole_end = ended(rows, stop);
        std::size_t row = begin;
        if (begun(rows, start) > begin) copy_part(rows, row++, block, start, stop);
        if (row < whole_end) {
            copy_whole(rows, row, whole_end - row, block + (rows.start + row * rows.source_stride - start));
            row = whole_end;
        }
        if (row < end) copy_part(rows, row, block, start, stop);
    }

    void copy_part(const Rows& rows, std::size_t row, const std::uint8_t* block, std::size_t start, std::size_t stop) {
        const std::size_t row_start = rows.start + row * rows.source_stride;
        const std::size_t from = std::max(row_start, start), to = std::min(row_start + rows.nbytes, stop);
        std::uint8_t* destination = rows.destination + row * rows.destination_stride + (from - row_start);
        if (rows.device != HostBuffer::NO_DEVICE) {
            copies_->copy(destination, block + (from - start), to - from);
        } else {
            copy_past_cache(destination, block + (from - start), to - from);
        }
    }

    void copy_whole(const Rows& rows, std::size_t first, std::size_t count, const std::uint8_t* source) {
        const Grid grid{rows.destination + first * rows.destination_stride,
                        rows.destination_stride,
                        source,
                        rows.source_stride,
                        rows.nbytes,
                        count};
        if (rows.device != HostBuffer::NO_DEVICE) {
            copies_->copy(grid);
        } else {
            copy_past_cache(grid);
        }
    }

    ReadJob& job_;
    std::optional<File> file_;
    std::size_t file_number_ = 0;
    std::optional<DeviceCalls> device_;
    std::array<std::shared_ptr<HostBuffer>, 2> buffers_;
    std::optional<HostToDeviceCopies> copies_;
    int buffer_ = 0;  // the one to read into next
};

// A block that does not begin on a page takes one page more than its size.
ReadJob::ReadJob(std::vector<std::string> paths, const Settings& settings)
    : paths_(std::move(paths)),
      settings_(settings),
      most_bytes_(page_ceil(std::max(settings.piece_bytes, settings.block_bytes)) + PAGE_BYTES) {
    if (settings.threads < 1) {
        throw std::invalid_argument("threads must be at least 1, not " + std::to_string(settings.threads));
    }
    if (settings.block_bytes == 0) throw std::invalid_argument("block_bytes must not be 0");
    if (std::max(settings.piece_bytes, settings.block_bytes) > SIZE_MAX / 2) {
        throw std::invalid_argument("pieces or blocks that no memory can hold");
    }
}

void ReadJob::refuse(std::size_t file, std::uint64_t offset, std::size_t nbytes, const std::optional<std::size_t>& crcs,
                     const Rows& rows) {
    if (started_) throw std::invalid_argument("the job has run: make another one");
    if (file >= paths_.size()) {
        throw std::invalid_argument("no file " + std::to_string(file) + " among " + std::to_string(paths_.size()));
    }
    // pread takes a signed offset.
    if (offset > INT64_MAX || nbytes > INT64_MAX - offset) {
        throw std::invalid_argument("no file has " + std::to_string(nbytes) + " bytes from byte " +
                                    std::to_string(offset) + " on");
    }
    const std::size_t blocks = nbytes / settings_.block_bytes + (nbytes % settings_.block_bytes != 0);
    if (crcs && *crcs != blocks) {
        throw std::invalid_argument(std::to_string(*crcs) + " CRCs for " + std::to_string(blocks) + " blocks");
    }
    const bool empty = rows.count == 0 || rows.nbytes == 0;
    if (rows.count > 1 && std::min(rows.source_stride, rows.destination_stride) < rows.nbytes) {
        throw std::invalid_argument(words(rows) + " overlap, with strides of " + std::to_string(rows.source_stride) +
                                    " and " + std::to_string(rows.destination_stride) + " bytes");
    }
    if (rows.start > nbytes || (!empty && !fit(rows, rows.source_stride, nbytes - rows.start))) {
        throw std::invalid_argument(words(rows) + " are not all in a tensor of " + std::to_string(nbytes) + " bytes");
    }
    if (empty) return;
    if (rows.destination == nullptr) throw std::invalid_argument("null address for " + words(rows));
    if (!fit(rows, rows.destination_stride, SIZE_MAX - reinterpret_cast<std::uintptr_t>(rows.destination))) {
        throw std::invalid_argument("no memory is large enough for " + words(rows) + " at the address");
    }
    if (rows.device == HostBuffer::NO_DEVICE) return;
    if (!settings_.pinned) {
        throw std::invalid_argument("reads to a GPU need pinned buffers: make the job with pinned=True");
    }
    if (device_ != HostBuffer::NO_DEVICE && device_ != rows.device) {
        throw std::invalid_argument("destinations on several GPUs: make a job for each");
    }
    const DeviceCalls calls(rows.device);
    if (const int found = device_of(rows.destination); found != rows.device) {
        throw std::invalid_argument("a tensor of GPU " + std::to_string(rows.device) + " is on GPU " +
                                    std::to_string(found));
    }
    device_ = rows.device;
}

std::size_t ReadJob::add(std::size_t file, std::uint64_t offset, std::size_t nbytes,
                         const std::optional<std::vector<std::uint32_t>>& crcs, Rows rows) {
    refuse(file, offset, nbytes, crcs ? std::make_optional(crcs->size()) : std::nullopt, rows);
    if (rows.nbytes == 0) rows.count = 0;
    if (rows.count > 1 && rows.source_stride == rows.nbytes && rows.destination_stride == rows.nbytes) {
        rows.nbytes *= rows.count;
        rows.count = 1;
    }
    if (rows.count == 1) rows.source_stride = rows.nbytes;  // the code below divides by it
    const std::size_t read = reads_.size(), block_bytes = settings_.block_bytes;
    reads_.push_back(rows);
    for (std::size_t row = 0, at = rows.start; row < rows.count;) {
        const std::size_t number = at / block_bytes, block = number * block_bytes;
        const std::size_t end = block + std::min(block_bytes, nbytes - block);
        const auto crc = crcs ? std::make_optional((*crcs)[number]) : std::nullopt;
        slices_.push_back({file, offset + block, end - block, crc, read, block});
        row = ended(rows, end);
        at = std::max(end, rows.start + row * rows.source_stride);
    }
    return read;
}

void ReadJob::cut_into_pieces() {
    // The sort is stable, so that the error of a damaged block names the first of several reads.
    std::stable_sort(slices_.begin(), slices_.end(), [](const Slice& a, const Slice& b) {
        return std::tie(a.file, a.offset, a.nbytes) < std::tie(b.file, b.offset, b.nbytes);
    });
    for (std::size_t i = 0; i < slices_.size(); ++i) {
        const Slice& slice = slices_[i];
        const std::uint64_t stop = slice.offset + slice.nbytes;
        if (!pieces_.empty()) {
            Piece& piece = pieces_.back();
            const std::uint64_t joined_stop = std::max(piece.stop, stop);
            if (piece.file == slice.file && slice.offset <= piece.stop + GAP_BYTES &&
                page_ceil(joined_stop) - page_floor(piece.start) <= most_bytes_) {
                piece.stop = joined_stop;
                piece.last = i + 1;
                continue;
            }
        }
        pieces_.push_back({slice.file, slice.offset, stop, i, i + 1});
    }
}

std::size_t ReadJob::scratch_bytes() const { return settings_.threads * most_bytes_ * (device_ >= 0 ? 2 : 1); }

void ReadJob::run() {
    if (started_.exchange(true)) throw std::invalid_argument("the job has run: make another one");
    cut_into_pieces();
    for (const Piece& piece : pieces_) {
        buffer_bytes_ = std::max<std::size_t>(buffer_bytes_, page_ceil(piece.stop) - page_floor(piece.start));
    }
    // Work that is queued on the GPU may still use the memory of the destinations.
    if (device_ >= 0) wait_for_device(device_, settings_.device_seconds);
    const std::size_t threads = std::min<std::size_t>(settings_.threads, pieces_.size());
    if (threads != 0) run_on_threads(static_cast<int>(threads), [this] { work(); });
    if (error_) std::rethrow_exception(error_);
    if (cancelled_) throw std::runtime_error("cancelled");
}

void ReadJob::work() noexcept {
    try {
        Lane lane(*this);
        while (!cancelled_ && !failed_) {
            const std::size_t number = next_piece_++;
            if (number >= pieces_.size()) break;
            lane.read(pieces_[number]);
        }
        lane.finish();
    } catch (...) {
        fail(std::current_exception());
    }
}

void ReadJob::fail(std::exception_ptr error) {
    const std::lock_guard lock(error_mutex_);
    if (!error_) error_ = error;
    failed_ = true;
}

}  // namespace mcore_ckpt
