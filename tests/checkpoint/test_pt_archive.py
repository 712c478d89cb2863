"""The zip directory of a file of `torch.save`: which names of records are refused."""

import io
import zipfile

import pytest

from mcore_ckpt.checkpoint.pt_archive import ArchiveError, PtArchive


def archive_of(*names: str) -> PtArchive:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("archive/data.pkl", *names):
            archive.writestr(name, b"x")
    data = file.getvalue()
    return PtArchive(lambda at, nbytes: data[at : at + nbytes], len(data))


def test_names_that_torch_writes() -> None:
    assert set(archive_of("archive/version", "archive/data/0").names) == {
        "archive/data.pkl",
        "archive/version",
        "archive/data/0",
    }


@pytest.mark.parametrize(
    "name",
    [
        "archive/../../x",
        "archive/./x",
        "archive//x",
        "/archive/x",
        "archive/",
        "archive/a\\b",
        "archive/a\nb",
        "archive/\x1b[2J",
    ],
)
def test_names_that_torch_does_not_write(name: str) -> None:
    """Another program might unpack them to outside of its folder, and a terminal would obey control characters."""
    with pytest.raises(ArchiveError, match="torch writes no record called"):
        archive_of(name)
