"""The host's side of all that uses a GPU, against a fake one that does everything as late as it may."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FAKE = REPOSITORY / "tests" / "native" / "fake_cuda"
SOURCES = ["read_job.cpp", "file.cpp", "crc32.cpp", "host_copy.cpp", "parallel.cpp"]
CUDA_SOURCES = ["device_copy.cu", "device_copier.cu"]


def cuda_headers() -> Path | None:
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and Path(home, "include", "cuda_runtime_api.h").exists():
            return Path(home, "include")
    return None


def test_order_reuse_and_failures(tmp_path: Path) -> None:
    headers = cuda_headers()
    if headers is None:
        pytest.skip("needs CUDA's headers, in CUDA_HOME or in /usr/local/cuda")
    program = tmp_path / "device_copy_test"
    command = ["g++", "-std=c++17", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover", "-pthread"]
    command += ["-I", str(REPOSITORY / "csrc"), "-isystem", str(headers), *map(str, sorted(FAKE.glob("*.cpp")))]
    command += [str(REPOSITORY / "csrc" / name) for name in SOURCES]
    command += ["-x", "c++", *(str(REPOSITORY / "csrc" / name) for name in CUDA_SOURCES), "-ldl", "-o", str(program)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run([program, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
