"""The samples of a ``DataLoader``, as slices see them: plainly shuffled, or in the order of the script's sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import structlog
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paramserver import errors
from paramserver.core.work.slices import DataSpec

log = structlog.get_logger("paramserver.worker")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a loader makes batches: ``batch_size`` entries of ``sampler`` each, a shorter last one unless ``drop_last``.

    ``whole``: each entry of the sampler is a batch, a list of indices. ``single``: a batch is one sample, which is not
    collated, as ``batch_size=None`` asks.
    """

    sampler: Any
    batch_size: int
    drop_last: bool = False
    whole: bool = False
    single: bool = False


def sampling_of(loader: DataLoader[Any]) -> Sampling:
    """How this loader makes batches."""
    own = loader.batch_sampler
    if loader.batch_size is not None:
        return Sampling(loader.sampler, loader.batch_size, loader.drop_last)
    if own is None:
        return Sampling(loader.sampler, 1, single=True)
    if type(own) is BatchSampler:
        return Sampling(own.sampler, own.batch_size, own.drop_last)
    return Sampling(own, 1, whole=True)


@dataclass(frozen=True, slots=True)
class Cut:
    """What slices are cut by, of a prepared loader. ``samples``: -1 where a sampler of the script's decides."""

    batch_size: int
    drop_last: bool
    samples: int = -1


def cut_of(loader: DataLoader[Any], data: DataSpec) -> Cut:
    """By what the slices of this loader are cut, now."""
    own = loader.batch_sampler
    if is_stream(loader):
        return Cut(getattr(own, "batch_size", 1), getattr(own, "drop_last", False))
    found = sampling_of(loader)
    if type(own) is BatchSampler:  # a script may change it, unlike the loader's own attributes
        found = replace(found, batch_size=own.batch_size, drop_last=own.drop_last)
    return Cut(found.batch_size, found.drop_last, -1 if data.drawn else _length(loader.dataset))


def check_cut(loader: DataLoader[Any], data: DataSpec, first: Cut) -> None:
    """Raises DataError if slices would be cut otherwise now than when the loader was prepared."""
    now = cut_of(loader, data)
    if now == first:
        return
    if now.samples != first.samples:
        what = f"the data set has {now.samples} samples, and had {first.samples} when its loader was prepared"
    elif now.batch_size != first.batch_size:
        what = f"the batches of the loader have {now.batch_size} samples, and had {first.batch_size} when prepared"
    else:
        what = f"the batch sampler has drop_last={now.drop_last}, and had {first.drop_last} when prepared"
    raise errors.DataError(
        f"{what}: a job keeps its slices. Give it all data at once, with a sampler or a batch sampler of your own that "
        "chooses by epoch (set_epoch), or begin another job"
    )


def with_turns(data: DataSpec, turns: int) -> DataSpec:
    """The same data, with so many optimizer steps on each batch. Raises DataError if it does not allow them."""
    try:
        return replace(data, turns=turns)
    except ValueError as error:
        raise errors.DataError(str(error)) from error


def describe_loader(
    loader: DataLoader[Any], accumulate: int = 1, slices_per_step: int = 0, batches: int = 0
) -> DataSpec:
    """The loader's data as slices of ``accumulate`` batches. Raises DataError for data that cannot be cut into slices.

    ``slices_per_step``: of the job. ``batches``: of an IterableDataset, the most in an epoch; 0: the loader knows.
    """
    if is_stream(loader):
        return _describe_stream(loader, accumulate, slices_per_step, batches)
    if batches:
        raise errors.DataError("batches is for an IterableDataset: a map-style data set says itself how many it has")
    found = sampling_of(loader)
    shuffle = shuffled(found.sampler, loader.dataset)
    samples = _length(loader.dataset if shuffle is not None else found.sampler, shuffle is None)
    if samples == 0:
        what = "data set is empty" if shuffle is not None else "sampler of the loader gives nothing"
        raise errors.DataError(f"the {what}: give it at least one sample")
    try:
        size, step = found.batch_size * accumulate, slices_per_step if accumulate > 1 else 0
        return DataSpec(samples, size, found.drop_last, bool(shuffle), accumulate, step, shuffle is None)
    except ValueError as error:
        raise errors.DataError(str(error)) from error


def is_stream(loader: DataLoader[Any]) -> bool:
    """Whether the data can only be read in order."""
    return isinstance(loader.dataset, IterableDataset)


def _describe_stream(loader: DataLoader[Any], accumulate: int, slices_per_step: int, batches: int) -> DataSpec:
    """The stretches of a stream: entries are its batches."""
    if not batches:
        try:
            batches = len(loader)
        except (TypeError, NotImplementedError) as error:
            raise errors.DataError(
                "the IterableDataset has no length: say how many batches an epoch has at most with "
                "ctx.prepare(model, optimizer, loader, batches=1000), or give it __len__"
            ) from error
    if not batches:
        raise errors.DataError("the IterableDataset has no batches: give it at least one sample")
    try:
        step = slices_per_step if accumulate > 1 else 0
        return DataSpec(batches, accumulate, False, False, accumulate, step, True)
    except ValueError as error:
        raise errors.DataError(str(error)) from error


def tell_epoch(dataset: Any, epoch: int, depth: int = 4) -> None:
    """Call ``set_epoch`` of a data set, and of the data sets that it is made of (a `Subset`, for example)."""
    if callable(set_epoch := getattr(dataset, "set_epoch", None)):
        set_epoch(epoch)
    if depth:
        several = getattr(dataset, "datasets", None)
        inner = [getattr(dataset, "dataset", None), *(several if isinstance(several, list | tuple) else ())]
        for one in inner:
            if one is not None:
                tell_epoch(one, epoch, depth - 1)


def shuffled(sampler: Any, dataset: Any) -> bool | None:
    """Whether a sampler gives each sample once, in an order by chance (True) or in theirs (False); None: its own way.

    Raises DataError for a sampler that gives the share of one process.
    """
    if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        log.warning(
            "the DistributedSampler is left out: slices share the samples out to the workers, and each sample comes "
            "once in an epoch. set_epoch may stay in the script; before the first loop it says which epoch that is"
        )
        return bool(sampler.shuffle)
    for one in (sampler, getattr(sampler, "sampler", None)):
        replicas = getattr(one, "num_replicas", 1)
        if isinstance(replicas, int) and replicas > 1:
            raise errors.DataError(
                f"{type(one).__name__} gives one process of {replicas} its share, but slices are shared out by the "
                "job: give it num_replicas=1 and rank=0, so that it has all samples"
            )
    kind = type(sampler)
    if kind.__iter__ not in (RandomSampler.__iter__, SequentialSampler.__iter__):
        return None
    if not isinstance(sampler, RandomSampler | SequentialSampler) or len(sampler.data_source) != _length(dataset):
        return None
    if isinstance(sampler, SequentialSampler):
        return False
    return True if not sampler.replacement and sampler.num_samples == len(sampler.data_source) else None


def _length(counted: Any, sampler: bool = False) -> int:
    try:
        return len(counted)
    except (TypeError, NotImplementedError) as error:
        if sampler:
            raise errors.DataError(
                f"{type(counted).__name__} has no length: give it __len__, the largest number that it gives in an epoch"
            ) from error
        raise errors.DataError("the data set has no length: give it __len__") from error
