"""Describes the machine: its GPUs, their NUMA nodes, whose contexts they hold, and where pages of memory are."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_checks.needs import need_program
from gpu_checks.outcome import NotPossible

PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_SMI_S = 60.0
# Ranges of memory that grow by less belong to threads and libraries.
LARGE_BYTES = 16 << 20


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi shows it.

    Attributes:
        index: its number there, which need not be torch's.
        uuid: as "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6".
        pci: its address as /sys/bus/pci/devices spells it.
        name: its model.
        driver: the version of the driver.
    """

    index: int
    uuid: str
    pci: str
    name: str
    driver: str


@dataclass(frozen=True)
class Context:
    """A process with a context on a GPU."""

    gpu: str
    pid: int


def nvidia_smi(*arguments: str) -> str:
    """Returns what nvidia-smi prints. Raises NotPossible if it is missing or fails."""
    program = need_program("nvidia-smi")
    ended = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=NVIDIA_SMI_S)
    if ended.returncode != 0:
        raise NotPossible(f"nvidia-smi ended with {ended.returncode}: {(ended.stderr or ended.stdout).strip()}")
    return ended.stdout


def gpus() -> list[Gpu]:
    """Returns the machine's GPUs. Raises NotPossible without nvidia-smi."""
    return parse_gpus(nvidia_smi("--query-gpu=index,uuid,pci.bus_id,name,driver_version", "--format=csv,noheader"))


def parse_gpus(text: str) -> list[Gpu]:
    """Reads the lines of `--query-gpu=index,uuid,pci.bus_id,name,driver_version --format=csv,noheader`."""
    found = []
    for line in filter(str.strip, text.splitlines()):
        index, uuid, pci, name, driver = (word.strip() for word in line.split(","))
        found.append(Gpu(int(index), uuid, pci_address(pci), name, driver))
    return found


def pci_address(bus_id: str) -> str:
    """Returns an address as sysfs spells it: nvidia-smi writes eight digits for the domain, in capitals.

    Example:
        >>> pci_address("00000000:3B:00.0")
        '0000:3b:00.0'
    """
    domain, rest = bus_id.lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def contexts() -> list[Context]:
    """Returns the compute processes of all GPUs. Raises NotPossible without nvidia-smi."""
    return parse_contexts(nvidia_smi("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"))


def parse_contexts(text: str) -> list[Context]:
    """Reads the lines of `--query-compute-apps=gpu_uuid,pid --format=csv,noheader`. Other lines are left out."""
    lines = re.findall(r"^\s*((?:GPU|MIG)-[^,\s]+)\s*,\s*(\d+)\s*$", text, re.MULTILINE)
    return [Context(uuid, int(pid)) for uuid, pid in lines]


def foreign(found: list[Context], own: Mapping[int, str]) -> list[str]:
    """Returns, for each context of one of the processes on a GPU that is not its own, what is wrong.

    Args:
        found: all contexts.
        own: for each process id the uuid of its GPU.
    """
    return [
        f"process {each.pid}, whose GPU is {own[each.pid]}, has a context on {each.gpu}"
        for each in found
        if each.pid in own and each.gpu != own[each.pid]
    ]


def active_devices() -> list[int]:
    """Returns the numbers of the GPUs on which this process has a primary context. Makes none.

    The driver answers also in a container, where nvidia-smi knows processes by other numbers, or none.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    _succeed(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    found = []
    for device in range(count.value):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        state = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        _succeed(state, "cuDevicePrimaryCtxGetState")
        if active.value:
            found.append(device)
    return found


def _succeed(status: int, function: str) -> None:
    if status != 0:
        raise RuntimeError(f"{function} returned {status}")


def numa_node(pci: str, devices: Path = PCI_DEVICES) -> int | None:
    """Returns the NUMA node of a PCI device. None if the system does not know: the kernel then writes -1.

    Args:
        pci: the address, as "0000:3b:00.0".
        devices: the folder of all devices.
    """
    try:
        node = int((devices / pci / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def numa_maps() -> dict[int, dict[int, int]]:
    """Returns where the memory of this process is. Raises NotPossible if the kernel does not tell."""
    try:
        return parse_numa_maps(Path("/proc/self/numa_maps").read_text())
    except OSError as error:
        raise NotPossible(f"the kernel does not tell on which node memory is: {error}") from error


def parse_numa_maps(text: str) -> dict[int, dict[int, int]]:
    """Reads /proc/PID/numa_maps: for each range's start its bytes on each node. Ranges without pages are left out."""
    found = {}
    for line in text.splitlines():
        page = int(match[1]) << 10 if (match := re.search(r" kernelpagesize_kB=(\d+)", line)) else 4096
        nodes = {int(node): int(pages) * page for node, pages in re.findall(r" N(\d+)=(\d+)", line)}
        if nodes:
            found[int(line.split()[0], 16)] = nodes
    return found


def grown(before: Mapping[int, Mapping[int, int]], after: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
    """Returns the bytes on each node of all ranges that have grown by LARGE_BYTES or more. Empty if none has."""
    found: Counter[int] = Counter()
    for start, nodes in after.items():
        if sum(nodes.values()) - sum(before.get(start, {}).values()) >= LARGE_BYTES:
            found.update(nodes)
    return dict(found)


def describe() -> str:
    """Returns a sentence about the machine's processors, memory, kernel, GPUs and driver, without its name."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    words = [f"{os.cpu_count()} cores ({_processor()}), {memory:.0f} GiB", f"Linux {platform.release()}"]
    try:
        found = gpus()
        words += [f"{number} x {name}" for name, number in Counter(gpu.name for gpu in found).items()]
        words += [f"driver {driver}" for driver in sorted({gpu.driver for gpu in found})]
    except NotPossible as missing:
        words.append(str(missing))
    return ", ".join(words)


def _processor() -> str:
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0].strip() if names else platform.machine()
