"""Signatures as they stand in sources, without importing them, and a program that records those of a checkout of ROLL.

`python tests/integrations/source_facts.py ~/ROLL > tests/integrations/facts/roll.json`
"""

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parent / "facts"

# What the integration overrides, calls or is called by.
ROLL_FUNCTIONS = (
    "roll/utils/upload_utils.py:FileSystemUploader.__init__",
    "roll/utils/upload_utils.py:FileSystemUploader.upload",
    "roll/utils/upload_utils.py:FileSystemUploader.get_latest_ckpt",
    "roll/utils/checkpoint_manager.py:get_latest_ckpt",
    "roll/utils/checkpoint_manager.py:download_model",
    "roll/utils/checkpoint_manager.py:CheckpointManager.__init__",
    "roll/utils/checkpoint_manager.py:CheckpointManager.upload",
    "roll/utils/worker_state.py:WorkerState.save_to_json",
    "roll/utils/worker_state.py:WorkerState.load_from_json",
    "roll/utils/worker_state.py:WorkerState.save_rng_state",
    "roll/distributed/strategy/factory.py:create_strategy",
    "roll/distributed/strategy/megatron_strategy.py:MegatronTrainStrategy.__init__",
    "roll/distributed/strategy/megatron_strategy.py:MegatronTrainStrategy.initialize",
    "roll/distributed/strategy/megatron_strategy.py:MegatronTrainStrategy.load_states",
    "roll/distributed/strategy/megatron_strategy.py:MegatronTrainStrategy.offload_states",
    "roll/distributed/strategy/megatron_strategy.py:MegatronTrainStrategy.save_checkpoint",
    "roll/distributed/strategy/megatron_strategy.py:MegatronTrainStrategy.load_checkpoint",
    "roll/pipeline/base_pipeline.py:BasePipeline.__init__",
    "roll/pipeline/base_pipeline.py:BasePipeline.run",
    "roll/pipeline/base_pipeline.py:BasePipeline.set_checkpoint_clusters",
    "roll/pipeline/base_pipeline.py:BasePipeline.do_checkpoint",
    "roll/pipeline/base_pipeline.py:BasePipeline._cleanup_old_checkpoints",
    "roll/pipeline/base_worker.py:ActorWorker.initialize",
    "roll/pipeline/base_worker.py:ActorWorker.do_checkpoint",
    "roll/pipeline/base_worker.py:CriticWorker.initialize",
    "roll/pipeline/base_worker.py:CriticWorker.do_checkpoint",
    "roll/pipeline/sft/sft_worker.py:SFTWorker.initialize",
    "roll/pipeline/sft/sft_worker.py:SFTWorker.do_checkpoint",
)

# Files and folders are named by these, and attributes are read.
ROLL_TEXTS = {
    "roll/utils/worker_state.py": ('"worker_state_{tag}.json"', 'f"rng_state_{tag}.pth"'),
    "roll/pipeline/base_pipeline.py": (
        'f"checkpoint-{global_step}"',
        'os.path.join(self.resume_from_checkpoint, "pipeline")',
        'os.path.join(self.pipeline_config.output_dir, "pipeline", ckpt_id, "pipeline")',
        "self.pipeline_config.save_steps",
        "self.pipeline_config.max_steps - 1",
        "'max_ckpt_to_keep', 0",
        '.get("async_upload", True) and not is_last_step',
        "self._cleanup_old_checkpoints()",
        "self.checkpoint_manager = CheckpointManager(",
    ),
    "roll/utils/checkpoint_manager.py": ("uploader_cls(**checkpoint_config)", "except Exception as e:"),
    "roll/distributed/strategy/strategy.py": (
        "self.checkpoint_manager = CheckpointManager(checkpoint_config=self.worker_config.checkpoint_config)",
    ),
    "roll/distributed/strategy/megatron_strategy.py": (
        "self.models_wrapped = [",
        "self.models_unwrapped = ",
        "self.optimizer: MegatronOptimizer = ",
        "self.scheduler = ",
        "self.tokenizer = ",
        "self.processor = ",
        "self.megatron_train_args.save_hf_model",
        "self.megatron_train_args.save_only_model",
        'kwargs.get("is_last_step", False)',
    ),
    "roll/pipeline/base_worker.py": (
        "self.strategy = create_strategy(worker=self)",
        "load_dir = os.path.join(load_dir, self.cluster_name)",
        'self.strategy.load_checkpoint(load_dir=load_dir, tag="checkpoint")',
    ),
    "roll/configs/base_config.py": ('upload_type == "file_system"', 'self.checkpoint_config["async_upload"] = False'),
    "roll/distributed/executor/cluster.py": ("worker_cls = safe_import_class(worker_cls)",),
    "mcore_adapter/src/mcore_adapter/checkpointing.py": ('f.write("1")',),
    "mcore_adapter/src/mcore_adapter/adapters/lora_layer.py": (
        "class LoraParallelLinear(MegatronModule, LoraLayer):",
        "self.lora_A[adapter_name] = lora_a",
        'if k in [f"{prefix}base_layer.weight", f"{prefix}base_layer.bias"]:',
        "r = r // self.config.moe_router_topk",
    ),
    "roll/models/model_providers.py": ("model.models[0] = setup_lora_training(", "model = get_peft_model("),
}


def signature_in(source: str, qualname: str) -> str:
    """The parameters of a function or method, as they stand in the source, without types."""
    body: list[ast.stmt] = ast.parse(source).body
    *classes, function = qualname.split(".")
    for name in classes:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name).body
    found = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
    for argument in ast.walk(found.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(found.args)})"


def signature_of(function: Callable[..., Any]) -> str:
    """The same of a function of ours."""
    signature = inspect.signature(function)
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)).replace(" = ", "=")


def class_names(folder: Path) -> list[str]:
    """Of all pipelines and workers: `roll.pipeline.base_worker:ActorWorker`."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        module = ".".join(path.relative_to(folder.parent.parent).with_suffix("").parts)
        names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        found += [f"{module}:{name}" for name in names if name.endswith(("Worker", "Pipeline"))]
    return found


def roll_facts(checkout: Path) -> dict[str, Any]:
    signatures = {}
    for name in ROLL_FUNCTIONS:
        path, qualname = name.split(":")
        signatures[name] = signature_in((checkout / path).read_text(), qualname)
    texts = {
        path: [text for text in wanted if text in (checkout / path).read_text()] for path, wanted in ROLL_TEXTS.items()
    }
    return {"signatures": signatures, "texts": texts, "classes": class_names(checkout / "roll" / "pipeline")}


if __name__ == "__main__":
    checkout = Path(sys.argv[1])
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    print(json.dumps({"commit": commit.stdout.strip(), **roll_facts(checkout)}, indent=1))  # noqa: T201
