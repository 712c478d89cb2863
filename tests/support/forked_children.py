"""Children that are forked from a test, as a data loader's worker is from a training."""

import os
import signal
import traceback
from collections.abc import Callable

from mcore_ckpt import delivery
from mcore_ckpt.io import host_memory
from mcore_ckpt.save import background
from mcore_ckpt.steps import trainer_lock, upload_queue

ALARM_S = 30


def ends_normally(work: Callable[[], object] = lambda: None) -> bool:
    """Whether a child does `work` and then ends: not if it raises, and not if it hangs."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(ALARM_S)
            work()
            exit_as_interpreter()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def exit_as_interpreter() -> None:
    """Runs the exit handlers of the package, and no other: those of pytest belong to the parent."""
    background._finish_all()
    upload_queue._finish_all()
    trainer_lock._release_all()
    host_memory._stop_all()
    delivery._drain_all()
