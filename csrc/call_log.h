// Which system calls on files are under way, and since when: a disk that hangs returns from none of them, and tells
// nobody.
#pragma once

#include <algorithm>
#include <chrono>
#include <list>
#include <mutex>
#include <optional>
#include <string>

namespace mcore_ckpt {

// All methods may be called from any thread.
class CallLog {
    using Clock = std::chrono::steady_clock;
    struct Entry {
        const char* doing;
        const std::string* path;
        Clock::time_point since;
    };

  public:
    // A call that lasts as long as this object. The log may be a nullptr. The text and the path must outlive it.
    class Call {
      public:
        Call(CallLog* log, const char* doing, const std::string& path) : log_(log) {
            if (log_ == nullptr) return;
            const std::lock_guard<std::mutex> lock(log_->mutex_);
            entry_ = log_->entries_.insert(log_->entries_.end(), {doing, &path, Clock::now()});
        }
        ~Call() {
            if (log_ == nullptr) return;
            const std::lock_guard<std::mutex> lock(log_->mutex_);
            log_->entries_.erase(entry_);
        }
        Call(const Call&) = delete;
        Call& operator=(const Call&) = delete;

      private:
        CallLog* log_;
        std::list<Entry>::iterator entry_;
    };

    struct Longest {
        std::string doing, path;
        double seconds;
    };

    // The call that has lasted longest.
    std::optional<Longest> longest() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (entries_.empty()) return {};
        const auto& first = *std::min_element(entries_.begin(), entries_.end(),
                                              [](const Entry& a, const Entry& b) { return a.since < b.since; });
        return Longest{first.doing, *first.path, std::chrono::duration<double>(Clock::now() - first.since).count()};
    }

  private:
    mutable std::mutex mutex_;
    std::list<Entry> entries_;
};

}  // namespace mcore_ckpt
