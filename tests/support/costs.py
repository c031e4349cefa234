"""Costs for simulated jobs of tests."""

from __future__ import annotations

import math

from paramserver.simulate.costs import Costs

# Nothing but computing takes time.
FREE = Costs(
    call_s=0.0,
    serve_s=0.0,
    push_bytes_s=math.inf,
    pull_bytes_s=math.inf,
    sum_ns=0.0,
    apply_ns={"sgd": 0.0},
    check_ns=0.0,
    hand_ns=0.0,
    parallel=1.0,
    frame_s=0.0,
    send_ns=0.0,
    take_ns=0.0,
    local_call_s=0.0,
    local_serve_s=0.0,
    uneven=0.0,
)
