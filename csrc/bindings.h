// The parts of mcore_ckpt.io._native, each bound in a file of its own beside what it binds.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "host_copy.h"

namespace mcore_ckpt {

using Numbers = std::vector<std::uintptr_t>;

// Throws std::invalid_argument for lists of different lengths and null addresses with bytes.
std::vector<Copy> pair_up(const Numbers& destinations, const Numbers& sources, const Numbers& nbytes);

void bind_host_buffer(pybind11::module_& m);
void bind_write_job(pybind11::module_& m);
void bind_read_job(pybind11::module_& m);
void bind_device_copy(pybind11::module_& m);

}  // namespace mcore_ckpt
