// Looks codes up in tables. Large blocks get a table of their own values, so that each code costs one look-up.
#include "dequantize.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "parallel.h"

namespace mcore_ckpt {
namespace {

// How many rows a thread takes at a time. A block's table of 256 values is computed anew for each of these shares,
// which costs little beside the block's codes in so many rows.
constexpr std::size_t SHARE_ROWS = 32;
// Blocks of fewer columns get no table of their own.
constexpr std::size_t TABLE_FROM_COLUMNS = 64;

void store(float value, float& to) { to = value; }

// Rounds to nearest even, as torch's c10::BFloat16 does. All NaNs become the same one.
void store(float value, std::uint16_t& to) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    to = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

template <int bits>
unsigned code_at(const std::uint8_t* row, std::size_t column) {
    if constexpr (bits == 8) return row[column];
    return row[column / 2] >> (column % 2 * 4) & 15;
}

// A part of the codes whose rows lie in one row of blocks.
template <typename T>
struct Share {
    const std::uint8_t* codes;
    std::size_t row_bytes;
    const float* scales;
    T* values;
    std::size_t row_elements;
    std::size_t rows;
};

template <int bits, typename T>
void by_table(const Share<T>& share, std::size_t start, std::size_t stop, const float* table, float scale) {
    std::array<T, std::size_t{1} << bits> own;
    for (std::size_t code = 0; code < own.size(); ++code) store(table[code] * scale, own[code]);
    for (std::size_t row = 0; row < share.rows; ++row) {
        const std::uint8_t* from = share.codes + row * share.row_bytes;
        T* to = share.values + row * share.row_elements;
        for (std::size_t column = start; column < stop; ++column) to[column] = own[code_at<bits>(from, column)];
    }
}

template <int bits, typename T>
void by_product(const Share<T>& share, std::size_t start, std::size_t stop, const float* table, float scale) {
    for (std::size_t row = 0; row < share.rows; ++row) {
        const std::uint8_t* from = share.codes + row * share.row_bytes;
        T* to = share.values + row * share.row_elements;
        for (std::size_t column = start; column < stop; ++column) {
            store(table[code_at<bits>(from, column)] * scale, to[column]);
        }
    }
}

template <int bits, typename T>
void dequantize_share(const Share<T>& share, const Codes& codes, const Scales& scales, const float* table) {
    for (std::size_t start = 0; start < codes.columns;) {
        const std::size_t block = (codes.first_column + start) / scales.block_columns;
        const std::size_t stop = std::min((block + 1) * scales.block_columns - codes.first_column, codes.columns);
        const auto compute = stop - start < TABLE_FROM_COLUMNS ? by_product<bits, T> : by_table<bits, T>;
        compute(share, start, stop, table, share.scales[block]);
        start = stop;
    }
}

template <int bits, typename T>
void dequantize_all(const Codes& codes, const float* table, const Scales& scales, const Values& values, int threads) {
    const std::size_t last_row = codes.first_row + codes.rows;
    // Shares begin at multiples of SHARE_ROWS in each row of blocks, so that no share lies in two of them.
    const std::size_t per_block = (std::min(scales.block_rows, last_row) + SHARE_ROWS - 1) / SHARE_ROWS;
    const std::size_t first_block = codes.first_row / scales.block_rows;
    const std::size_t blocks = (last_row - 1) / scales.block_rows - first_block + 1;
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
        for (std::size_t number = next++; number < blocks * per_block; number = next++) {
            const std::size_t block = first_block + number / per_block, part = number % per_block;
            const std::size_t end = std::min((block + 1) * scales.block_rows, last_row);
            const std::size_t begin = block * scales.block_rows + part * SHARE_ROWS;
            const std::size_t start = std::max(begin, codes.first_row);
            const std::size_t stop = std::min(begin + SHARE_ROWS, end);
            if (start >= stop) continue;
            const std::size_t row = start - codes.first_row;
            const Share<T> share{codes.first + row * codes.row_bytes,
                                 codes.row_bytes,
                                 scales.first + block * scales.row_scales,
                                 static_cast<T*>(values.first) + row * values.row_elements,
                                 values.row_elements,
                                 stop - start};
            dequantize_share<bits, T>(share, codes, scales, table);
        }
    };
    const std::size_t shares = std::min<std::size_t>(threads, (codes.rows + SHARE_ROWS - 1) / SHARE_ROWS);
    run_on_threads(static_cast<int>(shares), work);
}

}  // namespace

void dequantize(const Codes& codes, const float* table, const Scales& scales, const Values& values, int threads) {
    if (codes.rows == 0 || codes.columns == 0) return;
    if (codes.bits == 8) {
        const auto run = values.bfloat16 ? dequantize_all<8, std::uint16_t> : dequantize_all<8, float>;
        run(codes, table, scales, values, threads);
    } else {
        const auto run = values.bfloat16 ? dequantize_all<4, std::uint16_t> : dequantize_all<4, float>;
        run(codes, table, scales, values, threads);
    }
}

}  // namespace mcore_ckpt
