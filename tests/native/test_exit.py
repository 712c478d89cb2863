"""An interpreter that ends while threads are in native calls, as those that prepare host memory or write may be."""

import subprocess
import sys

PROGRAM = """
import ctypes, threading
from mcore_ckpt.io import _native

memory = bytearray(4 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
have_called = threading.Semaphore(0)

def work():
    while True:
        _native.crc32(address, len(memory))
        have_called.release()

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
for _ in range(30):
    have_called.acquire()
"""


def test_threads_in_native_calls_do_not_abort_the_process() -> None:
    """Python ends them when they come back, by unwinding their stacks."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
