// Implementations of CRC-32 for several CPUs.
//
// A CRC is the remainder of the message, read as a polynomial over GF(2), times x^32, modulo P. In the reflected
// convention the lowest bit of each word is the highest power of x: in 32 bits, bit i stands for x^(31-i).
//
// Folding (V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009):
// a register of 128 bits A, followed by D bits of message, may be replaced by A * x^D mod P added to the last 128 of
// these bits. A = L*x^64 + H, with L the register's low quadword and H its high one, so
//     A * x^D  =  L * (x^(D+64) mod P)  +  H * (x^D mod P)   (mod P)
// which is two carry-less multiplications and fits 128 bits again. The carry-less product of two reflected
// quadwords has its bits one place lower than a reflected register of 128 has, which is a factor of x: hence the
// exponents D+63 and D-1 below. The last 16 bytes and the tail are computed with tables, which is simpler than the
// Barrett reduction of the paper and takes no measurable time of a block of 1 MiB.
#include "crc32.h"

#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "parallel.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define MCORE_CKPT_X86 1
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#define MCORE_CKPT_ARM 1
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace mcore_ckpt {
namespace {

constexpr std::uint32_t POLYNOMIAL = 0xEDB88320u;
constexpr std::uint32_t ONE = 1u << 31;

constexpr std::uint32_t times_x(std::uint32_t a) { return (a >> 1) ^ ((a & 1u) ? POLYNOMIAL : 0u); }

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t power = ONE; power != 0; power >>= 1) {
        if (a & power) product ^= b;
        b = times_x(b);
    }
    return product;
}

// POWERS[k] = x^(2^k) mod P, up to what x^(8 n) with n of 64 bits needs.
constexpr std::array<std::uint32_t, 67> make_powers() {
    std::array<std::uint32_t, 67> powers{};
    powers[0] = times_x(ONE);
    for (std::size_t k = 1; k < powers.size(); ++k) powers[k] = multiply(powers[k - 1], powers[k - 1]);
    return powers;
}
constexpr auto POWERS = make_powers();

// x^(n * 2^first) mod P.
constexpr std::uint32_t x_to_the(std::uint64_t n, std::size_t first = 0) {
    std::uint32_t result = ONE;
    for (std::size_t k = first; n != 0; ++k, n >>= 1) {
        if (n & 1) result = multiply(result, POWERS[k]);
    }
    return result;
}

// TABLES[k][b] is the remainder of byte b followed by k zero bytes ("slicing by 8", Kounavis and Berry, 2005).
constexpr std::array<std::array<std::uint32_t, 256>, 8> make_tables() {
    std::array<std::array<std::uint32_t, 256>, 8> tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t remainder = byte;
        for (int bit = 0; bit < 8; ++bit) remainder = times_x(remainder);
        tables[0][byte] = remainder;
    }
    for (std::size_t k = 1; k < tables.size(); ++k) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t shorter = tables[k - 1][byte];
            tables[k][byte] = (shorter >> 8) ^ tables[0][shorter & 0xFF];
        }
    }
    return tables;
}
constexpr auto TABLES = make_tables();

// The functions update_* take and return the remainder itself; zlib's CRC is its complement.
using Update = std::uint32_t (*)(const std::uint8_t*, std::size_t, std::uint32_t);

std::uint32_t update_tables(const std::uint8_t* data, std::size_t nbytes, std::uint32_t state) {
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        const std::uint32_t low = state ^ (data[0] | data[1] << 8 | data[2] << 16 | std::uint32_t(data[3]) << 24);
        state = TABLES[7][low & 0xFF] ^ TABLES[6][low >> 8 & 0xFF] ^ TABLES[5][low >> 16 & 0xFF] ^
                TABLES[4][low >> 24] ^ TABLES[3][data[4]] ^ TABLES[2][data[5]] ^ TABLES[1][data[6]] ^
                TABLES[0][data[7]];
    }
    for (; nbytes > 0; ++data, --nbytes) state = (state >> 8) ^ TABLES[0][(state ^ *data) & 0xFF];
    return state;
}

#ifdef MCORE_CKPT_X86

// A remainder, placed in a quadword as a reflected polynomial of degree < 64.
constexpr long long quadword(std::uint32_t remainder) {
    return static_cast<long long>(static_cast<std::uint64_t>(remainder) << 32);
}
constexpr long long low_factor(std::uint64_t distance_bits) { return quadword(x_to_the(distance_bits + 63)); }
constexpr long long high_factor(std::uint64_t distance_bits) { return quadword(x_to_the(distance_bits - 1)); }

// The target attributes apply to single functions. With -mpclmul for the whole extension it would die with SIGILL on an
// older CPU. AVX is used only for its encoding of the 128-bit instruction, which is twice as fast as SSE's on Zen 4.
#define TARGET_PCLMUL __attribute__((target("avx,pclmul")))
#define TARGET_AVX512 __attribute__((target("avx512f,vpclmulqdq,avx,pclmul")))

TARGET_PCLMUL inline __m128i load128(const std::uint8_t* data) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

TARGET_PCLMUL inline __m128i fold128(__m128i lane, __m128i factors, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(lane, factors, 0x00);
    const __m128i high = _mm_clmulepi64_si128(lane, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

TARGET_PCLMUL inline std::uint32_t finish(__m128i lane, const std::uint8_t* data, std::size_t nbytes) {
    const __m128i by128 = _mm_set_epi64x(high_factor(128), low_factor(128));
    for (; nbytes >= 16; data += 16, nbytes -= 16) lane = fold128(lane, by128, load128(data));
    alignas(16) std::uint8_t folded[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(folded), lane);
    return update_tables(data, nbytes, update_tables(folded, sizeof folded, 0));
}

TARGET_PCLMUL std::uint32_t update_pclmul(const std::uint8_t* data, std::size_t nbytes, std::uint32_t state) {
    if (nbytes < 64) return update_tables(data, nbytes, state);
    __m128i a = _mm_xor_si128(load128(data), _mm_cvtsi32_si128(static_cast<int>(state)));
    __m128i b = load128(data + 16), c = load128(data + 32), d = load128(data + 48);
    data += 64, nbytes -= 64;
    // Four lanes, because a multiplication takes several cycles, but a new one can start in every cycle.
    const __m128i by512 = _mm_set_epi64x(high_factor(512), low_factor(512));
    for (; nbytes >= 64; data += 64, nbytes -= 64) {
        a = fold128(a, by512, load128(data));
        b = fold128(b, by512, load128(data + 16));
        c = fold128(c, by512, load128(data + 32));
        d = fold128(d, by512, load128(data + 48));
    }
    const __m128i by128 = _mm_set_epi64x(high_factor(128), low_factor(128));
    const __m128i all = fold128(fold128(fold128(a, by128, b), by128, c), by128, d);
    return finish(all, data, nbytes);
}

TARGET_AVX512 inline __m512i load512(const std::uint8_t* data) { return _mm512_loadu_si512(data); }

TARGET_AVX512 inline __m512i fold512(__m512i lane, __m512i factors, __m512i next) {
    const __m512i low = _mm512_clmulepi64_epi128(lane, factors, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(lane, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96);
}

TARGET_AVX512 inline __m512i factors512(long long low, long long high) {
    return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}

TARGET_AVX512 std::uint32_t update_avx512(const std::uint8_t* data, std::size_t nbytes, std::uint32_t state) {
    if (nbytes < 256) return update_pclmul(data, nbytes, state);
    const __m512i seed = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state)));
    __m512i a = _mm512_xor_si512(load512(data), seed);
    __m512i b = load512(data + 64), c = load512(data + 128), d = load512(data + 192);
    data += 256, nbytes -= 256;
    const __m512i by2048 = factors512(low_factor(2048), high_factor(2048));
    for (; nbytes >= 256; data += 256, nbytes -= 256) {
        a = fold512(a, by2048, load512(data));
        b = fold512(b, by2048, load512(data + 64));
        c = fold512(c, by2048, load512(data + 128));
        d = fold512(d, by2048, load512(data + 192));
    }
    const __m512i by512 = factors512(low_factor(512), high_factor(512));
    a = fold512(fold512(fold512(a, by512, b), by512, c), by512, d);
    for (; nbytes >= 64; data += 64, nbytes -= 64) a = fold512(a, by512, load512(data));
    alignas(64) std::uint8_t folded[64];
    _mm512_store_si512(folded, a);
    return update_pclmul(data, nbytes, update_pclmul(folded, sizeof folded, 0));
}

#endif  // MCORE_CKPT_X86

#ifdef MCORE_CKPT_ARM

// ARMv8 has an instruction for this polynomial.
__attribute__((target("+crc"))) std::uint32_t update_arm(const std::uint8_t* data, std::size_t nbytes,
                                                         std::uint32_t state) {
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        std::uint64_t word;
        std::memcpy(&word, data, sizeof word);
        state = __crc32d(state, word);
    }
    for (; nbytes > 0; ++data, --nbytes) state = __crc32b(state, *data);
    return state;
}

#endif  // MCORE_CKPT_ARM

struct Method {
    const char* name;
    Update update;
};

std::vector<Method> find_methods() {
    std::vector<Method> methods;
#ifdef MCORE_CKPT_X86
    // __builtin_cpu_supports also checks that the operating system saves the wide registers.
    const bool pclmul = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("avx");
    if (pclmul && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) {
        methods.push_back({"avx512", update_avx512});
    }
    if (pclmul) methods.push_back({"pclmul", update_pclmul});
#endif
#ifdef MCORE_CKPT_ARM
    if (getauxval(AT_HWCAP) & HWCAP_CRC32) methods.push_back({"arm", update_arm});
#endif
    methods.push_back({"tables", update_tables});
    return methods;
}

const std::vector<Method>& methods() {
    static const std::vector<Method> found = find_methods();
    return found;
}

std::uint32_t run(Update update, const void* data, std::size_t nbytes, std::uint32_t seed) {
    return ~update(static_cast<const std::uint8_t*>(data), nbytes, ~seed);
}

}  // namespace

std::uint32_t crc32(const void* data, std::size_t nbytes, std::uint32_t seed) {
    return run(methods().front().update, data, nbytes, seed);
}

std::vector<std::uint32_t> crc32_blocks(const void* data, std::size_t nbytes, std::size_t block_bytes, int threads) {
    const std::size_t blocks = nbytes / block_bytes + (nbytes % block_bytes != 0);
    std::vector<std::uint32_t> crcs(blocks);
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
        for (std::size_t i = next++; i < blocks; i = next++) {
            const std::size_t start = i * block_bytes;
            const std::size_t size = start + block_bytes <= nbytes ? block_bytes : nbytes - start;
            crcs[i] = crc32(static_cast<const std::uint8_t*>(data) + start, size, 0);
        }
    };
    run_on_threads(static_cast<std::size_t>(threads) < blocks ? threads : static_cast<int>(blocks), work);
    return crcs;
}

std::uint32_t crc32_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes) {
    return multiply(x_to_the(second_nbytes, 3), first) ^ second;
}

std::vector<std::string> crc32_methods() {
    std::vector<std::string> names;
    for (const auto& method : methods()) names.emplace_back(method.name);
    return names;
}

std::uint32_t crc32_by(const std::string& method, const void* data, std::size_t nbytes, std::uint32_t seed) {
    for (const auto& candidate : methods()) {
        if (method == candidate.name) return run(candidate.update, data, nbytes, seed);
    }
    throw std::invalid_argument("this CPU has no CRC method '" + method + "'; see crc32_methods()");
}

}  // namespace mcore_ckpt
