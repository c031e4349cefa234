"""A small disk of a command's own, which a test fills, makes read-only, or takes a directory away from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.integration.harness import Place, Running, until

_FILL = "while [ -e {disk}/filling ]; do head -c 1M /dev/zero >> {disk}/fill 2>/dev/null || true; sleep 0.02; done"
# What happens to the disk, and how it is as before: commands of a shell, which are tried again until they succeed.
FAULTS = {
    "full": ("touch {disk}/filling; (" + _FILL + ") >/dev/null 2>&1 &", "rm -f {disk}/filling {disk}/fill"),
    "read-only": ("mount -o remount,ro {disk}", "mount -o remount,rw {disk}"),
    "renamed": ("mv {disk}/ckpt {disk}/away", "mv {disk}/away {disk}/ckpt"),
    "deleted": ("rm -rf {disk}/ckpt", "mkdir -p {disk}/ckpt"),
}


class Disk:
    """A disk of 16 MB in a mount namespace of the command that :meth:`launch` starts. ``ckpt``: a directory on it."""

    def __init__(self, place: Place) -> None:
        self._place, self._disk = place, place.work / "disk"
        self._disk.mkdir()
        self._running: Running | None = None

    @property
    def ckpt(self) -> Path:
        """The directory for checkpoints."""
        return self._disk / "ckpt"

    def launch(self, *tokens: str | Path, environ: dict[str, str] | None = None) -> Running:
        """Start a command of paramserver that sees the disk."""
        words = " ".join(f"'{word}'" for word in (sys.executable, "-m", "paramserver", *tokens))
        line = f"mount -t tmpfs -o size=16m none {self._disk} && mkdir {self.ckpt} && exec {words}"
        argv = ("unshare", "--map-root-user", "--mount", "sh", "-c", line)
        self._running = self._place.start(*argv, environ=environ)
        return self._running

    def also(self, *tokens: str | Path, environ: dict[str, str] | None = None) -> Running:
        """Start another command of paramserver that sees the same disk."""
        return self._place.start(*self._inside(sys.executable, "-m", "paramserver", *map(str, tokens)), environ=environ)

    def fail(self, fault: str) -> None:
        """Let the disk have one of the `FAULTS`."""
        self._shell(FAULTS[fault][0])

    def mend(self, fault: str) -> None:
        """Take the fault away."""
        self._shell(FAULTS[fault][1])

    def _shell(self, line: str) -> None:
        argv = self._inside("sh", "-c", line.format(disk=self._disk))
        devnull = subprocess.DEVNULL
        until(line, lambda: subprocess.run(argv, stdout=devnull, stderr=devnull).returncode == 0, 10.0)

    def _inside(self, *words: str) -> list[str]:
        assert self._running is not None, "the disk is there when a command was launched"
        return ["nsenter", "--user", "--preserve-credentials", "--mount", "--target", str(self._running.pid), *words]
