// The layout of a file without its payload: where the tensors' bytes go, what stands between them, where their CRCs
// belong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mcore_ckpt {

// All offsets are those in the file, in bytes. Immutable: several threads and jobs may share one.
class FileImage {
  public:
    struct Slot {
        std::uint64_t begin, end;
        std::size_t first_block, end_block;
    };
    // What has a CRC of its own: `block_bytes` of a slot, counted from its begin; its last one may be shorter.
    struct Block {
        std::uint64_t begin, end;
        std::size_t slot;
    };
    // Four little-endian bytes that hold the CRC of a slot.
    struct Descriptor {
        std::uint64_t at;
        std::size_t slot;
    };
    using Gap = std::pair<std::uint64_t, std::string>;
    using Crcs = std::vector<std::uint32_t>;
    template <class T>
    struct Range {
        const T* first;
        const T* last;
        const T* begin() const { return first; }
        const T* end() const { return last; }
        std::size_t size() const { return last - first; }
    };

    static constexpr std::size_t DESCRIPTOR_BYTES = 4;

    // `descriptors[i]`: where slot i's CRC goes, or -1: nowhere. Throws
    // std::invalid_argument unless slots and gaps tile [0, end) in ascending order and each descriptor lies in the
    // gaps after its slot.
    FileImage(const std::vector<std::uint64_t>& offsets, const std::vector<std::uint64_t>& nbytes,
              const std::vector<std::int64_t>& descriptors, const std::vector<Gap>& gaps, std::uint64_t end,
              std::uint64_t block_bytes);

    std::uint64_t end() const { return end_; }
    const std::vector<Slot>& slots() const { return slots_; }
    const std::vector<Block>& blocks() const { return blocks_; }

    // The blocks, and the descriptors, of which at least one byte is in [start, stop).
    Range<Block> blocks_in(std::uint64_t start, std::uint64_t stop) const;
    Range<Descriptor> descriptors_in(std::uint64_t start, std::uint64_t stop) const;

    // Calls `payload(block, begin, end)` and `gap(begin, end, bytes)` for what is in [start, stop), in order.
    template <class Payload, class Between>
    void walk(std::uint64_t start, std::uint64_t stop, Payload&& payload, Between&& gap) const {
        for (const Block& block : blocks_in(start, stop)) {
            const std::uint64_t begin = block.begin > start ? block.begin : start;
            const std::uint64_t end = block.end < stop ? block.end : stop;
            if (start < begin) gap(start, begin, gap_bytes(start));
            payload(block, begin, end);
            start = end;
        }
        if (start < stop) gap(start, stop, gap_bytes(start));
    }

    std::size_t part_count(std::uint64_t start, std::uint64_t stop) const { return blocks_in(start, stop).size(); }

    // From the CRCs of the parts of each [cuts[k], cuts[k + 1]) those of the parts of [cuts.front(), cuts.back()):
    // whole blocks, but for a first and a last one that these two go through. Throws std::invalid_argument for counts
    // that do not fit.
    Crcs join(const std::vector<std::uint64_t>& cuts, const std::vector<Crcs>& crcs) const;

    // From the CRC of every block in the file that of every slot.
    Crcs slot_crcs(const Crcs& block_crcs) const;

    // The CRC of [0, end), descriptors filled in.
    std::uint32_t file_crc(const Crcs& slot_crcs) const;

    // The descriptors with a byte in a range [cuts[k], cuts[k + 1]) that begins after the descriptor's slot does:
    // whoever writes that range cannot know the CRC.
    std::vector<Descriptor> foreign_descriptors(const std::vector<std::uint64_t>& cuts) const;

  private:
    struct Span {
        std::uint64_t begin, end;
        std::size_t at;  // in gap_bytes_
    };

    void add_slots(const std::vector<std::uint64_t>& offsets, const std::vector<std::uint64_t>& nbytes,
                   std::uint64_t block_bytes);
    void add_gaps(const std::vector<Gap>& gaps);
    void check_tiling() const;
    void add_descriptors(const std::vector<std::int64_t>& descriptors);
    const Span& gap_at(std::uint64_t offset) const;
    const std::uint8_t* gap_bytes(std::uint64_t offset) const;

    const std::uint64_t end_;
    std::vector<Slot> slots_;
    std::vector<Block> blocks_;
    std::vector<Span> gaps_;  // neighbours are one, also where an empty slot lies between them
    std::vector<std::uint8_t> gap_bytes_;  // the descriptors are 0 in here
    std::vector<Descriptor> descriptors_;  // ascending
};

// The four bytes of a descriptor, as far as they are in [start, stop); `memory` is where the byte at `start` is.
void put_descriptor(std::uint64_t at, std::uint32_t crc, std::uint64_t start, std::uint64_t stop, std::uint8_t* memory);

}  // namespace mcore_ckpt
