"""The way to the coordinator and back: addresses, ports, versions, clocks."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from paramserver import errors
from paramserver.config import Settings, split_addresses
from paramserver.doctor.finding import Finding, Level, clean, in_thread, reason, sentence
from paramserver.doctor.software import satisfies
from paramserver.machine.hosts import coordinator_place, server_place, split
from paramserver.machine.jobs import list_jobs
from paramserver.machine.presence import list_signs
from paramserver.transport.addresses import is_here

if TYPE_CHECKING:
    from paramserver.transport.base import Channel
    from paramserver.v1.shard_pb2 import StatsRequest, StatsResponse

CALL_S = 5.0
# Longer than the coordinator's call back takes.
DIAL_BACK_S = 8.0
CLOCK_TRIES = 5
MAX_OFFSET_S = 1.0
SET_THE_CLOCK = "keep the clocks right with NTP (chrony, systemd-timesyncd)"

# To a coordinator's address, with this machine's security.
Connect = Callable[[str], "Channel"]


class Listening(Protocol):
    """A server that was started; see `transport.grpc.serve`."""

    port: int

    async def stop(self, grace: float = 0.0) -> None: ...


# Services, host and port, as `transport.grpc.serve` takes them.
Serve = Callable[[Sequence[tuple[str, object]], str, int], Awaitable[Listening]]


# ---- this machine's ports


async def check_listen(settings: Settings, answers: Sequence[Answer]) -> Finding:
    """Whether a coordinator, or a server, could listen at its configured address. ``answers``: of the coordinators."""
    from paramserver.transport.addresses import join, probe

    try:
        role, host, port = await in_thread(lambda: place(settings))
    except errors.ParamServerError as error:
        return sentence("listen", Level.FAIL, str(error))
    where = f"{join(host, port)}, for a {role}" if port else f"{host}, any port"
    try:
        await probe(host, port)
    except errors.ConfigError as error:
        named = {split(answer.address)[1]: answer for answer in answers}.get(port)
        if port and (is_ours(port) or (named and (named.error is None or isinstance(named.error, errors.DeniedError)))):
            return Finding("listen", Level.OK, f"{where}: in use by paramserver")
        if named:
            return Finding("listen", Level.NOTE, f"{where}: in use, but not by a coordinator that answers us")
        if not settings.cluster.listen and not settings.cluster.coordinator:
            remedy = f"start the coordinator at another port: --listen HOST:{port + 1}"
            return Finding("listen", Level.NOTE, f"the usual port of a coordinator, {port}, is taken", remedy)
        return sentence("listen", Level.FAIL, str(error))
    return Finding("listen", Level.OK, f"{where}: can be listened on")


def place(settings: Settings) -> tuple[str, str, int]:
    """Role, host, port: of a coordinator on its own machine, else of a server. Blocking; raises ParamServerError."""
    named = split_addresses(settings.cluster.coordinator)
    if named and not any(is_here(split(address)[0]) for address in named):
        return ("server", *server_place(settings)[:2])
    return ("coordinator", *coordinator_place(settings)[:2])


def is_ours(port: int) -> bool:
    """Whether a process of a job of this user, on this machine, has the port."""
    addresses = [sign.address for sign in list_signs() if sign.alive] + [job.coordinator for job in list_jobs()]
    return any(address.rpartition(":")[2] == str(port) for address in addresses)


# ---- the coordinator


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a coordinator, or `error`: the reason why there is none.

    `offset_s` is its clock minus ours; the truth is within `doubt_s` of that, half the way there and back.
    """

    address: str
    error: errors.ParamServerError | None = None
    stands_by: bool = False
    protocol: int = 0
    versions: Mapping[str, str] | None = None
    offset_s: float = 0.0
    doubt_s: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether the coordinator has answered, and leads."""
        return self.error is None and not self.stands_by


async def ask(address: str, connect: Connect) -> Answer:
    """Probe the coordinator there. The quickest of a few answers tells its clock best."""
    from paramserver.v1.coordinator_pb2 import ProbeRequest

    best: Answer | None = None
    try:
        await resolve(address)
        channel = connect(address)
        try:
            for _ in range(CLOCK_TRIES):
                begin, wall = time.monotonic(), time.time()
                response: Any = await channel.call("Coordinator.Probe", ProbeRequest(), timeout=CALL_S)
                doubt = (time.monotonic() - begin) / 2
                if best is None or doubt < best.doubt_s:
                    offset = response.wall_time_s - (wall + doubt)
                    best = Answer(address, None, False, response.protocol, dict(response.versions), offset, doubt)
        finally:
            await channel.close()
    except errors.NotLeaderError:
        return Answer(address, stands_by=True)
    except errors.ParamServerError as error:
        return best or Answer(address, error)
    assert best is not None
    return best


async def resolve(address: str) -> None:
    """Raises ConfigError if the host of the address is no name or address that is known here."""
    host, port = split(address)
    try:
        async with asyncio.timeout(CALL_S):
            await in_thread(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except TimeoutError as error:
        raise errors.ConfigError(f'the name service does not answer for "{host}": mend it, or use numbers') from error
    except (OSError, UnicodeError) as error:
        raise errors.ConfigError(
            f'the name "{host}" is not known here: correct cluster.coordinator, or the name service'
        ) from error


def check_reachable(answers: Sequence[Answer]) -> Finding:
    """Whether the coordinator answers. One of several coordinators has to lead."""
    parts = [f"{answer.address} {_said(answer)}" for answer in answers]
    failed = [answer for answer in answers if answer.error is not None]
    value = clean("; ".join(parts))
    if failed:
        level = Level.WARN if any(answer.usable for answer in answers) else Level.FAIL
        return Finding("coordinator", level, value, _how_to_reach(failed[0]))
    if not any(answer.usable for answer in answers):
        remedy = "wait until one of them takes over (status shows it), or name the coordinator that leads"
        return Finding("coordinator", Level.WARN, value, remedy)
    return Finding("coordinator", Level.OK, value)


def _said(answer: Answer) -> str:
    if answer.error is not None:
        return f"does not serve us: {reason(answer.error)}"
    return "stands by" if answer.stands_by else f"answers after {2000 * answer.doubt_s:.1f} ms"


def _how_to_reach(answer: Answer) -> str:
    if isinstance(answer.error, errors.DeniedError):
        return "use the certificates and the token of that job (security.certs, security.token_file); its log says more"
    if isinstance(answer.error, errors.ConfigError):
        return sentence("", Level.FAIL, str(answer.error)).remedy
    if isinstance(answer.error, errors.VersionMismatchError):
        return "another program, or another release of paramserver, answers: correct cluster.coordinator, or update it"
    return (
        "start it there (paramserver start coordinator), open its port in the firewalls, or correct "
        "cluster.coordinator; TLS on one side only looks like this, too"
    )


def check_versions(answer: Answer, protocol: int, versions: Mapping[str, str]) -> Finding:
    """Whether both sides run the same releases. Differences are shown as a table."""
    theirs = {"protocol": str(answer.protocol), **(answer.versions or {})}
    ours = {"protocol": str(protocol), **versions}
    names = [name for name in ours if ours[name] != theirs.get(name)]
    if not names:
        return Finding("versions", Level.OK, f"the same there: {', '.join(f'{k} {v}' for k, v in ours.items())}")
    rows = [("", "here", "coordinator"), *((name, ours[name], clean(theirs.get(name, "?"))) for name in names)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = ["  " + row[0].ljust(widths[0]) + "  " + row[1].ljust(widths[1]) + "  " + row[2] for row in rows]
    value = "\n".join([f"{len(names)} of {len(ours)} differ", *lines])
    if "protocol" in names:
        return Finding("versions", Level.FAIL, value, "install the same version of paramserver on all machines")
    apart = [name for name in ("paramserver", "torch") if not _same_release(ours.get(name), theirs.get(name))]
    if apart:
        remedy = f"install the same {' and '.join(apart)} on all machines; other releases compute other last bits"
        return Finding("versions", Level.WARN, value, remedy)
    return Finding("versions", Level.NOTE, value)


def _same_release(ours: str | None, theirs: str | None) -> bool:
    """ "2.13.0" and "2.13.0+cpu" are builds of one release."""
    return ours == theirs or (ours is not None and theirs is not None and satisfies(ours, f"=={theirs}"))


def check_clock(answer: Answer) -> Finding:
    """How far the coordinator's clock is from ours."""
    value = f"the coordinator's is {answer.offset_s:+.3f} s from ours (± {answer.doubt_s:.3f} s)"
    if abs(answer.offset_s) - answer.doubt_s > MAX_OFFSET_S:
        return Finding("clock", Level.WARN, f"{value}; certificates' dates go by it", SET_THE_CLOCK)
    return Finding("clock", Level.OK, value)


# ---- and back


class StubShard:
    """Answers like a server to the question whether it can be reached; refuses every other call."""

    def __init__(self) -> None:
        self.calls = 0

    async def stats(self, _: StatsRequest) -> StatsResponse:
        """See `ShardService`."""
        from paramserver.v1.shard_pb2 import StatsResponse

        self.calls += 1
        return StatsResponse(waiting_for="paramserver doctor")

    def __getattr__(self, _: str) -> Callable[..., NoReturn]:
        def refuse(*_: object) -> NoReturn:
            raise errors.ConfigError("this is paramserver doctor, no server: join the job to take part")

        return refuse


async def check_way_back(address: str, connect: Connect, serve: Serve, settings: Settings) -> Finding:
    """Whether the coordinator reaches this machine. A server on this machine needs this way."""
    from paramserver.transport.addresses import join
    from paramserver.v1.coordinator_pb2 import ProbeRequest

    stub = StubShard()
    try:
        host, port, advertised = await in_thread(lambda: server_place(settings))
        server = await _serve_somewhere(serve, stub, host, port)
    except errors.ParamServerError as error:
        return sentence("way back", Level.WARN, f"not tried: {error}")
    channel = connect(address)
    try:
        here = join(advertised.strip("[]"), server.port)
        response: Any = await channel.call("Coordinator.Probe", ProbeRequest(address=here), timeout=DIAL_BACK_S)
    finally:
        await channel.close()
        await server.stop()
    if response.reached and stub.calls:
        return Finding("way back", Level.OK, f"the coordinator reaches this machine at {here}")
    if response.reached:
        remedy = "give this machine's own address with --advertise-host: the present address belongs to another machine"
        return Finding("way back", Level.WARN, f"the coordinator called {here}, and another process answered", remedy)
    remedy = (
        "open this machine's ports to the coordinator and the workers, or set cluster.listen and "
        "cluster.advertise_host; a machine with workers only does not need it"
    )
    return Finding("way back", Level.WARN, f"the coordinator does not reach {here}: {clean(response.reason)}", remedy)


async def _serve_somewhere(serve: Serve, stub: StubShard, host: str, port: int) -> Listening:
    """Listen at this port, or at a free port if a server has it already."""
    try:
        return await serve([("Shard", stub)], host, port)
    except errors.ConfigError:
        if not port:
            raise
        return await serve([("Shard", stub)], host, 0)
