// Releases Python's global interpreter lock (GIL) around calls that take time, so that other Python threads run.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <exception>
#include <memory>

namespace mcore_ckpt {

inline bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
}

// Lets other Python threads run as long as it lives. An interpreter that ends makes a daemon thread that wants the GIL
// back exit, by unwinding its stack (up to Python 3.13). pybind11's own class does not let that through, so the process
// would abort. While an exception unwinds the stack already, the thread sleeps until the process is gone.
class ReleasedGil {
  public:
    ReleasedGil() : exceptions_(std::uncaught_exceptions()), state_(PyEval_SaveThread()) {}
    // What unwinds the stack is no exception of C++, and must not end the process.
    // NOLINTNEXTLINE(bugprone-unsafe-to-allow-exceptions)
    ~ReleasedGil() noexcept(false) {
        while (interpreter_ends() && std::uncaught_exceptions() > exceptions_) ::pause();
        PyEval_RestoreThread(state_);
    }
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

  private:
    const int exceptions_;
    PyThreadState* state_;
};

using WithoutGil = pybind11::call_guard<ReleasedGil>;

// For destructors that wait for threads or a GPU, or unmap much memory. The last owner may be Python, with the GIL, or
// a C++ object that is destroyed without it.
template <class T>
struct DeleteWithoutGil {
    void operator()(T* object) const {
        if (PyGILState_Check() != 0) {
            const ReleasedGil release;
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
        if (interpreter_ends()) return;  // its memory goes with the process
        const pybind11::gil_scoped_acquire gil;
        Py_DECREF(owned);
    };
    return std::shared_ptr<PyObject>(pybind11::object(object).release().ptr(), drop);
}

}  // namespace mcore_ckpt
