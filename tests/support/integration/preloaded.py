"""Scripts run as workers of a launcher without a cluster: started by themselves, and forked of a preloaded process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paramserver.config import ENV_PREFIX
from paramserver.launcher.spawn import ROLES
from paramserver.preload.starter import Preloading
from paramserver.preload.title import ROOM
from paramserver.processes.lines import NamedLines, OnceHeard, Output
from paramserver.processes.process import Child, Guard
from paramserver.processes.starting import Executing, Starter, python

LIMIT_S = 100.0


@dataclass
class Ended:
    """A process that has ended: its exit code, its lines, and whether it was forked."""

    code: int = 0
    lines: list[str] = field(default_factory=list)


class Nursery:
    """Starts scripts as a launcher does. ``said``: its lines for people."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.environment = {**environment, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self.said: list[str] = []
        self.preloads: list[Child] = []
        self._directory = directory
        self._guard = Guard()
        loader = [*python("paramserver.roles.preloaded"), str(directory / "any.py"), ROOM]
        self.forking = Preloading(ROLES, loader, self._preload, ENV_PREFIX, self.said.append)

    async def __aenter__(self) -> Nursery:
        await self.forking.prepare(self.environment)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.forking.close()
        self._guard.close()

    def _preload(self) -> Child:
        def output(name: str) -> Output:
            return NamedLines(name, lambda name, text: self.said.append(text))

        self.preloads.append(Child("preload", self._guard, lambda name: OnceHeard(lambda: output(name))))
        return self.preloads[-1]

    async def begin(self, starter: Starter, text: str, *args: str, light: bool = False) -> tuple[Child, list[str]]:
        """A process that runs this script, and the lines that it writes."""
        script = self._directory / f"script-{abs(hash(text))}.py"
        script.write_text(text)
        lines: list[str] = []
        child = Child(
            "worker-0", self._guard, lambda name: NamedLines(name, lambda _, line: lines.append(line)), starter
        )
        environment = {**self.environment, "PARAMSERVER_CONFIG": ""}
        await child.start([*ROLES, "worker", str(script), *args], environment, light=light)
        return child, lines

    async def run(self, starter: Starter, text: str, *args: str, light: bool = False) -> Ended:
        """Run the script to its end."""
        child, lines = await self.begin(starter, text, *args, light=light)
        return Ended(await self.end(child), lines)

    async def end(self, child: Child) -> int:
        """The exit code."""
        assert child.exited is not None
        async with asyncio.timeout(LIMIT_S):
            return await child.exited

    async def both(self, text: str, *args: str) -> tuple[Ended, Ended]:
        """Forked, and by itself."""
        return await self.run(self.forking, text, *args), await self.run(Executing(), text, *args)
