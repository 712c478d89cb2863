// Starts threads, and continues with fewer if the system refuses some.
#include "parallel.h"

#include <exception>

namespace mcore_ckpt {

std::vector<std::thread> start_threads(std::size_t count, const std::function<void()>& work) {
    std::vector<std::thread> threads;
    threads.reserve(count);
    while (threads.size() < count) {
        try {
            threads.emplace_back(work);
        } catch (const std::exception&) {
            break;  // a container's limit on threads or memory should make a save slower, not make it fail
        }
    }
    return threads;
}

void run_on_threads(int threads, const std::function<void()>& work) {
    auto others = start_threads(threads > 1 ? threads - 1 : 0, work);
    work();
    for (auto& other : others) other.join();
}

}  // namespace mcore_ckpt
