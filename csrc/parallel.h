// Running one function on several threads at once.
#pragma once

#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

namespace mcore_ckpt {

// Up to `count` threads that each call `work`, which must not throw: fewer, even none, where the system grants fewer.
std::vector<std::thread> start_threads(std::size_t count, const std::function<void()>& work);

// Calls `work` on `threads` threads, the caller's among them, and returns when all calls have returned. `work` must not
// throw and must take its share from a common counter: where the system grants fewer threads, fewer calls are made.
// Threads live for one call only. A pool would be gone in the child of a fork, which data loaders do, and
// starting a thread costs some 20 us beside the milliseconds that each call here is worth.
void run_on_threads(int threads, const std::function<void()>& work);

}  // namespace mcore_ckpt
