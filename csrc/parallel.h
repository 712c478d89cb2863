// Runs one function on several threads at once.
#pragma once

#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

namespace mcore_ckpt {

// Starts `count` threads that each call `work`, which must not throw. Returns fewer threads, or none, if the system
// refuses more.
std::vector<std::thread> start_threads(std::size_t count, const std::function<void()>& work);

// Calls `work` on `threads` threads, including the caller's, and returns when all calls have returned. `work` must not
// throw, and must take its share from a common counter, because there are fewer calls if the system refuses threads.
//
// The threads end with the call. The threads of a pool would not exist in a forked child, and data loaders fork.
// Starting a thread takes about 20 us; the work of each call here takes milliseconds.
void run_on_threads(int threads, const std::function<void()>& work);

}  // namespace mcore_ckpt
