// The module mcore_ckpt.io._native. It takes tensors as addresses and includes no torch headers, so that one build
// works with every torch release.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "bindings.h"
#include "crc32.h"
#include "file.h"
#include "host_copy.h"
#include "release_gil.h"

namespace py = pybind11;
using namespace mcore_ckpt;

namespace {

const void* readable(std::uintptr_t address, std::size_t nbytes) {
    if (address == 0 && nbytes != 0) {
        throw std::invalid_argument("null address for " + std::to_string(nbytes) + " bytes");
    }
    return reinterpret_cast<const void*>(address);
}

void require_threads(int threads) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1, not " + std::to_string(threads));
}

std::vector<Copy> pair_up(const Numbers& destinations, const Numbers& sources, const Numbers& nbytes) {
    require_same_length(destinations.size(), "destinations", sources.size(), nbytes.size());
    std::vector<Copy> copies(nbytes.size());
    for (std::size_t i = 0; i < copies.size(); ++i) {
        if (nbytes[i] != 0 && (destinations[i] == 0 || sources[i] == 0)) {
            throw std::invalid_argument("null address for copy " + std::to_string(i) + " of " +
                                        std::to_string(nbytes[i]) + " bytes");
        }
        copies[i] = {reinterpret_cast<void*>(destinations[i]), reinterpret_cast<const void*>(sources[i]), nbytes[i]};
    }
    return copies;
}

void refuse_overlap(const std::vector<Copy>& copies) {
    for (std::size_t i = 0; i < copies.size(); ++i) {
        const auto destination = reinterpret_cast<std::uintptr_t>(copies[i].destination);
        const auto source = reinterpret_cast<std::uintptr_t>(copies[i].source);
        const std::uintptr_t distance = destination > source ? destination - source : source - destination;
        if (distance < copies[i].nbytes) {
            throw std::invalid_argument("source and destination of copy " + std::to_string(i) + " overlap");
        }
    }
}

}  // namespace

void mcore_ckpt::require_same_length(std::size_t destinations, const char* what, std::size_t sources,
                                     std::size_t sizes) {
    if (destinations == sources && sources == sizes) return;
    throw std::invalid_argument("lists of different lengths: " + std::to_string(destinations) + " " + what + ", " +
                                std::to_string(sources) + " sources, " + std::to_string(sizes) + " sizes");
}

// Raises Python's OSError, which turns into a subclass for common error numbers (FileNotFoundError, ...).
void raise_as_os_error(std::exception_ptr thrown) {
    try {
        if (thrown) std::rethrow_exception(thrown);
    } catch (const FileError& error) {
        // The path of a file may contain bytes that are not UTF-8.
        const auto path = py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(error.path.c_str()));
        PyErr_SetObject(PyExc_OSError, py::make_tuple(error.number, error.what(), path).ptr());
    } catch (const std::system_error& error) {
        PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    }
}

PYBIND11_MODULE(_native, m) {
    py::register_local_exception_translator(raise_as_os_error);
    bind_host_buffer(m);
    bind_write_job(m);
    bind_read_job(m);
    bind_device_copy(m);
    bind_dequantize(m);

    m.doc() =
        "CRC-32, copies and file access at the speed of memory and disk. Addresses, sizes in bytes and CUDA streams "
        "are integers.";

    m.def(
        "crc32",
        [](std::uintptr_t address, std::size_t nbytes, std::uint32_t seed) {
            return crc32(readable(address, nbytes), nbytes, seed);
        },
        py::arg("address"), py::arg("nbytes"), py::arg("seed") = 0, WithoutGil());
    m.def(
        "crc32_blocks",
        [](std::uintptr_t address, std::size_t nbytes, std::size_t block_bytes, int threads) {
            if (block_bytes == 0) throw std::invalid_argument("block_bytes must not be 0");
            require_threads(threads);
            return crc32_blocks(readable(address, nbytes), nbytes, block_bytes, threads);
        },
        py::arg("address"), py::arg("nbytes"), py::arg("block_bytes"), py::arg("threads") = 1, WithoutGil());
    m.def("crc32_combine", &crc32_combine, py::arg("first"), py::arg("second"), py::arg("second_nbytes"));
    m.def("crc32_methods", &crc32_methods);
    m.def(
        "crc32_by",
        [](const std::string& method, std::uintptr_t address, std::size_t nbytes, std::uint32_t seed) {
            return crc32_by(method, readable(address, nbytes), nbytes, seed);
        },
        py::arg("method"), py::arg("address"), py::arg("nbytes"), py::arg("seed") = 0, WithoutGil());

    m.def(
        "copy_host",
        [](const Numbers& destinations, const Numbers& sources, const Numbers& nbytes, int threads) {
            require_threads(threads);
            const auto copies = pair_up(destinations, sources, nbytes);
            refuse_overlap(copies);
            copy_host(copies, threads);
        },
        py::arg("destinations"), py::arg("sources"), py::arg("nbytes"), py::arg("threads"), WithoutGil());
}
