// Releases Python's global interpreter lock (GIL) around calls that take time, so that other Python threads run.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace mcore_ckpt {

using WithoutGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// For destructors that wait for threads or a GPU, or unmap much memory. The last owner may be Python, with the GIL, or
// a C++ object that is destroyed without it.
template <class T>
struct DeleteWithoutGil {
    void operator()(T* object) const {
        if (PyGILState_Check() != 0) {
            const pybind11::gil_scoped_release release;
            delete object;
        } else {
            delete object;
        }
    }
};

// A C++ owner of a Python object, which may be dropped on any thread. nullptr for None.
inline std::shared_ptr<const void> owner_of(const pybind11::object& object) {
    if (object.is_none()) return nullptr;
    const auto drop = [](PyObject* owned) {
        const pybind11::gil_scoped_acquire gil;
        Py_DECREF(owned);
    };
    return std::shared_ptr<PyObject>(pybind11::object(object).release().ptr(), drop);
}

}  // namespace mcore_ckpt
