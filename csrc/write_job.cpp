// The threads of a write job, and how they share the pieces.
#include "write_job.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "buffer_cache.h"
#include "crc32.h"
#include "device_copy.h"
#include "host_copy.h"
#include "parallel.h"

namespace mcore_ckpt {
namespace {

// So many bytes are checked, then copied while they are in the core's own cache: memory is read once.
constexpr std::size_t CACHED_BYTES = std::size_t{32} << 10;
// The size of a piece of a file in the page cache. The system copies it while it is in the core's own cache from the
// computation of the CRC.
constexpr std::size_t BUFFERED_PIECE_BYTES = std::size_t{256} << 10;
// Smaller tensors are copied together, because an entry of a system call for each of them would cost more.
constexpr std::size_t GATHER_BELOW_BYTES = PAGE_BYTES;
constexpr std::uint64_t WRITEBACK_BYTES = std::uint64_t{16} << 20;

std::uint32_t copy_and_check(std::uint8_t* destination, const std::uint8_t* source, std::size_t nbytes) {
    std::uint32_t crc = 0;
    for (std::size_t at = 0; at < nbytes; at += CACHED_BYTES) {
        const std::size_t size = std::min(CACHED_BYTES, nbytes - at);
        crc = crc32(source + at, size, crc);
        copy_past_cache(destination + at, source + at, size);
    }
    return crc;
}

void append(std::vector<iovec>& pieces, const std::uint8_t* data, std::size_t nbytes) {
    if (!pieces.empty() && static_cast<std::uint8_t*>(pieces.back().iov_base) + pieces.back().iov_len == data) {
        pieces.back().iov_len += nbytes;
    } else {
        pieces.push_back({const_cast<std::uint8_t*>(data), nbytes});
    }
}

void refuse(const std::string& why) { throw std::invalid_argument(why); }

void check_ready(const WriteJob::Range& range) {
    if (range.ready.empty()) return;
    const auto earlier = [](const auto& a, const auto& b) { return a.first < b.first; };
    if (!std::is_sorted(range.ready.begin(), range.ready.end(), earlier)) refuse("ready is not ascending");
    const auto blocks = range.layout->blocks_in(range.start, range.stop);
    if (blocks.size() != 0 && range.ready.back().first < std::min((blocks.end() - 1)->end, range.stop)) {
        refuse("no event tells when the bytes from " + std::to_string(range.ready.back().first) + " on are in place");
    }
}

void check_sources(const WriteJob::Range& range) {
    const auto& slots = range.layout->slots();
    if (!range.ready.empty()) refuse("events are for a buffer, not for sources");
    if (range.sources.size() != slots.size()) {
        refuse(std::to_string(range.sources.size()) + " sources for " + std::to_string(slots.size()) + " slots");
    }
    for (const FileLayout::Block& block : range.layout->blocks_in(range.start, range.stop)) {
        if (range.sources[block.slot] == nullptr) refuse("null address for slot " + std::to_string(block.slot));
    }
    if (range.device == HostBuffer::NO_DEVICE) return;
    if (range.on_device.size() != slots.size()) {
        refuse(std::to_string(range.on_device.size()) + " places for " + std::to_string(slots.size()) + " slots");
    }
}

void check_buffer(const WriteJob::Range& range) {
    const std::size_t nbytes = range.buffer->nbytes(), offset = range.buffer_offset;
    if (!range.sources.empty()) refuse("either sources or a buffer, not both");
    if (offset % PAGE_BYTES != 0) {
        refuse("the offset in the buffer, " + std::to_string(offset) + ", is not a multiple of " +
               std::to_string(PAGE_BYTES));
    }
    if (offset > nbytes || range.stop - range.start > nbytes - offset) {
        refuse("the buffer of " + std::to_string(nbytes) + " bytes ends before the " +
               std::to_string(range.stop - range.start) + " bytes of the range, which begin at its byte " +
               std::to_string(offset));
    }
    check_ready(range);
}

void check(const WriteJob::Range& range) {
    const std::uint64_t end = range.layout->end();
    const std::string words = "[" + std::to_string(range.start) + ", " + std::to_string(range.stop) + ")";
    if (range.start > range.stop || range.stop > end) {
        refuse(words + " is no range of a file of " + std::to_string(end) + " bytes");
    }
    if (range.start % PAGE_BYTES != 0 || (range.stop % PAGE_BYTES != 0 && range.stop != end)) {
        refuse(words + " does not begin and end at multiples of " + std::to_string(PAGE_BYTES));
    }
    if (range.buffer) {
        check_buffer(range);
    } else {
        check_sources(range);
    }
}

void write_patches(File& file, const WriteJob::Patches& patches) {
    if (patches.empty()) return;
    const HostBuffer pages(2 * PAGE_BYTES);
    for (const auto& [offset, crc] : patches) {
        const std::uint64_t begin = page_floor(offset), after = offset + FileLayout::DESCRIPTOR_BYTES;
        const std::uint64_t end = page_ceil(after);
        // All of the page is there, because writers write whole pages, and the file is cut at the very end. What is
        // not read would be written back as zeros, over the bytes of another writer.
        file.read(pages.data(), end - begin, begin, end - begin);
        put_descriptor(offset, crc, begin, end, pages.data());
        file.write(pages.data(), end - begin, begin);
    }
}

// Writes whole pages, as O_DIRECT requires, and then cuts the file to its size.
void write_end(File& file, std::uint64_t end, const std::vector<std::uint8_t>& rest, const std::string& tail,
               const WriteJob::Patches& patches) {
    if (const std::size_t nbytes = rest.size() + tail.size()) {
        const HostBuffer pages(page_ceil(nbytes));
        std::copy(rest.begin(), rest.end(), pages.data());
        std::copy(tail.begin(), tail.end(), pages.data() + rest.size());
        file.write(pages.data(), pages.nbytes(), end - rest.size());
    }
    write_patches(file, patches);
    file.truncate(end + tail.size());
}

}  // namespace

// A range, and which of its pieces are done.
struct WriteJob::Target {
    Range range;
    std::size_t number;
    std::uint8_t* in_place;  // the address of the byte at range.start in the buffer; nullptr with sources

    // Guarded by the job's mutex.
    enum class State { WAITING, OPENING, OPEN, FINISHED } state = State::WAITING;
    std::unique_ptr<File> file;
    std::size_t taken = 0, written = 0;  // numbers of pieces
    std::size_t checked = 0;             // all pieces before this one have their CRCs in `crcs`
    std::vector<bool> has_crcs;
    std::uint64_t arrived = 0;  // with events: all slots before this offset are in place

    // Constant after the state is OPEN.
    std::uint64_t piece_bytes = 0;  // pieces end at multiples of it in the file
    std::size_t pieces = 0;

    // Each element is written by one thread, and read by others when `checked` is greater than its index.
    std::vector<Crcs> crcs;
    std::vector<std::uint8_t> rest;  // the bytes after the last page boundary of the file

    // Held while writing through the page cache. The kernel lets one thread at a time write to a file there, and a
    // second one would spin.
    std::mutex writing;

    bool ended() const { return pieces != 0 && written == pieces; }
    std::size_t piece_at(std::uint64_t offset) const { return offset / piece_bytes - range.start / piece_bytes; }
    std::uint64_t cut(std::size_t piece) const {
        return std::clamp((range.start / piece_bytes + piece) * piece_bytes, range.start, range.stop);
    }

    void set_pieces(std::uint64_t bytes) {
        piece_bytes = bytes;
        // An empty range has one piece, so that a thread opens the file.
        pieces = range.start == range.stop ? 1 : piece_at(range.stop - 1) + 1;
        has_crcs.resize(pieces);
        crcs.resize(pieces);
    }

    Crcs joined() const {
        std::vector<std::uint64_t> cuts;
        for (std::size_t k = 0; k <= pieces; ++k) cuts.push_back(cut(k));
        return range.layout->join(cuts, crcs);
    }

    // The CRC of a slot that begins in this range and whose pieces are all checked.
    std::uint32_t slot_crc(const FileLayout::Slot& slot) const {
        std::uint32_t crc = 0;
        if (slot.begin == slot.end) return crc;
        const std::size_t last = piece_at(slot.end - 1);
        for (std::size_t k = piece_at(slot.begin); k <= last; ++k) {
            const auto blocks = range.layout->blocks_in(cut(k), cut(k + 1));
            const FileLayout::Block* first = range.layout->blocks().data() + slot.first_block;
            for (const auto* block = std::max(blocks.begin(), first); block != blocks.end(); ++block) {
                if (block->begin >= slot.end) break;
                const std::uint64_t nbytes = std::min(block->end, cut(k + 1)) - std::max(block->begin, cut(k));
                crc = crc32_combine(crc, crcs[k][block - blocks.begin()], nbytes);
            }
        }
        return crc;
    }

    // The address of the bytes of a block from `offset` in the file on.
    const std::uint8_t* source(const FileLayout::Block& block, std::uint64_t offset) const {
        if (in_place != nullptr) return in_place + (offset - range.start);
        return range.sources[block.slot] + (offset - range.layout->slots()[block.slot].begin);
    }

    // Whether all slots before `offset` are in place. Needs the job's mutex.
    bool has_arrived(std::uint64_t offset) const {
        return range.ready.empty() || arrived >= std::min(offset, range.ready.back().first);
    }

    bool from_device() const { return range.device != HostBuffer::NO_DEVICE; }
};

// One thread's work on a piece, and the memory that the thread uses.
class WriteJob::Worker {
  public:
    explicit Worker(WriteJob& job) : job_(job), extent_(job.huge_page_credit_) {}

    // Returns false if the job was stopped meanwhile.
    bool process(const Piece& piece) {
        Target& target = *piece.target;
        if (!job_.wait_for_bytes(target, piece.end)) return false;
        prepare(piece);
        const auto descriptors = own_descriptors(piece);
        const bool in_turn = std::any_of(descriptors.begin(), descriptors.end(), [&](const auto& descriptor) {
            return target.range.layout->slots()[descriptor.slot].begin < piece.begin;
        });
        const bool from_sources = target.in_place == nullptr;
        if (!job_.publish(piece, std::move(crcs_), from_sources && copies_, in_turn)) return false;
        for (const auto& descriptor : descriptors) {
            const std::uint32_t crc = target.slot_crc(target.range.layout->slots()[descriptor.slot]);
            put_descriptor(descriptor.at, crc, piece.begin, piece.end, memory_);
        }
        if (!mapped_) write(piece);
        job_.written(piece, from_sources && !copies_);
        return true;
    }

  private:
    // Brings the piece's bytes into place, and stores their CRCs in crcs_.
    void prepare(const Piece& piece) {
        Target& target = *piece.target;
        choose_memory(piece);
        if (target.from_device()) fetch(piece);
        crcs_.clear();
        iovecs_.clear();
        const auto payload = [&](const FileLayout::Block& block, std::uint64_t begin, std::uint64_t end) {
            std::uint8_t* place = memory_ + (begin - piece.begin);
            const std::uint8_t* source = target.from_device() ? place : target.source(block, begin);
            if (source != place && (copies_ || end - begin < GATHER_BELOW_BYTES)) {
                crcs_.push_back(copy_and_check(place, source, end - begin));
                append(iovecs_, place, end - begin);
            } else {
                crcs_.push_back(crc32(source, end - begin, 0));
                append(iovecs_, source, end - begin);
            }
        };
        const auto gap = [&](std::uint64_t begin, std::uint64_t end, const std::uint8_t* bytes) {
            std::uint8_t* place = memory_ + (begin - piece.begin);
            std::memcpy(place, bytes, end - begin);
            append(iovecs_, place, end - begin);
        };
        target.range.layout->walk(piece.begin, piece.end, payload, gap);
    }

    // Copies the payload of a piece from the GPU, and from the host, to memory_.
    void fetch(const Piece& piece) {
        const Target& target = *piece.target;
        const auto payload = [&](const FileLayout::Block& block, std::uint64_t begin, std::uint64_t end) {
            std::uint8_t* place = memory_ + (begin - piece.begin);
            if (target.range.on_device[block.slot]) {
                device_->copies.copy(place, target.source(block, begin), end - begin);
            } else {
                std::memcpy(place, target.source(block, begin), end - begin);
            }
        };
        try {
            target.range.layout->walk(piece.begin, piece.end, payload, [](auto, auto, auto) {});
            device_->copies.wait(target.range.device, job_.device_seconds_, [&] {
                const Lock lock(job_.mutex_);
                return job_.stopped(target);
            });
        } catch (...) {
            keep_for_ever({std::move(pinned_)});
            throw;
        }
    }

    void choose_memory(const Piece& piece) {
        const Target& target = *piece.target;
        direct_ = target.file->direct();
        if (target.from_device()) {
            memory_ = pinned_memory(piece);
            mapped_ = false, copies_ = true;
            return;
        }
        memory_ = map_extent(piece);
        mapped_ = memory_ != nullptr;
        copies_ = mapped_ || (direct_ && target.in_place == nullptr);
        if (mapped_) return;
        memory_ = target.in_place != nullptr ? target.in_place + (piece.begin - target.range.start) : own_memory(piece);
    }

    std::uint8_t* map_extent(const Piece& piece) {
        File& file = *piece.target->file;
        const bool whole = piece.end - piece.begin == HugeExtent::BYTES && piece.begin % HugeExtent::BYTES == 0;
        return whole && file.in_memory() ? extent_.map(file, piece.begin) : nullptr;
    }

    std::uint8_t* pinned_memory(const Piece& piece) {
        const Target& target = *piece.target;
        if (!device_) device_.emplace(target.range.device);
        if (!pinned_ || pinned_->nbytes() < target.piece_bytes) {
            pinned_ = BufferCache::of_this_process().take(page_ceil(target.piece_bytes), target.range.device);
        }
        return pinned_->data();
    }

    std::uint8_t* own_memory(const Piece& piece) {
        const Target& target = *piece.target;
        const std::uint64_t most = std::min(target.piece_bytes, target.range.stop - target.range.start);
        if (most != 0 && (!own_ || own_->nbytes() < most)) own_.emplace(page_ceil(most));
        return own_ ? own_->data() : nullptr;
    }

    FileLayout::Range<FileLayout::Descriptor> own_descriptors(const Piece& piece) const {
        const Range& range = piece.target->range;
        auto found = range.layout->descriptors_in(piece.begin, piece.end);
        const auto foreign = [&](const auto& one) { return range.layout->slots()[one.slot].begin < range.start; };
        while (found.size() != 0 && foreign(*found.first)) ++found.first;
        return found;
    }

    void write(const Piece& piece) {
        Target& target = *piece.target;
        keep_rest(piece);
        if (direct_) {
            target.file->write(iovecs_, piece.begin);
        } else {
            const std::lock_guard<std::mutex> lock(target.writing);
            target.file->write(iovecs_, piece.begin);
        }
        if (!target.file->direct()) start_writeback(piece);
    }

    // Moves the bytes after the last page boundary from iovecs_ to `rest`.
    void keep_rest(const Piece& piece) {
        std::size_t left = piece.end % PAGE_BYTES;
        if (left == 0) return;  // do not touch `rest`, which the thread with the last piece may be writing
        auto& rest = piece.target->rest;
        rest.resize(left);
        while (left != 0) {
            iovec& last = iovecs_.back();
            const std::size_t size = std::min(left, last.iov_len);
            last.iov_len -= size, left -= size;
            std::memcpy(rest.data() + left, static_cast<const std::uint8_t*>(last.iov_base) + last.iov_len, size);
            if (last.iov_len == 0) iovecs_.pop_back();
        }
    }

    static void start_writeback(const Piece& piece) {
        const std::uint64_t begin = piece.begin / WRITEBACK_BYTES * WRITEBACK_BYTES;
        const std::uint64_t end = piece.end / WRITEBACK_BYTES * WRITEBACK_BYTES;
        if (begin < end) piece.target->file->start_writeback(begin, end - begin);
    }

    // What a thread needs to copy from a GPU. It leaves the GPU when the job ends.
    struct Device {
        explicit Device(int number) : calls(number) {}
        DeviceCalls calls;
        DeviceToHostCopies copies;
    };

    WriteJob& job_;
    HugeExtent extent_;
    std::optional<HostBuffer> own_;
    std::optional<Device> device_;
    std::shared_ptr<HostBuffer> pinned_;  // declared after device_, so that it is given back first
    std::uint8_t* memory_ = nullptr;      // where the piece's first byte goes
    bool mapped_ = false;                 // memory_ is mapped from the file
    bool copies_ = false;                 // all payload is copied to memory_
    bool direct_ = false;                 // whether the file used O_DIRECT when the piece was begun
    Crcs crcs_;
    std::vector<iovec> iovecs_;
};

WriteJob::WriteJob(int threads, std::size_t piece_bytes, bool direct, double device_seconds)
    : thread_count_(threads),
      piece_bytes_(piece_bytes),
      direct_(direct),
      process_(::getpid()),
      device_seconds_(device_seconds) {
    if (threads < 1) refuse("threads must be at least 1, not " + std::to_string(threads));
    if (piece_bytes == 0 || piece_bytes % PAGE_BYTES != 0) {
        refuse("piece_bytes must be a multiple of " + std::to_string(PAGE_BYTES) + ", not " +
               std::to_string(piece_bytes));
    }
}

// close() throws only in a forked child, where it returns at once.
WriteJob::~WriteJob() { close(); }  // NOLINT(bugprone-exception-escape)

bool WriteJob::forked() const { return ::getpid() != process_; }

void WriteJob::require_same_process() const {
    if (!forked()) return;
    throw std::runtime_error("this is a forked child, and a WriteJob can only be used in the process that made it");
}

std::size_t WriteJob::add_file(Range range) {
    require_same_process();
    check(range);
    const Lock lock(mutex_);
    if (started_ || cancelled_) {
        throw std::runtime_error("the job has been started or cancelled: add files before the job is started");
    }
    auto target = std::make_unique<Target>();
    target->in_place = range.buffer ? range.buffer->data() + range.buffer_offset : nullptr;
    target->range = std::move(range);
    target->number = targets_.size();
    targets_.push_back(std::move(target));
    return targets_.size() - 1;
}

void WriteJob::start() {
    require_same_process();
    const std::lock_guard<std::mutex> joining(joining_);
    std::uint64_t shares = 0;
    bool events = false;
    {
        const Lock lock(mutex_);
        if (started_ || cancelled_) {
            throw std::runtime_error("the job was started or cancelled before: a job is started once");
        }
        for (const auto& target : targets_) {
            shares += (target->range.stop - target->range.start) / BUFFERED_PIECE_BYTES + 1;
            events = events || !target->range.ready.empty();
        }
        started_ = true;
        start_time_ = Clock::now();
    }
    threads_ = start_threads(std::min<std::uint64_t>(thread_count_, shares), [this] { work(); });
    if (threads_.empty() && shares != 0) {
        cancel();
        throw std::system_error(EAGAIN, std::generic_category(), "starting a thread");
    }
    if (events) watcher_ = start_threads(1, [this] { watch_events(); });
    if (events && watcher_.empty()) {
        cancel();
        throw std::system_error(EAGAIN, std::generic_category(), "starting a thread");
    }
}

WriteJob::Target& WriteJob::at(std::size_t file) const {
    if (file >= targets_.size()) {
        refuse("there is no file " + std::to_string(file) + ", the job has " + std::to_string(targets_.size()));
    }
    return *targets_[file];
}

double WriteJob::seconds() const { return std::chrono::duration<double>(Clock::now() - start_time_).count(); }

bool WriteJob::stopped(const Target& target) const { return cancelled_ || (error_ && failed_ <= target.number); }

void WriteJob::throw_if_stopped(const Target& target) const {
    if (error_ && failed_ <= target.number) {
        try {
            std::rethrow_exception(error_);
        } catch (const std::bad_alloc&) {
            const Range& range = targets_[failed_]->range;
            throw FileError(ENOMEM, "making space for a piece", range.path, range.start);
        }
    }
    if (cancelled_) throw std::runtime_error("cancelled");
}

std::optional<WriteJob::Crcs> WriteJob::wait(std::size_t file, Clock::time_point deadline) {
    require_same_process();
    Lock lock(mutex_);
    Target& target = at(file);
    if (!started_ && !cancelled_) throw std::runtime_error("the job has not been started");
    const bool over = file_ended_.wait_until(lock, deadline, [&] { return target.ended() || stopped(target); });
    if (!over) return {};
    if (!target.ended()) throw_if_stopped(target);
    lock.unlock();
    return target.joined();
}

void WriteJob::finish(std::size_t number, const std::optional<std::string>& tail, const Patches& patches) {
    require_same_process();
    Lock lock(mutex_);
    Target& target = at(number);
    const Range& range = target.range;
    if (tail.has_value() != (range.stop == range.layout->end())) {
        refuse("a tail belongs to the range that ends the file, and to no other");
    }
    if (!tail && !patches.empty()) refuse("patches come with the tail");
    for (const auto& patch : patches) {
        if (patch.first + FileLayout::DESCRIPTOR_BYTES > range.layout->end()) {
            refuse("a patch at " + std::to_string(patch.first) + " is beyond the end");
        }
    }
    if (!target.ended()) {
        throw_if_stopped(target);
        throw std::runtime_error("file " + std::to_string(number) + " is not written yet: wait for it first");
    }
    if (!target.file) throw std::runtime_error("file " + std::to_string(number) + " is closed already");
    // Take the file out of the job now, also if an error follows: the system reports an error of fdatasync only once,
    // and a second call would succeed.
    const std::unique_ptr<File> file = std::move(target.file);
    target.state = Target::State::FINISHED;
    lock.unlock();
    if (tail) write_end(*file, range.stop, target.rest, *tail, patches);
    file->sync();
}

std::pair<double, double> WriteJob::times() const {
    require_same_process();
    const Lock lock(mutex_);
    return {copied_seconds_, written_seconds_};
}

void WriteJob::cancel() {
    require_same_process();
    const Lock lock(mutex_);
    cancelled_ = true;
    changed_.notify_all();
    file_ended_.notify_all();
}

void WriteJob::close() {
    if (forked()) return;
    cancel();
    // Declared before the locks, so that it is destroyed after they are released: an owner may wait for Python's GIL.
    std::vector<Range> dropped;
    const std::lock_guard<std::mutex> joining(joining_);
    for (auto* threads : {&threads_, &watcher_}) {
        for (auto& thread : *threads) thread.join();
        threads->clear();
    }
    const Lock lock(mutex_);
    dropped.reserve(targets_.size());
    for (auto& target : targets_) {
        target->file.reset();
        auto& range = target->range;
        dropped.emplace_back();
        dropped.back().sources_owner = std::move(range.sources_owner);
        dropped.back().buffer = std::move(range.buffer);
        dropped.back().ready.swap(range.ready);
    }
}

// Called in a handler. It keeps the exception without allocating memory, which may have run out.
void WriteJob::fail(const Target& target) noexcept {
    const Lock lock(mutex_);
    if (!error_ || target.number < failed_) {
        error_ = std::current_exception();
        failed_ = target.number;
    }
    changed_.notify_all();
    file_ended_.notify_all();
}

std::size_t WriteJob::piece_bytes_of(const File& file) const {
    if (file.direct()) return piece_bytes_;
    const bool huge = file.in_memory() && huge_page_credit_.left() && piece_bytes_ >= HugeExtent::BYTES;
    return huge ? HugeExtent::BYTES : std::min(piece_bytes_, BUFFERED_PIECE_BYTES);
}

void WriteJob::open(Target& target) {
    auto file = std::make_unique<File>(target.range.path, File::Mode::WRITE, direct_, &calls_);
    file->reserve(target.range.start, target.range.stop - target.range.start);
    const Lock lock(mutex_);
    target.set_pieces(piece_bytes_of(*file));
    target.file = std::move(file);
    target.state = Target::State::OPEN;
    changed_.notify_all();
}

// Takes the next piece of the first file that has one left.
std::optional<WriteJob::Piece> WriteJob::take() {
    Lock lock(mutex_);
    // Files before the one that has failed are still written.
    while (current_ < targets_.size() && !stopped(*targets_[current_])) {
        Target& target = *targets_[current_];
        if (target.state == Target::State::WAITING) {
            target.state = Target::State::OPENING;
            lock.unlock();
            try {
                open(target);
            } catch (...) {
                fail(target);
            }
            lock.lock();
        } else if (target.state == Target::State::OPENING) {
            changed_.wait(lock);
        } else if (target.taken == target.pieces) {
            ++current_;
        } else {
            const std::size_t number = target.taken++;
            return Piece{&target, number, target.cut(number), target.cut(number + 1)};
        }
    }
    return {};
}

// Stores the CRCs of a piece. Returns false if the job has been stopped. `in_turn`: waits until all earlier pieces have
// their CRCs too, because the piece contains the CRC of a slot that begins in one of them.
bool WriteJob::publish(const Piece& piece, Crcs crcs, bool copied, bool in_turn) {
    Target& target = *piece.target;
    Lock lock(mutex_);
    target.crcs[piece.number] = std::move(crcs);
    target.has_crcs[piece.number] = true;
    while (target.checked < target.pieces && target.has_crcs[target.checked]) ++target.checked;
    if (copied) copied_seconds_ = seconds();
    changed_.notify_all();
    if (in_turn) changed_.wait(lock, [&] { return target.checked > piece.number || stopped(target); });
    return !stopped(target);
}

void WriteJob::written(const Piece& piece, bool copied) {
    bytes_written_ += piece.end - piece.begin;
    const Lock lock(mutex_);
    written_seconds_ = seconds();
    if (copied) copied_seconds_ = written_seconds_;
    ++piece.target->written;
    if (piece.target->ended()) file_ended_.notify_all();
}

void WriteJob::arrived(Target& target, std::uint64_t before) {
    const Lock lock(mutex_);
    target.arrived = before;
    copied_seconds_ = seconds();
    changed_.notify_all();
}

// Waits until all slots before `end` are in place. Returns false if the job has been stopped.
bool WriteJob::wait_for_bytes(const Target& target, std::uint64_t end) {
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return target.has_arrived(end) || stopped(target); });
    return !stopped(target);
}

// Returns false if the job has been stopped.
bool WriteJob::wait_for_event(const Event& event, const Target& target) {
    const auto started = Clock::now();
    for (auto pause = FIRST_PAUSE;; pause = std::min(2 * pause, LONGEST_PAUSE)) {
        if (event.happened()) return true;
        const double waited = std::chrono::duration<double>(Clock::now() - started).count();
        if (waited > device_seconds_) throw DeviceStuck(event.device(), waited);
        Lock lock(mutex_);
        if (changed_.wait_for(lock, pause, [&] { return stopped(target); })) return false;
    }
}

// One thread asks the driver, which has locks that the training needs. The copies are done in the order of the files.
void WriteJob::watch_events() {
    for (const auto& target : targets_) {
        try {
            for (const auto& [before, event] : target->range.ready) {
                if (!wait_for_event(*event, *target)) return;
                arrived(*target, before);
            }
        } catch (const std::exception&) {
            fail(*target);
            return;
        }
    }
}

void WriteJob::work() {
    Worker worker(*this);
    while (const auto piece = take()) {
        try {
            if (!worker.process(*piece)) return;
        } catch (...) {
            fail(*piece->target);
        }
    }
}

}  // namespace mcore_ckpt
