// Copies with ordinary or streaming stores, on one or several threads.
#include "host_copy.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "parallel.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace mcore_ckpt {
namespace {

// How many bytes a thread takes at a time: few enough that the slowest thread ends soon after the others, and enough
// that taking them and cutting a tensor there costs nothing.
constexpr std::size_t SHARE_BYTES = std::size_t{1} << 20;

#if defined(__x86_64__)

// An ordinary store first reads the line that it overwrites into the cache. That is a third of the traffic, and wasted:
// the line leaves the cache before it is used. memcpy uses streaming stores only for a copy as large as the cache, and
// each tensor of a checkpoint is smaller. Below this size ordinary stores are as fast or faster.
constexpr std::size_t STREAM_FROM_BYTES = std::size_t{16} << 10;
// The same for a row, of which many share one finish_streams(). The first and the last line of a shorter row, which it
// shares with its neighbours, cost more than streaming saves.
constexpr std::size_t STREAM_ROWS_FROM_BYTES = std::size_t{2} << 10;

void stream_copy(std::uint8_t* destination, const std::uint8_t* source, std::size_t nbytes) {
    // The processor combines the stores of a whole line of 64 bytes into one write.
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(destination) % 64;
    std::memcpy(destination, source, head);
    destination += head, source += head, nbytes -= head;
    for (; nbytes >= 64; destination += 64, source += 64, nbytes -= 64) {
        const __m128i* from = reinterpret_cast<const __m128i*>(source);
        __m128i* to = reinterpret_cast<__m128i*>(destination);
        const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    std::memcpy(destination, source, nbytes);
}

void copy_bytes(std::uint8_t* destination, const std::uint8_t* source, std::size_t nbytes, std::size_t stream_from) {
    if (nbytes >= stream_from) {
        stream_copy(destination, source, nbytes);
    } else {
        std::memcpy(destination, source, nbytes);
    }
}

// Streaming stores are not ordered with other stores. Without this, a thread that learns that the copy is done could
// read old bytes.
void finish_streams() { _mm_sfence(); }

#else

constexpr std::size_t STREAM_FROM_BYTES = SIZE_MAX, STREAM_ROWS_FROM_BYTES = SIZE_MAX;

void copy_bytes(std::uint8_t* destination, const std::uint8_t* source, std::size_t nbytes, std::size_t) {
    std::memcpy(destination, source, nbytes);
}

void finish_streams() {}

#endif

}  // namespace

void copy_past_cache(void* destination, const void* source, std::size_t nbytes) {
    copy_bytes(static_cast<std::uint8_t*>(destination), static_cast<const std::uint8_t*>(source), nbytes,
               STREAM_FROM_BYTES);
    finish_streams();
}

void copy_past_cache(const Grid& grid) {
    for (std::size_t row = 0; row < grid.count; ++row) {
        copy_bytes(grid.destination + row * grid.destination_stride, grid.source + row * grid.source_stride,
                   grid.nbytes, STREAM_ROWS_FROM_BYTES);
    }
    finish_streams();
}

void copy_host(const std::vector<Copy>& copies, int threads) {
    // All copies form one sequence of bytes, in which copy i ends at ends[i]. A share is a range of this sequence.
    std::vector<std::size_t> ends(copies.size());
    std::size_t total = 0;
    for (std::size_t i = 0; i < copies.size(); ++i) ends[i] = total += copies[i].nbytes;

    std::atomic<std::size_t> next{0};
    const auto work = [&] {
        for (std::size_t start = next.fetch_add(SHARE_BYTES); start < total; start = next.fetch_add(SHARE_BYTES)) {
            const std::size_t stop = std::min(start + SHARE_BYTES, total);
            std::size_t i = std::upper_bound(ends.begin(), ends.end(), start) - ends.begin();
            for (std::size_t position = start; position < stop; ++i) {
                const Copy& copy = copies[i];
                const std::size_t offset = position - (ends[i] - copy.nbytes);
                const std::size_t nbytes = std::min(ends[i], stop) - position;
                copy_bytes(static_cast<std::uint8_t*>(copy.destination) + offset,
                           static_cast<const std::uint8_t*>(copy.source) + offset, nbytes, STREAM_FROM_BYTES);
                position += nbytes;
            }
        }
        finish_streams();
    };
    const std::size_t shares = total / SHARE_BYTES + 1;
    run_on_threads(static_cast<int>(std::min<std::size_t>(threads, shares)), work);
}

}  // namespace mcore_ckpt
