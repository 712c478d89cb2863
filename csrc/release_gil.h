// What takes time lets other Python threads run.
#pragma once

#include <pybind11/pybind11.h>

namespace mcore_ckpt {

using WithoutGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// For destructors that wait for threads or for a GPU, or give back much memory.
template <class T>
struct DeleteWithoutGil {
    void operator()(T* object) const {
        pybind11::gil_scoped_release release;
        delete object;
    }
};

}  // namespace mcore_ckpt
