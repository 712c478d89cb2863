"""Exports the HuggingFace model of a save, from the files that the ranks have just written.

A HuggingFace file has whole tensors, but a rank has only slices. Once the files of all ranks are on the disk, each rank
reads from these files what it needs to write its share of the `.safetensors` files. So no tensor is gathered over the
network. `mcore-ckpt merge` exports the same model, but from a committed checkpoint; this export runs just before the
commit.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, WrittenFile, encode_manifest
from mcore_ckpt.checkpoint.model_facts import described as text_of
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointMismatchError, CommitError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.formats.contract import weights_of
from mcore_ckpt.formats.huggingface.adapter_folder import plan_adapter_folder, write_adapter_folder
from mcore_ckpt.formats.huggingface.assets import config_of, save_assets, unknown_fields, write_config
from mcore_ckpt.formats.huggingface.export_plan import ExportPlan, plan_export
from mcore_ckpt.formats.huggingface.side_files import written_side_files
from mcore_ckpt.formats.huggingface.tokenizer_size import tokens_of
from mcore_ckpt.formats.huggingface.writer import write_index, write_weights
from mcore_ckpt.formats.native.file_plan import FilePlan
from mcore_ckpt.formats.native.folder import LocalFolder
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.formats.native.write_requests import TensorWrite
from mcore_ckpt.io import tuning
from mcore_ckpt.io.files import make_folder, new_folder, sync_names, write_file
from mcore_ckpt.models.accounting import account
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import HfTensor, hf_tensors
from mcore_ckpt.models.peft_adapters import (
    FullyTrained,
    fully_trained_in_peft,
    no_place_in_peft,
    peft_tensors,
    with_adapters,
)
from mcore_ckpt.models.reconcile import reconcile, with_mtp_of, with_tokens, with_tower_of
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.models.stated_facts import check_rows
from mcore_ckpt.models.table import MCORE_EMBEDDING
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.sharding.adapter_names import is_adapter
from mcore_ckpt.sharding.counterparts import find_counterparts, layers_of
from mcore_ckpt.sharding.plan import MODEL, OPAQUE
from mcore_ckpt.sharding.regions import Shape
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows, padding_is_plausible
from mcore_ckpt.state.shards import LocalShard
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import commit

logger = logging.getLogger(__name__)


def check_exportable(trainer: Trainer, model: Sequence[LocalShard]) -> None:
    """Checks that the table of the architecture has all tensors of this rank, with the same shapes and order of rows.

    Raises UnsupportedError if there is no table for the architecture, and CheckpointMismatchError if `hf_config`
    describes another model.
    """
    names = [shard.key.name for shard in model]
    described = with_mtp_of(with_tower_of(described_model(trainer), names), names)
    head = {described.mcore_head}
    if any(found_as(shard.key.name, head) and shard.region.global_shape[0] == 1 for shard in model):
        described = _as_value_model(described)
    _check_config(trainer, described)
    described = _with_vocabulary(trainer, described, {shard.key.name: shard.region.global_shape for shard in model})
    wanted = {slab.mcore: slab.region.global_shape for tensor in hf_tensors(described) for slab in tensor.slabs}
    # A HybridModel has attention and MLP in separate layers, so its layers have other numbers than in the table.
    counterparts = find_counterparts(trainer.layers, layers_of(wanted))
    if counterparts.layer_mismatch is not None:
        raise CheckpointMismatchError(
            f"hf_config describes {described.describe()}, another model than the one to save: "
            f"{counterparts.layer_mismatch}: pass the model's own hf_config, or leave 'hf_model' out of save_contents"
        )
    _check_adapters(trainer, described, model)
    for shard in model:
        if shard.key.kind == OPAQUE or is_adapter(shard.key.name):
            continue
        name, shape = found_as(counterparts.stored_name(shard.key.name), wanted), shard.region.global_shape
        if name is None:
            raise CheckpointMismatchError(
                f"tensor {shard.key}: hf_config describes {described.describe()}, which has no such tensor: pass the "
                "model's own hf_config, or leave 'hf_model' out of save_contents"
            )
        if shape != wanted[name] and not _is_padded(name, shape, wanted[name]):
            raise CheckpointMismatchError(
                f"tensor {shard.key}: has shape {list(shape)} in the model, but {list(wanted[name])} according to "
                "hf_config: pass the model's own hf_config"
            )


def _check_adapters(trainer: Trainer, described: HfModel, model: Sequence[LocalShard]) -> None:
    """Checks that this rank's adapters can be merged or, with skip_frozen, written in PEFT's form."""
    shapes = {shard.key.name: shard.region.global_shape for shard in model if shard.key.kind != OPAQUE}
    adapters = {name: shape for name, shape in shapes.items() if is_adapter(name)}
    alone = trainer.config.skip_frozen
    if trainer.adapters is None and adapters:
        raise UnsupportedError(
            "the model has adapters that do not say what their alpha is, so their scale is unknown: leave 'hf_model' "
            "out of save_contents"
        )
    if trainer.adapters is None and alone:
        raise InvalidArgumentError(
            "save_contents has 'hf_model', which needs all parameters, but skip_frozen leaves some out, and the model "
            "has no adapters that could be written alone: use only one of the two"
        )
    if trainer.adapters is not None:
        adapted = with_adapters(described, hf_tensors(described), adapters, trainer.adapters.alpha)
        if alone:
            peft_tensors(adapted)
            beside = {s.key.name for s in model if s.key.kind == MODEL and not (s.is_frozen or is_adapter(s.key.name))}
            _in_peft(described, adapted, beside)


def _in_peft(described: HfModel, adapted: Sequence[HfTensor], weights: Iterable[str]) -> FullyTrained:
    """Returns PEFT's form of the weights that skip_frozen saves besides adapters.

    Raises UnsupportedError for a weight that has no form in PEFT.
    """
    names = set(weights)
    beside = fully_trained_in_peft(described, adapted, names, names)
    account(sorted(names), beside.sources, [], no_place_in_peft)
    return beside


def _is_padded(name: str, shape: Shape, wanted: Shape) -> bool:
    # Accept only padding. The export would refuse any other difference later, and the save would fail.
    return has_vocabulary_rows(name) and shape[1:] == wanted[1:] and padding_is_plausible(wanted[0], shape[0])


_MODEL_KINDS = ("model", "experts")
_IN_CONFIG = "in hf_config"


def warn_of_config(trainer: Trainer) -> None:
    """Warns, on rank 0, if `hf_config` describes another model.

    Later exports of the checkpoint need the right config.
    """
    if trainer.hf_config is None or not trainer.agreement.is_coordinator:
        return
    try:
        _check_config(trainer, described_model(trainer))
    except CheckpointMismatchError as error:
        logger.warning("%s. mcore-ckpt merge will refuse the checkpoints unless another config is named", error)
    except UnsupportedError:
        return  # the architecture has no table to compare with


def _check_config(trainer: Trainer, described: HfModel) -> None:
    """Checks that `hf_config` agrees with the live model.

    A difference that changes the order of rows is an error. Other differences are only logged, because the exported
    weights are right even though transformers computes something else with them.
    """
    found = check_rows(trainer.model, described, "in the model", _IN_CONFIG)
    if found and trainer.agreement.is_coordinator:
        logger.warning(
            "hf_config differs from the trained model, so transformers will compute something else with the exported "
            "weights: %s",
            text_of(found, "in the model", _IN_CONFIG),
        )


def least_exported_bytes(trainer: Trainer, owned: Iterable[FilePlan]) -> int:
    """Returns this rank's part of a lower bound on the HuggingFace weights' bytes. The sum over all ranks is the bound.

    The weights are the model's tensors without the padding of the vocabulary. Tensors that are stored twice count once.
    Adapters add nothing, because they are merged into the weights. But with `skip_frozen`, only the adapters count,
    because the base model is not written. `owned` are the plans of the files that this rank owns.
    """
    return sum(
        _least_part(trainer, write, _most_holders(trainer.topology, plan.request.kind, write.key.name))
        for plan in owned
        if plan.request.kind in _MODEL_KINDS
        for write in plan.request.tensors
        if write.key.kind == MODEL and write.shape and is_adapter(write.key.name) == trainer.config.skip_frozen
    )


def _most_holders(topology: Topology, kind: str, name: str) -> int:
    """Returns how many files of this kind, at most, may have a tensor of this name."""
    if kind == "model":
        return topology.tp
    # An adapter may belong to all experts, and then each expert-parallel rank has it.
    return topology.etp * (topology.ep if is_adapter(name) else 1)


def _least_part(trainer: Trainer, write: TensorWrite, holders: int) -> int:
    """Returns how many bytes a file may add to the bound for one of its tensors.

    No file adds more than an equal part of the whole tensor, because several files may hold the same elements. For
    example, norms and routers are replicated over tensor parallelism, so each rank's file has the whole tensor.
    """
    shape = write.region.global_shape
    stored = min(write.tensor.nbytes, prod(shape) * write.tensor.dtype.itemsize // holders)
    return stored * _exported_rows(trainer, write) // max(1, shape[0])


def _exported_rows(trainer: Trainer, write: TensorWrite) -> int:
    rows = write.region.global_shape[0]
    # If the size of the vocabulary is unknown, any row may be padding.
    return min(rows, trainer.vocab_size or 0) if has_vocabulary_rows(write.key.name) else rows


def described_model(trainer: Trainer) -> HfModel:
    """Returns the model that `hf_config` describes. Raises UnsupportedError if its architecture has no table."""
    return model_from_config(config_of(trainer.hf_config))


def _with_vocabulary(trainer: Trainer, model: HfModel, shapes: Mapping[str, Sequence[int]]) -> HfModel:
    """Returns the model with a row for each token of the tokenizer, even if `hf_config` has fewer rows."""
    # Look at the embedding and at the head, because a pipeline stage may have only one of the two.
    rows = [found_as(name, shapes) for name in (model.architecture.table.mcore + MCORE_EMBEDDING, model.mcore_head)]
    tokens = max(trainer.config.vocab_size or 0, tokens_of(trainer.processing_class) or 0)
    return with_tokens(model, max((shapes[name][0] for name in rows if name), default=0), tokens or None)


def _as_value_model(model: HfModel) -> HfModel:
    """Returns the model with a value head, because frameworks pass the language model's config even for a critic."""
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
    """Writes the checkpoint's own files on all ranks, and then makes the HuggingFace model from these files.

    Args:
        commits: this rank's agreement for rounds on the thread that finishes a save.
        trainer: the objects to save.
        staging, attempt: the staging folder and the id of the save.
        write: writes this rank's files durably, and returns this rank's report.
        describe: builds, on rank 0, the manifest of all files from the ranks' reports.

    Returns the files of the HuggingFace model that this rank has written.

    Raises:
        CheckpointError: on all ranks if some rank could not write the checkpoint's own files; only on this rank if the
            model does not agree with hf_config, or if this rank's files of the HuggingFace model cannot be written.
    """

    def combine(records: Sequence[Record]) -> Record:
        manifest = describe(records)
        # Add "model" even if save_contents does not have it, because the model's tensors are in the staging folder.
        manifest = replace(manifest, contents=tuple({*manifest.contents, "model"}))
        write_file(staging / file_names.WRITTEN_FILE, [encode_manifest(manifest)])
        return {}

    topic = f"writing the files from which the HuggingFace model of {trainer.role} is made"
    decide(commits, topic, write, combine, CommitError, name=export_of(attempt))
    reader = NativeReader(LocalFolder(staging), read_manifest(staging, file_names.WRITTEN_FILE))
    return _export(trainer, reader, staging / file_names.HUGGINGFACE_DIR)


def export_of(number: str) -> str:
    """Returns the name of the round in which `export_together` writes the files of a save with this id."""
    return f"{number}-model"


def completed(trainer: Trainer, staging: Path, records: Sequence[Record]) -> Manifest:
    """Adds the files of the HuggingFace model to the manifest, from the reports of all ranks.

    Only rank 0 calls this function. Deletes the files of the model's tensors if `save_contents` does not have "model".
    Raises CommitError if a file is missing or has the wrong size.
    """
    manifest = read_manifest(staging, file_names.WRITTEN_FILE)
    (staging / file_names.WRITTEN_FILE).unlink()
    contents, kept = trainer.config.save_contents, manifest.files
    if "model" not in contents:
        shutil.rmtree(staging / file_names.MODEL_DIR)
        kept = tuple(file for file in kept if file.kind not in _MODEL_KINDS)
    found = [(rank, WrittenFile(**item)) for rank, record in enumerate(records) for item in record["files"]]
    commit.check_files(staging, found)
    new = (FileRecord(file.path, file.kind, rank, file.size, file.crc32) for rank, file in found)
    return replace(manifest, contents=contents, files=(*kept, *new))


def _export(trainer: Trainer, reader: NativeReader, folder: Path) -> list[WrittenFile]:
    if trainer.config.skip_frozen:
        return _export_adapter(trainer, reader, folder)
    tensors = weights_of(reader)
    shapes = {name: info.shape for name, info in tensors.items() if not is_adapter(name)}
    described = _with_vocabulary(trainer, described_model(trainer), shapes)
    # The saved shapes decide whether the model is a value model, because frameworks pass the language model's config
    # even for a critic.
    head = found_as(described.mcore_head, shapes)
    model = reconcile(described, shapes, is_value_model=head is not None and shapes[head][0] == 1)
    nbytes = sum(prod(info.shape) * info.dtype.itemsize for info in tensors.values())
    useful = max(1, min(trainer.topology.world_size, nbytes // tuning.HF_LEAST_FILE_BYTES))
    alpha = None if trainer.adapters is None else trainer.adapters.alpha
    plan = plan_export(model, tensors, alpha=alpha, max_shard_bytes=tuning.HF_FILE_BYTES, least_files=useful)
    if trainer.agreement.is_coordinator:
        _tell_left_out(plan, folder)
    new_folder(folder, exist_ok=True)
    # NaN is allowed, because a training that has diverged must still get its checkpoint.
    weights = write_weights(plan, _own_files(trainer, len(plan.files)), reader, folder, allow_nan=True)
    index = write_index(plan, folder) if trainer.agreement.is_coordinator else None
    written = [replace(file, path=f"{folder.name}/{file.path}") for file in (*weights, *((index,) if index else ()))]
    if trainer.agreement.is_coordinator:
        source = trainer.source_files
        assets = save_assets(folder, trainer.hf_config, trainer.processing_class, source, is_export=True)
        more = unknown_fields(trainer.hf_config, source)
        config = write_config(folder, model, plan.dtype, plan.has_mtp, more=more)
        written += written_side_files(folder, [*assets, config])
    sync_names(folder.parent, [file.path for file in written])
    return written


def _export_adapter(trainer: Trainer, reader: NativeReader, folder: Path) -> list[WrittenFile]:
    """Writes the adapters in PEFT's form. Only rank 0 writes, because adapters are small."""
    if not trainer.agreement.is_coordinator or trainer.adapters is None:
        return []
    tensors = weights_of(reader)
    model = _with_vocabulary(trainer, described_model(trainer), {name: info.shape for name, info in tensors.items()})
    adapters = {name: tuple(info.shape) for name, info in tensors.items() if is_adapter(name)}
    adapted = with_adapters(model, hf_tensors(model), adapters, trainer.adapters.alpha)
    base = getattr(trainer.hf_config, "name_or_path", None) or None
    beside = _in_peft(model, adapted, (name for name in tensors if not is_adapter(name)))
    planned = plan_adapter_folder(model, adapted, tensors, trainer.adapters, base=base, beside=beside)
    target = folder / file_names.ADAPTER_DIR
    _tell_left_out(planned.plan, target)
    make_folder(target)
    written = write_adapter_folder(planned, reader, target, allow_nan=True)
    paths = save_assets(folder, trainer.hf_config, trainer.processing_class, trainer.source_files)
    assets = written_side_files(folder, paths)
    written = [*(replace(file, path=f"{folder.name}/{target.name}/{file.path}") for file in written), *assets]
    sync_names(folder.parent, [file.path for file in written])
    return written


def _tell_left_out(plan: ExportPlan, folder: Path) -> None:
    for each in plan.left_out:
        logger.info("%s: %s", folder, each.text)


def _own_files(trainer: Trainer, count: int) -> list[int]:
    """Returns the numbers of the files that this rank writes.

    If there are fewer files than ranks, the ranks that write are spread over the nodes.
    """
    world, rank = trainer.topology.world_size, trainer.agreement.rank
    owners = [number * world // count if count < world else number % world for number in range(count)]
    return [number for number, owner in enumerate(owners) if owner == rank]
