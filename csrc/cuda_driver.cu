// Finds functions of the GPU driver at run time. The extension does not link the driver, because Python must be able to
// import the extension on a machine without one.
#include <dlfcn.h>

#include "cuda_support.h"

namespace mcore_ckpt {

void* driver_function(const char* name) {
    // RTLD_NOLOAD: the CUDA runtime, which is linked statically, loads the driver at its first call.
    void* driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return driver == nullptr ? nullptr : ::dlsym(driver, name);
}

}  // namespace mcore_ckpt
