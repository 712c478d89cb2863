"""A command that a rank of a training has started: it has the training's variables, and waits for nobody in silence."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt.cli import arguments
from mcore_ckpt.cli.main import main
from mcore_ckpt.ranks import deadlines

COMMANDS = {
    "merge": ["merge", "{folder}", "{folder}/out"],
    "convert": ["convert", "--hf_model_path", "{folder}", "--output_path", "{folder}/out"],
}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The variables of rank 0 of a training that runs, whose agent hosts a store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(deadlines, "NOTICE_S", 0.05)
    monkeypatch.setattr(arguments.command_agreement.__wrapped__, "__defaults__", (0.5,))  # type: ignore[attr-defined]
    yield port
    del store


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("has_agent", [True, False])
def test_it_says_what_it_waits_for_and_ends(
    command: str,
    has_agent: bool,
    training: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not has_agent:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # the training's rank 0 hosts the store: its port is taken
    assert main([word.format(folder=tmp_path) for word in COMMANDS[command]]) == 1
    error = capsys.readouterr().err
    said = f"{command}: RANK and WORLD_SIZE say that this is process 0 of 2"
    assert f"{said}, but the processes have not met at 127.0.0.1:{training}" in error
    assert "unset WORLD_SIZE" in error
    if has_agent:
        assert "no word from rank 1 within 0.5 s" in error
        assert f"{said}: it waits up to 0.5 s for the other processes at 127.0.0.1:{training}" in caplog.text
