"""``ctx.load``: checks state dicts of the script, turns them into weights and state for servers, and loads them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paramserver import errors
from paramserver.core.layout.naming import plain_name
from paramserver.core.layout.plan import Kind
from paramserver.core.work.passes import Passes
from paramserver.tensors.dtypes import buffer_of, in_model_type, real_of
from paramserver.tensors.finite import is_finite
from paramserver.v1 import coordinator_pb2
from paramserver.worker.engine import Engine
from paramserver.worker.flat import FlatSpace
from paramserver.worker.script.binding import ModelBinding
from paramserver.worker.script.state import Brought, bring


def load(
    engine: Engine,
    passes: Passes,
    binding: ModelBinding,
    model: nn.Module,
    scheduled: bool,
    weights: Mapping[str, Any] | None,
    optimizers: Sequence[Mapping[str, Any]] | None,
) -> bool:
    """Go on from these state dicts of the model and of its optimizers. ``scheduled``: a scheduler was prepared.

    False: the job went back, and the script comes to this epoch and to this call once more.
    Raises ModelError for what does not fit, JobFailedError if the job went back before it was done.
    """
    if passes.planned and engine.rollback.aborted:
        engine.rollback.say("what ctx.load is given")
        return False
    first = passes.epoch < 0 and engine.progress.slices == 0
    fixed = not (first or scheduled)
    state, groups = (None, []) if optimizers is None else take_state(binding, optimizers, fixed)
    space = None if weights is None else engine.reading.weights_now()
    put = "" if weights is None or space is None else put_weights(binding, model, weights, space)
    epoch, count = passes.call("load")
    place = coordinator_pb2.LoadPlace(epoch=epoch + 1, count=count + 1, digest=digest_of(put, state, groups))
    if not engine.loading.load(place, space, state):
        if passes.planned and engine.rollback.open_epoch() < passes.epoch:
            return False
        raise errors.JobFailedError(
            f"a server was lost, and the job went back to version {engine.weights.version} before ctx.load was done: "
            "go on from there with --resume"
        )
    if first and not scheduled:
        present = [group for one in binding.optimizers for group in one.param_groups]
        for group, loaded in zip(present, groups, strict=False):
            group.update({key: value for key, value in loaded.items() if key != "params"})
    return True


def parts_of(
    state: object,
    model: Mapping[str, Any] | None,
    optimizer: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    count: int,
) -> tuple[Mapping[str, Any] | None, Sequence[Mapping[str, Any]] | None]:
    """The states that ``ctx.load`` is to load: of the model, and of each of its ``count`` optimizers.

    Raises UserError for what are no states, ModelError for the states of another number of optimizers.
    """
    if state is not None:
        if model is not None or optimizer is not None:
            raise errors.UserError(
                "give ctx.load a state of ctx.state_dict(), or model=... and optimizer=..., not both"
            )
        if not isinstance(state, Mapping) or not state or state.keys() - {"model", "optimizer"}:
            raise errors.UserError(
                "ctx.load takes what ctx.state_dict() gives, with the keys 'model' and 'optimizer'; for state dicts of "
                "torch, say ctx.load(model=...) or ctx.load(optimizer=...)"
            )
        model, optimizer = state.get("model"), state.get("optimizer")
    if model is None and optimizer is None:
        raise errors.UserError("ctx.load was given nothing: give it model=..., optimizer=..., or both")
    if optimizer is None:
        return model, None
    states = [optimizer] if isinstance(optimizer, Mapping) else list(optimizer)
    if len(states) != count:
        raise errors.ModelError(
            f"ctx.load was given the state of {len(states)} optimizer(s), and the model has {count}: give it the state "
            "of each, in the order of ctx.prepare (optimizer=[...])"
        )
    return model, states


def read_weights(binding: ModelBinding, model: nn.Module, space: FlatSpace) -> dict[str, Any]:
    """The model's state dict with the weights and buffers in ``space``, which the caller gives away.

    The names of a compiled model are those of the model inside.

    Entries that servers do not have (extra state of modules) are the model's own.
    """
    places = {id(tensor): index for index, tensor in binding.tensors()}
    found: dict[str, Any] = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            continue
        index = places.get(id(value), -1)
        # What the optimizer does not have is the script's own, see docs/training.md.
        own = index < 0 or binding.specs[index].kind is Kind.FROZEN
        found[name] = (
            value.detach().to("cpu", copy=True) if own else in_model_type(space.view(index), value.dtype).clone()
        )
    return found


def put_weights(binding: ModelBinding, model: nn.Module, given: Mapping[str, Any], into: FlatSpace) -> str:
    """Write a model's state dict over the weights and buffers in ``into``, which is in main memory; a digest of it.

    Raises ModelError, naming the entry, for a dict that is not of this model.
    """
    if not isinstance(given, Mapping):
        raise errors.ModelError(f"ctx.load takes the model's state_dict(), not {type(given).__name__}")
    places = {id(tensor): index for index, tensor in binding.tensors()}
    wanted = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    given = {plain_name(name) if isinstance(name, str) else name: value for name, value in given.items()}
    missing, foreign = sorted(wanted.keys() - given.keys()), sorted(map(str, given.keys() - wanted.keys()))
    if missing or foreign:
        what = f"lacks {missing[0]!r}" if missing else f"has {foreign[0][:100]!r}, which the model does not have"
        wrapped = all(str(name).startswith("module.") for name in given)
        raise errors.ModelError(
            f"the state dict given to ctx.load {what}: give it all of model.state_dict()"
            + (", without the 'module.' of DistributedDataParallel before each name" if given and wrapped else "")
        )
    own = {id(tensor) for _, tensor in binding.left_out}
    known = {id(tensor) for tensor in wanted.values()}
    if any(id(parameter) not in known for parameter in binding.parameters):
        raise errors.ModelError(
            "the optimizer has parameters that are not the model's, so no state dict of the model has them: "
            "ctx.load(model=...) is for models that hold all that is trained"
        )
    found = hashlib.sha256()
    for name, mine in wanted.items():
        value = given[name]
        if id(mine) in own:  # servers do not have it, and it does not change
            continue
        if not isinstance(mine, torch.Tensor) or id(mine) not in places or not isinstance(value, torch.Tensor):
            raise errors.ModelError(f"{name!r} of the state dict is no tensor of the model that servers have")
        if value.shape != mine.shape:
            raise errors.ModelError(
                f"{name!r} has shape {tuple(value.shape)} in the state dict, and {tuple(mine.shape)} in the model"
            )
        if value.is_complex() and not mine.is_complex():
            raise errors.ModelError(f"{name!r} of the state dict is complex, the model's is {mine.dtype}")
        index = places[id(mine)]
        into.view(index).copy_(real_of(value.detach().to("cpu").to(mine.dtype)))
        if binding.specs[index].kind is Kind.PARAMETER and not is_finite(into.view(index).reshape(-1)):
            raise errors.ModelError(f"{name!r} of the state dict has a NaN or an infinite number: load finite weights")
        found.update(f"{index} ".encode())
        found.update(buffer_of(into.view(index).reshape(-1)))
    return found.hexdigest()


def take_state(
    binding: ModelBinding, given: Sequence[Mapping[str, Any]], fixed: bool
) -> tuple[Brought, list[dict[str, Any]]]:
    """The state dict of each optimizer as the state that servers take, and the parameter groups of all.

    ``fixed``: their hyper-parameters must be the present ones. Raises ModelError for that, and for a state that is not
    of these optimizers, or differs in settings that cannot change.
    """
    found: dict[torch.Tensor, Any] = {}
    loaded: list[dict[str, Any]] = []
    for optimizer, one in zip(binding.optimizers, given, strict=True):
        shadow = copy.copy(optimizer)
        try:
            torch.optim.Optimizer.load_state_dict(shadow, dict(one))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise errors.ModelError(f"ctx.load cannot take this optimizer state: {error}") from error
        found |= shadow.state
        loaded += shadow.param_groups
    groups = binding.script_groups.hypers(loaded)
    present = binding.hypers()
    binding.kinds.validate_change(present, groups)
    for one, other in zip(present, groups, strict=True) if fixed else ():
        for key in (key for key in sorted(one) if one[key] != other[key]):
            raise errors.ModelError(
                f"the optimizer state given to ctx.load has {key} = {other[key]}, this optimizer has {one[key]}: "
                "workers that come later, or when the job is resumed, would not have that. In the middle of the "
                "training, set hyper-parameters in the script, and load a state with the present ones"
            )
    return bring(binding, found), loaded


def digest_of(weights: str, state: Brought | None, groups: list[dict[str, Any]]) -> str:
    """A digest of the loaded content; ``weights`` is the digest of its weights. Equal content has equal digests."""
    found = hashlib.sha256(f"{weights} {state is not None} ".encode())
    found.update((state.digest() if state is not None else "").encode())
    for group in groups:
        found.update(repr(sorted((k, str(v)) for k, v in group.items() if k != "params")).encode())
    return found.hexdigest()
