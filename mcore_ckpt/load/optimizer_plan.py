"""Plans the fills of main parameters and moments, in the form in which this rank's optimizer keeps them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.locate import Located, Locator, Wanted
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.load.fill import TensorFill, refuse_freed
from mcore_ckpt.load.tensor_fills import not_there, plan_fill, replicas_of
from mcore_ckpt.sharding.plan import MODEL, PARAM, ReadRange, ShardKey, StoredShard
from mcore_ckpt.state.optimizers.part import Form, OptimizerPart
from mcore_ckpt.state.shards import ParameterState
from mcore_ckpt.state.trainer import Trainer

NewlyStarted = tuple[OptimizerPart, ParameterState, bool]
"""A parameter that starts without moments, and whether its main parameter is filled.

The parameter starts without moments because the optimizer had done no step at the save, or because the stored moments
are not taken over.
"""


@dataclass(frozen=True, eq=False)
class PartPlan:
    """The plan of one chained optimizer.

    Attributes:
        newly_started: the parameters without moments.
        all_newly_started: all parameters of the part; takes the place of `newly_started` if no moments are loaded.
        other_moments: why the optimizer cannot use the stored moments; None if it can.
    """

    mains: tuple[TensorFill, ...]
    state: tuple[TensorFill, ...]
    newly_started: tuple[NewlyStarted, ...]
    all_newly_started: tuple[NewlyStarted, ...]
    other_moments: str | None

    def with_new_moments(self) -> PartPlan:
        """Returns the plan that takes over only main parameters."""
        return replace(self, state=(), newly_started=self.all_newly_started)


@dataclass(frozen=True)
class OptimizerPlanner:
    """Plans the fills of one optimizer. The locator finds tensors in the checkpoint, and the reader reads them."""

    trainer: Trainer
    reader: NativeReader
    locator: Locator

    def plan(self, part: OptimizerPart, states: Sequence[ParameterState], starts_anew: bool) -> PartPlan:
        """Plans the fills of one part, from its parameters on this rank.

        If `starts_anew` is True, the part takes over only main parameters, whatever moments are stored.

        Raises CheckpointMismatchError: the checkpoint lacks a tensor, has it in another shape or dtype, or has other
        moments than the part needs.
        """
        mains: list[TensorFill] = []
        moments: list[TensorFill] = []
        entries: list[tuple[NewlyStarted, bool]] = []
        other: str | None = None
        for state in states:
            kinds = self.locator.moments(state.name)
            bound = self._bound(state)
            has_stepped = bool(kinds or bound)
            fills = self._main_fills(part, state, has_stepped and not starts_anew)
            replicas = () if part.is_sharded else replicas_of(self.trainer, state.expert)
            mains += [replace(fill, replicas=replicas) for fill in fills]
            entries.append(((part, state, bool(fills)), has_stepped))
            wrong = None if starts_anew else self._other_moments(part, state, kinds, bound)
            other = other or wrong
            if starts_anew or wrong is not None:
                continue
            found = [fill for kind in kinds for fill in self._moment_fills(part, state, kind)]
            found += self._bound_fills(part, state, bound or {})
            moments += [replace(fill, replicas=replicas) for fill in found]
        if other is not None and not self.trainer.config.reset_moments:
            raise CheckpointMismatchError(
                f"{other}: set reset_moments=True to take over the main parameters alone, and to start with new moments"
            )
        every = tuple(entry for entry, _ in entries)
        newly_started = tuple(entry for entry, has_stepped in entries if starts_anew or not has_stepped)
        return PartPlan(tuple(mains), tuple(moments), newly_started, every, other)

    def _bound(self, state: ParameterState) -> dict[str, StoredShard] | None:
        """Returns the stored bound state of exactly the region of `state`; None if only other regions have any."""
        key = self.locator.stored_key(ShardKey(state.name, PARAM))
        return {} if key is None else self.reader.bound_to(key, state.region)

    def _other_moments(
        self, part: OptimizerPart, state: ParameterState, kinds: Sequence[str], bound: dict[str, StoredShard] | None
    ) -> str | None:
        """Returns why the part cannot use the stored moments of a parameter; None if it can."""
        where = f"{self._wanted(state, PARAM).file}: optimizer state of {state.name}"
        if bound is None:
            return (
                f"{where}: belongs to other parts of the parameter than {state.region.describe()}, and cannot be "
                "divided: use the tensor-parallel size of the checkpoint"
            )
        kind, found = part.kind, {*kinds, *bound}
        if kind is None or not found:
            return None
        shapes = part.bound_shapes(state.main)
        wanted = {*kind.moments, *shapes}
        # A class that is derived from a known class may keep more tensors. Such a class gets only state that the same
        # class has saved.
        allowed = found if part.kind_name != kind.name else wanted.union(kind.optional)
        if not wanted <= found <= allowed or set(bound) != set(shapes):
            return f"{where}: wanted {_listed(wanted)} of {part.kind_name}, found {_listed(found)}"
        for name, shape in shapes.items():
            if bound[name].region.local_shape != shape:
                return f"{where}: wanted {name} of shape {list(shape)}, found {list(bound[name].region.local_shape)}"
        return None

    def _bound_fills(
        self, part: OptimizerPart, state: ParameterState, bound: dict[str, StoredShard]
    ) -> Iterator[TensorFill]:
        for kind, stored in bound.items():
            dtype, shape = torch_dtype(stored.dtype), stored.region.local_shape
            every = ReadRange.whole(stored)
            yield TensorFill((every,), dtype, partial(part.bound_tensor, state.key, kind, shape, dtype))

    def _main_fills(self, part: OptimizerPart, state: ParameterState, has_stepped: bool) -> list[TensorFill]:
        # Look for the main parameter even if it need not be filled. A parameter that was frozen at the save has no
        # stored main parameter. Without this check, it would seem that the optimizer had done no step for such a
        # parameter.
        wanted = self._wanted(state, PARAM)
        refuse_freed(wanted.key, state.main, "load()")
        located = self.locator.find(wanted)
        in_model = self.locator.stored_key(ShardKey(state.name, MODEL))
        if located is None and in_model is not None and any(self.reader.parts(in_model)):
            raise CheckpointMismatchError(
                f"{wanted.file}: tensor {wanted.key}: wanted {state.region.describe()}, found no "
                "such tensor: the saved optimizer did not train this tensor (it was frozen), or trained it as part of "
                "another one (tied embeddings): load without 'optimizer' in load_contents, and start the optimizer's "
                "state anew"
            )
        if located is None:
            raise not_there(wanted)
        if "model" in self.trainer.config.load_contents:
            form = part.form_of(state, PARAM)
            if state.is_model_view and form == Form(state.main.dtype):
                return []  # this is the memory of the model's tensor, which has its own fill
            if not has_stepped and form != Form(state.main.dtype) and located.dtype == state.key.dtype:
                return []  # FusedAdam will make the main parameter from the model's parameter, in its first step
        return self._fills(part, state, wanted, located)

    def _moment_fills(self, part: OptimizerPart, state: ParameterState, kind: str) -> list[TensorFill]:
        wanted = self._wanted(state, kind)
        located = self.locator.find(wanted)
        if located is None:
            raise not_there(wanted)
        live = state.moments.get(kind)
        if live is not None:
            refuse_freed(wanted.key, live, "load()")
        return self._fills(part, state, wanted, located)

    def _fills(self, part: OptimizerPart, state: ParameterState, wanted: Wanted, located: Located) -> list[TensorFill]:
        kind = wanted.key.kind
        form = part.form_of(state, kind)
        dtype = form.dtype or located.dtype
        if form.is_plain:
            return [plan_fill(wanted, dtype, located, lambda: part.tensor_of(state, kind, dtype))]
        stored = self.locator.coded(wanted)
        if stored is not None and self._fits(stored, form):
            return self._fills_as_stored(part, state, kind, stored)
        # Two halves together keep float32, so values are rounded to float32, and not to the dtype of one half.
        kept = torch.float32 if form.is_halved else dtype
        fill = plan_fill(wanted, kept, located, lambda: part.tensor_of(state, kind, dtype), form.is_scaled)
        return [replace(fill, encode=lambda values: part.encode(state, kind, values.float()))]

    def _fits(self, stored: StoredShard, form: Form) -> bool:
        """Returns True if the stored elements can be loaded as they are. Otherwise their values are coded anew."""
        coding = stored.coding
        assert coding is not None
        if torch_dtype(coding.dtype) != form.dtype or form.is_scaled != (coding.scale is not None):
            return False
        # Lower halves fit only the upper halves in the model's files. They do not fit weights that were rounded from
        # whole values.
        return form.is_scaled or (coding.upper == MODEL and "model" in self.trainer.config.load_contents)

    def _fills_as_stored(
        self, part: OptimizerPart, state: ParameterState, kind: str, stored: StoredShard
    ) -> list[TensorFill]:
        elements, scale = stored.as_stored, self.reader.partners(stored).scale
        dtype = torch_dtype(elements.dtype)
        fills = [TensorFill((ReadRange.whole(elements),), dtype, lambda: part.tensor_of(state, kind, dtype))]
        if scale is not None:
            one = ReadRange.whole(scale)
            fills.append(TensorFill((one,), torch.float32, lambda: part.live_scale_of(state, kind)))
        return fills

    def _wanted(self, state: ParameterState, kind: str) -> Wanted:
        file = file_names.optimizer_file(*self.trainer.coordinates.place)
        return Wanted(ShardKey(state.name, kind), state.region, file)


def _listed(kinds: Collection[str]) -> str:
    return " and ".join(sorted(kinds)) or "no moments"
