"""Which versions of megatron-core the tests know, and which tests of several ranks each of them runs."""

from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.state.megatron_versions import TESTED

REPOSITORY = Path(__file__).parents[2]
VERSIONS = TESTED


@dataclass(frozen=True)
class Cases:
    """Tests of one file of tests/distributed, which the table in docs/compatibility.md counts.

    Attributes:
        file: the file.
        chosen: the cases that show what the row says, as an expression for `pytest -k`.
        in_ci: whether CI runs them with each version. The others do not depend on what differs between versions.
    """

    file: str
    chosen: str
    in_ci: bool = False

    @property
    def path(self) -> str:
        return f"tests/distributed/{self.file}.py"


CASES = {
    "a killed training goes on bit for bit": Cases("test_resume", "pp2-tied-bf16 or pp2-vpp2-hybrid", in_ci=True),
    "loads under any other layout": Cases("test_reshard", "before and tied-mtp2", in_ci=True),
    "optimizer offloaded to the host": Cases("test_offload", "killed and half-overlap"),
    "precision-aware optimizer": Cases("test_precision_aware", "killed and tp2-remainders"),
    "weights in FP8 and MXFP8": Cases("test_quantized", "killed and (delayed or overlap-mxfp8 or overlap-blockwise)"),
    "Muon, each parameter with its owner": Cases("test_muon", "killed and owners-ep2"),
    "process groups of the trainer's own": Cases("test_process_groups", "never_had"),
    "HuggingFace in and out": Cases("test_hf_round_trip", "vpp2 or hybrid-mtp", in_ci=True),
    "HuggingFace as `torch_dist`, loaded by Megatron": Cases("test_load_hf", "dist_checkpoint and dense-tp2"),
    "Megatron's `torch_dist`": Cases("test_foreign", "resumed and ep2-dp_reshardable", in_ci=True),
    "Megatron's own loop": Cases(
        "test_megatron_loop", "run_of_megatron_lm or (plain_loop and dp2-bf16 and async)", in_ci=True
    ),
    "back to Megatron-LM, by its own `load_checkpoint`": Cases(
        "test_for_trainers", "goes_back and dp2-bf16-fused", in_ci=True
    ),
    "refuses experts whose replicas drift apart": Cases("test_refusals", "drift_apart", in_ci=True),
    "`HybridModel`, and `GPTModel` to it and back": Cases("test_hybrid", "returns", in_ci=True),
}


def packages(version: str) -> list[Path]:
    """The folders of a version, for PYTHONPATH.

    They must be there. Otherwise Python would find another version.
    """
    folders = [REPOSITORY / ".venv" / name for name in (f"megatron-{version}", "triton")]
    for folder in folders:
        assert folder.is_dir(), f"{folder} is missing: scripts/test.sh installs it"
    return folders
