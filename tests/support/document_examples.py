"""The examples of the documents that this project was built from: commands, configurations and Python.

They are as the documents print them, but for the indentation of YAML, which the documents' text has lost. The paths in
them begin with folders that a test must not make. `relocated` puts these below a folder of the test.

`test_documents.py` compares these examples with the documents where they are at hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

# -- verl: checkpoints for fault tolerance ------------------------------------------------------------------

MERGE_USAGE = """\
usage: model_merger.py merge [-h] --backend {fsdp,megatron} --local_dir LOCAL_DIR [--hf_model_path HF_MODEL_PATH]
                            [--tie-word-embedding] [--is-value-model] [--target_dir TARGET_DIR]
                            [--hf_upload_path HF_UPLOAD_PATH] [--private]
"""

MERGE_MEGATRON = r"""
python scripts/model_merger.py merge \
    --backend megatron \
    --tie-word-embedding \
    --local_dir checkpoints/verl_megatron_gsm8k_examples/qwen2_5_0b5_megatron_saveload/global_step_1/actor \
    --target_dir /path/to/merged_hf_model
"""

MERGE_FSDP = r"""
python scripts/model_merger.py merge \
    --backend fsdp \
    --local_dir checkpoints/verl_fsdp_gsm8k_examples/qwen2_5_0b5_fsdp_saveload/global_step_1/actor \
    --target_dir /path/to/merged_hf_model
"""

CONVERT = r"""
python scripts/converter_hf_to_mcore.py \
    --hf_model_path Qwen/Qwen1.5-MoE-A2.7B-Chat \
    --output_path /mnt/disk/Qwen/Qwen1.5-MoE-A2.7B-Chat \
    --use_cpu_initialization    # Only work for MoE models
"""
CONVERTED_MODEL = "Qwen/Qwen1.5-MoE-A2.7B-Chat"

# -- AReaL: checkpointing -----------------------------------------------------------------------------------

AREAL_SAVER = """
saver:
  freq_epochs: 1      # Save at end of each epoch
  freq_steps: null    # Disabled
  freq_secs: null     # Disabled
  # mode defaults to "auto" - Archon users get async automatically
"""

AREAL_LOAD_EXPORT = """
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(
    "/path/to/checkpoint/epoch0epochstep99globalstep99"
)
tokenizer = AutoTokenizer.from_pretrained(
    "/path/to/checkpoint/epoch0epochstep99globalstep99"
)
"""

AREAL_RECOVER = """
recover:
  mode: on            # or "auto" for backward compatibility
  freq_steps: 100     # Checkpoint every 100 steps
  retries: 3
"""

# -- ROLL: saving and resuming ------------------------------------------------------------------------------

ROLL_CHECKPOINTS = """
checkpoint_config:
  type: file_system
  output_dir: /data/cpfs_0/rl_examples/models/${exp_name}
"""

ROLL_SAVE_STEPS = "save_steps: 100  # Save checkpoint every 100 steps\n"
ROLL_NO_RESUME = "resume_from_checkpoint: false  # Default is not to resume training\n"
ROLL_RESUME = "resume_from_checkpoint: /data/cpfs_0/rl_examples/models/exp_name/checkpoint-500\n"

ROLL_COMPLETE = """
exp_name: "qwen2.5-7B-rlvr-config"
seed: 42
logging_dir: ./output/logs
output_dir: ./output

# Checkpoint configuration
checkpoint_config:
  type: file_system
  output_dir: /data/cpfs_0/rl_examples/models/${exp_name}

# Resume training configuration
resume_from_checkpoint: false # Set to checkpoint path to resume training

# Training control parameters
max_steps: 500
save_steps: 100 # Save checkpoint every 100 steps
logging_steps: 1
eval_steps: 10

# Other training configurations...
"""

ROLL_RESUME_COMPLETE = "resume_from_checkpoint: /data/cpfs_0/rl_examples/models/qwen2.5-7B-rlvr-config/checkpoint-300\n"

BY_DOCUMENT = {
    "verl_checkpoints.txt": (MERGE_USAGE, MERGE_MEGATRON, MERGE_FSDP, CONVERT),
    "areal_checkpointing.txt": (AREAL_SAVER, AREAL_LOAD_EXPORT, AREAL_RECOVER),
    "roll_checkpoints.txt": (
        ROLL_CHECKPOINTS,
        ROLL_SAVE_STEPS,
        ROLL_NO_RESUME,
        ROLL_RESUME,
        ROLL_COMPLETE,
        ROLL_RESUME_COMPLETE,
    ),
}

_OUTSIDE = ("/path/to/", "/mnt/disk/", "/data/cpfs_0/")


def relocated(example: str, folder: Path) -> str:
    """The example with its absolute paths below `folder`."""
    for start in _OUTSIDE:
        example = example.replace(start, f"{folder}{start}")
    return example


def run_in_shell(command: str, folder: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Types a command as it is printed, in a folder that has this repository's `scripts`."""
    if not (folder / "scripts").exists():
        (folder / "scripts").symlink_to(REPOSITORY / "scripts")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    packages = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PATH": path, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=os.environ | environment | variables, capture_output=True, text=True
    )
