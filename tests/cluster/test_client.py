"""ps.Client: arrays by name, from NumPy or torch, synchronously and asynchronously."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import paramserver as ps
from paramserver import errors
from paramserver.worker.client import Array, RawClient
from tests.support.cluster.harness import Cluster, at_once


@contextmanager
def clients(
    count: int, servers: int = 1, mode: str = "sync", chunk_bytes: int = 0, **options: Any
) -> Iterator[tuple[Cluster, list[RawClient]]]:
    """A job of clients, which leave at the end."""
    with Cluster(count, servers, mode, **options) as cluster:
        made = [cluster.client(index, chunk_bytes=chunk_bytes) for index in range(count)]
        yield cluster, made
        for client in made:
            client.close()


def raw(value: Array) -> bytes:
    data = value if isinstance(value, np.ndarray) else value.numpy()
    return bytes(data.tobytes())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_of_several_first_values_one_wins_and_all_see_its_bytes(mode: str) -> None:
    """A19."""
    values = [np.random.default_rng(seed).standard_normal((300, 7)).astype(np.float32) for seed in range(4)]
    with clients(4, 3, mode, chunk_bytes=1024) as (cluster, made):
        works = [lambda c=c, v=v: c.init({"w": v}) for c, v in zip(made, values, strict=True)]
        results = at_once(cluster, *works)
        seen = {raw(result["w"]) for result in results}
        assert len(seen) == 1
        assert seen <= {value.tobytes() for value in values}, "it is one client's values, not a mixture"
        assert {raw(client.pull()["w"]) for client in made} == seen
        assert [client.version for client in made] == [0] * 4
        assert raw(cluster.outcome().tensor("w")) in seen


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_push_and_pull(kind: str, dtype: str) -> None:
    def array(*values: float) -> Array:
        found = np.array(values, dtype=dtype)
        return found if kind == "numpy" else torch.from_numpy(found)

    with clients(1, 2, chunk_bytes=64) as (_, (client,)):
        first = client.init({"a": array(1, 2, 3), "b": array(*range(40))})
        assert first["a"].tolist() == [1, 2, 3]
        assert client.push({"a": array(0.5, 0, 0)}) == 1
        assert client.push({"a": array(0.5, 0, 1), "b": array(*[1] * 40)}) == 2
        found = client.pull()
        assert found["a"].tolist() == [2, 2, 4]
        assert found["b"].tolist() == [i + 1 for i in range(40)]
        assert {type(value) for value in found.values()} == {type(array(1))}
        assert all(str(value.dtype).endswith(dtype) for value in found.values())
        assert client.version == 2
        assert list(client.pull(["b"])) == ["b"]


def test_what_is_pulled_is_a_copy() -> None:
    with clients(1) as (_, (client,)):
        mine = np.zeros(4, dtype=np.float32)
        given = client.init({"x": mine})["x"]
        given += 7.0
        mine += 9.0
        assert client.pull()["x"].tolist() == [0, 0, 0, 0]
        pulled = client.pull()["x"]
        client.push({"x": np.ones(4, dtype=np.float32)})
        assert pulled.tolist() == [0, 0, 0, 0]


def test_shapes_of_all_kinds() -> None:
    arrays: dict[str, Array] = {
        "number": np.array(2.5),
        "empty": np.zeros((0, 3)),
        "matrix": np.arange(6.0).reshape(2, 3),
        "transposed": np.arange(6.0).reshape(2, 3).T,
    }
    with clients(1, 2, chunk_bytes=64) as (_, (client,)):
        for name, value in client.init(arrays).items():
            np.testing.assert_array_equal(value, arrays[name])
        client.push(arrays)
        for name, value in client.pull().items():
            np.testing.assert_array_equal(value, 2 * np.asarray(arrays[name]))


def test_sgd_by_name_takes_means_weighed_by_samples() -> None:
    def ones(factor: float) -> dict[str, Array]:
        return {"x": torch.full((3,), factor)}

    with clients(2, slices_per_step=2) as (cluster, made):
        at_once(cluster, *[lambda c=c: c.init(ones(0.0), "sgd", lr=0.5, momentum=0.5) for c in made])
        at_once(cluster, lambda: made[0].push(ones(1.0), samples=3), lambda: made[1].push(ones(5.0), samples=1))
        assert made[0].pull()["x"].tolist() == [-1.0] * 3  # (3 * 1 + 1 * 5) / 4 = 2, times 0.5
        at_once(cluster, lambda: made[0].push(ones(0.0)), lambda: made[1].push(ones(0.0)))
        assert made[1].pull()["x"].tolist() == [-1.5] * 3  # the momentum goes on


def test_a_torch_optimizer_gives_its_class_and_numbers() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.1, weight_decay=0.0)
    with clients(1) as (_, (client,)):
        client.init({"x": torch.zeros(2)}, optimizer)
        client.push({"x": torch.tensor([1.0, -1.0])})
        torch.testing.assert_close(client.pull()["x"], torch.tensor([-0.1, 0.1]))


@pytest.mark.parametrize("staleness", [0, 2, "unbounded"])
def test_asynchronous_clients_go_on_by_themselves(staleness: int | str) -> None:
    def work(client: RawClient, cell: int) -> None:
        for own in range(1, 21):
            value = np.zeros(3, dtype=np.float32)
            value[cell] = 1.0
            client.push({"x": value})
            assert client.pull()["x"][cell] == own, "a client sees its own pushes"
        client.close()  # who stays, and pushes no more, would hold the others back

    with Cluster(3, 2, "async", staleness) as cluster:
        made = [cluster.client(index) for index in range(3)]
        at_once(cluster, *[lambda c=c: c.init({"x": np.zeros(3, dtype=np.float32)}) for c in made])
        at_once(cluster, *[lambda c=c, i=i: work(c, i) for i, c in enumerate(made)])
        outcome = cluster.outcome()
    assert outcome.tensor("x").tolist() == [20.0] * 3
    assert outcome.summary["steps"] == 60 == outcome.summary["contributions_applied"]
    if staleness != "unbounded":
        assert outcome.summary["max_clock_spread"] <= staleness


def test_threads_of_one_client_take_turns() -> None:
    with clients(1, 2) as (cluster, (client,)):
        client.init({"x": torch.zeros(64)})

        def work(cell: int) -> None:
            for _ in range(8):
                value = torch.zeros(64)
                value[cell] = 1.0
                client.push({"x": value})
                assert client.pull(["x"])["x"][cell] >= 1.0

        at_once(cluster, *[lambda i=i: work(i) for i in range(8)])
        assert client.pull()["x"].tolist() == [8.0] * 8 + [0.0] * 56
        assert client.version == 64


def test_a_client_with_two_parts_of_a_step_pushes_twice() -> None:
    """Three slices for two clients: the first push of the second client returns without a new version."""

    def twice() -> list[int]:
        return [made[1].push({"x": torch.ones(1)}) for _ in range(2)]

    with clients(2, slices_per_step=3) as (cluster, made):
        at_once(cluster, *[lambda c=c: c.init({"x": torch.zeros(1)}) for c in made])
        for step in range(3):
            results = at_once(cluster, lambda: made[0].push({"x": torch.ones(1)}), twice)
            assert results == [step + 1, [step, step + 1]]
        assert made[0].pull()["x"].tolist() == [9.0]


WRONG: dict[str, tuple[dict[str, Array], type[errors.ParamServerError], str]] = {
    "name": ({"y": torch.zeros(3)}, errors.ModelError, "no array is named 'y'; there are 'x', 'z'"),
    "shape": ({"x": torch.zeros(4)}, errors.ModelError, r"'x' has shape \(3,\), its gradient has \(4,\)"),
    "dimensions": ({"x": torch.zeros(3, 1)}, errors.ModelError, r"'x' has shape \(3,\), its gradient has \(3, 1\)"),
    "float64": ({"x": torch.zeros(3, dtype=torch.float64)}, errors.ModelError, "'x' is float32, its gradient is float"),
    "integers": ({"x": np.zeros(3, dtype=np.int64)}, errors.ModelError, "'x' is of type int64"),
    "half": ({"x": torch.zeros(3, dtype=torch.float16)}, errors.ModelError, "'x' is of type torch.float16"),
    "a number": ({"x": 1.0}, errors.ModelError, "'x' is a float: give a NumPy array or a tensor"),  # type: ignore[dict-item]
    "masked": ({"x": np.ma.masked_equal(np.ones(3, np.float32), 1)}, errors.ModelError, "'x' is a masked array"),
    "byte order": ({"x": np.zeros(3, ">f4")}, errors.ModelError, "'x' is of type >f4: clients move"),
    "sparse": ({"x": torch.zeros(3).to_sparse()}, errors.ModelError, "'x' is sparse: give a dense array"),
    "meta": ({"x": torch.zeros(3, device="meta")}, errors.ModelError, "'x' is on the meta device, without values"),
    "NaN": ({"x": torch.tensor([0.0, float("nan"), 0.0])}, errors.NonFiniteError, "'x' has a NaN or an infinite"),
    "infinite": ({"x": np.array([np.inf, 0, 0], dtype=np.float32)}, errors.NonFiniteError, "nothing was pushed"),
}


def test_arrays_keep_their_shape_and_may_lie_in_memory_as_they_like() -> None:
    """Without dimensions, without elements, transposed, read-only, a NumPy scalar."""
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    fixed = np.ones(2, np.float64)
    fixed.flags.writeable = False
    arrays = {"scalar": np.array(3.0), "none": np.zeros((0, 2), np.float32), "turned": table.T, "fixed": fixed}
    with clients(1, 2) as (_, (client,)):
        for found in (client.init(arrays), client.pull()):
            for name, array in arrays.items():
                assert found[name].shape == array.shape, name
                assert np.array_equal(np.asarray(found[name]), array), name
        numbers: Any = {"scalar": np.float64(2.0), "turned": np.ones((3, 2), np.float32)}
        client.push(numbers)
        pulled = client.pull()
        assert pulled["scalar"].shape == ()
        assert float(pulled["scalar"]) == 5.0
        assert np.array_equal(np.asarray(pulled["turned"]), table.T + 1)


def begun() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    return optimizer


def test_optimizers_that_arrays_cannot_have() -> None:
    groups: Any = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": 2.0}]
    with clients(1) as (_, (client,)):
        for optimizer, hypers, text in (
            (torch.optim.SGD(groups, lr=1.0), {}, "the optimizer has 2 parameter groups"),
            (torch.optim.SGD([torch.zeros(1)], lr=1.0), {"lr": 2.0}, "the optimizer has hyper-parameters beside it"),
            (begun(), {}, "the optimizer has state, which arrays cannot take over"),
        ):
            with pytest.raises(errors.ModelError, match=text):
                client.init({"x": torch.zeros(3)}, optimizer, **hypers)
        with pytest.raises(errors.ModelError, match="an array is named 7: names are strings"):
            client.init({7: torch.zeros(3)})  # type: ignore[dict-item]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_wrong_pushes_push_nothing(mode: str) -> None:
    with clients(1, 2, mode) as (cluster, (client,)):
        client.init({"x": torch.zeros(3), "z": torch.zeros(3)})
        for what, (grads, kind, text) in WRONG.items():
            with pytest.raises(kind, match=text):
                client.push({"z": torch.ones(3), **grads})
            assert client.version == 0, what
        with pytest.raises(errors.UserError, match="samples must be at least 1, not 0"):
            client.push({"x": torch.zeros(3)}, samples=0)
        with pytest.raises(errors.ModelError, match="no array is named 'y'"):
            client.pull(["x", "y"])
        assert client.push({"x": torch.ones(3)}) == 1
        outcome = cluster.outcome()
    assert outcome.tensor("x").tolist() == [1.0] * 3
    assert outcome.tensor("z").tolist() == [0.0] * 3
    assert outcome.summary["contributions_applied"] == 1


def test_an_empty_push_counts_as_one_of_zeros() -> None:
    with clients(1) as (_, (client,)):
        client.init({"x": torch.zeros(3)})
        assert client.push({}) == 1
        assert client.pull()["x"].tolist() == [0.0] * 3


def test_wrong_beginnings() -> None:
    with clients(1) as (_, (client,)):
        for call in (lambda: client.push({}), client.pull, lambda: client.version):
            with pytest.raises(errors.UserError, match="call init first"):
                call()
        with pytest.raises(errors.ModelError, match="nothing to serve"):
            client.init({})
        with pytest.raises(errors.ModelError, match="'x' is of type int64"):
            client.init({"x": np.zeros(3, dtype=np.int64)})
        with pytest.raises(errors.ModelError, match="optimizer 'lion' is not supported; use one of sgd, adam"):
            client.init({"x": torch.zeros(3)}, "lion")
        with pytest.raises(errors.ModelError, match=r"optimizer 'sgd': .*speed"):
            client.init({"x": torch.zeros(3)}, "sgd", speed=3.0)
        with pytest.raises(errors.ModelError, match="unknown hyper-parameter 'lr'"):
            client.init({"x": torch.zeros(3)}, "sum", lr=0.1)
        client.init({"x": torch.zeros(3)})
        with pytest.raises(errors.UserError, match="initialised already"):
            client.init({"x": torch.zeros(3)})


def test_clients_with_other_arrays_are_refused() -> None:
    with clients(2) as (_, (first, second)):
        first.init({"x": torch.zeros(3), "y": torch.zeros(2)})
        with pytest.raises(errors.ModelError, match=r"'y' is a parameter of shape \(5,\) .*, but .* shape \(2,\)"):
            second.init({"x": torch.zeros(3), "y": torch.zeros(5)})
        with pytest.raises(errors.ModelError, match=r"the optimizer is adam .* but sum"):
            second.init({"x": torch.zeros(3), "y": torch.zeros(2)}, "adam")


def test_initial_values_that_are_not_finite_are_refused() -> None:
    with clients(1) as (_, (client,)), pytest.raises(errors.NonFiniteError, match="initial value of 'x' is not finite"):
        client.init({"x": torch.tensor([1.0, float("inf")])})


def test_alone_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMSERVER_CONFIG", "")
    monkeypatch.delenv("PARAMSERVER_CLUSTER__COORDINATOR", raising=False)
    with ps.Client() as client:
        client.init({"x": np.zeros(2, dtype=np.float32)})
        client.push({"x": np.ones(2, dtype=np.float32)})
        assert client.pull()["x"].tolist() == [1.0, 1.0]
        assert client.rank == 0
