#include <cstdint>
#include <memory>

#include "bindings.h"
#include "host_buffer.h"
#include "release_gil.h"

namespace py = pybind11;

namespace mcore_ckpt {

void bind_host_buffer(py::module_& m) {
    using Holder = std::unique_ptr<HostBuffer, DeleteWithoutGil<HostBuffer>>;
    py::class_<HostBuffer, Holder>(m, "HostBuffer", py::buffer_protocol())
        .def(py::init<std::size_t, bool, int>(), py::arg("nbytes"), py::kw_only(), py::arg("pinned") = false,
             py::arg("threads") = 1, py::call_guard<py::gil_scoped_release>())
        .def_static(
            "reserve",
            [](std::size_t nbytes, bool to_pin) { return Holder(HostBuffer::reserve(nbytes, to_pin).release()); },
            py::arg("nbytes"), py::kw_only(), py::arg("to_pin") = false)
        .def("fetch", &HostBuffer::fetch, py::arg("begin"), py::arg("nbytes"), py::kw_only(), py::arg("threads") = 1,
             py::call_guard<py::gil_scoped_release>())
        .def("pin", &HostBuffer::pin, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly(
            "address", [](const HostBuffer& buffer) { return reinterpret_cast<std::uintptr_t>(buffer.data()); })
        .def_property_readonly("nbytes", &HostBuffer::nbytes)
        .def_property_readonly("pinned", &HostBuffer::pinned)
        .def_buffer([](HostBuffer& b) {
            return py::buffer_info(b.data(), static_cast<py::ssize_t>(b.nbytes()));
        });
}

}  // namespace mcore_ckpt
