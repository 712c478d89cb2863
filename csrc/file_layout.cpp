// Checks a layout, finds the blocks of a range, and combines CRCs.
#include "file_layout.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "crc32.h"

namespace mcore_ckpt {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument("not a layout of a file: " + why); }

void require_ascending(const std::vector<std::uint64_t>& cuts) {
    if (cuts.size() < 2) throw std::invalid_argument("fewer than 2 cuts");
    if (!std::is_sorted(cuts.begin(), cuts.end())) throw std::invalid_argument("cuts are not ascending");
}

void require_count(const FileLayout::Crcs& crcs, std::size_t count, const std::string& what) {
    if (crcs.size() == count) return;
    throw std::invalid_argument(std::to_string(crcs.size()) + " CRCs for " + std::to_string(count) + " " + what);
}

}  // namespace

FileLayout::FileLayout(const std::vector<std::uint64_t>& offsets, const std::vector<std::uint64_t>& nbytes,
                       const std::vector<std::int64_t>& descriptors, const std::vector<Gap>& gaps, std::uint64_t end,
                       std::uint64_t block_bytes)
    : end_(end) {
    if (offsets.size() != nbytes.size() || offsets.size() != descriptors.size()) {
        refuse(std::to_string(offsets.size()) + " offsets, " + std::to_string(nbytes.size()) + " sizes, " +
               std::to_string(descriptors.size()) + " descriptors");
    }
    if (block_bytes == 0) throw std::invalid_argument("block_bytes must not be 0");
    add_slots(offsets, nbytes, block_bytes);
    add_gaps(gaps);
    check_tiling();
    add_descriptors(descriptors);
}

void FileLayout::add_slots(const std::vector<std::uint64_t>& offsets, const std::vector<std::uint64_t>& nbytes,
                           std::uint64_t block_bytes) {
    slots_.reserve(offsets.size());
    std::uint64_t before = 0;
    for (std::size_t i = 0; i < offsets.size(); ++i) {
        const std::uint64_t begin = offsets[i];
        if (begin < before) refuse("slot " + std::to_string(i) + " begins before the one before it ends");
        if (begin > end_ || nbytes[i] > end_ - begin) refuse("slot " + std::to_string(i) + " goes beyond the end");
        const std::uint64_t end = before = begin + nbytes[i];
        const std::size_t first = blocks_.size();
        for (std::uint64_t at = begin; at < end; at = blocks_.back().end) {
            blocks_.push_back({at, end - at > block_bytes ? at + block_bytes : end, i});
        }
        slots_.push_back({begin, end, first, blocks_.size()});
    }
}

void FileLayout::add_gaps(const std::vector<Gap>& gaps) {
    for (const auto& [begin, bytes] : gaps) {
        if (begin > end_ || bytes.size() > end_ - begin) {
            refuse("the gap at " + std::to_string(begin) + " goes beyond the end");
        }
        if (bytes.empty()) continue;
        const std::uint64_t end = begin + bytes.size();
        if (!gaps_.empty() && gaps_.back().end == begin) {
            gaps_.back().end = end;
        } else {
            gaps_.push_back({begin, end, gap_bytes_.size()});
        }
        gap_bytes_.insert(gap_bytes_.end(), bytes.begin(), bytes.end());
    }
}

void FileLayout::check_tiling() const {
    std::uint64_t position = 0;
    auto gap = gaps_.begin();
    const auto pass_gap = [&] {
        if (gap != gaps_.end() && gap->begin == position) position = (gap++)->end;
    };
    for (const Slot& slot : slots_) {
        if (slot.begin == slot.end) continue;
        pass_gap();
        if (slot.begin != position) {
            refuse("slots and gaps do not tile it, at " + std::to_string(std::min(position, slot.begin)));
        }
        position = slot.end;
    }
    pass_gap();
    if (position != end_ || gap != gaps_.end()) refuse("slots and gaps do not tile it, at " + std::to_string(position));
}

void FileLayout::add_descriptors(const std::vector<std::int64_t>& descriptors) {
    for (std::size_t i = 0; i < descriptors.size(); ++i) {
        const std::string which = "the descriptor of slot " + std::to_string(i);
        if (descriptors[i] == -1) continue;
        const std::uint64_t at = descriptors[i];
        if (descriptors[i] < 0 || at < slots_[i].end) refuse(which + " is not after it");
        if (gaps_.empty() || at < gaps_.front().begin || at >= end_) refuse(which + " is not in a gap");
        const Span& gap = gap_at(at);
        if (at >= gap.end || gap.end - at < DESCRIPTOR_BYTES) refuse(which + " is not in a gap");
        std::memset(&gap_bytes_[gap.at + (at - gap.begin)], 0, DESCRIPTOR_BYTES);
        descriptors_.push_back({at, i});
    }
    std::sort(descriptors_.begin(), descriptors_.end(), [](const auto& a, const auto& b) { return a.at < b.at; });
    for (std::size_t i = 1; i < descriptors_.size(); ++i) {
        if (descriptors_[i].at - descriptors_[i - 1].at < DESCRIPTOR_BYTES) {
            refuse("descriptors overlap at " + std::to_string(descriptors_[i].at));
        }
    }
}

const FileLayout::Span& FileLayout::gap_at(std::uint64_t offset) const {
    const auto after = [](std::uint64_t at, const Span& gap) { return at < gap.begin; };
    return *(std::upper_bound(gaps_.begin(), gaps_.end(), offset, after) - 1);
}

const std::uint8_t* FileLayout::gap_bytes(std::uint64_t offset) const {
    const Span& gap = gap_at(offset);
    return gap_bytes_.data() + gap.at + (offset - gap.begin);
}

FileLayout::Range<FileLayout::Block> FileLayout::blocks_in(std::uint64_t start, std::uint64_t stop) const {
    const auto begins_before = [](const Block& block, std::uint64_t at) { return block.begin < at; };
    const auto ends_after = [](std::uint64_t at, const Block& block) { return at < block.end; };
    const Block* first = blocks_.data();
    const Block* last = first + blocks_.size();
    const Block* from = std::upper_bound(first, last, start, ends_after);
    return {from, start < stop ? std::lower_bound(from, last, stop, begins_before) : from};
}

FileLayout::Range<FileLayout::Descriptor> FileLayout::descriptors_in(std::uint64_t start, std::uint64_t stop) const {
    const auto ends_by = [](const Descriptor& one, std::uint64_t at) { return one.at + DESCRIPTOR_BYTES <= at; };
    const auto begins_before = [](const Descriptor& one, std::uint64_t at) { return one.at < at; };
    const Descriptor* first = descriptors_.data();
    const Descriptor* last = first + descriptors_.size();
    const Descriptor* from = std::lower_bound(first, last, start, ends_by);
    return {from, std::lower_bound(from, last, stop, begins_before)};
}

FileLayout::Crcs FileLayout::join(const std::vector<std::uint64_t>& cuts, const std::vector<Crcs>& crcs) const {
    require_ascending(cuts);
    if (crcs.size() != cuts.size() - 1) {
        throw std::invalid_argument(std::to_string(crcs.size()) + " lists of CRCs for " + std::to_string(cuts.size()) +
                                    " cuts");
    }
    Crcs joined;
    for (std::size_t k = 0; k < crcs.size(); ++k) {
        const auto range = blocks_in(cuts[k], cuts[k + 1]);
        if (crcs[k].size() != range.size()) {
            throw std::invalid_argument(std::to_string(crcs[k].size()) + " CRCs for the " +
                                        std::to_string(range.size()) + " parts from " + std::to_string(cuts[k]) +
                                        " to " + std::to_string(cuts[k + 1]));
        }
        const std::uint32_t* crc = crcs[k].data();
        for (const Block& block : range) {
            if (block.begin < cuts[k] && cuts.front() < cuts[k]) {
                joined.back() = crc32_combine(joined.back(), *crc++, std::min(block.end, cuts[k + 1]) - cuts[k]);
            } else {
                joined.push_back(*crc++);
            }
        }
    }
    return joined;
}

FileLayout::Crcs FileLayout::slot_crcs(const Crcs& block_crcs) const {
    require_count(block_crcs, blocks_.size(), "blocks");
    Crcs crcs(slots_.size(), 0);
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        const Slot& slot = slots_[i];
        if (slot.first_block < slot.end_block) crcs[i] = block_crcs[slot.first_block];
        for (std::size_t b = slot.first_block + 1; b < slot.end_block; ++b) {
            crcs[i] = crc32_combine(crcs[i], block_crcs[b], blocks_[b].end - blocks_[b].begin);
        }
    }
    return crcs;
}

std::uint32_t FileLayout::file_crc(const Crcs& slot_crcs) const {
    require_count(slot_crcs, slots_.size(), "slots");
    std::vector<std::uint8_t> filled = gap_bytes_;
    for (const Descriptor& descriptor : descriptors_) {
        const Span& gap = gap_at(descriptor.at);
        put_descriptor(descriptor.at, slot_crcs[descriptor.slot], gap.begin, gap.end, filled.data() + gap.at);
    }
    std::uint32_t crc = 0;
    auto gap = gaps_.begin();
    const auto pass_gaps = [&](std::uint64_t before) {
        for (; gap != gaps_.end() && gap->begin < before; ++gap) {
            crc = crc32(filled.data() + gap->at, gap->end - gap->begin, crc);
        }
    };
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        pass_gaps(slots_[i].begin);
        crc = crc32_combine(crc, slot_crcs[i], slots_[i].end - slots_[i].begin);
    }
    pass_gaps(end_);
    return crc;
}

std::vector<FileLayout::Descriptor> FileLayout::foreign_descriptors(const std::vector<std::uint64_t>& cuts) const {
    require_ascending(cuts);
    std::vector<Descriptor> foreign;
    for (const Descriptor& descriptor : descriptors_) {
        const std::uint64_t last = descriptor.at + DESCRIPTOR_BYTES - 1;
        const auto after = std::upper_bound(cuts.begin(), cuts.end(), last);
        // Of the ranges that the descriptor has bytes in, the one with its last byte begins latest.
        if (after != cuts.begin() && *(after - 1) > slots_[descriptor.slot].begin) foreign.push_back(descriptor);
    }
    return foreign;
}

void put_descriptor(std::uint64_t at, std::uint32_t crc, std::uint64_t start, std::uint64_t stop,
                    std::uint8_t* memory) {
    for (std::size_t i = 0; i < FileLayout::DESCRIPTOR_BYTES; ++i) {
        if (at + i >= start && at + i < stop) memory[at + i - start] = static_cast<std::uint8_t>(crc >> 8 * i);
    }
}

}  // namespace mcore_ckpt
