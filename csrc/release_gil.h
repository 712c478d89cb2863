// Destructors that wait for threads or give back much memory let other Python threads run.
#pragma once

#include <pybind11/pybind11.h>

namespace mcore_ckpt {

template <class T>
struct DeleteWithoutGil {
    void operator()(T* object) const {
        pybind11::gil_scoped_release release;
        delete object;
    }
};

}  // namespace mcore_ckpt
