// Python's dequantize.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

#include "bindings.h"
#include "dequantize.h"
#include "release_gil.h"

namespace py = pybind11;

namespace mcore_ckpt {
namespace {

void check(const Codes& codes, const float* table, const Scales& scales, const Values& values, int threads) {
    if (codes.bits != 4 && codes.bits != 8) throw std::invalid_argument("bits must be 4 or 8");
    if (scales.block_rows == 0 || scales.block_columns == 0) throw std::invalid_argument("a block must not be empty");
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    if (codes.rows == 0 || codes.columns == 0) return;
    if (!codes.first || !table || !scales.first || !values.first) throw std::invalid_argument("null address");
    if (codes.row_bytes < (codes.columns * codes.bits + 7) / 8) throw std::invalid_argument("rows of codes overlap");
    if (values.row_elements < codes.columns) throw std::invalid_argument("rows of values overlap");
    if ((codes.first_row + codes.rows - 1) / scales.block_rows >= scales.rows) {
        throw std::invalid_argument("there are rows without scales");
    }
    if ((codes.first_column + codes.columns - 1) / scales.block_columns >= scales.row_scales) {
        throw std::invalid_argument("there are columns without scales");
    }
}

}  // namespace

void bind_dequantize(py::module_& m) {
    m.def(
        "dequantize",
        [](std::uintptr_t codes, std::size_t row_bytes, int bits, std::size_t rows, std::size_t columns,
           std::size_t first_row, std::size_t first_column, std::uintptr_t table, std::uintptr_t scales,
           std::size_t scale_rows, std::size_t row_scales, std::size_t block_rows, std::size_t block_columns,
           std::uintptr_t values, std::size_t row_elements, bool bfloat16, int threads) {
            const Codes from{
                reinterpret_cast<const std::uint8_t*>(codes), row_bytes, bits, rows, columns, first_row, first_column};
            const auto* by_code = reinterpret_cast<const float*>(table);
            const Scales by{reinterpret_cast<const float*>(scales), scale_rows, row_scales, block_rows, block_columns};
            const Values to{reinterpret_cast<void*>(values), row_elements, bfloat16};
            check(from, by_code, by, to, threads);
            dequantize(from, by_code, by, to, threads);
        },
        py::kw_only(), py::arg("codes"), py::arg("row_bytes"), py::arg("bits"), py::arg("rows"), py::arg("columns"),
        py::arg("first_row"), py::arg("first_column"), py::arg("table"), py::arg("scales"), py::arg("scale_rows"),
        py::arg("row_scales"), py::arg("block_rows"), py::arg("block_columns"), py::arg("values"),
        py::arg("row_elements"), py::arg("bfloat16"), py::arg("threads"), WithoutGil());
}

}  // namespace mcore_ckpt
