"""The HuggingFace model of a save: read back from the files that the ranks have just written beside it.

HuggingFace wants whole tensors, and a rank has slices. The one place where all slices meet without anything being
gathered is the file system: when all ranks' files are on the disk, each rank writes some of the `.safetensors` files
from them. It is the merge of a committed checkpoint, a little earlier; training is not asked for anything.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, WrittenFile, encode_manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointMismatchError, CommitError, UnsupportedError
from mcore_ckpt.formats.contract import weights_of
from mcore_ckpt.formats.huggingface.assets import config_of, save_assets, write_config, written_assets
from mcore_ckpt.formats.huggingface.export_plan import plan_export
from mcore_ckpt.formats.huggingface.writer import write_index, write_weights
from mcore_ckpt.formats.native.folder import LocalFolder
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.io import tuning
from mcore_ckpt.io.files import FOLDER_MODE, sync_dir, write_file
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import hf_tensors
from mcore_ckpt.models.mcore_config import check_model
from mcore_ckpt.models.reconcile import reconcile
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.models.table import MCORE_HEAD
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.sharding.plan import OPAQUE
from mcore_ckpt.sharding.regions import Shape
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows, may_be_padding
from mcore_ckpt.state.model import unwrap
from mcore_ckpt.state.shards import LocalShard
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import commit

logger = logging.getLogger(__name__)


def check_exportable(trainer: Trainer, model: Sequence[LocalShard]) -> None:
    """What of the model this rank has must be in the table of its architecture, with the table's shapes.

    Raises:
        UnsupportedError: there is no table for it.
        CheckpointMismatchError: a tensor is not in it, or of another shape, or its rows are in another order.
    """
    described = described_model(trainer)
    if any(shard.key.name == MCORE_HEAD and shard.region.global_shape[0] == 1 for shard in model):
        described = _as_value_model(described)
    _check_config(trainer, described)
    wanted = {slab.mcore: slab.region.global_shape for tensor in hf_tensors(described) for slab in tensor.slabs}
    for shard in model:
        if shard.key.kind == OPAQUE:
            continue
        name, shape = found_as(shard.key.name, wanted), shard.region.global_shape
        if name is None:
            raise CheckpointMismatchError(
                f"tensor {shard.key}: {described.describe()}, as hf_config says, has no such tensor: 'hf_model' cannot "
                "be saved"
            )
        if shape != wanted[name] and not _is_padded(name, shape, wanted[name]):
            raise CheckpointMismatchError(
                f"tensor {shard.key}: the model has shape {list(shape)}, hf_config means {list(wanted[name])}"
            )


def _is_padded(name: str, shape: Shape, wanted: Shape) -> bool:
    # What the export would refuse must be refused here: there it would be a save that fails.
    return has_vocabulary_rows(name) and shape[1:] == wanted[1:] and may_be_padding(wanted[0], shape[0])


# By what the table calls it: sizes that say in what order a tensor's rows are, whatever its shape.
_ORDER = {"num_attention_heads": "heads", "num_query_groups": "groups", "kv_channels": "head_dim"}


def _check_config(trainer: Trainer, described: HfModel) -> None:
    """What decides on the order of elements must be the same. Of the rest a difference is told: the weights are right,
    and what transformers computes with them is not what was trained."""
    live = unwrap(trainer.chunks[0])
    for field, word in _ORDER.items():
        found = getattr(live.config, field, None)
        latent = getattr(live.config, "multi_latent_attention", False)
        if not latent and word in described.sizes and found not in (None, described.sizes[word]):
            raise CheckpointMismatchError(
                f"the model's {field} is {found}, hf_config of this {described.describe()} says {described.sizes[word]}"
            )
    if not described.architecture.rules:
        return
    try:
        check_model(live, described)
    except (CheckpointMismatchError, UnsupportedError) as difference:
        if trainer.agreement.is_coordinator:
            logger.warning(
                "hf_config is not what is trained, so the exported model will compute other things: %s", difference
            )


def described_model(trainer: Trainer) -> HfModel:
    """What `hf_config` describes. Raises UnsupportedError if there is no table for it."""
    return model_from_config(config_of(trainer.hf_config))


def _as_value_model(model: HfModel) -> HfModel:
    """The same with a head of one value: frameworks hand over the language model's config for a critic, too."""
    wanted = next((name for name in model.architecture.classes if name.endswith("ForTokenClassification")), None)
    if wanted is None:
        raise UnsupportedError(
            f"hf_config: transformers has no value model of {model.architecture.model_type}: leave 'hf_model' out of "
            "save_contents"
        )
    return model_from_config({**model.config, "architectures": [wanted]})


def export_together(
    commits: Agreement,
    trainer: Trainer,
    staging: Path,
    attempt: str,
    write: Callable[[], Record],
    describe: Callable[[Sequence[Record]], Manifest],
) -> list[WrittenFile]:
    """All ranks write the checkpoint's own files, then from these the HuggingFace model.

    Args:
        staging: the folder of the save under way.
        attempt: its id.
        write: writes this rank's files durably, and reports them.
        describe: on rank 0, the manifest of all files, from the reports.

    Returns:
        This rank's files of the HuggingFace model.

    Raises:
        CheckpointError: on all ranks, if one could not write its own files; on this one, if the model is not what the
            config says, or its part cannot be written.
    """

    def combine(records: Sequence[Record]) -> Record:
        manifest = describe(records)
        # The model's own files are there, whether they were asked for or not.
        manifest = replace(manifest, contents=tuple({*manifest.contents, "model"}))
        write_file(staging / file_names.WRITTEN_FILE, [encode_manifest(manifest)])
        return {}

    topic = f"writing what the HuggingFace model of {trainer.role} is made from"
    decide(commits, topic, write, combine, CommitError, name=f"{attempt}-model")
    reader = NativeReader(LocalFolder(staging), read_manifest(staging, file_names.WRITTEN_FILE))
    return _export(trainer, reader, staging / file_names.HUGGINGFACE_DIR)


def completed(trainer: Trainer, staging: Path, records: Sequence[Record]) -> Manifest:
    """Rank 0's part before the commit: the manifest with the HuggingFace model, from what all ranks told of it.

    Raises:
        CommitError: a file is not there.
    """
    manifest = read_manifest(staging, file_names.WRITTEN_FILE)
    (staging / file_names.WRITTEN_FILE).unlink()
    contents, kept = trainer.config.save_contents, manifest.files
    if "model" not in contents:
        shutil.rmtree(staging / file_names.MODEL_DIR)
        kept = tuple(file for file in kept if file.kind not in ("model", "experts"))
    found = [(rank, WrittenFile(**item)) for rank, record in enumerate(records) for item in record["files"]]
    commit.check_files(staging, found)
    new = (FileRecord(file.path, file.kind, rank, file.size, file.crc32) for rank, file in found)
    return replace(manifest, contents=contents, files=(*kept, *new))


def _export(trainer: Trainer, reader: NativeReader, folder: Path) -> list[WrittenFile]:
    tensors = weights_of(reader)
    shapes = {name: info.shape for name, info in tensors.items()}
    # What is trained is known; frameworks hand over the language model's config for a critic, too.
    model = reconcile(
        described_model(trainer), shapes, is_value_model=MCORE_HEAD in shapes and shapes[MCORE_HEAD][0] == 1
    )
    nbytes = sum(prod(info.shape) * info.dtype.itemsize for info in tensors.values())
    useful = max(1, min(trainer.topology.world_size, nbytes // tuning.HF_LEAST_FILE_BYTES))
    plan = plan_export(model, tensors, max_shard_bytes=tuning.HF_FILE_BYTES, least_files=useful)
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    # A training that has diverged has a checkpoint all the same.
    weights = write_weights(plan, _own_files(trainer, len(plan.files)), reader, folder, allow_nan=True)
    index = write_index(plan, folder) if trainer.agreement.is_coordinator else None
    written = [replace(file, path=f"{folder.name}/{file.path}") for file in (*weights, *((index,) if index else ()))]
    if trainer.agreement.is_coordinator:
        assets = save_assets(folder, trainer.hf_config, trainer.processing_class)
        written += written_assets(folder, [*assets, write_config(folder, model, plan.dtype, plan.has_mtp)])
    sync_dir(folder)
    return written


def _own_files(trainer: Trainer, count: int) -> list[int]:
    """Which of the files this rank writes; if there are fewer than ranks, ranks far apart write them."""
    world, rank = trainer.topology.world_size, trainer.agreement.rank
    owners = [number * world // count if count < world else number % world for number in range(count)]
    return [number for number, owner in enumerate(owners) if owner == rank]
