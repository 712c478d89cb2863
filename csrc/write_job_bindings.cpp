#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <stdexcept>

#include "bindings.h"
#include "file_image.h"
#include "release_gil.h"
#include "write_job.h"

namespace py = pybind11;

namespace mcore_ckpt {
namespace {

using Offsets = std::vector<std::uint64_t>;
using Crcs = FileImage::Crcs;
using Addresses = std::vector<std::uintptr_t>;
using Ready = std::vector<std::pair<std::uint64_t, std::uintptr_t>>;

// How long a thread waits before it looks for Ctrl-C.
constexpr std::chrono::milliseconds SIGNALS_EVERY{100};

struct LeaveOrDelete {
    void operator()(WriteJob* job) const {
        if (!job->forked()) DeleteWithoutGil<WriteJob>()(job);
    }
};

Crcs join_all(const FileImage& image, const Offsets& cuts, const std::vector<Crcs>& crcs) {
    if (cuts.empty() || cuts.front() != 0 || cuts.back() != image.end()) {
        throw std::invalid_argument("cuts do not go from 0 to " + std::to_string(image.end()));
    }
    return image.join(cuts, crcs);
}

std::vector<std::pair<std::uint64_t, std::size_t>> foreign_descriptors(const FileImage& image, const Offsets& cuts) {
    std::vector<std::pair<std::uint64_t, std::size_t>> pairs;
    for (const auto& descriptor : image.foreign_descriptors(cuts)) pairs.emplace_back(descriptor.at, descriptor.slot);
    return pairs;
}

std::size_t add_file(WriteJob& job, const std::filesystem::path& path, std::shared_ptr<FileImage> image,
                     std::uint64_t start, std::uint64_t stop, const std::optional<Addresses>& sources,
                     std::uintptr_t buffer, Ready ready) {
    if (sources.has_value() == (buffer != 0)) throw std::invalid_argument("either sources or the address of a buffer");
    auto* memory = reinterpret_cast<std::uint8_t*>(buffer);
    WriteJob::Range range{path.string(), std::move(image), start, stop, {}, memory, std::move(ready)};
    if (sources) {
        for (const auto address : *sources) range.sources.push_back(reinterpret_cast<const std::uint8_t*>(address));
    }
    return job.add_file(std::move(range));
}

std::size_t number(std::int64_t file) {
    if (file < 0) throw std::invalid_argument("there is no file " + std::to_string(file));
    return static_cast<std::size_t>(file);
}

WriteJob::Clock::time_point deadline_after(const std::optional<double>& timeout) {
    const auto now = WriteJob::Clock::now();
    constexpr double FOREVER = 1e9;
    if (!timeout || *timeout > FOREVER) return WriteJob::Clock::time_point::max();
    const std::chrono::duration<double> seconds(*timeout > 0 ? *timeout : 0);
    return now + std::chrono::duration_cast<WriteJob::Clock::duration>(seconds);
}

std::optional<Crcs> wait(WriteJob& job, std::int64_t file, const std::optional<double>& timeout) {
    const auto deadline = deadline_after(timeout);
    for (;;) {
        const auto until = std::min(deadline, WriteJob::Clock::now() + SIGNALS_EVERY);
        std::optional<Crcs> crcs;
        {
            const py::gil_scoped_release release;
            crcs = job.wait(number(file), until);
        }
        if (crcs || until == deadline) return crcs;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

// Copies the tail out of the Python object before the GIL goes.
void finish(WriteJob& job, std::int64_t file, const std::optional<py::bytes>& tail, const WriteJob::Patches& patches) {
    std::optional<std::string> bytes;
    if (tail) bytes = static_cast<std::string>(*tail);
    const py::gil_scoped_release release;
    job.finish(number(file), bytes, patches);
}

void bind_file_image(py::module_& m) {
    py::class_<FileImage, std::shared_ptr<FileImage>>(m, "FileImage")
        .def(py::init<const Offsets&, const Offsets&, const std::vector<std::int64_t>&,
                      const std::vector<FileImage::Gap>&, std::uint64_t, std::uint64_t>(),
             py::arg("offsets"), py::arg("nbytes"), py::arg("descriptor_crc_at"), py::arg("gaps"), py::arg("end"),
             py::arg("block_bytes"))
        .def("part_count", &FileImage::part_count, py::arg("start"), py::arg("stop"))
        .def("join", &join_all, py::arg("cuts"), py::arg("crcs"))
        .def("slot_crcs", &FileImage::slot_crcs, py::arg("block_crcs"))
        .def("file_crc", &FileImage::file_crc, py::arg("slot_crcs"))
        .def("foreign_descriptors", &foreign_descriptors, py::arg("cuts"));
}

}  // namespace

void bind_write_job(py::module_& m) {
    bind_file_image(m);
    py::class_<WriteJob, std::unique_ptr<WriteJob, LeaveOrDelete>>(m, "WriteJob")
        .def(py::init<int, std::size_t, bool>(), py::kw_only(), py::arg("threads"), py::arg("piece_bytes"),
             py::arg("direct") = true)
        .def("add_file", &add_file, py::arg("path"), py::arg("image").none(false), py::arg("start"), py::arg("stop"),
             py::arg("sources").none(true), py::arg("buffer"), py::arg("ready") = Ready())
        .def("start", &WriteJob::start, WithoutGil())
        .def("wait", &wait, py::arg("file"), py::arg("timeout") = py::none())
        .def("finish", &finish, py::arg("file"), py::arg("tail").none(true), py::arg("patches") = WriteJob::Patches())
        .def("progress", &WriteJob::progress)
        .def("times", &WriteJob::times, WithoutGil())
        .def("cancel", &WriteJob::cancel, WithoutGil())
        .def("close", &WriteJob::close, WithoutGil());
}

}  // namespace mcore_ckpt
