"""A read that hung, was given up and returns after all changes nothing: the model may have other weights by then."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Before the C library: while the folder HANGS is there, reads of whole pages, which only the extension makes, wait.
HANGS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
static void hang(void *memory, size_t size) {
    while (((uintptr_t)memory | size) % 4096 == 0 && access(getenv("HANGS"), F_OK) == 0) usleep(10000);
}
#define READ(name) \
    ssize_t name(int file, void *memory, size_t size, off_t at) { \
        hang(memory, size); \
        return ((__typeof__(&name))dlsym(RTLD_NEXT, #name))(file, memory, size, at); \
    }
READ(pread)
READ(pread64)
"""

PROGRAM = """
import os, sys
from pathlib import Path
import pytest, torch
from tests.doors.test_runs import Training
from tests.support.waiting import wait_for
from mcore_ckpt.errors import HungDiskError

training, hangs = Training(Path(sys.argv[1]), timeout_s=1.0).save(1), Path(os.environ["HANGS"])
with torch.no_grad():
    training.model.weight.fill_(7)
hangs.mkdir()
with pytest.raises(HungDiskError, match="reading has not returned for"):
    training.manager.load()
with torch.no_grad():
    training.model.weight.fill_(9)
hangs.rmdir()
(work,) = training.manager._disk._left
wait_for(lambda: work.ended)
assert bool((training.model.weight == 9).all())
assert training.manager.load().step == 1
assert training.value == 1
"""


def test_a_load_that_was_given_up_changes_nothing_later(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    library = tmp_path / "hangs.so"
    compiler = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(compiler, input=HANGS, text=True, check=True)
    more = {
        "LD_PRELOAD": str(library),
        "HANGS": str(tmp_path / "hangs"),
    }
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
