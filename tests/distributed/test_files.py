"""What a save leaves on disk: every tensor once, under its global name, for anyone with torch to open."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.utils import unwrap_model

from tests.distributed.agreement import everywhere, gather
from tests.distributed.checkpointing import manager_of, save
from tests.distributed.layouts import LAYOUTS
from tests.distributed.tiers import marks
from tests.distributed.training import DTYPES, Layout, Training, build, parallel, train

TRACKER = "latest_checkpointed_iteration.txt"

# Runs where neither package can be imported, and opens every file named on the command line twice.
OPEN_WITH_TORCH_ALONE = """
import sys
sys.modules["mcore_ckpt"] = sys.modules["megatron"] = None
import torch
for path in sys.argv[1:]:
    read, mapped = (torch.load(path, weights_only=True, mmap=mmap) for mmap in (False, True))
    assert repr(read) == repr(mapped), path
"""


def of_world(name: str, in_ci: bool = True, **changes: Any) -> Any:
    layout = replace(LAYOUTS[name], **changes)
    return pytest.param(layout, id=name, marks=marks(layout.world, in_ci))


@pytest.mark.parametrize(
    "layout",
    [
        of_world("mtp"),
        of_world("pp2-vpp2"),
        of_world("pp2-dp2-uneven", in_ci=False),
        of_world("pp2-vpp2-dp2-stages"),
        of_world("ep2"),
    ],
)
def test_every_tensor_is_in_one_file_under_its_global_name(layout: Layout, shared_path: Path) -> None:
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 2)
        save(training, shared_path, 2)
        owned = gather(global_tensors(training))
        with everywhere():
            stored = [torch.load(path, weights_only=True) for path in sorted(shared_path.rglob("model_states.pt"))]
            names = [name for file in stored for name in file]
            layers = [layer_numbers(file) for file in stored]
            assert sorted(names) == sorted(set(names)), "a tensor is in two files"
            assert set().union(*layers) == set(range(layout.num_layers))
            everything = {name: tensor for file in stored for name, tensor in file.items()}
            wanted = {name: tensor for rank in owned for name, tensor in rank.items()}
            assert everything.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(everything[name], tensor), name
        if layout.experts is None:
            with everywhere():
                assert sum(len(numbers) for numbers in layers) == layout.num_layers, "a layer is in two files"


def layer_numbers(file: dict[str, torch.Tensor]) -> set[int]:
    return {int(match[1]) for name in file if (match := re.match(r"decoder\.layers\.(\d+)\.", name))}


def global_tensors(training: Training) -> dict[str, torch.Tensor]:
    """This rank's tensors by the name they have in the whole model, found without the package under test."""
    return {
        global_name(name, chunk, training.layout): value.detach().cpu().clone()
        for chunk in unwrap_model(training.model)
        for name, value in chunk.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def global_name(name: str, chunk: GPTModel, layout: Layout) -> str:
    first_expert = parallel_state.get_expert_model_parallel_rank() * (layout.experts or 0) // layout.ep
    name = re.sub(
        r"^(decoder\.layers\.)(\d+)", lambda m: f"{m[1]}{chunk.decoder.layers[int(m[2])].layer_number - 1}", name
    )
    # As megatron 0.17 and newer call it.
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")
    return re.sub(r"(local_experts\.)(\d+)", lambda m: f"{m[1]}{first_expert + int(m[2])}", name)


IN_CI = ("dp2-bf16", "dp2-bf16-replicated", "ep2", "ep2-replicated")


@pytest.mark.parametrize(
    "layout",
    [
        of_world(name, in_ci=name in IN_CI, hidden_size=256, num_layers=10)
        for name in (*IN_CI, "cp2", "dp2-fp32-replicated", "dp4-two-instances")
    ],
)
def test_replicated_bytes_are_written_once(layout: Layout, shared_path: Path) -> None:
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 1)
        save(training, shared_path, 1)
        elements = round(sum(gather(share_of_elements(training))))
        # fp32 training has no main parameter beside the model's
        main = 0 if layout.precision == "fp32" else torch.float32.itemsize
        moments = 2 * torch.float32.itemsize
        wanted = elements * (DTYPES[layout.precision].itemsize + main + moments)
        with everywhere():
            found = sum(path.stat().st_size for path in shared_path.rglob("*") if path.is_file())
            assert wanted >= 50e6
            assert found == pytest.approx(wanted, rel=0.01)


def share_of_elements(training: Training) -> float:
    """This rank's part of all elements of the model, counting what n ranks hold as 1/n of it on each."""
    replicas = {
        True: parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        False: parallel_state.get_expert_data_parallel_world_size(),
    }
    return sum(
        parameter.numel() / replicas[getattr(parameter, "allreduce", True)]
        for chunk in training.model
        for parameter in chunk.parameters()
    )


@pytest.mark.parametrize(
    "layout", [of_world("plain", in_ci=False), of_world("dp2-fp16", in_ci=False), of_world("dp2-expert-bias")]
)
def test_files_open_with_torch_alone(layout: Layout, shared_path: Path) -> None:
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 1)
        save(training, shared_path, 1)
        with everywhere():
            if dist.get_rank() == 0:
                paths = [str(path) for path in sorted(shared_path.rglob("*.pt"))]
                kinds = {Path(path).parent.name.split("_")[0] for path in paths}
                assert kinds == {"mp", "optim", "rng", "extra"}
                run([sys.executable, "-c", OPEN_WITH_TORCH_ALONE, *paths])
                for path in paths:
                    assert run([sys.executable, "-m", "zipfile", "-t", path]) == "Done testing\n"


def run(command: list[str]) -> str:
    # Neither may find this package by the folder it runs in, or believe to be a rank.
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(sys.executable).parent, env={})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.world(2)
def test_tracker_moves_when_all_roles_have_committed(shared_path: Path) -> None:
    layout, roles = LAYOUTS["dp2-bf16"], ("actor", "critic")
    tracker = shared_path / TRACKER
    with parallel(layout):
        actor, critic = build(layout, seed=1), build(layout, seed=2)
        save(actor, shared_path, 1, role="actor", roles=roles)
        with everywhere():
            assert not tracker.exists()
        save(critic, shared_path, 1, role="critic", roles=roles)
        with everywhere():
            assert tracker.read_text() == "1"
        save(critic, shared_path, 2, role="critic", roles=roles)
        for training, role in ((actor, "actor"), (critic, "critic")):
            manager = manager_of(training, shared_path, role, roles=roles)
            result = manager.load()
            manager.close()
            with everywhere():
                assert tracker.read_text() == "1"
                assert result.step == 1
        save(actor, shared_path, 2, role="actor", roles=roles)
        with everywhere():
            assert tracker.read_text() == "2"


@pytest.mark.world(2)
def test_only_the_newest_checkpoints_are_kept(shared_path: Path) -> None:
    layout = LAYOUTS["dp2-bf16"]
    with parallel(layout):
        training = build(layout, seed=1)
        for step in (1, 2, 3):
            save(training, shared_path, step)
        with everywhere():
            assert steps_in(shared_path) == {1, 2, 3}
        # counted on disk, whoever wrote them
        manager = manager_of(training, shared_path, max_to_keep=2)
        for step in (4, 5):
            manager.save(step)
            # One rank deletes, beside the training, after the commit that the others waited for.
            manager.wait()
            dist.barrier()
            with everywhere():
                assert steps_in(shared_path) == {step - 1, step}
        manager.close()


def steps_in(root: Path) -> set[int]:
    return {int(path.name.rpartition("_")[2]) for path in root.iterdir() if path.name.startswith("global_steps_")}
