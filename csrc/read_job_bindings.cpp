// Python's ReadJob and DamagedBlock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "read_job.h"
#include "release_gil.h"

namespace py = pybind11;

namespace mcore_ckpt {
namespace {

PyObject* damaged_block = nullptr;

void raise_damaged_block(std::exception_ptr thrown) {
    try {
        if (thrown) std::rethrow_exception(thrown);
    } catch (const DamagedBlock& error) {
        PyErr_SetObject(damaged_block, py::make_tuple(error.read, error.offset, error.nbytes).ptr());
    }
}

}  // namespace

void bind_read_job(py::module_& m) {
    damaged_block = PyErr_NewException("mcore_ckpt.io._native.DamagedBlock", PyExc_ValueError, nullptr);
    if (damaged_block == nullptr) throw py::error_already_set();
    m.attr("DamagedBlock") = py::handle(damaged_block);
    py::register_local_exception_translator(raise_damaged_block);

    py::class_<ReadJob>(m, "ReadJob")
        .def(py::init([](std::vector<std::string> paths, int threads, std::size_t piece_bytes, std::size_t block_bytes,
                         bool direct, bool pinned, double device_timeout) {
                 return new ReadJob(std::move(paths),
                                    {threads, piece_bytes, block_bytes, direct, pinned, device_timeout});
             }),
             py::arg("paths"), py::kw_only(), py::arg("threads"), py::arg("piece_bytes"), py::arg("block_bytes"),
             py::arg("direct") = true, py::arg("pinned") = false, py::arg("device_timeout") = FOREVER_S)
        .def(
            "add",
            [](ReadJob& job, std::size_t file, std::uint64_t offset, std::size_t nbytes,
               const std::optional<std::vector<std::uint32_t>>& crcs, std::size_t start, std::size_t row_bytes,
               std::size_t rows, std::size_t source_stride, std::uintptr_t destination, std::size_t destination_stride,
               const std::optional<int>& device, const py::object& owner) {
                auto* address = reinterpret_cast<std::uint8_t*>(destination);
                return job.add(file, offset, nbytes, crcs,
                               {start, row_bytes, rows, source_stride, address, destination_stride,
                                device.value_or(HostBuffer::NO_DEVICE), owner_of(owner)});
            },
            py::arg("file"), py::arg("offset"), py::arg("nbytes"), py::arg("crcs"), py::arg("start"),
            py::arg("row_bytes"), py::arg("rows"), py::arg("source_stride"), py::arg("destination"),
            py::arg("destination_stride"), py::arg("device") = py::none(), py::arg("owner") = py::none())
        .def("run", &ReadJob::run, WithoutGil())
        .def("progress", &ReadJob::progress)
        .def("longest_call", &longest_call<ReadJob>)
        .def("cancel", &ReadJob::cancel)
        .def_property_readonly("scratch_bytes", &ReadJob::scratch_bytes);
}

}  // namespace mcore_ckpt
