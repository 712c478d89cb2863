import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder)]
    command += ["--build-temp", str(folder / "temp")]
    return subprocess.run(command, cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True)


def use(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` with `native` the module built into the folder, in a process that has no other."""
    (library,) = (folder / "mcore_ckpt" / "io").glob("_native.*")
    load = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('_native', sys.argv[1])\n"
        "native = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(native)\n"
    )
    return subprocess.run([sys.executable, "-c", load + code, str(library)], capture_output=True, text=True)


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def why_without_cuda(built: subprocess.CompletedProcess[str]) -> str:
    assert built.returncode == 0, built.stderr
    (sentence,) = [line for line in built.stderr.splitlines() if "without CUDA" in line]
    return sentence


# Makes the file that a compiler is asked for, empty.
COMPILE_NOTHING = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && touch "$2"; shift; done\n'


def test_cuda_can_be_declined(tmp_path: Path) -> None:
    compiler = script(tmp_path / "c++", COMPILE_NOTHING)
    built = build(tmp_path, MCORE_CKPT_CUDA="0", CXX=str(compiler))
    assert why_without_cuda(built) == "mcore_ckpt is built without CUDA, because MCORE_CKPT_CUDA was 0."


def broken_nvcc(folder: Path) -> tuple[str, str]:
    """A PATH with an nvcc that fails, and the reason that a build without CUDA must give."""
    nvcc = script(folder / "nvcc", "echo 'nvcc fatal : out of order' >&2\nexit 1\n")
    return f"{folder}{os.pathsep}{os.environ['PATH']}", f"{nvcc} failed: nvcc fatal : out of order"


def test_a_broken_nvcc_leaves_a_build_without_cuda(tmp_path: Path) -> None:
    """What setup.py decides, with a compiler that notes what it is told and compiles nothing."""
    path, reason = broken_nvcc(tmp_path)
    compiler = script(tmp_path / "c++", f'echo "$@" >> {tmp_path}/told\n{COMPILE_NOTHING}')
    built = build(tmp_path, PATH=path, MCORE_CKPT_CUDA="1", CXX=str(compiler))
    assert why_without_cuda(built) == f"mcore_ckpt is built without CUDA, because {reason}."
    told = (tmp_path / "told").read_text()
    assert "csrc/device_copy_none.cpp" in told
    assert f"-DMCORE_CKPT_NO_CUDA_REASON={json.dumps(reason)}" in told
    assert "cudart" not in told


@pytest.mark.full
def test_a_broken_nvcc_leaves_a_host_only_build_that_says_so(tmp_path: Path) -> None:
    path, reason = broken_nvcc(tmp_path)
    # How fast the result is does not matter, and how long the compiler takes does.
    compiler = script(tmp_path / "quick-g++", 'exec g++ "$@" -O0\n')
    built = build(tmp_path, PATH=path, MCORE_CKPT_CUDA="1", CXX=str(compiler))
    assert why_without_cuda(built) == f"mcore_ckpt is built without CUDA, because {reason}."
    used = use(
        tmp_path,
        "import ctypes\n"
        "text = ctypes.create_string_buffer(b'123456789')\n"
        "print(native.built_with_cuda, hex(native.crc32(ctypes.addressof(text), 9)))\n"
        "native.DeviceCopier(0, 1)\n",
    )
    assert used.stdout.split() == ["False", "0xcbf43926"]
    assert used.stderr.splitlines()[-1].startswith("RuntimeError: mcore_ckpt cannot copy GPU tensors")
    assert reason in used.stderr


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
