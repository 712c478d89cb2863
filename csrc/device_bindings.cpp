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

PyObject* device_stuck = nullptr;

void raise_device_stuck(std::exception_ptr thrown) {
    try {
        if (thrown) std::rethrow_exception(thrown);
    } catch (const DeviceStuck& error) {
        PyErr_SetObject(device_stuck, py::make_tuple(error.device, error.seconds).ptr());
    }
}

}  // namespace

void bind_device_copy(py::module_& m) {
    m.attr("built_with_cuda") = BUILT_WITH_CUDA;
    device_stuck = PyErr_NewException("mcore_ckpt.io._native.DeviceStuck", PyExc_RuntimeError, nullptr);
    if (device_stuck == nullptr) throw py::error_already_set();
    m.attr("DeviceStuck") = py::handle(device_stuck);
    py::register_local_exception_translator(raise_device_stuck);
    m.def("wait_for_device", &wait_for_device, py::arg("device"), py::arg("timeout"), WithoutGil());
    m.def("side_stream", &side_stream, py::arg("device"), WithoutGil());
    m.def("numa_node_of", &numa_node_of, py::arg("device"), WithoutGil());
    py::class_<DeviceEvent, std::shared_ptr<DeviceEvent>>(m, "DeviceEvent")
        .def("happened", &DeviceEvent::happened, WithoutGil());
    using Holder = std::unique_ptr<DeviceCopier, DeleteWithoutGil<DeviceCopier>>;
    py::class_<DeviceCopier, Holder>(m, "DeviceCopier")
        .def(py::init<int, std::uintptr_t>(), py::arg("device"), py::arg("stream"))
        .def("start", &start, py::arg("buffer").none(false), py::arg("offsets"), py::arg("sources"), py::arg("nbytes"),
             py::arg("after"), py::arg("group_bytes"), WithoutGil())
        .def("hold", &DeviceCopier::hold, py::arg("stream"), py::arg("timeout"), WithoutGil())
        .def("done", &DeviceCopier::done, WithoutGil())
        .def("wait", &DeviceCopier::wait, py::arg("timeout"), WithoutGil())
        .def("close", &DeviceCopier::close, py::arg("timeout"), WithoutGil());
}

}  // namespace mcore_ckpt
