// Declares the functions that bind the parts of mcore_ckpt.io._native. Each is defined beside the C++ code that it
// binds.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace mcore_ckpt {

using Numbers = std::vector<std::uintptr_t>;

// Throws std::invalid_argument unless the lists of destinations (which the caller calls `what`), sources and sizes have
// the same length.
void require_same_length(std::size_t destinations, const char* what, std::size_t sources, std::size_t sizes);

// What a job's `longest_call` is to Python.
template <typename Job>
std::optional<std::tuple<std::string, std::string, double>> longest_call(const Job& job) {
    const auto found = job.longest_call();
    if (!found) return {};
    return std::make_tuple(found->doing, found->path, found->seconds);
}

void bind_host_buffer(pybind11::module_& m);
void bind_write_job(pybind11::module_& m);
void bind_read_job(pybind11::module_& m);
void bind_device_copy(pybind11::module_& m);
void bind_dequantize(pybind11::module_& m);

}  // namespace mcore_ckpt
