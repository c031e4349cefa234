"""``ctx.load`` while shards have backups and a server dies: all of it or nothing, and the same bits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paramserver.server.rpc.setup import Setup
from tests.support.cluster.harness import train
from tests.support.cluster.processes import Killed, running_process
from tests.support.failover.loading import saved, script_loading
from tests.support.failover.rollback import Rig, Strike, same
from tests.support.marks import long_but

STRIKES = {
    "in the step before it": Strike("commit.before_log", "server-1", 1),
    "with the checkpoint before it": Strike("ckpt.mid_write", "server-1", 2),
    "with the checkpoint of what was loaded": Strike("ckpt.mid_write", "server-1", 2, nth=2),
    "in the step after it": Strike("commit.before_log", "server-1", 2),
}
# A server is killed when it gets this command or these bytes, or has taken them in.
COMMANDS = {
    "told to begin": ("_configure_to_load", True),
    "has begun": ("_configure_to_load", False),
    "gets what is loaded": ("initialize", True),
    "has what is loaded": ("initialize", False),
    "publishes it": ("activate", True),
    "has published it": ("activate", False),
}


async def others_have_begun(rig: Rig) -> None:
    """Return when all shards but those of server-1 are on the timeline of the load."""
    others = [keeper for keeper in rig.keepers if keeper.address != "server-1"]
    hosts = [service.host for keeper in others for service in keeper.service.shards.values()]
    async with asyncio.timeout(10.0):
        while any(host.shard is None or (host.shard.kept is None and not host.shard.state.backup) for host in hosts):
            await asyncio.sleep(0.01)


def trained(rig: Rig) -> None:
    script = script_loading(1, **saved())
    rig.begin(script)
    summary = rig.finish()
    same(summary, train(script, 1, 1, slices_per_step=4).summary)


@pytest.mark.parametrize("when", STRIKES)
def test_a_server_dies(when: str, tmp_path: Path) -> None:
    with Rig(tmp_path, 2, [STRIKES[when]], workers=2, servers=2, cluster__replicas=1) as rig:
        trained(rig)


@pytest.mark.parametrize("when", long_but({"told to begin", "has what is loaded", "has published it"}, COMMANDS))
def test_a_server_dies_while_all_servers_change_to_what_is_loaded(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, before = COMMANDS[when]
    method, struck = getattr(Setup, name), list[str]()

    async def strike(self: Setup, argument: Any) -> Any:
        mine = running_process()
        loads = name == "_configure_to_load" or (self._host.shard is not None and self._host.shard.kept is not None)
        due = loads and not struck and mine is not None and mine.name == "server-1"
        made = None if due and before else await method(self, argument)
        if due:
            struck.append(when)
            if name == "_configure_to_load":
                await others_have_begun(rig)
            rig._at_once(lambda: rig.strike("server-1"))
            raise Killed
        return made

    monkeypatch.setattr(Setup, name, strike)
    with Rig(tmp_path, 2, [], workers=2, servers=2, cluster__replicas=1) as rig:
        trained(rig)
    assert struck
