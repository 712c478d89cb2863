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
#include "host_buffer.h"
#include "host_copy.h"
#include "parallel.h"

namespace mcore_ckpt {
namespace {

// What is read from memory once: checked, then copied while it is in a core's own cache.
constexpr std::size_t CACHED_BYTES = std::size_t{32} << 10;
// A piece of a file in the page cache. The system copies it while the CRC has it in the core's own cache.
constexpr std::size_t BUFFERED_PIECE_BYTES = std::size_t{256} << 10;
// Smaller tensors are gathered by copying: for them a system call's entry per tensor costs more.
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
    const HostBuffer pages(2 * PAGE_BYTES);
    for (const auto& [offset, crc] : patches) {
        const std::uint64_t begin = page_floor(offset), after = offset + FileImage::DESCRIPTOR_BYTES;
        const std::uint64_t end = page_ceil(after);
        file.read(pages.data(), end - begin, begin, after - begin);
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
    bool has_arrived = false;

    // Fixed once OPEN.
    std::uint64_t piece_bytes = 0;  // pieces end at multiples of it in the file
    std::size_t pieces = 0;

    // Each written by one thread, and read by others after `checked` has passed it.
    std::vector<Crcs> crcs;
    std::vector<std::uint8_t> rest;  // what is after the last page boundary of the file

    // A second thread that writes to the same file would spin in the kernel, which lets one at a time into the page
    // cache.
    std::mutex writing;

    bool ended() const { return pieces != 0 && written == pieces; }
    std::size_t piece_at(std::uint64_t offset) const { return offset / piece_bytes - range.start / piece_bytes; }
    std::uint64_t cut(std::size_t piece) const {
        return std::clamp((range.start / piece_bytes + piece) * piece_bytes, range.start, range.stop);
    }

    void set_pieces(std::uint64_t bytes) {
        piece_bytes = bytes;
        // A range without bytes has a piece, too: somebody must open the file.
        pieces = range.start == range.stop ? 1 : piece_at(range.stop - 1) + 1;
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
        const std::size_t last = piece_at(slot.end - 1);
        for (std::size_t k = piece_at(slot.begin); k <= last; ++k) {
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

    // Of the bytes that block `block` has from `offset` on.
    const std::uint8_t* source(const FileImage::Block& block, std::uint64_t offset) const {
        if (in_place) return range.buffer + (offset - range.start);
        return range.sources[block.slot] + (offset - range.image->slots()[block.slot].begin);
    }

    // The first event after which all slots are in place up to `offset`.
    std::optional<std::uintptr_t> event_before(std::uint64_t offset) const {
        if (range.ready.empty()) return {};
        const auto before = [](const auto& ready, std::uint64_t at) { return ready.first < at; };
        const std::uint64_t needed = std::min(offset, range.ready.back().first);
        return std::lower_bound(range.ready.begin(), range.ready.end(), needed, before)->second;
    }
};

// What a thread does with a piece, and the memory that it does it in.
class WriteJob::Worker {
  public:
    explicit Worker(WriteJob& job) : job_(job), extent_(job.huge_page_credit_) {}

    // False if the job has been stopped in between.
    bool process(const Piece& piece) {
        Target& target = *piece.target;
        prepare(piece);
        const auto descriptors = own_descriptors(piece);
        const bool in_turn = std::any_of(descriptors.begin(), descriptors.end(), [&](const auto& descriptor) {
            return target.range.image->slots()[descriptor.slot].begin < piece.begin;
        });
        if (!job_.publish(piece, std::move(crcs_), !target.in_place && copies_, in_turn)) return false;
        for (const auto& descriptor : descriptors) {
            const std::uint32_t crc = target.slot_crc(target.range.image->slots()[descriptor.slot]);
            put_descriptor(descriptor.at, crc, piece.begin, piece.end, memory_);
        }
        if (!mapped_) write(piece);
        job_.written(piece, !target.in_place && !copies_);
        return true;
    }

  private:
    // Brings the piece's bytes into place, and their CRCs into crcs_.
    void prepare(const Piece& piece) {
        Target& target = *piece.target;
        if (const auto event = target.event_before(piece.end)) {
            wait_for_event(*event);
            if (piece.end == target.range.stop) job_.arrived(target);
        }
        choose_memory(piece);
        crcs_.clear();
        iovecs_.clear();
        const auto payload = [&](const FileImage::Block& block, std::uint64_t begin, std::uint64_t end) {
            std::uint8_t* place = memory_ + (begin - piece.begin);
            const std::uint8_t* source = target.source(block, begin);
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
        target.range.image->walk(piece.begin, piece.end, payload, gap);
    }

    void choose_memory(const Piece& piece) {
        const Target& target = *piece.target;
        direct_ = target.file->direct();
        memory_ = map_extent(piece);
        mapped_ = memory_ != nullptr;
        copies_ = mapped_ || (direct_ && !target.in_place);
        if (mapped_) return;
        memory_ = target.in_place ? target.range.buffer + (piece.begin - target.range.start) : own_memory(piece);
    }

    std::uint8_t* map_extent(const Piece& piece) {
        File& file = *piece.target->file;
        const bool whole = piece.end - piece.begin == HugeExtent::BYTES && piece.begin % HugeExtent::BYTES == 0;
        return whole && file.in_memory() ? extent_.map(file, piece.begin) : nullptr;
    }

    std::uint8_t* own_memory(const Piece& piece) {
        const Target& target = *piece.target;
        const std::uint64_t most = std::min(target.piece_bytes, target.range.stop - target.range.start);
        if (most != 0 && (!own_ || own_->nbytes() < most)) own_.emplace(page_ceil(most));
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
    HugeExtent extent_;
    std::optional<HostBuffer> own_;
    std::uint8_t* memory_ = nullptr;  // where the piece's first byte goes
    bool mapped_ = false;             // what is in memory_ is in the file
    bool copies_ = false;             // all payload goes to memory_
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
    bool events = false;
    {
        const Lock lock(mutex_);
        if (started_ || cancelled_) throw std::runtime_error("a job is started once");
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
    for (auto* threads : {&threads_, &watcher_}) {
        for (auto& thread : *threads) thread.join();
        threads->clear();
    }
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

std::size_t WriteJob::piece_bytes_of(const File& file) const {
    if (file.direct()) return piece_bytes_;
    const bool huge = file.in_memory() && huge_page_credit_.left() && piece_bytes_ >= HugeExtent::BYTES;
    return huge ? HugeExtent::BYTES : std::min(piece_bytes_, BUFFERED_PIECE_BYTES);
}

void WriteJob::open(Target& target) {
    auto file = std::make_unique<File>(target.range.path, File::Mode::WRITE, direct_);
    file->reserve(target.range.start, target.range.stop - target.range.start);
    const Lock lock(mutex_);
    target.set_pieces(piece_bytes_of(*file));
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

void WriteJob::arrived(Target& target) {
    const Lock lock(mutex_);
    if (!target.has_arrived) copied_seconds_ = seconds();
    target.has_arrived = true;
}

// A piece may be taken long after its event has happened.
void WriteJob::watch_events() {
    for (const auto& target : targets_) {
        const auto event = target->event_before(target->range.stop);
        if (!event) continue;
        try {
            wait_for_event(*event);
        } catch (const std::exception&) {
            return;  // whoever takes the piece gets the same error, and tells it
        }
        arrived(*target);
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
