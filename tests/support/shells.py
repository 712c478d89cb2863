"""Runs the commands of a document: in a shell and an environment of a stranger, or, in CI, at once.

Both show what a terminal of 100 columns would show on stdout; warnings and progress go to stderr.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from unittest import mock

from tests.support.forks import Launched, launch

TERMINAL = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "xterm"}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")

# A fork is in the folder of the process that it is a fork of.
_PROGRAM = """
import os, runpy, sys
os.chdir({folder!r})
sys.path[0] = ""
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Ended:
    """What has become of a command."""

    status: int
    stdout: str
    stderr: str


class Shell(Protocol):
    """Runs a command in a folder, as it is typed."""

    def run(self, command: str, folder: Path) -> Ended: ...


class StrangersShell:
    """A bash with a virtual environment in which nothing is installed but what `packages` has already.

    Args:
        folder: where to make the environment, and its home.
        variables: of the shell, beside a minimum.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self._environment = folder / "env"
        venv.create(self._environment, symlinks=True)
        # What pip would have to download: torch, Megatron-core, transformers and the tools of a build. Of this
        # checkout nothing is there: Python follows no `.pth` file of a folder that is on its path in this way.
        packages = sysconfig.get_path("purelib", vars={"base": str(self._environment)})
        (Path(packages) / "downloaded.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self._command("pip", "pip._internal.cli.main", "main")
        self._command("torchrun", "torch.distributed.run", "main")
        folders = [str(self._environment / "bin"), "/usr/local/bin", "/usr/bin", "/bin"]
        self._variables = {"PATH": os.pathsep.join(folders), "HOME": str(folder), **TERMINAL, **variables}

    def _command(self, name: str, module: str, function: str) -> None:
        """Makes the command that an installation of its package would have made."""
        path = self._environment / "bin" / name
        path.write_text(
            f"#!{self._environment}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        path.chmod(0o755)

    def run(self, command: str, folder: Path) -> Ended:
        ours, theirs = os.openpty()
        with tempfile.TemporaryFile("w+") as stderr:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=folder,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=stderr,
            )
            os.close(theirs)
            stdout = _until_it_is_closed(ours)
            status = process.wait()
            stderr.seek(0)
            return Ended(status, _ESCAPES.sub("", stdout.replace("\r\n", "\n")), stderr.read())


def _until_it_is_closed(terminal: int) -> str:
    pieces = []
    with contextlib.suppress(OSError):  # EIO: nobody has the other side any more
        while piece := os.read(terminal, 1 << 16):
            pieces.append(piece)
    os.close(terminal)
    return b"".join(pieces).decode()


class QuickShell:
    """Knows three programs: `mcore-ckpt`, which it runs in this process, and `torchrun` and `python`, which it forks.

    Args:
        folder: for files of its own.
        imports: what the programs import, and their forks have imported.
    """

    def __init__(self, folder: Path, imports: Sequence[str]) -> None:
        self._program, self._imports = folder / "program.py", imports

    def run(self, command: str, folder: Path) -> Ended:
        words = shlex.split(command)
        variables = dict(word.split("=", 1) for word in words if re.fullmatch(r"[A-Z_]+=.*", word))
        program, *arguments = words[len(variables) :]
        if program == "mcore-ckpt":
            return in_this_process(arguments, folder)
        ranks = 0
        if program == "torchrun":
            from torch.distributed.run import parse_args

            torchrun = parse_args(arguments)
            arguments = [torchrun.training_script, *torchrun.training_script_args]
            ranks = int(torchrun.nproc_per_node)
        else:
            assert program == "python", f"{command}: a quick shell does not know {program}"
        self._program.write_text(_PROGRAM.format(folder=str(folder)))
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            launched: Launched = launch(
                [self._program, *arguments],
                ranks,
                imports=self._imports,
                environment=variables,
                stdout=stdout,
                stderr=stderr,
            )
            status = launched.wait()
            for file in (stdout, stderr):
                file.seek(0)
            return Ended(status, stdout.read(), stderr.read())


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def in_this_process(arguments: Sequence[str], folder: Path) -> Ended:
    """Runs `mcore-ckpt` with these arguments, as if it had been typed at a terminal in this folder."""
    from mcore_ckpt.cli.main import main

    with _as_at_a_terminal(folder) as (stdout, stderr):
        try:
            status = main(list(arguments))
        except SystemExit as ended:  # of argparse
            status = int(ended.code or 0)
    return Ended(status, _ESCAPES.sub("", stdout.getvalue()), stderr.getvalue())


@contextlib.contextmanager
def _as_at_a_terminal(folder: Path) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    stdout, stderr = _Terminal(), io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, TERMINAL),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        yield stdout, stderr
