"""A run of ours goes back to verl's own engine, which knows nothing of this package, and is as if it never left."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import verl
from packaging.version import parse

from mcore_ckpt.cli.main import main
from tests.verl.sft import OURS, SFTRun
from tests.verl.with_verl.test_sft import OPTIONS, check_went_on

BOTH = (
    # One data-parallel rank: of the others verl's own manager has no random states.
    "engine.tensor_model_parallel_size=2",
    # verl would leave the schedule where it began.
    "++optim.use_checkpoint_opt_param_scheduler=True",
    # transformer-engine's FusedAdam: without it megatron loads no state that any layout can load. Nor does it load
    # whole main parameters into an optimizer that keeps remainders of them.
    f"{OPTIONS}.use_precision_aware_optimizer=True",
    f"{OPTIONS}.store_param_remainders=False",
)


@pytest.mark.shows("verl", "going back")
@pytest.mark.full
@pytest.mark.skipif(
    parse(verl.__version__) < parse("0.7.1"),
    reason="verl 0.6 and 0.7.0 load only the form of optimizer state that megatron-core 0.16 has removed",
)
def test_a_run_goes_back_to_verls_own_engine(model: Path, tmp_path: Path) -> None:
    reference = SFTRun(2, model, tmp_path / "reference", tmp_path / "none", BOTH, saves=False)
    assert reference.start() == [0, 0], reference.log
    ours = SFTRun(2, model, tmp_path / "ours", tmp_path / "root", (*BOTH, OURS), killed_at=5)
    assert -9 in ours.start(), ours.log

    is_old = parse(verl.__version__) < parse("0.9")
    layout = ("--layout", "verl-0.8" if is_old else "verl")
    back = ("--format", "torch_dist", *layout, "--output_path", str(tmp_path / "theirs"), "--test")
    assert main(["convert", str(tmp_path / "root"), *back]) == 0
    assert torch.load(tmp_path / "theirs" / "global_step_4" / "data_0.pt", weights_only=False)
    theirs = replace(
        ours,
        folder=tmp_path / "resumed",
        root=tmp_path / "theirs",
        overrides=BOTH,
        killed_at=None,
        saves=False,
    )
    assert theirs.start() == [0, 0], theirs.log
    check_went_on(theirs, reference, since=4)
