"""Adds ones to an array with `ps.Client`, until told to stop."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import paramserver as ps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stop", type=Path, required=True, help="ends when this file exists")
    parser.add_argument("--pace", type=float, default=0.01)
    args = parser.parse_args()
    with ps.Client() as client:
        first = client.init({"total": np.zeros(3), "weight": np.ones((2, 2), np.float32)})
        assert first["total"].tolist() == [0.0, 0.0, 0.0]
        print(f"rank {client.rank} counts", flush=True)
        while not args.stop.exists():
            client.push({"total": np.ones(3)})
            time.sleep(args.pace)
        print(f"rank {client.rank} has seen {client.pull(['total'])['total'].tolist()}", flush=True)


if __name__ == "__main__":
    main()
