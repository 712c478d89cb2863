#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings.h"
#include "device_copy.h"
#include "release_gil.h"

namespace py = pybind11;

namespace mcore_ckpt {

void bind_device_copy(py::module_& m) {
    m.attr("built_with_cuda") = BUILT_WITH_CUDA;
    using Holder = std::unique_ptr<DeviceCopier, DeleteWithoutGil<DeviceCopier>>;
    py::class_<DeviceCopier, Holder>(m, "DeviceCopier")
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
