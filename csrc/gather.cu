// The kernel that makes many small copies from GPU memory at once.
#include "gather.h"

#include <cstdint>

namespace mcore_ckpt {
namespace {

// Enough threads to fill the link to the host. The other multiprocessors stay free for training.
constexpr unsigned BLOCKS = 32;
constexpr unsigned THREADS = 512;

// How many bytes one block copies at a time. A multiple of 16 gives all shares of a tensor the alignment of its start.
constexpr std::size_t SHARE_BYTES = std::size_t{16} << 10;

template <typename Word>
__device__ void copy_words(std::uint8_t* destination, const std::uint8_t* source, std::size_t nbytes) {
    const std::size_t to_boundary = -reinterpret_cast<std::uintptr_t>(destination) % sizeof(Word);
    const std::size_t head = to_boundary < nbytes ? to_boundary : nbytes;
    const std::size_t words = (nbytes - head) / sizeof(Word);
    auto* to = reinterpret_cast<Word*>(destination + head);
    const auto* from = reinterpret_cast<const Word*>(source + head);
    for (std::size_t i = threadIdx.x; i < words; i += THREADS) to[i] = from[i];
    for (std::size_t i = threadIdx.x; i < head; i += THREADS) destination[i] = source[i];
    for (std::size_t i = head + words * sizeof(Word) + threadIdx.x; i < nbytes; i += THREADS) {
        destination[i] = source[i];
    }
}

// Copies in the widest words for which source and destination have the same alignment.
__device__ void copy_share(std::uint8_t* destination, const std::uint8_t* source, std::size_t nbytes) {
    const auto apart = reinterpret_cast<std::uintptr_t>(destination) - reinterpret_cast<std::uintptr_t>(source);
    if (apart % 16 == 0) {
        copy_words<uint4>(destination, source, nbytes);
    } else if (apart % 8 == 0) {
        copy_words<std::uint64_t>(destination, source, nbytes);
    } else if (apart % 4 == 0) {
        copy_words<std::uint32_t>(destination, source, nbytes);
    } else if (apart % 2 == 0) {
        copy_words<std::uint16_t>(destination, source, nbytes);
    } else {
        copy_words<std::uint8_t>(destination, source, nbytes);
    }
}

// The shares of all rows form one sequence, and the blocks take them in turn. So all blocks end at about the same time,
// whatever the sizes of the rows.
__global__ void gather(const __grid_constant__ GatherTable table) {
    std::size_t share = blockIdx.x;
    for (std::size_t i = 0; i < table.count; ++i) {
        const std::size_t nbytes = table.rows[i].nbytes;
        const std::size_t shares = (nbytes + SHARE_BYTES - 1) / SHARE_BYTES;
        for (; share < shares; share += gridDim.x) {
            const std::size_t start = share * SHARE_BYTES;
            copy_share(static_cast<std::uint8_t*>(table.rows[i].destination) + start,
                       static_cast<const std::uint8_t*>(table.rows[i].source) + start,
                       nbytes - start < SHARE_BYTES ? nbytes - start : SHARE_BYTES);
        }
        share -= shares;
    }
}

}  // namespace

static_assert(sizeof(GatherTable) <= 4096, "a kernel's parameters take at most 4 KiB");

cudaError_t launch_gather(const GatherTable& table, cudaStream_t stream) {
    gather<<<BLOCKS, THREADS, 0, stream>>>(table);
    return cudaGetLastError();
}

}  // namespace mcore_ckpt
