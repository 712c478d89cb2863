"""Builds the extension mcore_ckpt.io._native from csrc/.

It is built with CUDA if nvcc is found, and for the host alone otherwise or with MCORE_CKPT_CUDA=0.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

WITHOUT_CUDA = "csrc/device_copy_none.cpp"
BINDINGS = sorted(Path("csrc").glob("*bindings.cpp"))
HOST_SOURCES = sorted(str(path) for path in {*Path("csrc").glob("*.cpp")} - {*BINDINGS, Path(WITHOUT_CUDA)})
CUDA_SOURCES = sorted(Path("csrc").glob("*.cu"))
# The driver compiles the PTX of the last entry for GPUs newer than these.
GPU_CODE = ["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"]


def find_nvcc() -> str:
    """Returns the path of nvcc. Raises OSError with the reason if there is none, or if CUDA is switched off."""
    if os.environ.get("MCORE_CKPT_CUDA") == "0":
        raise OSError("MCORE_CKPT_CUDA was 0")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [os.path.join(home, "bin") for home in homes if home]
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None:
        raise OSError("there was no nvcc on the PATH, in CUDA_HOME or in /usr/local/cuda")
    return nvcc


def run(command: list[str]) -> str:
    """Runs a command and returns its output. Raises OSError with the first line of the output if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        reason = (done.stdout.strip() or f"exit status {done.returncode}").splitlines()[0]
        raise OSError(f"{command[0]} failed: {reason}")
    return done.stdout


def compile_cuda(nvcc: str, build_folder: str) -> list[str]:
    """Compiles the CUDA sources and returns the files to link: object files and the static CUDA runtime.

    The runtime is linked statically, so that the package can be imported without a GPU driver.
    """
    objects = [os.path.join(build_folder, f"{source.stem}.o") for source in CUDA_SOURCES]
    command = [nvcc, "-c", "-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
    command += [f"-gencode={code}" for code in GPU_CODE]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda at: run([*command, str(at[0]), "-o", at[1]]), zip(CUDA_SOURCES, objects, strict=True)))
    # The nvcc on the PATH may be a wrapper far from its toolkit, so nvcc itself must say where its libraries are.
    for folder in re.findall(r'"-L(.+?)"', run([*command, "-dryrun", str(CUDA_SOURCES[0])])):
        runtime = os.path.join(folder, "libcudart_static.a")
        if os.path.exists(runtime):
            return [*objects, runtime]
    raise OSError(f"{nvcc} has no libcudart_static.a")


def unite_bindings(build_folder: str) -> str:
    """Returns the path of a source that includes all bindings, so that pybind11's templates are compiled once.

    It takes a quarter of the time that the bindings take one by one.
    """
    united = Path(build_folder) / "bindings.cpp"
    united.write_text("".join(f'#include "{path.absolute()}"\n' for path in BINDINGS))
    return str(united)


class BuildNative(build_ext):
    """Builds the extension with CUDA if possible, and without it otherwise."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_temp = "build/native"  # not a folder that pip deletes: scripts/emulated_cuda.sh links what is there

    def build_extension(self, ext: Pybind11Extension) -> None:
        compiler = self.compiler.compiler_so_cxx[0]
        if shutil.which(compiler) is None:
            sys.exit(f"mcore_ckpt needs a C++ compiler, but there is no {compiler}: install g++ (apt install g++).")
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        ext.sources.insert(0, unite_bindings(self.build_temp))
        try:
            ext.extra_objects += compile_cuda(find_nvcc(), self.build_temp)
            # The symbols stay hidden. Otherwise the loader could mix this CUDA runtime up with torch's own copy.
            ext.extra_link_args += ["-Wl,--exclude-libs,ALL", "-ldl", "-lrt"]
        except OSError as reason:
            print(f"mcore_ckpt is built without CUDA, because {reason}.", file=sys.stderr)
            ext.sources.append(WITHOUT_CUDA)
            # pip hides the output of a build, so the reason also goes into the error that a GPU user meets later.
            ext.define_macros.append(("MCORE_CKPT_NO_CUDA_REASON", json.dumps(str(reason))))
        super().build_extension(ext)


native = Pybind11Extension(
    "mcore_ckpt.io._native",
    HOST_SOURCES,
    depends=[str(path) for path in Path("csrc").glob("*")],
    cxx_std=17,
    # Python's own flags have -g, with which it takes twice the time to compile.
    extra_compile_args=["-O3", "-g0", "-pthread"],
    extra_link_args=["-pthread"],
)

ParallelCompile(default=0).install()  # on all cores
setup(ext_modules=[native], cmdclass={"build_ext": BuildNative})
