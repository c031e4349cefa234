"""``paramserver drain`` and ``paramserver stop``: what operators do to a running job."""

from __future__ import annotations

from paramserver.cli.target import find_target

WAIT_S = 60.0


def drain(
    worker: str,
    /,
    *,
    job: str | None = None,
    coordinator: str | None = None,
    certs: str | None = None,
    insecure: bool | None = None,
) -> int:
    """Ask a worker to leave: it hands in what it is computing, and its share goes to the others.

    Parameters
    ----------
    worker
        Its name, such as worker-3 ("paramserver status" lists them).
    job
        Name of the job, where several run on this machine.
    coordinator
        Address of the coordinator, host:port, where the job runs elsewhere.
    certs
        Directory with certificates (see "paramserver certs init").
    insecure
        Talk to another machine without TLS.
    """
    from paramserver.v1.coordinator_pb2 import DrainRequest

    target = find_target(job, coordinator, certs, insecure)
    target.call("Coordinator.Drain", DrainRequest(name=worker, wait_s=WAIT_S), WAIT_S + 10.0)
    print(f"{worker} has left.")
    return 0


def stop(
    *,
    reason: str = "",
    job: str | None = None,
    coordinator: str | None = None,
    certs: str | None = None,
    insecure: bool | None = None,
) -> int:
    """End a running job: its workers leave, the weights so far are gathered, coordinator and servers end.

    Parameters
    ----------
    reason
        Why, in words, for the logs.
    job
        Name of the job, where several run on this machine.
    coordinator
        Address of the coordinator, host:port, where the job runs elsewhere.
    certs
        Directory with certificates (see "paramserver certs init").
    insecure
        Talk to another machine without TLS.
    """
    from paramserver.v1.coordinator_pb2 import StopRequest

    target = find_target(job, coordinator, certs, insecure)
    target.call("Coordinator.Stop", StopRequest(reason=reason), WAIT_S)
    print("The job is stopping.")
    return 0
