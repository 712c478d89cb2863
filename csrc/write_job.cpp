#include "write_job.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "crc32.h"
#include "device_copy.h"

namespace mcore_ckpt {
namespace {

// What is read from memory once: copied or checked while it is in a core's own cache, where the next step finds it.
constexpr std::size_t CACHED_BYTES = std::size_t{128} << 10;
// A piece of a file in the page cache. The system copies it while the CRC has it in the core's own cache.
constexpr std::size_t BUFFERED_PIECE_BYTES = std::size_t{256} << 10;
// Smaller tensors are gathered by copying: for them a system call's entry per tensor costs more.
constexpr std::size_t GATHER_BELOW_BYTES = PAGE_BYTES;
constexpr std::uint64_t WRITEBACK_BYTES = std::uint64_t{16} << 20;

std::uint32_t copy_and_check(std::uint8_t* destination, const std::uint8_t* source, std::size_t nbytes) {
    std::uint32_t crc = 0;
    for (std::size_t at = 0; at < nbytes; at += CACHED_BYTES) {
        const std::size_t size = std::min(CACHED_BYTES, nbytes - at);
        std::memcpy(destination + at, source + at, size);
        crc = crc32(destination + at, size, crc);
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
    const auto blocks = range.image->blocks_in(range.start, range.stop);
    if (blocks.size() != 0 && range.ready.back().first < std::min((blocks.end() - 1)->end, range.stop)) {
        refuse("no event says when the bytes from " + std::to_string(range.ready.back().first) + " on are in place");
    }
}

void check_sources(const WriteJob::Range& range) {
    const auto& slots = range.image->slots();
    if (!range.ready.empty()) refuse("sources have no events to wait for");
    if (range.sources.size() != slots.size()) {
        refuse(std::to_string(range.sources.size()) + " sources for " + std::to_string(slots.size()) + " slots");
    }
    for (const FileImage::Block& block : range.image->blocks_in(range.start, range.stop)) {
        if (range.sources[block.slot] == nullptr) refuse("null address for slot " + std::to_string(block.slot));
    }
}

void check(const WriteJob::Range& range, bool in_place) {
    const std::uint64_t end = range.image->end();
    const std::string words = "[" + std::to_string(range.start) + ", " + std::to_string(range.stop) + ")";
    if (range.start > range.stop || range.stop > end) {
        refuse(words + " is no range of a file of " + std::to_string(end) + " bytes");
    }
    if (range.start % PAGE_BYTES != 0 || (range.stop % PAGE_BYTES != 0 && range.stop != end)) {
        refuse(words + " does not begin and end at multiples of " + std::to_string(PAGE_BYTES));
    }
    if (!in_place) return check_sources(range);
    if (range.buffer == nullptr || reinterpret_cast<std::uintptr_t>(range.buffer) % PAGE_BYTES != 0) {
        refuse("the buffer's address is not a multiple of " + std::to_string(PAGE_BYTES));
    }
    check_ready(range);
}

void write_patches(File& file, const WriteJob::Patches& patches) {
    if (patches.empty()) return;
    const File reader(file.path(), File::Mode::READ, file.direct());
    const HostBuffer pages(2 * PAGE_BYTES);
    for (const auto& [offset, crc] : patches) {
        const std::uint64_t begin = page_floor(offset), after = offset + FileImage::DESCRIPTOR_BYTES;
        const std::uint64_t end = page_ceil(after);
        reader.read(pages.data(), end - begin, begin, after - begin);
        put_descriptor(offset, crc, begin, end, pages.data());
        file.write(pages.data(), end - begin, begin);
    }
}

// In whole pages, which O_DIRECT wants: what is too much is cut off at the end.
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

// A range, and how far it is.
struct WriteJob::Target {
    Range range;
    std::size_t number;
    bool in_place;

    // Guarded by the job's mutex.
    enum class State { WAITING, OPENING, OPEN, FINISHED } state = State::WAITING;
    std::unique_ptr<File> file;
    std::size_t taken = 0, checked = 0, written = 0;  // pieces; checked: all before this one have their CRCs in `crcs`
    std::vector<bool> has_crcs;

    // Fixed once OPEN.
    std::uint64_t piece_bytes = 0;
    std::size_t pieces = 0;

    // Each written by one thread, and read by others after `checked` has passed it.
    std::vector<Crcs> crcs;
    std::vector<std::uint8_t> rest;  // what is after the last page boundary of the file

    // A second thread that writes to the same file would spin in the kernel, which lets one at a time into the page
    // cache.
    std::mutex writing;

    bool ended() const { return pieces != 0 && written == pieces; }
    std::uint64_t cut(std::size_t piece) const { return std::min(range.start + piece * piece_bytes, range.stop); }

    void set_pieces(std::uint64_t bytes) {
        piece_bytes = bytes;
        // A range without bytes has a piece, too: somebody must open the file.
        pieces = std::max<std::size_t>(1, (range.stop - range.start + bytes - 1) / bytes);
        has_crcs.resize(pieces);
        crcs.resize(pieces);
    }

    Crcs joined() const {
        std::vector<std::uint64_t> cuts;
        for (std::size_t k = 0; k <= pieces; ++k) cuts.push_back(cut(k));
        return range.image->join(cuts, crcs);
    }

    // Of a slot that begins in this range and whose pieces are all checked.
    std::uint32_t slot_crc(const FileImage::Slot& slot) const {
        std::uint32_t crc = 0;
        if (slot.begin == slot.end) return crc;
        const std::size_t last = (slot.end - 1 - range.start) / piece_bytes;
        for (std::size_t k = (slot.begin - range.start) / piece_bytes; k <= last; ++k) {
            const auto blocks = range.image->blocks_in(cut(k), cut(k + 1));
            const FileImage::Block* first = range.image->blocks().data() + slot.first_block;
            for (const auto* block = std::max(blocks.begin(), first); block != blocks.end(); ++block) {
                if (block->begin >= slot.end) break;
                const std::uint64_t nbytes = std::min(block->end, cut(k + 1)) - std::max(block->begin, cut(k));
                crc = crc32_combine(crc, crcs[k][block - blocks.begin()], nbytes);
            }
        }
        return crc;
    }

    // The first event after which all of the piece's slots are in place.
    std::optional<std::uintptr_t> event_of(const Piece& piece) const {
        if (range.ready.empty()) return {};
        const auto before = [](const auto& ready, std::uint64_t at) { return ready.first < at; };
        const std::uint64_t needed = std::min(piece.end, range.ready.back().first);
        return std::lower_bound(range.ready.begin(), range.ready.end(), needed, before)->second;
    }
};

// What a thread does with a piece, and the memory that it does it in.
class WriteJob::Worker {
  public:
    explicit Worker(WriteJob& job) : job_(job) {}

    // False if the job has been stopped in between.
    bool process(const Piece& piece) {
        Target& target = *piece.target;
        prepare(piece);
        const auto descriptors = own_descriptors(piece);
        const bool in_turn = std::any_of(descriptors.begin(), descriptors.end(), [&](const auto& descriptor) {
            return target.range.image->slots()[descriptor.slot].begin < piece.begin;
        });
        if (!job_.publish(piece, std::move(crcs_), !target.in_place && direct_, in_turn)) return false;
        for (const auto& descriptor : descriptors) {
            const std::uint32_t crc = target.slot_crc(target.range.image->slots()[descriptor.slot]);
            put_descriptor(descriptor.at, crc, piece.begin, piece.end, memory_);
        }
        write(piece);
        job_.written(piece, !target.in_place && !direct_);
        return true;
    }

  private:
    // Brings the piece's bytes into place, and their CRCs into crcs_.
    void prepare(const Piece& piece) {
        Target& target = *piece.target;
        if (const auto event = target.event_of(piece)) wait_for_event(*event);
        memory_ = memory_of(piece);
        crcs_.clear();
        iovecs_.clear();
        const auto payload = [&](const FileImage::Block& block, std::uint64_t begin, std::uint64_t end) {
            std::uint8_t* place = memory_ + (begin - piece.begin);
            if (target.in_place) {
                crcs_.push_back(crc32(place, end - begin, 0));
                return append(iovecs_, place, end - begin);
            }
            const std::uint64_t slot_begin = target.range.image->slots()[block.slot].begin;
            const std::uint8_t* source = target.range.sources[block.slot] + (begin - slot_begin);
            if (direct_ || end - begin < GATHER_BELOW_BYTES) {
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
        target.range.image->walk(piece.begin, piece.end, payload, gap);
    }

    std::uint8_t* memory_of(const Piece& piece) {
        const Target& target = *piece.target;
        direct_ = target.file->direct();
        if (target.in_place) return target.range.buffer + (piece.begin - target.range.start);
        const std::size_t available = own_ ? own_->nbytes() : 0;
        if (available < piece.end - piece.begin) own_.emplace(page_ceil(target.cut(1) - target.cut(0)));
        return own_ ? own_->data() : nullptr;
    }

    FileImage::Range<FileImage::Descriptor> own_descriptors(const Piece& piece) const {
        const Range& range = piece.target->range;
        auto found = range.image->descriptors_in(piece.begin, piece.end);
        const auto foreign = [&](const auto& one) { return range.image->slots()[one.slot].begin < range.start; };
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

    // Takes what is after the last page boundary out of iovecs_.
    void keep_rest(const Piece& piece) {
        std::size_t left = piece.end % PAGE_BYTES;
        if (left == 0) return;  // and `rest` belongs to the thread that has the last piece
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

    WriteJob& job_;
    std::optional<HostBuffer> own_;
    std::uint8_t* memory_ = nullptr;  // where the piece's first byte is; with O_DIRECT so is all the rest
    bool direct_ = false;             // as the file was when the piece was begun
    Crcs crcs_;
    std::vector<iovec> iovecs_;
};

WriteJob::WriteJob(int threads, std::size_t piece_bytes, bool direct)
    : thread_count_(threads), piece_bytes_(piece_bytes), direct_(direct), process_(::getpid()) {
    if (threads < 1) refuse("threads must be at least 1, not " + std::to_string(threads));
    if (piece_bytes == 0 || piece_bytes % PAGE_BYTES != 0) {
        refuse("piece_bytes must be a multiple of " + std::to_string(PAGE_BYTES) + ", not " +
               std::to_string(piece_bytes));
    }
}

WriteJob::~WriteJob() { close(); }

bool WriteJob::forked() const { return ::getpid() != process_; }

void WriteJob::require_same_process() const {
    if (forked()) throw std::runtime_error("a WriteJob belongs to the process that made it, this is a forked child");
}

std::size_t WriteJob::add_file(Range range) {
    require_same_process();
    const bool in_place = range.buffer != nullptr;
    check(range, in_place);
    const Lock lock(mutex_);
    if (started_ || cancelled_) throw std::runtime_error("files are added before the job is started");
    auto target = std::make_unique<Target>();
    target->range = std::move(range);
    target->number = targets_.size();
    target->in_place = in_place;
    targets_.push_back(std::move(target));
    return targets_.size() - 1;
}

void WriteJob::start() {
    require_same_process();
    const std::lock_guard<std::mutex> joining(joining_);
    std::uint64_t shares = 0;
    {
        const Lock lock(mutex_);
        if (started_ || cancelled_) throw std::runtime_error("a job is started once");
        for (const auto& target : targets_) {
            shares += (target->range.stop - target->range.start) / BUFFERED_PIECE_BYTES + 1;
        }
        started_ = true;
        start_time_ = Clock::now();
    }
    const std::size_t wanted = std::min<std::uint64_t>(thread_count_, shares);
    threads_.reserve(wanted);
    while (threads_.size() < wanted) {
        try {
            threads_.emplace_back([this] { work(); });
        } catch (const std::system_error&) {
            // A container's limit on threads makes a save slower, it must not make it fail.
            if (!threads_.empty()) break;
            cancel();
            throw;
        }
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
            throw FileError(ENOMEM, "making room for a piece", range.path, range.start);
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
    if (tail.has_value() != (range.stop == range.image->end())) {
        refuse("a tail belongs to the range that ends the file, and to no other");
    }
    if (!tail && !patches.empty()) refuse("patches come with the tail");
    for (const auto& patch : patches) {
        if (patch.first + FileImage::DESCRIPTOR_BYTES > range.image->end()) {
            refuse("a patch at " + std::to_string(patch.first) + " is beyond the end");
        }
    }
    if (!target.ended()) {
        throw_if_stopped(target);
        throw std::runtime_error("file " + std::to_string(number) + " is not written yet: wait for it first");
    }
    if (!target.file) throw std::runtime_error("file " + std::to_string(number) + " is closed already");
    // Out of the job, also where this fails: an error of fdatasync is told once, a second call would find nothing
    // wrong.
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
    const std::lock_guard<std::mutex> joining(joining_);
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    const Lock lock(mutex_);
    for (auto& target : targets_) target->file.reset();
}

// In a handler: keeps what has been thrown, without asking for memory that may have run out.
void WriteJob::fail(const Target& target) noexcept {
    const Lock lock(mutex_);
    if (!error_ || target.number < failed_) {
        error_ = std::current_exception();
        failed_ = target.number;
    }
    changed_.notify_all();
    file_ended_.notify_all();
}

void WriteJob::open(Target& target) {
    auto file = std::make_unique<File>(target.range.path, File::Mode::WRITE, direct_);
    file->reserve(target.range.start, target.range.stop - target.range.start);
    const Lock lock(mutex_);
    target.set_pieces(file->direct() ? piece_bytes_ : std::min(piece_bytes_, BUFFERED_PIECE_BYTES));
    target.file = std::move(file);
    target.state = Target::State::OPEN;
    changed_.notify_all();
}

// The next piece of the first file that has one left.
std::optional<WriteJob::Piece> WriteJob::take() {
    Lock lock(mutex_);
    while (current_ < targets_.size() && !cancelled_ && !error_) {
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

// False if the job has been stopped. Only a piece that needs CRCs of earlier ones waits for them: other threads have
// these.
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
