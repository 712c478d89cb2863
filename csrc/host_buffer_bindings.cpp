// Python's HostBuffer, and the function that frees idle buffers.
#include <cstdint>
#include <memory>

#include "bindings.h"
#include "buffer_cache.h"
#include "host_buffer.h"
#include "release_gil.h"

namespace py = pybind11;

namespace mcore_ckpt {

void bind_host_buffer(py::module_& m) {
    // Shared: jobs and copiers keep a buffer alive while they use it.
    const auto shared = [](HostBuffer* buffer) {
        return std::shared_ptr<HostBuffer>(buffer, DeleteWithoutGil<HostBuffer>());
    };
    py::class_<HostBuffer, std::shared_ptr<HostBuffer>>(m, "HostBuffer", py::buffer_protocol())
        .def(py::init([shared](std::size_t nbytes, bool pinned, int threads) {
                 const py::gil_scoped_release release;
                 return shared(new HostBuffer(nbytes, pinned, threads));
             }),
             py::arg("nbytes"), py::kw_only(), py::arg("pinned") = false, py::arg("threads") = 1)
        .def_static(
            "reserve",
            [shared](std::size_t nbytes, bool to_pin) { return shared(HostBuffer::reserve(nbytes, to_pin).release()); },
            py::arg("nbytes"), py::kw_only(), py::arg("to_pin") = false)
        .def("fetch", &HostBuffer::fetch, py::arg("begin"), py::arg("nbytes"), py::kw_only(), py::arg("threads") = 1,
             WithoutGil())
        .def("pin", &HostBuffer::pin, WithoutGil())
        .def_property_readonly("address",
                               [](const HostBuffer& buffer) { return reinterpret_cast<std::uintptr_t>(buffer.data()); })
        .def_property_readonly("nbytes", &HostBuffer::nbytes)
        .def_property_readonly("pinned", &HostBuffer::pinned)
        .def_buffer([](HostBuffer& b) { return py::buffer_info(b.data(), static_cast<py::ssize_t>(b.nbytes())); });
    m.def("free_idle_buffers", [] { return BufferCache::of_this_process().free_idle(); }, WithoutGil());
}

}  // namespace mcore_ckpt
