"""Defines the structures of the zip format that torch uses, for reading and writing `.pt` files.

Source: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.7 (local header), 4.3.9 (data descriptor), 4.3.12 (directory entry),
4.3.14 to 4.3.16 (end records) and 4.5.3 (zip64 field).
"""

from __future__ import annotations

import struct

# Fields: signature, version, flags, method, time, date, CRC-32, stored size, size, bytes of the name and of the extra
# field.
LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
LOCAL_SIGNATURE = 0x04034B50

# Fields: signature, versions of the writer and for the reader, flags, method, time, date, CRC-32, stored size, size,
# bytes of the name, of the extra field and of the comment, disk, internal and external attributes, offset of the local
# header.
DIRECTORY_ENTRY = struct.Struct("<IHHHHHHIIIHHHHHII")
DIRECTORY_SIGNATURE = 0x02014B50
DIRECTORY_CRC_OFFSET = 16

# Fields: signature, size of the rest of the record, versions of the writer and for the reader, disk, disk of the
# directory, entries on this disk, entries, bytes of the directory, offset of the directory.
END_64 = struct.Struct("<IQHHIIQQQQ")
END_64_SIGNATURE = 0x06064B50
# The size in the record leaves out the signature and the size field itself.
END_64_LENGTH = END_64.size - 12

# Fields: signature, disk of the zip64 end record, offset of that record, number of disks.
LOCATOR_64 = struct.Struct("<IIQI")
LOCATOR_64_SIGNATURE = 0x07064B50

# Fields: signature, disk, disk of the directory, entries on this disk, entries, bytes of the directory, offset of the
# directory, bytes of the comment.
END = struct.Struct("<IHHHHIIH")
END_SIGNATURE = 0x06054B50

# If a record's local header has this flag, a data descriptor follows the record's bytes. The descriptor begins with a
# signature and the CRC-32.
DESCRIPTOR_FLAG = 0x8
DESCRIPTOR_SIGNATURE = 0x08074B50
DESCRIPTOR_CRC_OFFSET = 4
UTF8_FLAG = 0x800

# If a field has the largest value of its size (MAX_32 or MAX_16), the real number is in the zip64 extra field
# (identifier ZIP64_FIELD) or in the zip64 end record.
MAX_32, MAX_16 = 0xFFFFFFFF, 0xFFFF
ZIP64_FIELD = 1
