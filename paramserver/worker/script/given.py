"""Checks the arguments of ``ctx.prepare`` and ``ctx.log``, and refuses unsupported ones."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.worker.data.described import is_stream

log = structlog.get_logger("paramserver.worker")

# Of ctx.log: characters in a name, values in a call.
_NAME_CHARS = 200
_VALUES = 1000


_ONE_EACH: tuple[tuple[type, str, str], ...] = (
    (
        nn.Module,
        "models",
        "give each a call of its own, with its optimizer and a name (name=...)",
    ),
    (DataLoader, "DataLoaders", "one gives the slices of the job; use others as they are"),
)


def check_objects(objects: Sequence[Any]) -> None:
    """Raises ModelError or DataError for two models, optimizers or loaders, UserError if there are no objects."""
    if not objects:
        raise errors.UserError("nothing was given to ctx.prepare: give it a model with its optimizer, and a DataLoader")
    for kind, name, advice in _ONE_EACH:
        if len({id(one) for one in objects if isinstance(one, kind)}) > 1:
            refusal = errors.DataError if kind is DataLoader else errors.ModelError
            raise refusal(f"several {name} were given to ctx.prepare: {advice}")


def check_accumulate(accumulate: object, objects: Sequence[Any]) -> None:
    """Raises UserError for a number of batches to accumulate that is none, or that comes without a loader."""
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise errors.UserError(f"accumulate is a number of batches of at least 1, not {accumulate!r}")
    if accumulate > 1 and not any(isinstance(one, DataLoader) for one in objects):
        raise errors.UserError(
            "accumulate belongs into the call of ctx.prepare that gets the DataLoader; without one, optimizer.step() "
            "takes the gradients of as many backward passes as the script has made"
        )


_RULES = ("mean", "first", "sum")


def check_rules(rules: object, model: nn.Module | None) -> Mapping[str, str]:
    """The rules for changes of buffers, by pattern. Raises UserError, or ModelError for a pattern without a buffer."""
    if rules is None:
        return {}
    if not isinstance(rules, Mapping) or any(rule not in _RULES for rule in rules.values()):
        raise errors.UserError(
            f"buffers takes a rule ({', '.join(_RULES)}) for each pattern of names, such as "
            f'buffers={{"queue*": "first"}}, not {rules!r}'
        )
    if model is None:
        raise errors.UserError("buffers belongs into the call of ctx.prepare that gets the model")
    names = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    for pattern in rules:
        if not isinstance(pattern, str) or not fnmatch.filter(names, pattern):
            raise errors.ModelError(
                f"the model has no buffer like {pattern!r}; it has {', '.join(names[:20]) or 'none'}"
            )
    return rules


def check_scheduler(scheduler: LRScheduler, *optimizers: torch.optim.Optimizer) -> None:
    """Raises ModelError if a scheduler changes another optimizer than the one that is prepared."""
    bound = getattr(scheduler, "optimizer", None)
    if bound is not None and all(bound is not optimizer for optimizer in optimizers):
        raise errors.ModelError(
            f"the {type(scheduler).__name__} changes another optimizer than the one given to ctx.prepare: "
            "build it on that one"
        )


def check_loader(loader: DataLoader[Any], own_streams: bool = False) -> None:
    """Raises DataError for a DataLoader that gives batches in a way of its own.

    The ``__iter__`` of a loader that has a state (torchdata's StatefulDataLoader) gives what torch's gives. The job
    keeps its position.
    """
    stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    if type(loader).__iter__ is not DataLoader.__iter__ and not stateful:
        raise errors.DataError(
            f"{type(loader).__name__} has an __iter__ of its own, which would not be called: put what it does into the "
            "data set or into collate_fn"
        )
    if loader.generator is not None:
        log.warning("the order of the samples follows from training.seed, not from the DataLoader's generator")
    if own_streams and not is_stream(loader):
        raise errors.DataError("own_streams is for an IterableDataset: samples of a map-style data set have numbers")
    if own_streams:
        log.warning(
            "each worker reads its own stream (own_streams): which samples a slice has depends on the worker that "
            "computes it, the samples of a worker that dies or comes late may be left out or come twice, and the "
            "result depends on the number of workers"
        )


def check_model(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises ModelError, naming the tensor, for a model or optimizers that flat tensors would change."""
    _check_modules(model, optimizers)
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    given = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    mine = list(model.parameters())
    extra = [(f"optimizer.{number}", p) for number, p in enumerate(given) if id(p) not in names]
    parameters = [*((names[id(p)], p) for p in mine), *_each_once(extra)]
    for name, parameter in parameters:
        _check_tensor("parameter", name, parameter)
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in ignored and any(parameter is p for p in given):
            raise errors.ModelError(
                f"the model names {name!r} in _ddp_params_and_buffers_to_ignore: each process of DDP would train its "
                "own, and servers have one value for all workers. Leave the name out there, or leave the parameter out "
                "of the optimizer"
            )
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if buffer is not None]
    for name, buffer in buffers:
        _check_tensor("buffer", name, buffer)
    seen: set[int] = set()
    for parameter in given:
        if id(parameter) in seen:
            raise errors.ModelError(
                f"{'the optimizers have' if len(optimizers) > 1 else 'the optimizer has'} parameter "
                f"{names.get(id(parameter), '?')!r} twice, and would update it twice: "
                "give each parameter once"
            )
        seen.add(id(parameter))
    if mine and given and not any(id(p) in names for p in given):
        raise errors.ModelError(
            "the optimizer has none of the model's parameters: build it on the parameters() of the model that is given"
        )
    _check_memory([*parameters, *buffers])


def _each_once(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _check_modules(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    trained = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    for name, module in model.named_modules():
        kind = type(module).__name__
        where = f"{kind} {name!r}" if name else kind
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel) or kind.startswith("FullySharded"):
            raise errors.ModelError(
                f"the model is wrapped in {kind}, which combines gradients itself: give ctx.prepare the module inside"
            )
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or id(module.weight) not in trained:
            continue
        if module.sparse:
            raise errors.ModelError(f"{where} makes sparse gradients, which servers do not take: use sparse=False")
        if module.max_norm is not None:
            raise errors.ModelError(
                f"{where} has max_norm, with which the forward pass writes to weights of the servers: leave it out"
            )


def _check_tensor(what: str, name: str, tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise errors.ModelError(f"{what} {name!r} has no shape yet: run the model once before ctx.prepare")
    if hasattr(tensor, "__tensor_flatten__"):
        raise errors.ModelError(
            f"{what} {name!r} is a {type(tensor).__name__}, which is no plain tensor: give ctx.prepare the plain model"
        )
    if tensor.is_meta:
        raise errors.ModelError(
            f"{what} {name!r} is on the meta device, without values: make it real (model.to_empty) and fill it "
            "before ctx.prepare"
        )
    if tensor.layout is not torch.strided:
        raise errors.ModelError(f"{what} {name!r} is sparse: make it dense (to_dense) before ctx.prepare")
    if tensor.is_quantized:
        raise errors.ModelError(f"{what} {name!r} is quantised, which cannot be trained: give the model before that")
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise errors.ModelError(
            f"{what} {name!r} is expanded, so several of its elements share memory: give it memory of its own (clone)"
        )
    if tensor.device.type == "cpu" and tensor.is_shared():  # type: ignore[no-untyped-call]
        raise errors.ModelError(
            f"{what} {name!r} shares memory with other processes, which would no longer see it: do not call "
            "share_memory() before ctx.prepare"
        )


def _check_memory(named: Sequence[tuple[str, Tensor]]) -> None:
    """Tensors that lie in each other's memory would come apart."""
    by_storage: dict[tuple[torch.device, int], list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        if tensor.numel():
            key = tensor.device, tensor.untyped_storage().data_ptr()
            by_storage.setdefault(key, []).append((name, tensor))
    for sharing in by_storage.values():
        if len(sharing) > 1:
            _check_overlap(sharing)


def _check_overlap(sharing: Sequence[tuple[str, Tensor]]) -> None:
    """Raises ModelError if two of these tensors, which share a storage, share bytes of it."""
    nbytes = sharing[0][1].untyped_storage().nbytes()
    owner = torch.full((nbytes,), -1, dtype=torch.int32)
    for number, (name, tensor) in enumerate(sharing):
        size = tensor.element_size()
        shape, stride = (*tensor.shape, size), (*(step * size for step in tensor.stride()), 1)
        mine = owner.as_strided(shape, stride, tensor.storage_offset() * size)
        if (taken := int(mine.max())) >= 0:
            raise errors.ModelError(
                f"{sharing[taken][0]!r} and {name!r} overlap in memory without being one tensor, and would come apart: "
                "tie them as one Parameter, or give each memory of its own (clone)"
            )
        mine.fill_(number)


# ---- ctx.log


def as_numbers(values: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, float]:
    """The values by name. Raises UserError for a name that is no text, and for a value that is no single number."""
    if values is not None and not isinstance(values, Mapping):
        raise errors.UserError(
            f'ctx.log takes names and numbers: ctx.log(loss=...) or ctx.log({{"loss": ...}}), {_not(values)}'
        )
    given = {**(values or {}), **named}
    if values and len(given) < len(values) + len(named):
        raise errors.UserError(f"ctx.log was given {sorted(set(values) & set(named))[0]!r} twice: give each name once")
    if len(given) > _VALUES:
        raise errors.UserError(f"ctx.log was given {len(given)} values: {_VALUES} in one call are the most")
    for name in given:
        if not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARS or not name.isprintable():
            raise errors.UserError(
                f"ctx.log was given the name {str(name)[:_NAME_CHARS]!r}: a name is a text of 1 to {_NAME_CHARS} "
                "printable characters"
            )
    return {name: _number(name, value) for name, value in given.items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        value = value.detach()
    size = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", 1)
    if isinstance(size, int) and size != 1:
        raise errors.UserError(
            f"ctx.log takes one number for {name!r}, not {size} of them: log their mean, for example"
        )
    try:
        if not isinstance(value, str | bytes):
            return float(value.item() if size == 1 and hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise errors.UserError(f"ctx.log takes a number for {name!r}, {_not(value)}")


def _not(value: object) -> str:
    text = repr(value)
    return f"not {type(value).__name__} ({text if len(text) <= 80 else text[:77] + '...'})"
