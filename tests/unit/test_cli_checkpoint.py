"""`paramserver checkpoint`: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from google.protobuf import json_format

from paramserver.checkpoint.catalog import write_manifest
from paramserver.checkpoint.contents import ShardFacts
from paramserver.checkpoint.manifest import Manifest
from paramserver.checkpoint.place import Place
from paramserver.checkpoint.tensorfile import Entry, write_tensors
from paramserver.cli.look.checkpoint import epochs, is_private
from paramserver.cli.main import main
from paramserver.config.private import ENV_RUNTIME_DIR
from paramserver.core.layout.optimizers import Optimizers
from paramserver.errors import CheckpointError
from paramserver.machine.jobs import Job, publish_job
from paramserver.processes.alive import process_birth
from paramserver.server.saving.restoring import restore
from paramserver.server.versions.shard import ShardTensors
from paramserver.v1 import types_pb2
from paramserver.wire.messages import layout_of
from tests.support.unit import trained
from tests.support.unit.checkpoints import MODEL, facts, manifest, save, save_files

T50, T60, T70 = "step-00000050-t1", "step-00000060-t1", "step-00000070-t1"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    made = Place("ckpt")
    made.prepare()
    return made


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """A log of one test, to the standard error of that test."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def run(capsys: pytest.CaptureFixture[str], *tokens: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    code = main(["checkpoint", *tokens])
    out, err = capsys.readouterr()
    return code, out, err


def damage(checkpoint: str) -> None:
    path = Path("ckpt", checkpoint, "weights-0-of-2.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_list(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    written = (datetime.now(UTC) - timedelta(minutes=5, seconds=10)).isoformat(timespec="seconds")
    save(place, 50, written=written)
    save(place, 60, finite=False, written=(datetime.now(UTC) - timedelta(hours=30)).isoformat())
    save(place, 55, timeline=2)
    Path("ckpt/step-00000055-t2/weights-0-of-2.safetensors").unlink()
    save_files(place, 70)
    code, out, _ = run(capsys, "list", "ckpt")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["name", "version", "epochs", "size", "age", "state"]
    assert [line[0] for line in lines[1:]] == ["step-00000055-t2", T70, T60, T50]
    assert "ckpt/step-00000055-t2/weights-0-of-2.safetensors is missing" in out
    assert lines[2] == [T70, "unfinished"]
    assert "5 min  good" in out
    assert "1 d  NaN or infinite weights" in out

    code, out, _ = run(capsys, "list", "ckpt", "--json")
    assert code == 0
    rows = json.loads(out)
    assert [row["good"] for row in rows] == [False, False, False, True]
    assert rows[3]["version"] == 50
    assert rows[3]["problem"] == ""
    assert rows[1] == {"name": T70, "good": False, "problem": "unfinished"}


def test_an_empty_list(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "list", "ckpt") == (0, "There are no checkpoints in ckpt.\n", "")
    assert run(capsys, "list", "ckpt", "--json") == (0, "[]\n", "")


def test_one_checkpoint_is_a_directory_too(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(place, 50)
    save(place, 60)
    for directory in (f"ckpt/{T50}", f"ckpt/{T50}/", str(Path("ckpt", T50).absolute())):
        code, out, _ = run(capsys, "list", directory)
        assert (code, out.count("step-")) == (0, 1)
    monkeypatch.chdir(Path("ckpt", T50))
    code, out, _ = run(capsys, "show", ".")
    assert out.startswith(f"{T50}: good\n")


def test_show(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    save(place, 50)
    made = save(place, 60)
    save_files(place, 70)
    code, out, _ = run(capsys, "show", "ckpt")
    assert code == 0
    assert out.startswith(f"{T60}: good\n")
    for text in (
        "job        digits",
        "60 (timeline 1, term 3)",
        "sgd",
        "torch 2.13.0",
        *(i.sha256 for i in made.files),
    ):
        assert text in out
    assert run(capsys, "show", "ckpt", T50)[1].startswith(f"{T50}: good\n")
    code, out, _ = run(capsys, "show", "ckpt", T50, "--json")
    found = json.loads(out)
    assert (found["name"], found["problem"], found["version"], found["position"]["seed"]) == (T50, "", 50, 7)


def test_show_what_cannot_be_shown(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "show", "ckpt")[0] == 2
    save_files(place, 50)
    code, _, err = run(capsys, "show", "ckpt", T50)
    assert code == 1
    assert "was never completed" in err


def test_verify(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", "ckpt")[0] == 5  # nothing is whole
    save(place, 50)
    save(place, 60, fill=float("inf"), finite=False)
    save_files(place, 70)
    code, out, _ = run(capsys, "verify", "ckpt")
    assert code == 0
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    assert lines[1:] == [[T60, "whole", "but it has NaN or infinite weights"], [T50, "whole"]]
    assert lines[0][:2] == [T70, "unfinished"]
    assert run(capsys, "verify", "ckpt", T70)[0] == 5
    damage(T60)
    code, out, _ = run(capsys, "verify", "ckpt")
    assert code == 5
    assert f"{T60}  damaged     ckpt/{T60}/weights-0-of-2.safetensors is damaged" in out
    assert run(capsys, "verify", "ckpt", T60)[0] == 5
    assert run(capsys, "verify", f"ckpt/{T60}")[0] == 5
    assert run(capsys, "verify", "ckpt", T50)[0] == 0
    code, out, _ = run(capsys, "verify", "ckpt", "--json")
    assert code == 5
    assert [row["state"] for row in json.loads(out)] == ["unfinished", "damaged", "whole"]


def test_verify_leaves_those_of_a_later_paramserver_open(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    save(place, 50)
    save(place, 60)
    path = Path("ckpt", T60, "MANIFEST.json")
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    code, out, _ = run(capsys, "verify", "ckpt")
    assert code == 0
    assert f"{T60}  unknown" in out
    assert "which a later paramserver has written" in out
    assert run(capsys, "verify", "ckpt", T60)[0] == 5


def test_optimizers_of_different_groups_are_named(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = {"names": ["muon", "adamw", "adamw"], "groups": [{}, {}, {}]}
    save(place, 50, model=MODEL | {"optimizer": optimizer})
    assert "optimizer  muon and adamw\n" in run(capsys, "show", "ckpt")[1]


@pytest.mark.parametrize("tokens", [["list"], ["show"], ["verify"], ["export", "--to", "torch", "out"]])
def test_a_place_or_a_name_that_is_not_there(
    place: Place, capsys: pytest.CaptureFixture[str], tokens: list[str]
) -> None:
    command, *rest = tokens
    code, _, err = run(capsys, command, "nowhere", *rest)
    assert code == 2
    assert "there is no directory nowhere" in err
    save(place, 50)
    if command in ("show", "verify"):
        for name in (T60, "../ckpt", "step-50-t1"):
            code, _, err = run(capsys, command, "ckpt", name)
            assert code == 2
            assert "there is no checkpoint" in err


# ---- export


def test_export(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained.make("adamw")
    trained.train(model, optimizer, 1)
    trained.save(place, model, optimizer, 50)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained.train(model, optimizer, 1)
    trained.save(place, model, optimizer, 60)
    code, out, err = run(capsys, "export", "ckpt", "--to", "torch", "new.pt")
    assert (code, err) == (0, "")
    assert out.startswith(f"Wrote {T60} to new.pt: 1 file, ")
    assert torch.load("new.pt", weights_only=True)["version"] == 60
    assert run(capsys, "export", "ckpt", T50, "--to", "torch", "old.pt")[0] == 0
    old = torch.load("old.pt", weights_only=True)
    assert all(torch.equal(old["model"][name], tensor) for name, tensor in first.items())
    assert run(capsys, "export", f"ckpt/{T50}", "--to", "hf", "hf")[0] == 0
    assert run(capsys, "export", "ckpt", "out.safetensors", "--to", "safetensors")[0] == 0
    assert Path("hf", "model.safetensors.index.json").exists()
    code, _, err = run(capsys, "export", "ckpt", "--to", "hf", "hf")
    assert code == 2
    assert "hf exists; remove it" in err
    for tokens in (["--to", "torch"], [T50, T60, "out", "--to", "torch"], ["--to", "pickle", "out"], ["out"]):
        assert run(capsys, "export", "ckpt", *tokens)[0] == 2
    assert not Path("out").exists()
    assert not list(Path("ckpt").rglob(".*"))


def test_damage_is_not_exported(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    save(place, 50)
    save(place, 60)
    damage(T60)
    code, _, err = run(capsys, "export", "ckpt", T60, "--to", "safetensors", "out")
    assert code == 1
    assert "is damaged" in err
    assert not Path("out").exists()
    code, out, err = run(capsys, "export", "ckpt", "--to", "safetensors", "out")
    assert code == 0
    assert out.startswith(f"Wrote {T50} ")
    assert f"a checkpoint is passed over checkpoint={T60}" in err
    damage(T50)
    code, _, err = run(capsys, "export", "ckpt", "--to", "safetensors", "more")
    assert code == 2
    assert "there is no good checkpoint in ckpt" in err


# ---- epochs


def test_epochs_of_a_synchronous_job(place: Place) -> None:
    position = {
        "view": {
            "consistency": {"mode": "MODE_SYNC"},
            "slices_per_step": 4,
            "sync_origin": {"base_version": "10", "epoch": "1"},
        },
        "data": {"samples": "100", "slice_size": "10"},
    }
    for version, expected in ((10, 1.0), (11, 1.4), (12, 1.8), (13, 2.0), (16, 3.0), (9, None)):
        found = epochs(place, manifest([], [], version, position=position))
        assert found == (expected if expected is None else pytest.approx(expected))


ASYNC = {"view": {"consistency": {"mode": "MODE_ASYNC"}}, "data": {"samples": "100", "slice_size": "10"}}
COUNTED = [
    ({}, 0.0),
    ({"0": [[0, 5]]}, 0.5),
    ({"0": [[0, 10]], "1": [[0, 2], [4, 5]]}, 1.3),
    ({"3": [[0, 10]], "4": [[0, 10]]}, 5.0),
    ({"x": [[0, 1]]}, None),
    ({"0": [[0]]}, None),
    ([], None),
]


@pytest.mark.parametrize(("counted", "expected"), COUNTED)
def test_epochs_of_an_asynchronous_job(place: Place, counted: object, expected: float | None) -> None:
    facts = {"shard": json.dumps({"version": 50, "counted": counted})}
    info = write_tensors(place, T50, "state.safetensors", [], [], facts)
    found = epochs(place, manifest([info], [info], 50, position=ASYNC))
    assert found == (expected if expected is None else pytest.approx(expected))


POSITIONS: list[dict[str, object]] = [
    {},
    {"view": 7},
    {"data": {"samples": "1"}},
    {"view": {}, "data": {"slice_size": "5"}},
    ASYNC,
]


@pytest.mark.parametrize("position", POSITIONS)
def test_epochs_that_are_not_known(place: Place, position: dict[str, object]) -> None:
    assert epochs(place, manifest([], [], 10, position=position)) is None


# ---- what verify and restoring refuse, with checksums that match

WEIGHT = Entry("weight", "float32", (2, 3))
MOMENTUM = Entry("optimizer/weight/momentum_buffer", "float32", (2, 3))
T80 = "step-00000080-t1"


@pytest.mark.parametrize(
    ("weight", "state", "told", "others", "reason"),
    [
        (Entry("weight", "float32", (3, 2)), [MOMENTUM], facts(80), {}, "'weight' of the checkpoint has another shape"),
        (Entry("weight", "int32", (2, 3)), [MOMENTUM], facts(80), {}, "'weight' of the checkpoint is of another type"),
        (Entry("weights", "float32", (2, 3)), [MOMENTUM], facts(80), {}, "the checkpoint has no tensor 'weight'"),
        (WEIGHT, [MOMENTUM], facts(80), {"layout_digest": "ab" * 32}, f"{T80} is of another model"),
        (WEIGHT, [MOMENTUM], {}, {}, "state.safetensors does not say what its shard had counted"),
        (WEIGHT, [MOMENTUM], facts(80, counted={"0": [[4]]}), {}, "does not say what its shard had counted"),
        (WEIGHT, [MOMENTUM], facts(80, counted={"0": [[4, 2]]}), {}, "does not say what its shard had counted"),
        (WEIGHT, [MOMENTUM], facts(79), {}, "(of server-0) is of version 79, the checkpoint is of version 80"),
        (WEIGHT, [MOMENTUM], facts(80, samples=1), {}, "are not of the same moment"),
        (WEIGHT, [MOMENTUM], facts(80) | {"names": "[]"}, {}, "the names of workers in state.safetensors are damaged"),
        (WEIGHT, [Entry("ledger", "int64", (4, 4))], facts(80), {}, "the ledger in a checkpoint is no table of five"),
        (WEIGHT, [Entry("optimizer/weight/exp_avg", "float32", (6,))], facts(80), {}, "has the state 'exp_avg', which"),
        (WEIGHT, [Entry("optimizer/weight/momentum_buffer", "float32", (5,))], facts(80), {}, "has 5 of 6 elements of"),
        (
            WEIGHT,
            [Entry("optimizer/weight/momentum_buffer@1", "float32", (5,))],
            facts(80),
            {},
            "lacks momentum_buffer",
        ),
        (WEIGHT, [Entry("optimizer/weight/momentum_buffer@x", "float32", (6,))], facts(80), {}, "with the odd name"),
        (WEIGHT, [Entry("optimizer/weight/momentum_buffer", "int32", (6,))], facts(80), {}, "in another type"),
        (WEIGHT, [MOMENTUM], facts(80), {"model": MODEL | {"optimizer": {"name": "magic"}}}, "servers do not run"),
        (WEIGHT, [MOMENTUM], facts(80), {"position": {}}, f"the manifest of {T80} does not say where training stands"),
    ],
)
def test_verify_refuses_what_resuming_refuses(
    weight: Entry,
    state: list[Entry],
    told: dict[str, str],
    others: dict[str, Any],
    reason: str,
    place: Place,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server does not take it in, either, and says the same; a position is read by the coordinator."""
    good = save(place, 70)
    weights, states = save_files(place, 80)
    odd = write_tensors(place, T80, "odd.safetensors", [weight], [bytes(weight.nbytes)], {})
    data = [bytes(entry.nbytes) for entry in state]
    odd_state = write_tensors(place, T80, "state.safetensors", state, data, told)
    made = manifest([odd, weights[1]], [odd_state, states[1]], 80, **others)
    write_manifest(place, made)
    code, out, _ = run(capsys, "verify", "ckpt", T80)
    assert code == 5
    assert "damaged" in out
    assert reason in out
    if "position" not in others:
        with pytest.raises(CheckpointError) as refused:
            taken_in(place, made)
        assert str(refused.value) in out
    assert taken_in(place, good).samples == 20 * 70
    assert run(capsys, "verify", "ckpt", good.name)[0] == 0


def taken_in(place: Place, made: Manifest) -> ShardFacts:
    """As a single server takes a checkpoint in for a job that trains the model of the tests."""
    model = json_format.ParseDict(made.model, types_pb2.ModelSpec())
    layout = layout_of(model)
    tensors = ShardTensors(layout, layout.chunks, Optimizers(("sgd",)))
    return restore(place, made, layout, model.optimizer, tensors)[1]


def test_the_private_directory_of_a_run_is_known_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `checkpoint now` writes there is gone when the run ends, and the command says so."""
    monkeypatch.setenv(ENV_RUNTIME_DIR, str(tmp_path / "runtime"))
    pid = os.getpid()
    publish_job(Job("digits", "127.0.0.1:8790", pid, 1.5, process_birth(pid), logs=str(tmp_path / "own" / "logs")))
    assert is_private(str(tmp_path / "own" / "checkpoints"))
    assert not is_private(str(tmp_path / "ckpt"))
    assert not is_private("s3://bucket/run")
