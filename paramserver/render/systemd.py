"""systemd: one unit per role, the coordinator's configuration file, and the other machines' environment file."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence

from paramserver.errors import ConfigError
from paramserver.render.request import CERTS, ETC, HOPELESS, STATE, STOP_S, STORE_PASSWORD, Files, Request
from paramserver.render.storage import Checkpoints, checkpoints_of
from paramserver.render.text import comment, environment_file, toml_text, unit_words

# A unit's settings: (name, value); a section is (name, settings).
_Lines = Sequence[tuple[str, object]]
_Section = tuple[str, _Lines]

_CONFIG = f"{ETC}/cluster.toml"
_MEMBER = f"{ETC}/member.env"
# With the keys of the storage behind a URL. systemd reads it as root.
_STORAGE_KEYS = f"{ETC}/storage.env"
# Shared by all units, so that `paramserver health` finds all processes of the machine in one place.
_STATE_HOME = posixpath.dirname(STATE)
_RUNTIME = "paramserver"

_HARDENING: _Lines = [
    ("NoNewPrivileges", "yes"),
    ("CapabilityBoundingSet", ""),
    ("LockPersonality", "yes"),
    ("PrivateTmp", "yes"),
    ("ProtectControlGroups", "yes"),
    ("ProtectHome", "read-only"),
    ("ProtectHostname", "yes"),
    ("ProtectKernelLogs", "yes"),
    ("ProtectKernelModules", "yes"),
    ("ProtectKernelTunables", "yes"),
    ("ProtectSystem", "strict"),
    ("RestrictAddressFamilies", "AF_INET AF_INET6 AF_UNIX AF_NETLINK"),
    ("RestrictNamespaces", "yes"),
    ("RestrictRealtime", "yes"),
    ("RestrictSUIDSGID", "yes"),
    ("SystemCallArchitectures", "native"),
    ("UMask", "0077"),
]
# Not for workers: these settings shut out GPUs, and a script may need more than a server.
_MORE_HARDENING: _Lines = [
    ("PrivateDevices", "yes"),
    ("ProtectClock", "yes"),
    ("ProtectProc", "invisible"),
    ("SystemCallErrorNumber", "EPERM"),
    ("SystemCallFilter", "@system-service"),
]


def render(request: Request) -> Files:
    """Units and their files, by file name. Raises ConfigError if the others would not find the coordinator."""
    settings = request.settings
    if not settings.cluster.coordinator:
        raise ConfigError(
            "cluster.coordinator is empty, but the other machines need to know it; write host:port into the file, or "
            "give it with --set"
        )
    binary = f"{request.prefix}/bin/paramserver"
    checkpoints = checkpoints_of(settings, STATE, f"checkpoints/{request.job}")
    security = request.security_values(CERTS)
    # Not where the machine's own name leads: on Debian that is the loopback interface.
    listen = {"cluster.listen": settings.cluster.listen or "0.0.0.0"}
    password = {"cluster.store_password_file": STORE_PASSWORD} if settings.cluster.store_password_file else {}
    numbers = "The numbers only tell instances apart. The coordinator gives names and ranks."
    gpu_numbers = "The numbers are the numbers of the GPUs to compute on. The coordinator gives names and ranks."
    two = "0 paramserver-worker@1" if request.gpu else "1 paramserver-worker@2"
    return {
        "cluster.toml": toml_text(
            f"{_CONFIG} on the coordinator's machine. Other machines get their settings from the coordinator.",
            request.coordinator_values({**listen, **security, **password, "checkpoint.dir": checkpoints.dir}),
        ),
        "member.env": environment_file(
            f"{_MEMBER} on the machines of servers and workers.\n"
            "A machine that others reach under a name of its own adds PARAMSERVER_CLUSTER__ADVERTISE_HOST.",
            request.member_values(security),
        ),
        "paramserver-coordinator.service": _unit(
            "coordinator",
            request,
            [binary, "start", "coordinator", "--config", _CONFIG, "--continue"],
            [*_may_write(_result_directories(request) | _outside(checkpoints)), *_keys(checkpoints)],
            _MORE_HARDENING,
            _about_coordinator(settings.cluster.store),
            checkpoints,
        ),
        "paramserver-server@.service": _unit(
            "server",
            request,
            [binary, "start", "server"],
            [("EnvironmentFile", _MEMBER), *_may_write(_outside(checkpoints)), *_keys(checkpoints)],
            _MORE_HARDENING,
            f"One server: systemctl enable --now paramserver-server@1\n{numbers}",
            checkpoints,
        ),
        "paramserver-worker@.service": _unit(
            "worker",
            request,
            [binary, *_worker_words(request)],
            [("EnvironmentFile", _MEMBER), *([("Environment", "CUDA_VISIBLE_DEVICES=%i")] if request.gpu else [])],
            [],
            f"Two workers: systemctl enable --now paramserver-worker@{two}\n{gpu_numbers if request.gpu else numbers}",
        ),
    }


def _about_coordinator(store: str) -> str:
    where = f"\nIts store lies in {STATE}: a coordinator on another machine could not go on." if store == "auto" else ""
    return f"It exits with 0 when the job is done. After a crash it goes on with its job (--continue).{where}"


def _worker_words(request: Request) -> list[str]:
    """A script with a relative path lies in the prefix."""
    words = request.worker_words
    script = words.index("--") + 1
    return [*words[:script], posixpath.join(request.prefix, words[script]), *words[script + 1 :]]


def _needs(request: Request, role: str) -> str:
    """The files that the machine needs, in words."""
    files = [_CONFIG if role == "coordinator" else _MEMBER]
    if not request.insecure:
        files.append(f"{CERTS} with the certificate of a {role}")
    if role == "coordinator" and request.settings.cluster.store_password_file:
        files.append(STORE_PASSWORD)
    return (
        f"Needs paramserver in the virtual environment {request.prefix}; the user it runs as:\n"
        f"  useradd --system --home-dir {STATE} --shell /usr/sbin/nologin paramserver\n"
        f"and, readable by that user, {', '.join(files)}."
    )


def _about_checkpoints(checkpoints: Checkpoints, replicated: bool) -> str:
    if checkpoints.by_url:
        return f"{_STORAGE_KEYS} has the keys of {checkpoints.dir}, one NAME=value a line. Only root needs to read it."
    if not checkpoints.on_disk:
        dies = "the death of all servers that hold a shard" if replicated else "the death of a server"
        return f"There are no checkpoints: {dies} ends the job."
    return (
        f"Checkpoints lie in {checkpoints.dir}. If there are servers on other machines than the\n"
        f"coordinator's, {checkpoints.parent} has to be one network file system on all of them, and\n"
        "the user needs the same number everywhere (useradd --uid). A server that does not see it is refused.\n"
        f"  install -d -o paramserver -g paramserver -m 700 {checkpoints.parent}"
    )


def _after_mounts(checkpoints: Checkpoints | None) -> _Lines:
    """A unit waits for the file system of the checkpoints, where the machine knows it."""
    if checkpoints is None or not checkpoints.on_disk:
        return []
    return [("RequiresMountsFor", unit_words([checkpoints.dir]))]


def _keys(checkpoints: Checkpoints) -> _Lines:
    """The keys of a storage; no file is needed where the machine has a role."""
    return [("EnvironmentFile", f"-{_STORAGE_KEYS}")] if checkpoints.by_url else []


def _outside(checkpoints: Checkpoints) -> set[str]:
    """The directory of checkpoints that a unit could not write to otherwise."""
    inside = not checkpoints.on_disk or f"{checkpoints.parent}/".startswith(f"{STATE}/")
    return set() if inside else {checkpoints.parent}


def _may_write(directories: set[str]) -> _Lines:
    return [("ReadWritePaths", " ".join(unit_words([path]) for path in sorted(directories)))] if directories else []


def _result_directories(request: Request) -> set[str]:
    """Directories of results that the unit could not write to otherwise."""
    run = request.settings.run
    paths = [run.summary, run.report, run.save, run.records]
    if request.settings.cluster.state_dir:
        paths.append(f"{request.settings.cluster.state_dir}/")
    return {posixpath.dirname(path) for path in paths if path.startswith("/") and not path.startswith(f"{STATE}/")}


def _unit(
    role: str,
    request: Request,
    command: Sequence[str],
    more: _Lines,
    hardening: _Lines,
    about: str,
    checkpoints: Checkpoints | None = None,
) -> str:
    service: _Lines = [
        ("Type", "exec"),
        ("User", "paramserver"),
        ("Group", "paramserver"),
        ("StateDirectory", posixpath.basename(STATE)),
        ("StateDirectoryMode", "0700"),
        ("WorkingDirectory", STATE),
        ("RuntimeDirectory", _RUNTIME),
        ("RuntimeDirectoryMode", "0700"),
        ("RuntimeDirectoryPreserve", "yes"),
        (
            "Environment",
            f"XDG_RUNTIME_DIR=/run/{_RUNTIME} XDG_STATE_HOME={_STATE_HOME} PYTHONUNBUFFERED=1",
        ),
        *more,
        ("ExecStart", unit_words(command)),
        ("Restart", "on-failure"),
        ("RestartSec", 5),
        # A server whose job has begun anew ends with 2, to be started again.
        ("RestartPreventExitStatus", " ".join(str(code) for code in HOPELESS if (role, code) != ("server", 2))),
        ("SuccessExitStatus", "130 143"),
        ("KillSignal", "SIGTERM"),
        ("KillMode", "mixed"),
        ("TimeoutStopSec", STOP_S),
        ("LimitNOFILE", 65536),
        ("LimitCORE", 0),
    ]
    sections: list[_Section] = [
        (
            "Unit",
            [
                ("Description", _describe(role, request.settings.cluster.job)),
                ("Wants", "network-online.target"),
                ("After", "network-online.target"),
                *_after_mounts(checkpoints),
                ("StartLimitIntervalSec", 600),
                ("StartLimitBurst", 10),
            ],
        ),
        ("Service", [*service, *_HARDENING, *hardening]),
        ("Install", [("WantedBy", "multi-user.target")]),
    ]
    places = [] if checkpoints is None else [_about_checkpoints(checkpoints, request.replicated)]
    return comment("\n".join([about, _needs(request, role), *places])) + "\n".join(_sections(sections))


def _describe(role: str, job: str) -> str:
    return f"paramserver {role}{'' if role == 'coordinator' else ' %i'}{f' of the job {job}' if job else ''}"


def _sections(sections: Iterable[_Section]) -> Iterable[str]:
    for name, lines in sections:
        yield f"\n[{name}]"
        yield from (f"{key}={value}" for key, value in lines)
    yield ""
