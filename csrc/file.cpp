// System calls on files, repeated after an interruption or without O_DIRECT.
#include "file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <system_error>

namespace mcore_ckpt {
namespace {

// mcore_ckpt/io/file_systems.py has what else is known of types of file systems.
bool has_no_disk(int descriptor) {
    struct statfs system{};
    return ::fstatfs(descriptor, &system) == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC);
}

// What mcore_ckpt/io/access.py decides (`mode_in`): a new file is not more open than its folder.
mode_t mode_of_new(const std::string& path) {
    const std::size_t slash = path.find_last_of('/');
    const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    struct stat status{};
    const mode_t given = ::stat(folder.c_str(), &status) == 0 ? status.st_mode : 0;
    return 0664 & (given | S_IRWXU);
}

int open_file(const std::string& path, int flags) {
    const mode_t mode = flags & O_CREAT ? mode_of_new(path) : 0;
    for (;;) {
        const int descriptor = ::open(path.c_str(), flags, mode);
        if (descriptor >= 0 || errno != EINTR) return descriptor;
    }
}

}  // namespace

FileError::FileError(int error, const std::string& doing, const std::string& file, std::uint64_t at)
    : std::runtime_error(std::generic_category().message(error) + ", " + doing + " at byte " + std::to_string(at)),
      number(error),
      path(file),
      offset(at) {}

File::File(const std::string& path, Mode mode, bool direct, CallLog* calls)
    : path_(path), calls_(calls), direct_(direct) {
    const CallLog::Call call(calls_, "opening", path_);
    const int flags = O_CLOEXEC | (mode == Mode::READ ? O_RDONLY : O_RDWR | O_CREAT);
    descriptor_ = open_file(path, flags | (direct ? O_DIRECT : 0));
    if (descriptor_ < 0 && direct && errno == EINVAL) {
        direct_ = false;
        descriptor_ = open_file(path, flags);
    }
    if (descriptor_ < 0) throw FileError(errno, "opening", path, 0);
    in_memory_ = has_no_disk(descriptor_);
    if (in_memory_) direct_ = false;  // since Linux 6.6 tmpfs accepts O_DIRECT and ignores it
}

File::~File() {
    const CallLog::Call call(calls_, "closing", path_);
    ::close(descriptor_);
}

std::uint64_t File::size() const {
    struct stat status{};
    if (::fstat(descriptor_, &status) != 0) throw FileError(errno, "asking for the size", path_, 0);
    return status.st_size;
}

void File::reserve(std::uint64_t offset, std::uint64_t nbytes) {
    if (nbytes == 0 || in_memory_) return;
    const CallLog::Call call(calls_, "reserving space", path_);
    while (::fallocate(descriptor_, 0, offset, nbytes) != 0) {
        if (errno == EINTR) continue;
        if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL) return;
        throw FileError(errno, "reserving " + std::to_string(nbytes) + " bytes", path_, offset);
    }
}

// Whether to repeat a call that failed. Some file systems accept O_DIRECT at open and refuse it later, or require
// larger blocks than pages; then this turns O_DIRECT off. `was_direct` is the state before the failed call, because
// another thread may have turned O_DIRECT off since.
bool File::worth_another_try(int number, bool was_direct) const {
    if (number == EINTR) return true;
    if (number != EINVAL || !was_direct) return false;
    if (!open_again_without_direct()) return false;
    direct_.store(false, std::memory_order_release);  // after that: a thread that reads false relies on it
    return true;
}

// Replaces what the descriptor stands for, so that threads that use it need not know. Changing its flags would not be
// enough: a FUSE file system has passed O_DIRECT on to a file of its own, and only a new open reaches that one.
bool File::open_again_without_direct() const {
    const int flags = ::fcntl(descriptor_, F_GETFL);
    if (flags < 0) return false;
    // The file may have been renamed or deleted since it was opened, so it is not opened by its path.
    const std::string same = "/proc/self/fd/" + std::to_string(descriptor_);
    const int again = open_file(same, (flags & O_ACCMODE) | O_CLOEXEC);
    if (again < 0) return ::fcntl(descriptor_, F_SETFL, flags & ~O_DIRECT) == 0;
    const bool replaced = ::dup3(again, descriptor_, O_CLOEXEC) >= 0;
    ::close(again);
    return replaced;
}

void File::write(const void* data, std::size_t nbytes, std::uint64_t offset) {
    std::vector<iovec> pieces{{const_cast<void*>(data), nbytes}};
    write(pieces, offset);
}

void File::write(std::vector<iovec>& pieces, std::uint64_t offset) {
    auto next = pieces.begin();
    const auto pass = [&](std::size_t nbytes) {
        for (; next != pieces.end() && nbytes >= next->iov_len; ++next) nbytes -= next->iov_len;
        if (nbytes == 0) return;
        next->iov_base = static_cast<std::uint8_t*>(next->iov_base) + nbytes;
        next->iov_len -= nbytes;
    };
    pass(0);
    while (next != pieces.end()) {
        const bool was_direct = direct();
        const int count = static_cast<int>(std::min<std::ptrdiff_t>(pieces.end() - next, IOV_MAX));
        const CallLog::Call call(calls_, "writing", path_);
        const ssize_t written = ::pwritev(descriptor_, &*next, count, offset);
        if (written < 0) {
            const int number = errno;
            if (worth_another_try(number, was_direct)) continue;
            throw FileError(number, "writing", path_, offset);
        }
        if (written == 0) throw FileError(EIO, "writing, but the system took no bytes", path_, offset);
        offset += written;
        pass(written);
    }
}

std::size_t File::read(void* data, std::size_t nbytes, std::uint64_t offset, std::size_t least) const {
    auto* next = static_cast<std::uint8_t*>(data);
    std::size_t done = 0;
    while (done < nbytes) {
        const bool was_direct = direct();
        const CallLog::Call call(calls_, "reading", path_);
        const ssize_t count = ::pread(descriptor_, next + done, nbytes - done, offset + done);
        if (count < 0) {
            const int number = errno;
            if (worth_another_try(number, was_direct)) continue;
            throw FileError(number, "reading", path_, offset + done);
        }
        done += count;
        if (count == 0) break;
        // A direct read that ends inside a page has nearly always reached the end of the file, but some file systems
        // return less for other reasons. So another read follows while bytes are missing. If its offset, which is not
        // aligned, is refused, the file is read without O_DIRECT from then on.
        if (direct() && done % PAGE_BYTES != 0 && done >= least) break;
    }
    if (done < least) throw FileError(ENODATA, "the file ends", path_, offset + done);
    return done;
}

void File::start_writeback(std::uint64_t offset, std::uint64_t nbytes) {
    // An error is ignored: sync() writes the bytes then.
    const CallLog::Call call(calls_, "writing", path_);
    ::sync_file_range(descriptor_, offset, nbytes, SYNC_FILE_RANGE_WRITE);
}

bool File::map(void* address, std::size_t nbytes, std::uint64_t offset) const {
    const int protection = PROT_READ | PROT_WRITE, kind = MAP_SHARED | MAP_FIXED;
    return ::mmap(address, nbytes, protection, kind, descriptor_, offset) != MAP_FAILED;
}

void File::truncate(std::uint64_t size) {
    const CallLog::Call call(calls_, "setting the size", path_);
    while (::ftruncate(descriptor_, size) != 0) {
        if (errno != EINTR) throw FileError(errno, "setting the size", path_, size);
    }
}

void File::sync() {
    const CallLog::Call call(calls_, "waiting for the disk", path_);
    while (::fdatasync(descriptor_) != 0) {
        if (errno != EINTR) throw FileError(errno, "waiting for the disk", path_, 0);
    }
}

}  // namespace mcore_ckpt
