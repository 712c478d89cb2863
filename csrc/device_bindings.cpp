// Python's DeviceCopier and DeviceEvent.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "device_copy.h"
#include "release_gil.h"

namespace py = pybind11;

namespace mcore_ckpt {
namespace {

std::vector<DeviceCopier::Done> start(DeviceCopier& copier, const std::shared_ptr<HostBuffer>& buffer,
                                      const std::vector<std::size_t>& offsets, const Numbers& sources,
                                      const std::vector<std::size_t>& nbytes, std::uintptr_t after,
                                      std::size_t group_bytes) {
    require_same_length(offsets.size(), "offsets", sources.size(), nbytes.size());
    std::vector<DeviceCopier::ToBuffer> copies(nbytes.size());
    for (std::size_t i = 0; i < copies.size(); ++i) {
        copies[i] = {offsets[i], reinterpret_cast<const void*>(sources[i]), nbytes[i]};
    }
    return copier.start(buffer, copies, after, group_bytes);
}

}  // namespace

void bind_device_copy(py::module_& m) {
    m.attr("built_with_cuda") = BUILT_WITH_CUDA;
    py::class_<DeviceEvent, std::shared_ptr<DeviceEvent>>(m, "DeviceEvent")
        .def("wait", &DeviceEvent::wait, WithoutGil());
    using Holder = std::unique_ptr<DeviceCopier, DeleteWithoutGil<DeviceCopier>>;
    py::class_<DeviceCopier, Holder>(m, "DeviceCopier")
        .def(py::init<int>(), py::arg("device"))
        .def_property_readonly("stream", py::cpp_function(&DeviceCopier::stream, WithoutGil()))
        .def("start", &start, py::arg("buffer").none(false), py::arg("offsets"), py::arg("sources"), py::arg("nbytes"),
             py::arg("after"), py::arg("group_bytes"), WithoutGil())
        .def("hold", &DeviceCopier::hold, py::arg("stream"), WithoutGil())
        .def("done", &DeviceCopier::done, WithoutGil())
        .def("wait", &DeviceCopier::wait, WithoutGil())
        .def("close", &DeviceCopier::close, WithoutGil());
}

}  // namespace mcore_ckpt
