// The layout of a file: where the bytes of each tensor and the bytes between them are, and where the CRCs go. It does
// not contain the payload, which is the bytes of the tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mcore_ckpt {

// All offsets are in bytes from the start of the file. A layout is immutable, so threads and jobs may share it.
class FileLayout {
  public:
    // The place of a tensor, and the numbers of its blocks.
    struct Slot {
        std::uint64_t begin, end;
        std::size_t first_block, end_block;
    };
    // A range that has a CRC of its own: `block_bytes` bytes of a slot, counted from its begin. The last one may be
    // shorter.
    struct Block {
        std::uint64_t begin, end;
        std::size_t slot;
    };
    // The place of the CRC of a slot: four bytes, little-endian, in a gap.
    struct Descriptor {
        std::uint64_t at;
        std::size_t slot;
    };
    // An offset and the bytes there, which belong to no slot.
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

    // `descriptors[i]` is the offset of the CRC of slot i, or -1 if the file does not contain it. Throws
    // std::invalid_argument unless slots and gaps tile [0, end) in ascending order and each descriptor lies in a gap
    // after its slot.
    FileLayout(const std::vector<std::uint64_t>& offsets, const std::vector<std::uint64_t>& nbytes,
               const std::vector<std::int64_t>& descriptors, const std::vector<Gap>& gaps, std::uint64_t end,
               std::uint64_t block_bytes);

    std::uint64_t end() const { return end_; }
    const std::vector<Slot>& slots() const { return slots_; }
    const std::vector<Block>& blocks() const { return blocks_; }

    // The blocks and the descriptors that have at least one byte in [start, stop).
    Range<Block> blocks_in(std::uint64_t start, std::uint64_t stop) const;
    Range<Descriptor> descriptors_in(std::uint64_t start, std::uint64_t stop) const;

    // Calls `payload(block, begin, end)` for each part of a block in [start, stop), and `gap(begin, end, bytes)` for
    // each gap between them, in order.
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

    // Computes the CRCs of the parts of [cuts.front(), cuts.back()) from those of the parts of each [cuts[k], cuts[k +
    // 1]). A part is the intersection of a block with a range, so all are whole blocks, except that the ends of the
    // range may cut the first and the last. Throws std::invalid_argument for a wrong number of CRCs.
    Crcs join(const std::vector<std::uint64_t>& cuts, const std::vector<Crcs>& crcs) const;

    // Computes the CRC of every slot from the CRCs of all blocks of the file.
    Crcs slot_crcs(const Crcs& block_crcs) const;

    // The CRC of [0, end) with the descriptors filled in.
    std::uint32_t file_crc(const Crcs& slot_crcs) const;

    // The descriptors that have a byte in a range [cuts[k], cuts[k + 1]) that begins after the begin of their slot. The
    // writer of such a range does not have the bytes to compute the CRC.
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
    std::vector<Span> gaps_;               // neighbours are merged, also if an empty slot lies between them
    std::vector<std::uint8_t> gap_bytes_;  // with 0 in the place of the descriptors
    std::vector<Descriptor> descriptors_;  // ascending
};

// Writes those of the four bytes of a descriptor that are in [start, stop) to memory that begins with the byte at
// `start`.
void put_descriptor(std::uint64_t at, std::uint32_t crc, std::uint64_t start, std::uint64_t stop, std::uint8_t* memory);

}  // namespace mcore_ckpt
