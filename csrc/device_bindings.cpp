#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings.h"
#include "device_copy.h"

namespace py = pybind11;

namespace mcore_ckpt {
namespace {

using WithoutGil = py::call_guard<py::gil_scoped_release>;

// The destructor waits for the GPU.
struct DeleteWithoutGil {
    void operator()(DeviceCopier* copier) const {
        const py::gil_scoped_release release;
        delete copier;
    }
};

}  // namespace

void bind_device_copy(py::module_& m) {
    m.attr("built_with_cuda") = BUILT_WITH_CUDA;
    m.def(
        "copy_to_host",
        [](const Numbers& destinations, const Numbers& sources, const Numbers& nbytes, std::uintptr_t stream) {
            copy_to_host(pair_up(destinations, sources, nbytes), stream);
        },
        py::arg("destinations"), py::arg("sources"), py::arg("nbytes"), py::arg("stream"), WithoutGil());
    m.def(
        "copy_to_device",
        [](const Numbers& destinations, const Numbers& sources, const Numbers& nbytes, std::uintptr_t stream) {
            copy_to_device(pair_up(destinations, sources, nbytes), stream);
        },
        py::arg("destinations"), py::arg("sources"), py::arg("nbytes"), py::arg("stream"), WithoutGil());

    py::class_<DeviceCopier, std::unique_ptr<DeviceCopier, DeleteWithoutGil>>(m, "DeviceCopier")
        .def(py::init<int>(), py::arg("device"))
        .def_property_readonly("stream", &DeviceCopier::stream)
        .def(
            "start",
            [](DeviceCopier& copier, const Numbers& destinations, const Numbers& sources, const Numbers& nbytes,
               std::uintptr_t after, std::size_t group_bytes) {
                return copier.start(pair_up(destinations, sources, nbytes), after, group_bytes);
            },
            py::arg("destinations"), py::arg("sources"), py::arg("nbytes"), py::arg("after"), py::arg("group_bytes"),
            WithoutGil())
        .def("hold", &DeviceCopier::hold, py::arg("stream"), WithoutGil())
        .def("done", &DeviceCopier::done, WithoutGil())
        .def("wait", &DeviceCopier::wait, WithoutGil())
        .def("close", &DeviceCopier::close, WithoutGil());
}

}  // namespace mcore_ckpt
