"""A client that knows nothing of a job but its coordinator's address: `visit.py HOST:PORT PUSHES`."""

from __future__ import annotations

import sys

import numpy as np

import paramserver as ps


def main() -> None:
    address, pushes = sys.argv[1], int(sys.argv[2])
    with ps.Client(address) as client:
        arrays = {"total": np.full(3, 1000.0), "weight": np.zeros((2, 2), np.float32)}
        first = client.init(arrays)  # somebody else's values count
        assert first["weight"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
        before = client.pull()["total"]
        for _ in range(pushes):
            client.push({"total": np.array([1.0, 10.0, 100.0])})
        after = client.pull(["total"])["total"]
        print(f"rank {client.rank} version {client.version} before {before.tolist()} after {after.tolist()}")


if __name__ == "__main__":
    main()
