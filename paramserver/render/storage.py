"""The place of the checkpoints in rendered files: a path below a directory of the target's own, a URL, or none."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from paramserver.config import NO_CHECKPOINTS, Settings, hide_password
from paramserver.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The place of the checkpoints. ``dir``: the value of checkpoint.dir in the rendered files, never empty."""

    dir: str

    @property
    def on_disk(self) -> bool:
        """Whether this is a directory, which the coordinator and all servers must see under the same path."""
        return not (self.by_url or self.dir == NO_CHECKPOINTS)

    @property
    def by_url(self) -> bool:
        """Whether this is a URL, for which the coordinator and all servers need keys."""
        return "://" in self.dir

    @property
    def parent(self) -> str:
        """The directory that has to be mounted: checkpoints that are set aside are moved to a place beside ``dir``."""
        return posixpath.dirname(self.dir)


def checkpoints_of(settings: Settings, root: str, default: str) -> Checkpoints:
    """The place that checkpoint.dir names; ``default`` if it is empty. Relative paths begin at ``root``.

    Raises ConfigError for a place that several processes cannot share, and for a URL with a password.
    """
    wanted = settings.checkpoint.dir.removeprefix("file://")
    if hide_password(wanted) != wanted:
        raise ConfigError(
            f'checkpoint.dir is "{hide_password(wanted)}" and holds a key, which would end up in the files; leave it '
            "out: the keys of a storage have a place of their own (docs/deploy.md)"
        )
    if wanted.startswith("memory://"):
        raise ConfigError(f'checkpoint.dir is "{wanted}", the memory of one process; name a directory or another URL')
    if wanted == NO_CHECKPOINTS or "://" in wanted:
        return Checkpoints(wanted)
    if wanted.startswith("~"):
        raise ConfigError(
            f'checkpoint.dir is "{wanted}", but "~" is another directory for each user; give a whole path'
        )
    path = posixpath.normpath(posixpath.join(root, wanted or default))
    if posixpath.dirname(path) == "/":
        raise ConfigError(f'checkpoint.dir is "{wanted}", but must be below another directory, such as /shared/run')
    return Checkpoints(path)
