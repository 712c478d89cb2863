// zlib's CRC-32 (reflected polynomial 0xEDB88320), at the speed of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mcore_ckpt {

// Continues `seed`, the CRC of what came before (0: nothing), over `nbytes` bytes. Bit-identical with zlib's crc32().
std::uint32_t crc32(const void* data, std::size_t nbytes, std::uint32_t seed);

// The CRC of each `block_bytes` of the data, the last block may be shorter. `block_bytes` must not be 0.
std::vector<std::uint32_t> crc32_blocks(const void* data, std::size_t nbytes, std::size_t block_bytes, int threads);

// The CRC of two pieces in a row from the CRC of each, in O(log(second_nbytes)).
std::uint32_t crc32_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes);

// Names of the implementations that this CPU can run, the one that crc32() uses first.
std::vector<std::string> crc32_methods();

// As crc32(), by a named implementation: lets the tests reach those that a better CPU would never choose.
// Throws std::invalid_argument for a name that crc32_methods() does not list.
std::uint32_t crc32_by(const std::string& method, const void* data, std::size_t nbytes, std::uint32_t seed);

}  // namespace mcore_ckpt
