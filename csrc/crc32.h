// The CRC-32 of zlib (reflected polynomial 0xEDB88320), computed at the speed of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mcore_ckpt {

// The CRC of `nbytes` bytes that follow bytes with CRC `seed` (0: no bytes). Equal to zlib's crc32().
std::uint32_t crc32(const void* data, std::size_t nbytes, std::uint32_t seed);

// The CRC of each block of `block_bytes` bytes; the last block may be shorter. `block_bytes` must not be 0.
std::vector<std::uint32_t> crc32_blocks(const void* data, std::size_t nbytes, std::size_t block_bytes, int threads);

// The CRC of two consecutive pieces, computed from the CRC of each in O(log(second_nbytes)).
std::uint32_t crc32_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes);

// The names of the implementations that this CPU can run. crc32() uses the first.
std::vector<std::string> crc32_methods();

// crc32() by a named implementation, so that tests can run those that crc32() does not choose on this CPU.
// Throws std::invalid_argument for a name that crc32_methods() does not list.
std::uint32_t crc32_by(const std::string& method, const void* data, std::size_t nbytes, std::uint32_t seed);

}  // namespace mcore_ckpt
