// Python's WriteJob and FileLayout.
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <stdexcept>

#include "bindings.h"
#include "device_copy.h"
#include "file_layout.h"
#include "release_gil.h"
#include "write_job.h"

namespace py = pybind11;

namespace mcore_ckpt {
namespace {

using Offsets = std::vector<std::uint64_t>;
using Crcs = FileLayout::Crcs;
using Addresses = std::vector<std::uintptr_t>;
using Ready = std::vector<std::pair<std::uint64_t, std::shared_ptr<DeviceEvent>>>;

// How long a thread waits before it checks for Ctrl-C.
constexpr std::chrono::milliseconds SIGNALS_EVERY{100};

// A forked child leaks the job (see WriteJob::forked).
struct LeaveOrDelete {
    void operator()(WriteJob* job) const {
        if (!job->forked()) DeleteWithoutGil<WriteJob>()(job);
    }
};

Crcs join_all(const FileLayout& layout, const Offsets& cuts, const std::vector<Crcs>& crcs) {
    if (cuts.empty() || cuts.front() != 0 || cuts.back() != layout.end()) {
        throw std::invalid_argument("cuts do not go from 0 to " + std::to_string(layout.end()));
    }
    return layout.join(cuts, crcs);
}

std::vector<std::pair<std::uint64_t, std::size_t>> foreign_descriptors(const FileLayout& layout, const Offsets& cuts) {
    std::vector<std::pair<std::uint64_t, std::size_t>> pairs;
    for (const auto& descriptor : layout.foreign_descriptors(cuts)) pairs.emplace_back(descriptor.at, descriptor.slot);
    return pairs;
}

std::size_t add_file(WriteJob& job, const std::filesystem::path& path, std::shared_ptr<FileLayout> layout,
                     std::uint64_t start, std::uint64_t stop, const std::optional<Addresses>& sources,
                     const py::object& owner, const std::optional<int>& device, const std::vector<bool>& on_device,
                     std::shared_ptr<HostBuffer> buffer, std::size_t offset, const Ready& ready) {
    if (sources.has_value() == (buffer != nullptr)) throw std::invalid_argument("pass either sources or a buffer");
    WriteJob::Range range{path.string(), std::move(layout), start, stop};
    range.sources_owner = owner_of(owner);
    if (sources) {
        for (const auto address : *sources) range.sources.push_back(reinterpret_cast<const std::uint8_t*>(address));
    }
    range.device = device.value_or(HostBuffer::NO_DEVICE);
    range.on_device = on_device;
    range.buffer = std::move(buffer);
    range.buffer_offset = offset;
    for (const auto& [before, event] : ready) {
        if (event == nullptr) throw std::invalid_argument("an event of `ready` is None");
        range.ready.emplace_back(before, event);
    }
    return job.add_file(std::move(range));
}

std::size_t number(std::int64_t file) {
    if (file < 0) throw std::invalid_argument("there is no file " + std::to_string(file));
    return static_cast<std::size_t>(file);
}

Clock::time_point deadline_after(const std::optional<double>& timeout) {
    return timeout ? after_seconds(std::max(0.0, *timeout)) : Clock::time_point::max();
}

std::optional<Crcs> wait(WriteJob& job, std::int64_t file, const std::optional<double>& timeout) {
    const auto deadline = deadline_after(timeout);
    for (;;) {
        const auto until = std::min(deadline, WriteJob::Clock::now() + SIGNALS_EVERY);
        std::optional<Crcs> crcs;
        {
            const ReleasedGil release;
            crcs = job.wait(number(file), until);
        }
        if (crcs || until == deadline) return crcs;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

// Copies the tail out of the Python object before it releases the GIL.
void finish(WriteJob& job, std::int64_t file, const std::optional<py::bytes>& tail, const WriteJob::Patches& patches) {
    std::optional<std::string> bytes;
    if (tail) bytes = static_cast<std::string>(*tail);
    const ReleasedGil release;
    job.finish(number(file), bytes, patches);
}

void bind_file_layout(py::module_& m) {
    py::class_<FileLayout, std::shared_ptr<FileLayout>>(m, "FileLayout")
        .def(py::init<const Offsets&, const Offsets&, const std::vector<std::int64_t>&,
                      const std::vector<FileLayout::Gap>&, std::uint64_t, std::uint64_t>(),
             py::arg("offsets"), py::arg("nbytes"), py::arg("descriptor_crc_at"), py::arg("gaps"), py::arg("end"),
             py::arg("block_bytes"))
        .def("part_count", &FileLayout::part_count, py::arg("start"), py::arg("stop"))
        .def("join", &join_all, py::arg("cuts"), py::arg("crcs"))
        .def("slot_crcs", &FileLayout::slot_crcs, py::arg("block_crcs"))
        .def("file_crc", &FileLayout::file_crc, py::arg("slot_crcs"))
        .def("foreign_descriptors", &foreign_descriptors, py::arg("cuts"));
}

}  // namespace

void bind_write_job(py::module_& m) {
    bind_file_layout(m);
    py::class_<WriteJob, std::unique_ptr<WriteJob, LeaveOrDelete>>(m, "WriteJob")
        .def(py::init<int, std::size_t, bool, double>(), py::kw_only(), py::arg("threads"), py::arg("piece_bytes"),
             py::arg("direct") = true, py::arg("device_timeout") = FOREVER_S)
        .def("add_file", &add_file, py::arg("path"), py::arg("layout").none(false), py::arg("start"), py::arg("stop"),
             py::kw_only(), py::arg("sources") = py::none(), py::arg("owner") = py::none(),
             py::arg("device") = py::none(), py::arg("on_device") = std::vector<bool>(), py::arg("buffer") = py::none(),
             py::arg("offset") = 0, py::arg("ready") = Ready())
        .def("start", &WriteJob::start, WithoutGil())
        .def("wait", &wait, py::arg("file"), py::arg("timeout") = py::none())
        .def("finish", &finish, py::arg("file"), py::arg("tail").none(true), py::arg("patches") = WriteJob::Patches())
        .def("progress", &WriteJob::progress)
        .def("times", &WriteJob::times, WithoutGil())
        .def("limit_device_wait", &WriteJob::limit_device_wait, py::arg("seconds"))
        .def("longest_call", &longest_call<WriteJob>)
        .def("cancel", &WriteJob::cancel, WithoutGil())
        .def("close", &WriteJob::close, WithoutGil());
}

}  // namespace mcore_ckpt
