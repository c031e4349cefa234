"""A manifest comes back as it was written, or is refused with the reason."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from paramserver.checkpoint.manifest import Manifest, NewerFormatError, decode, encode
from paramserver.checkpoint.tensorfile import FileInfo
from paramserver.coordinator.history.manifests import manifest_of
from paramserver.coordinator.options import JobOptions
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.errors import CheckpointError
from paramserver.v1 import coordinator_pb2, types_pb2
from tests.support.unit.checkpoints import manifest

SHA = "0123456789abcdef" * 4


def example(**others: Any) -> Manifest:
    weights = (FileInfo("weights-0.safetensors", 100, SHA), FileInfo("weights-1.safetensors", 200, SHA))
    state = (FileInfo("state-0.safetensors", 300, SHA), FileInfo("state-1.safetensors", 400, SHA))
    return manifest(weights, state, **others)


def signed(table: dict[str, Any]) -> bytes:
    """The text of a manifest with any content, as an attacker would write it: the digest is right."""
    rest = {key: value for key, value in table.items() if key != "sha256"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return json.dumps({**rest, "sha256": hashlib.sha256(canonical.encode()).hexdigest()}).encode()


def test_a_manifest_comes_back_as_it_was() -> None:
    made = example(
        position={"lr": 0.1 + 0.2, "tiny": 5e-324, "big": 2**70, "none": None, "text": "naïve\n"}, finite=False
    )
    assert decode(encode(made)) == made
    assert made.name == "step-00000050-t1"
    assert made.nbytes == 1000
    assert [info.name for info in made.files][:2] == ["weights-0.safetensors", "weights-1.safetensors"]


def test_the_text_is_the_same_every_time_and_sorted() -> None:
    text = encode(example(position={"b": 1, "a": 2}))
    assert text == encode(example(position={"a": 2, "b": 1}))
    keys = list(json.loads(text))
    assert keys == sorted(keys)
    assert json.loads(text)["format_version"] == 1


@pytest.mark.parametrize("position", [{"a": float("nan")}, {"a": (1, 2)}, {1: "a"}, {"a": object()}, {"a": {1, 2}}])
def test_what_json_does_not_keep_is_not_written(position: Any) -> None:
    with pytest.raises(CheckpointError, match="manifest"):
        encode(example(position=position))


def test_every_flipped_bit_is_found() -> None:
    text = encode(example())
    whole = decode(text)
    for bit in range(8 * len(text)):
        bad = bytearray(text)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            found = decode(bytes(bad))
        except CheckpointError:
            continue
        assert found == whole  # the bit was one of white space


def test_every_shorter_text_is_refused() -> None:
    text = encode(example()).rstrip()
    for length in range(len(text)):
        with pytest.raises(CheckpointError):
            decode(text[:length])


def test_a_newer_format_is_refused_by_its_number() -> None:
    """E18. Whatever else it holds is not looked at."""
    with pytest.raises(
        NewerFormatError, match="it has format 2, which a later paramserver has written; this one reads"
    ):
        decode(b'{"format_version": 2, "shards": []}')


@pytest.mark.parametrize("number", [0, -1, True, "1", 1.0, None, [1]])
def test_a_format_that_never_was_is_refused(number: object) -> None:
    table = json.loads(encode(example()))
    with pytest.raises(CheckpointError, match="does not say which format it has"):
        decode(signed({**table, "format_version": number}))


HOSTILE_NAMES = (
    "../x.safetensors",
    "/x.safetensors",
    "a/b.safetensors",
    "x\0.safetensors",
    "",
    ".safetensors",
    "x.bin",
)
FIRST = {"name": "weights-0.safetensors", "bytes": 100, "sha256": SHA}
COUNTS: list[object] = [-1, 1.5, True, "1", None, 10**18]
LISTS: list[object] = [None, {}, [], [FIRST], ["a", "b"], [FIRST] * 3, [FIRST, {**FIRST, "more": 1}], [FIRST, {}]]
OBJECTS: list[object] = [None, [], "x", 1]
TEXTS: list[object] = [None, 1, "a\nb", "x" * 201]
VALUES: dict[str, list[object]] = {
    "timeline": COUNTS,
    "version": COUNTS,
    "term": COUNTS,
    "servers": [0, 1, 3, -2, 2.0, 10**9],
    "job": ["", "../x", "a b", "a\0", 7, "x" * 65],
    "layout_digest": ["", "xyz", "../x", 7, "a" * 129],
    "model": OBJECTS,
    "position": OBJECTS,
    "run": OBJECTS,
    "written": ["", "yesterday", "2026-11-21T15:00:00", 7],
    "paramserver": TEXTS,
    "torch": TEXTS,
    "finite": [0, 1, None, "true"],
    "weights": LISTS,
    "state": LISTS,
}
FIELDS: dict[str, list[object]] = {
    "name": [*HOSTILE_NAMES, 7, None],
    "bytes": [-1, 8, 1.0, True, "9", None],
    "sha256": ["", "x" * 64, SHA[1:], 7],
}
SECOND = {**FIRST, "name": "weights-1.safetensors"}
WRONG: list[tuple[str, object]] = [
    *[(key, value) for key, values in VALUES.items() for value in values],
    *[("weights", [FIRST, {**SECOND, field: value}]) for field, values in FIELDS.items() for value in values],
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=lambda value: repr(value)[:60])
def test_a_value_that_cannot_be_right_is_refused_by_name(key: str, value: object) -> None:
    """J10 among them. The digest is right, so it is the value that is refused."""
    table = json.loads(encode(example()))
    with pytest.raises(CheckpointError, match=rf'value in "({key}|weights|state)" that cannot be right'):
        decode(signed({**table, key: value}))


def test_a_file_that_is_named_twice_is_refused() -> None:
    table = json.loads(encode(example()))
    with pytest.raises(CheckpointError, match="names a file twice"):
        decode(signed({**table, "state": table["weights"]}))


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "one more": lambda table: table.update(pickle="gASV"),
    "one less": lambda table: table.pop("run"),
    "no digest": lambda table: table.pop("sha256"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_fields_are_refused(change: str) -> None:
    table = json.loads(encode(example()))
    CHANGES[change](table)
    with pytest.raises(CheckpointError, match=r"lacks, or should not have, (pickle|run|sha256)"):
        decode(json.dumps(table).encode())


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"a":1,"a":2}', b'{"a":NaN}'])
def test_what_is_no_manifest(text: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode(text)


def test_a_job_that_goes_on_compares_its_samples_anew() -> None:
    record = coordinator_pb2.JobRecord(
        agreed=[coordinator_pb2.Agreed(name=name, epoch=1, count=1, value=1) for name in ("samples", "script loss")]
    )
    options = JobOptions("job", 1, 1, Consistency(Mode.SYNC))
    saved = manifest_of(options, record, types_pb2.ModelSpec(), 3, [])
    assert [one["name"] for one in saved.position["agreed"]] == ["script loss"]
