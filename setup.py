"""Builds mcore_ckpt._native from csrc/: with CUDA if nvcc is found, host-only elsewhere or with MCORE_CKPT_CUDA=0."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

HOST_SOURCES = ["bindings", "crc32", "host_copy", "parallel"]
# device_copy.cu has no kernels: this list says for which GPUs those to come are compiled; newer ones translate the PTX.
GPU_CODE = ["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"]


def find_nvcc() -> str:
    if os.environ.get("MCORE_CKPT_CUDA") == "0":
        raise OSError("MCORE_CKPT_CUDA was 0")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [os.path.join(home, "bin") for home in homes if home]
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None:
        raise OSError("there was no nvcc on the PATH, in CUDA_HOME or in /usr/local/cuda")
    return nvcc


def run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        reason = (done.stdout.strip() or f"exit status {done.returncode}").splitlines()[0]
        raise OSError(f"{command[0]} failed: {reason}")
    return done.stdout


def compile_cuda(nvcc: str, build_folder: str) -> list[str]:
    """Returns what to link: the object file and the static CUDA runtime, so that no GPU driver is needed to import."""
    target = os.path.join(build_folder, "device_copy.o")
    command = [nvcc, "-c", "-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    command += [*(f"-gencode={code}" for code in GPU_CODE), "csrc/device_copy.cu", "-o", target]
    run(command)
    # The nvcc on the PATH may be a wrapper far from its toolkit, so ask it where its libraries are.
    for folder in re.findall(r'"-L(.+?)"', run([*command, "-dryrun"])):
        runtime = os.path.join(folder, "libcudart_static.a")
        if os.path.exists(runtime):
            return [target, runtime]
    raise OSError(f"{nvcc} has no libcudart_static.a")


class BuildNative(build_ext):
    def build_extension(self, ext: Pybind11Extension) -> None:
        compiler = self.compiler.compiler_so_cxx[0]
        if shutil.which(compiler) is None:
            sys.exit(f"mcore_ckpt needs a C++ compiler, but there is no {compiler}: install g++ (apt install g++).")
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        try:
            ext.extra_objects += compile_cuda(find_nvcc(), self.build_temp)
            # Hidden, or torch's own copy of the CUDA runtime could be mixed up with this one.
            ext.extra_link_args += ["-Wl,--exclude-libs,ALL", "-ldl", "-lrt"]
        except OSError as reason:
            print(f"mcore_ckpt is built without CUDA, because {reason}.", file=sys.stderr)
            ext.sources.append("csrc/device_copy_none.cpp")
            # pip hides what a build prints, so the error that a user meets much later says it too.
            ext.define_macros.append(("MCORE_CKPT_NO_CUDA_REASON", json.dumps(str(reason))))
        super().build_extension(ext)


native = Pybind11Extension(
    "mcore_ckpt._native",
    [f"csrc/{name}.cpp" for name in HOST_SOURCES],
    depends=[str(path) for path in Path("csrc").glob("*")],
    cxx_std=17,
    extra_compile_args=["-O3", "-pthread"],
    extra_link_args=["-pthread"],
)

setup(ext_modules=[native], cmdclass={"build_ext": BuildNative})
