import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder)]
    command += ["--build-temp", str(folder / "temp")]
    return subprocess.run(command, cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True)


def use(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` with `native` the module built into the folder, in a process that has no other."""
    (library,) = (folder / "mcore_ckpt").glob("_native.*")
    load = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('_native', sys.argv[1])\n"
        "native = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(native)\n"
    )
    return subprocess.run([sys.executable, "-c", load + code, str(library)], capture_output=True, text=True)


def test_without_cuda(tmp_path: Path) -> None:
    built = build(tmp_path, MCORE_CKPT_CUDA="0")
    assert built.returncode == 0, built.stderr
    used = use(
        tmp_path,
        "import ctypes\n"
        "text = ctypes.create_string_buffer(b'123456789')\n"
        "print(native.built_with_cuda, hex(native.crc32(ctypes.addressof(text), 9)))\n"
        "native.copy_to_host([1], [2], [3], 0)\n",
    )
    assert used.stdout.split() == ["False", "0xcbf43926"]
    assert used.stderr.splitlines()[-1].startswith("RuntimeError: mcore_ckpt cannot copy GPU tensors")
    assert "MCORE_CKPT_CUDA was 0" in used.stderr


def test_a_broken_nvcc_leaves_a_host_only_build_that_says_so(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'nvcc fatal : out of order' >&2\nexit 1\n")
    nvcc.chmod(0o755)
    built = build(tmp_path, PATH=f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}", MCORE_CKPT_CUDA="1")
    assert built.returncode == 0, built.stderr
    (sentence,) = [line for line in built.stderr.splitlines() if "without CUDA" in line]
    assert sentence == f"mcore_ckpt is built without CUDA, because {nvcc} failed: nvcc fatal : out of order."
    assert use(tmp_path, "print(native.built_with_cuda)").stdout.split() == ["False"]


@pytest.mark.parametrize(
    "environment",
    [lambda empty: {"CXX": str(empty / "c++")}, lambda empty: {"PATH": str(empty), "CXX": "g++"}],
    ids=["CXX", "PATH"],
)
def test_a_missing_compiler_ends_the_build_with_one_sentence(
    tmp_path: Path, environment: Callable[[Path], dict[str, str]]
) -> None:
    built = build(tmp_path, **environment(tmp_path))
    assert built.returncode != 0
    (sentence,) = built.stderr.splitlines()
    assert sentence.startswith("mcore_ckpt needs a C++ compiler")
    assert "install g++" in sentence
