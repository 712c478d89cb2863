// Maps, fetches and pins host memory.
#include "host_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <system_error>

#include "device_copy.h"
#include "file.h"
#include "parallel.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; the headers may be older than the kernel
#endif

namespace mcore_ckpt {
namespace {

// How many bytes a thread fetches at a time.
constexpr std::size_t SHARE_BYTES = std::size_t{32} << 20;

// Returns 0, or errno.
int fetch_pages(std::uint8_t* data, std::size_t nbytes) {
    while (::madvise(data, nbytes, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINTR || errno == EAGAIN) continue;
        if (errno != EINVAL) return errno;
        // The kernel is older than MADV_POPULATE_WRITE: touch each page. A lack of memory then ends the process, as
        // for any other memory.
        for (std::size_t at = 0; at < nbytes; at += PAGE_BYTES) static_cast<volatile std::uint8_t*>(data)[at] = 0;
        return 0;
    }
    return 0;
}

}  // namespace

std::uint8_t* map_anonymous(std::size_t nbytes, int protection) {
    void* found = ::mmap(nullptr, nbytes + HUGE_PAGE_BYTES, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return nullptr;
    auto* begin = static_cast<std::uint8_t*>(found);
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(begin) % HUGE_PAGE_BYTES;
    if (head != 0) ::munmap(begin, head);
    ::munmap(begin + head + nbytes, HUGE_PAGE_BYTES - head);
    return begin + head;
}

OutOfMemory::OutOfMemory(std::size_t nbytes, int number)
    : words_("no " + std::to_string(nbytes) + " bytes of host memory: " + std::generic_category().message(number)) {}

HostBuffer::HostBuffer(std::size_t nbytes, bool to_pin, Reserved) : nbytes_(nbytes), process_(::getpid()) {
    if (nbytes == 0) throw std::invalid_argument("a buffer of 0 bytes");
    map(to_pin);
}

// The destructor runs if fetching or pinning fails, because the other constructor has completed by then.
HostBuffer::HostBuffer(std::size_t nbytes, bool pinned, int threads) : HostBuffer(nbytes, pinned, Reserved{}) {
    fetch(0, nbytes, threads);
    if (pinned) pin();
}

std::unique_ptr<HostBuffer> HostBuffer::reserve(std::size_t nbytes, bool to_pin) {
    return std::unique_ptr<HostBuffer>(new HostBuffer(nbytes, to_pin, Reserved{}));
}

HostBuffer::~HostBuffer() {
    // A forked child does not inherit pinned memory, so other memory may be at its addresses.
    if (::getpid() != process_) return;
    if (pinned_) unpin_memory(data_, device_);
    unmap();
}

void HostBuffer::map(bool to_pin) {
    if (nbytes_ > std::numeric_limits<std::size_t>::max() / 2) throw OutOfMemory(nbytes_, ENOMEM);
    const std::size_t size = page_ceil(nbytes_);
    data_ = map_anonymous(size, PROT_READ | PROT_WRITE);
    if (data_ == nullptr) throw OutOfMemory(nbytes_, errno);
    ::madvise(data_, size, MADV_HUGEPAGE);
    // After a fork the parent's next write to a page would give the parent a new page, while the GPU still uses the
    // old.
    if (to_pin) ::madvise(data_, size, MADV_DONTFORK);
}

void HostBuffer::fetch(std::size_t begin, std::size_t nbytes, int threads) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1, not " + std::to_string(threads));
    if (begin > nbytes_ || nbytes > nbytes_ - begin) {
        throw std::invalid_argument("a buffer of " + std::to_string(nbytes_) + " bytes has no " +
                                    std::to_string(nbytes) + " bytes from " + std::to_string(begin));
    }
    const std::size_t first = begin / PAGE_BYTES * PAGE_BYTES, end = page_ceil(begin + nbytes);
    std::atomic<std::size_t> next{first};
    std::atomic<int> error{0};
    const std::size_t shares = (end - first) / SHARE_BYTES + 1;
    run_on_threads(static_cast<int>(std::min<std::size_t>(threads, shares)), [&] {
        for (std::size_t at = next.fetch_add(SHARE_BYTES); at < end && error == 0; at = next.fetch_add(SHARE_BYTES)) {
            const int number = fetch_pages(data_ + at, std::min(SHARE_BYTES, end - at));
            if (number != 0) error = number;
        }
    });
    if (error != 0) throw OutOfMemory(nbytes, error);
}

void HostBuffer::pin() {
    if (pinned_) return;
    device_ = pin_memory(data_, nbytes_);
    pinned_ = true;
}

void HostBuffer::unmap() noexcept { ::munmap(data_, page_ceil(nbytes_)); }

}  // namespace mcore_ckpt
