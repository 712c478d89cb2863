"""Runs the tests of the GPU under other conditions: compute-sanitizer, expandable segments, kernels from PTX."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gpu_checks.needs import need_gpus, need_program
from gpu_checks.outcome import Failed, NotPossible
from gpu_checks.ranks import on_ranks
from gpu_checks.runner import Command, Ended, last_line, run

# The exit status of compute-sanitizer when it has found something; pytest has none that is as high.
FOUND = 99
SANITIZER_S = 38 * 60.0
# A sanitizer makes kernels hundreds of times as slow as copies. Thousands of rounds would take hours, and the control
# would see no kernel that overtakes a copy.
SANITIZED = ("-k", "not thousand_times and not would_fail")
TENSORS, TENSOR_BYTES = 1000, 40_960


def compute_sanitizer() -> str:
    """Runs the GPU tests under memcheck and racecheck."""
    need_gpus()
    program = need_program("compute-sanitizer")
    tools = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60).stdout
    found, failed = [], []
    for tool in ("memcheck", "racecheck"):
        if tool not in tools:
            found.append(f"{tool} is not installed")
            continue
        words = (program, f"--tool={tool}", f"--error-exitcode={FOUND}", "--target-processes=all")
        # memcheck would count calls that fail and are handled, also those of torch.
        words += ("--report-api-errors=no",) if tool == "memcheck" else ()
        # Without torch's cache each tensor is an allocation, so that an access beyond its end is seen.
        more = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        ended = _pytest(tool, words, more, SANITIZED, SANITIZER_S)
        if ended.status == 0:
            found.append(f"{tool}: {tests_in(ended.log)}, {sanitizer_summary(ended.log.read_text(errors='replace'))}")
        else:
            failed.append(f"{tool} {ended.why}")
    if failed:
        raise Failed("; ".join(failed))
    if all(each.endswith("not installed") for each in found):
        raise NotPossible("compute-sanitizer has neither memcheck nor racecheck")
    return "; ".join(found)


def sanitizer_summary(text: str) -> str:
    """Returns the last summary that compute-sanitizer has printed, without its frame."""
    lines = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", text, re.MULTILINE)
    return lines[-1].strip() if lines else "no summary"


def expandable_segments() -> str:
    """Runs the GPU tests with torch's expandable segments, whose tensors lie in virtual ranges of many allocations."""
    need_gpus()
    more = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ended = _pytest("segments", (), more, (), 25 * 60.0)
    if ended.status != 0:
        raise Failed(f"pytest {ended.why}")
    return tests_in(ended.log)


def _pytest(name: str, before: tuple[str, ...], more: Mapping[str, str], after: tuple[str, ...], limit: float) -> Ended:
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu")
    log = Path(tempfile.gettempdir()) / f"{name}.log"
    return run(Command((*before, *pytest, *after), log, more), limit)


def tests_in(log: Path) -> str:
    """Returns what pytest says at its end, as "31 passed in 40.11s"."""
    ends = re.findall(r"^=*\s*(\d+ (?:passed|skipped).*? in [\d.]+s)", log.read_text(errors="replace"), re.MULTILINE)
    return ends[-1] if ends else last_line(log)


def forced_ptx() -> str:
    """Copies small tensors with a kernel that the driver compiles from PTX, as a GPU newer than the build needs."""
    need_gpus()
    import torch

    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        raise NotPossible(f"the build has PTX for 9.0 and newer (setup.py), and this GPU has {major}.{minor}")
    more = {"CUDA_FORCE_PTX_JIT": "1", "CUDA_CACHE_DISABLE": "1"}
    (found,) = on_ranks("gpu_checks.variants:copy_small_tensors", limit_s=300.0, more=more)
    return str(found)


def copy_small_tensors() -> str:
    """Copies tensors out of the GPU through the gather kernel, and compares them.

    Uses no kernel of torch's, because torch need not have PTX for this GPU: the tensors come from the host.
    """
    import torch

    from mcore_ckpt.io import _native

    host = torch.randint(0, 256, (TENSORS, TENSOR_BYTES), dtype=torch.uint8)
    state = host.to("cuda")
    buffer = _native.HostBuffer(host.nbytes, device=torch.cuda.current_device())
    copied = torch.frombuffer(buffer, dtype=torch.uint8)[: host.nbytes].view_as(host).zero_()
    starts = list(range(0, host.nbytes, TENSOR_BYTES))
    sources = [state.data_ptr() + start for start in starts]
    copier = _native.DeviceCopier(torch.cuda.current_device(), torch.cuda.Stream().cuda_stream)
    copier.start(
        buffer, starts, sources, [TENSOR_BYTES] * TENSORS, torch.cuda.current_stream().cuda_stream, host.nbytes
    )
    copier.close(60.0)
    if not torch.equal(copied, host):
        raise Failed("the copies differ from the tensors")
    return f"{TENSORS:,} tensors of {TENSOR_BYTES:,} bytes are copied right"
