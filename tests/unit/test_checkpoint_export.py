"""What is exported loads with torch alone, with safetensors, and by the index of Hugging Face, with the same bits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paramserver.checkpoint import export as module
from paramserver.checkpoint.export import FORMATS, export
from paramserver.checkpoint.manifest import Manifest
from paramserver.checkpoint.place import Place
from paramserver.errors import CheckpointError, ConfigError
from paramserver.failpoints import arm
from paramserver.tensors.dtypes import buffer_of
from tests.support.unit.checkpoints import Watch
from tests.support.unit.trained import OPTIMIZERS, Net, make, save, train


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Equal names, types, shapes and bits."""
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.shape == other[name].shape, name
        assert bytes(buffer_of(tensor)) == bytes(buffer_of(other[name])), name


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Place, Manifest, Net]:
    place = Place(str(tmp_path / "ckpt"))
    place.prepare()
    model, optimizer = make("adam")
    train(model, optimizer, 3)
    return place, save(place, model, optimizer), model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_goes_on_from_it_with_the_same_bits(tmp_path: Path, name: str) -> None:
    place = Place(str(tmp_path / "ckpt"))
    place.prepare()
    model, optimizer = make(name)
    train(model, optimizer, 3)
    made = save(place, model, optimizer)
    out = tmp_path / "all.pt"
    assert export(place, made, "torch", out) == [out]

    content = torch.load(out, weights_only=True)
    assert content["version"] == 50
    assert content["timeline"] == 1
    assert_same(content["model"], model.state_dict())
    other, fresh = make(name)
    train(other, fresh, 1, seed=9)
    other.load_state_dict(content["model"])
    fresh.load_state_dict(content["optimizer"])
    expected = optimizer.state_dict()
    found = fresh.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert set(found["state"]) == set(expected["state"])
    assert content["optimizer_names"] == ["embed.weight", "norm.weight", "norm.bias", "shift", "scale"]
    train(model, optimizer, 3, seed=1)
    train(other, fresh, 3, seed=1)
    assert_same(other.state_dict(), model.state_dict())


def test_before_the_first_step_there_is_no_state(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "ckpt"))
    place.prepare()
    model, optimizer = make("adamw")
    export(place, save(place, model, optimizer, version=0), "torch", tmp_path / "all.pt")
    content = torch.load(tmp_path / "all.pt", weights_only=True)
    assert content["optimizer"]["state"] == {}
    optimizer.load_state_dict(content["optimizer"])


def test_one_file_of_safetensors_has_every_name(tmp_path: Path, saved: tuple[Place, Manifest, Net]) -> None:
    place, made, model = saved
    out = tmp_path / "model.safetensors"
    plan = Watch()
    arm(plan)
    assert export(place, made, "safetensors", out) == [out]
    arm(None)
    assert plan.seen == []  # an export is no checkpoint, and no planned fault of one strikes here
    assert_same(load_file(out), model.state_dict())
    Net().load_state_dict(load_file(out))


@pytest.mark.parametrize("shard_bytes", [module.SHARD_BYTES, 100, 1])
def test_a_directory_as_hugging_face_has_it(
    tmp_path: Path, saved: tuple[Place, Manifest, Net], shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, made, model = saved
    monkeypatch.setattr(module, "SHARD_BYTES", shard_bytes)
    out = tmp_path / "hf"
    files = export(place, made, "hf", out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert sorted(path.name for path in files) == [*shards, "model.safetensors.index.json"]
    assert shards[-1] == f"model-{len(shards):05d}-of-{len(shards):05d}.safetensors"
    assert (len(shards) > 1) == (shard_bytes < 1000)
    loaded: dict[str, torch.Tensor] = {}
    for shard in shards:
        part = load_file(out / shard)
        assert {name for name, file in index["weight_map"].items() if file == shard} == set(part)
        loaded |= part
    expected = dict(model.state_dict())
    del expected["head.weight"]  # tied to embed.weight, and not repeated
    assert_same(loaded, expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in loaded.values())


# ---- what is not exported


@pytest.mark.parametrize("to", FORMATS)
def test_nothing_is_overwritten(tmp_path: Path, saved: tuple[Place, Manifest, Net], to: str) -> None:
    place, made, _ = saved
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name in ("file", "link", "ckpt"):
        with pytest.raises(ConfigError, match="exists; remove it"):
            export(place, made, to, tmp_path / name)
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(ConfigError, match="there is no directory"):
        export(place, made, to, tmp_path / "a" / "b")


@pytest.mark.parametrize("to", FORMATS)
def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, saved: tuple[Place, Manifest, Net], to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, made, _ = saved
    before = sorted(tmp_path.rglob("*"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"cannot write .*out.*: No space left on device"):
        export(place, made, to, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def changed(made: Manifest, change: Any) -> Manifest:
    """The same files under another description of the model."""
    model = json.loads(json.dumps(made.model))
    change(model)
    return dataclasses.replace(made, model=model)


CHANGES: dict[str, tuple[Any, str]] = {
    "a tensor more": (lambda model: model["tensors"][0].update(name="other"), "lacks tensor 'other'"),
    "another shape": (lambda model: model["tensors"][0].update(shape=["35"]), "of shape .35."),
    "another type": (lambda model: model["tensors"][0].update(dtype="object"), "type 'object', which is not supported"),
    "no optimizer of ours": (lambda model: model["optimizer"].update(name="os.system"), "servers do not run"),
    "a group too many": (lambda model: model["tensors"][0].update(group=9), "in group 9 of 2"),
    "no message": (lambda model: model.update(tensors=7), "in an unknown way"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_checkpoint_that_does_not_fit_together(tmp_path: Path, saved: tuple[Place, Manifest, Net], what: str) -> None:
    """J08 among them."""
    place, made, _ = saved
    change, reason = CHANGES[what]
    with pytest.raises(CheckpointError, match=reason):
        export(place, changed(made, change), "torch", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_piece_of_state_that_is_missing(tmp_path: Path, saved: tuple[Place, Manifest, Net]) -> None:
    place, made, _ = saved
    for keep in made.state:
        alone = dataclasses.replace(made, state=(keep, keep))
        with pytest.raises(CheckpointError, match=r"has no exp_avg|elements of \d+ of exp_avg|from element"):
            export(place, alone, "torch", tmp_path / "out")
