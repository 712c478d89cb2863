// Computes the values of quantized weights: the value of each code, times the scale of the code's block.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mcore_ckpt {

// `rows` rows of `columns` codes, cut out of a matrix of codes. Row k begins `k * row_bytes` after `first`.
struct Codes {
    const std::uint8_t* first;
    std::size_t row_bytes;
    // 8, or 4: then each byte has two codes, the first of them in its lower half.
    int bits;
    std::size_t rows, columns;
    // The place of the first code in the matrix, which determines its block.
    std::size_t first_row, first_column;
};

// One scale for each block of `block_rows` rows and `block_columns` columns of the matrix, row by row. The last block
// of a row or column can be smaller.
struct Scales {
    const float* first;
    std::size_t rows, row_scales;
    std::size_t block_rows, block_columns;
};

// What is written: `row_elements` from one row to the next, as float32 or, rounded to nearest even, as bfloat16.
struct Values {
    void* first;
    std::size_t row_elements;
    bool bfloat16;
};

// Computes `table[code] * scale` in float32 on up to `threads` threads. `table` has 2**bits entries.
void dequantize(const Codes& codes, const float* table, const Scales& scales, const Values& values, int threads);

}  // namespace mcore_ckpt
