#include "parallel.h"

#include <system_error>
#include <thread>
#include <vector>

namespace mcore_ckpt {

void run_on_threads(int threads, const std::function<void()>& work) {
    std::vector<std::thread> others;
    others.reserve(threads > 1 ? threads - 1 : 0);
    for (int i = 1; i < threads; ++i) {
        try {
            others.emplace_back(work);
        } catch (const std::system_error&) {
            break;  // a container's limit on threads makes a save slower, it must not make it fail
        }
    }
    work();
    for (auto& other : others) other.join();
}

}  // namespace mcore_ckpt
