"""Clusters of containers with deadlines, each under a project name of its own, and all of it removed in the end."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[3]
NO_VARIABLES = Path(__file__).resolve().parent / "none.env"
IMAGE = "paramserver:test-compose"
# With a C compiler, so that the build needs no network; docker/base-images.sh sees to it that it is here.
BUILD_IMAGE = "python:3.11"
# Nothing here should take this long, on whatever machine; what does counts as hanging.
PATIENCE_S = 240.0
JOB_S = 1500.0
BUILD_S = 1800.0
DIGESTS = ("weights_sha256", "buffers_sha256", "optimizer_sha256")

T = TypeVar("T")


def until(what: str, found: Callable[[], T], deadline_s: float = PATIENCE_S) -> T:
    """Ask again and again until the answer counts as true; fails with `what` after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (answer := found()):
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.3)
    return answer


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Standard output and standard error together."""
        return self.out + self.err


def run(
    *command: str, check: bool = True, deadline_s: float = PATIENCE_S, environ: Mapping[str, str] | None = None
) -> Done:
    """Run a command to its end; by default it has to succeed."""
    process = subprocess.run(
        command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s
    )
    done = Done(process.returncode, process.stdout, process.stderr)
    assert done.code == 0 or not check, f"{shlex.join(command)}: exit code {done.code}\n{done.said}"
    return done


@cache
def compose_command() -> tuple[str, ...]:
    """docker-compose of whichever generation is here; $COMPOSE says which if both are."""
    if given := os.environ.get("COMPOSE"):
        return tuple(shlex.split(given))
    second = subprocess.run(["docker", "compose", "version"], capture_output=True)
    return ("docker-compose",) if second.returncode else ("docker", "compose")


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without settings, plus some variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PARAMSERVER_")}
    # Any free port of the host: clusters of several tests are there at the same time.
    return {**kept, "IMAGE": IMAGE, "BUILD_IMAGE": BUILD_IMAGE, "DASHBOARD_PORT": "0", **variables}


def run_here(script: str, directory: Path, **settings: str) -> dict[str, Any]:
    """The summary of `paramserver run` on this machine, with the settings that the compose file has."""
    summary = directory / "summary.json"
    environ = clean_environment(PARAMSERVER_TRAINING__SLICES_PER_STEP="4", **settings)
    name, *arguments = script.split()
    command = [sys.executable, "-m", "paramserver", "run", name, "--servers", "2", "--workers", "2"]
    run(*command, "--summary", str(summary), "--", *arguments, environ=environ, deadline_s=JOB_S)
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


class Container:
    """One container, found by its id."""

    def __init__(self, identity: str) -> None:
        self.id = identity

    def facts(self) -> dict[str, Any]:
        """What `docker inspect` says."""
        found: dict[str, Any] = json.loads(run("docker", "inspect", self.id).out)[0]
        return found

    @property
    def name(self) -> str:
        return str(self.facts()["Name"]).lstrip("/")

    @property
    def running(self) -> bool:
        return bool(self.facts()["State"]["Running"])

    @property
    def exit_code(self) -> int:
        return int(self.facts()["State"]["ExitCode"])

    @property
    def restarts(self) -> int:
        return int(self.facts()["RestartCount"])

    @property
    def health(self) -> str:
        """ "starting", "healthy" or "unhealthy"."""
        return str(self.facts()["State"]["Health"]["Status"])

    def logs(self) -> str:
        """All that it has said."""
        return run("docker", "logs", self.id).said

    def exec(self, *command: str, check: bool = True) -> Done:
        """Run a command inside."""
        return run("docker", "exec", self.id, *command, check=check)

    def crash(self) -> None:
        """Kill all processes inside at once, as when memory runs out; the restart policy applies."""
        self.exec("sh", "-c", "kill -9 -1", check=False)


class Cluster:
    """What docker-compose.yml makes, with some variables. A context manager: at its end nothing is left."""

    def __init__(self, **variables: str) -> None:
        self.project = f"paramserver-test-{secrets.token_hex(4)}"
        self.variables = variables

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.compose("logs", "--no-color", "--tail", "60", check=False).said)
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")
        for kind_of_thing in ("container", "volume", "network"):
            left = run("docker", kind_of_thing, "ls", "-q", "--filter", f"name={self.project}").out
            assert not left, f"a {kind_of_thing} is left: {left}"

    def compose(self, *arguments: str, check: bool = True, deadline_s: float = PATIENCE_S) -> Done:
        """docker-compose with this project."""
        command = (*compose_command(), "--project-name", self.project, "--env-file", str(NO_VARIABLES), *arguments)
        return run(*command, check=check, deadline_s=deadline_s, environ=clean_environment(**self.variables))

    def up(self, *arguments: str) -> None:
        """docker-compose up, in the background."""
        self.compose("up", "-d", *arguments)

    def containers(self, service: str | None = None) -> list[Container]:
        """The containers of a service, or all, the stopped ones included; the newest first."""
        labels = [f"label=com.docker.compose.project={self.project}"]
        if service:
            labels.append(f"label=com.docker.compose.service={service}")
        filters = [word for label in labels for word in ("--filter", label)]
        return [Container(line) for line in run("docker", "ps", "-aq", "--no-trunc", *filters).out.split()]

    def one(self, service: str) -> Container:
        """The first container of a service."""
        return self.containers(service)[-1]

    def admin(self, *arguments: str, check: bool = True) -> Done:
        """The paramserver command, in the coordinator's container."""
        return self.one("coordinator").exec("paramserver", *arguments, check=check)

    def status(self) -> dict[str, Any]:
        """What `paramserver status --json` says; empty while nobody answers."""
        if not self.containers("coordinator"):
            return {}
        done = self.admin("status", "--json", check=False)
        return json.loads(done.out) if done.code == 0 else {}

    def workers(self, state: str = "training") -> list[dict[str, Any]]:
        """Workers in a state, as `status` shows them."""
        processes = self.status().get("processes", [])
        return [one for one in processes if one["role"] == "worker" and one["state"] == state]

    def wait_for_version(self, version: int) -> None:
        """Until the weights have this version. The job must not have ended by then: nothing could happen to it."""

        def reached() -> bool:
            status = self.status()
            assert status.get("state") != "done", "the job is over before the test has begun: it needs more epochs"
            assert status.get("state") != "failed", status
            versions = [one["version"] for one in status.get("processes", []) if one["role"] == "server"]
            return bool(versions) and min(versions) >= version

        until(f"version {version}", reached)

    def result(self, state: str = "done") -> dict[str, Any]:
        """Wait until the job is done, or in another final state, and give its summary."""

        def ended() -> bool:
            status = self.status()
            assert status.get("state") != "failed", status
            return status.get("state") == state

        until(f"the job is {state}", ended, JOB_S)
        summary: dict[str, Any] = json.loads(self.one("coordinator").exec("cat", "/data/summary.json").out)
        return summary


def digests(summary: Mapping[str, Any]) -> dict[str, str]:
    """What has to be equal, bit by bit."""
    return {key: summary[key] for key in DIGESTS}
