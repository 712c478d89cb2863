// Python's HostBuffer, and the function that frees idle buffers.
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>

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
        .def(py::init([shared](std::size_t nbytes, const std::optional<int>& device, int threads) {
                 const ReleasedGil release;
                 return shared(new HostBuffer(nbytes, device.value_or(HostBuffer::NO_DEVICE), threads));
             }),
             py::arg("nbytes"), py::kw_only(), py::arg("device") = py::none(), py::arg("threads") = 1)
        .def_readonly_static("PIN_BYTES", &HostBuffer::PIN_BYTES)
        .def_static(
            "reserve",
            [shared](std::size_t nbytes, const std::optional<int>& device, int numa_node) {
                const int number = device.value_or(HostBuffer::NO_DEVICE);
                return shared(HostBuffer::reserve(nbytes, number, numa_node).release());
            },
            py::arg("nbytes"), py::kw_only(), py::arg("device") = py::none(),
            py::arg("numa_node") = HostBuffer::ANY_NODE)
        .def("fetch", &HostBuffer::fetch, py::arg("begin"), py::arg("nbytes"), py::kw_only(), py::arg("threads") = 1,
             WithoutGil())
        .def("pin", &HostBuffer::pin, py::arg("nbytes"), WithoutGil())
        .def_property_readonly("address",
                               [](const HostBuffer& buffer) { return reinterpret_cast<std::uintptr_t>(buffer.data()); })
        .def_property_readonly("nbytes", &HostBuffer::nbytes)
        .def_property_readonly("device",
                               [](const HostBuffer& buffer) {
                                   const bool none = buffer.device() == HostBuffer::NO_DEVICE;
                                   return none ? std::nullopt : std::make_optional(buffer.device());
                               })
        .def_property_readonly("pinned_bytes", &HostBuffer::pinned_bytes)
        .def_buffer([](HostBuffer& b) { return py::buffer_info(b.data(), static_cast<py::ssize_t>(b.nbytes())); });
    m.def("free_idle_buffers", [] { return BufferCache::of_this_process().free_idle(); }, WithoutGil());
}

}  // namespace mcore_ckpt
