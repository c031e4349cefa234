"""``paramserver top``: a running job on the whole terminal, with keys."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.live import Live

from paramserver.cli.look.screen import Screen
from paramserver.cli.target import NEAR, Where, find_target
from paramserver.config import split_addresses
from paramserver.errors import ConfigError, RetryableError, UnavailableError
from paramserver.transport.rotating import coordinator_channel

if TYPE_CHECKING:
    from paramserver.transport.base import Channel
    from paramserver.v1.coordinator_pb2 import StatusResponse

_EVERY_S = 1.0
_ANSWER_S = 2.0


def top(*, where: Where = NEAR) -> int:
    """Show a running job on the whole terminal: processes, curves, what is left, and events.

    Waits for a job if there is none, and goes on when another coordinator takes the job over. Keys: q quits, p pauses
    and goes on, s sorts the processes by name, state or samples.
    """
    if not sys.stdout.isatty():
        raise ConfigError("this view needs a terminal; without one use: paramserver status (for programs: --json)")
    return asyncio.run(_show(where))


class Source:
    """Asks for the status of the job that the flags name; looks for the job anew after a failure."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._channel: Channel | None = None

    async def ask(self) -> StatusResponse:
        """The status. Raises RetryableError if no coordinator that leads a job answers."""
        from paramserver.transport.grpc import connector
        from paramserver.v1.coordinator_pb2 import StatusRequest

        if self._channel is None:
            target = find_target(self._where)
            connect = connector(target.security, "coordinator")
            self._channel = coordinator_channel(split_addresses(target.addresses), connect)
        try:
            reply = await self._channel.call("Coordinator.Status", StatusRequest(), timeout=_ANSWER_S)
        except RetryableError:
            await self.close()
            raise
        status = cast("StatusResponse", reply)
        if not status.term:
            raise UnavailableError("the coordinators that answer stand by, and none leads the job")
        return status

    async def close(self) -> None:
        """Give the connection up."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


async def _show(where: Where) -> int:
    screen, source, console = Screen(), Source(where), Console()
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, end, 128 + number)
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw() -> None:
            live.update(screen.draw(console.height), refresh=True)

        def press(keys: str) -> None:
            if not all(screen.press(key) for key in keys):
                end(0)
            draw()

        with _keys(press):
            asking = asyncio.create_task(_ask(source, screen, draw))
            try:
                waiting: set[asyncio.Future[Any]] = {asking, ended}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    asking.result()
                return ended.result()
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await source.close()


async def _ask(source: Source, screen: Screen, draw: Callable[[], None]) -> None:
    """Ask every second. Raises the errors that do not pass by themselves, such as a wrong token."""
    while True:
        try:
            status = await source.ask()
        except RetryableError as error:
            screen.unheard(str(error), time.strftime("%H:%M:%S"))
        else:
            screen.heard(status, time.strftime("%H:%M:%S"))
        draw()
        await asyncio.sleep(_EVERY_S)


@contextlib.contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Have ``press`` called with the keys that the user types. Does nothing if standard input is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def read() -> None:
        data = os.read(fd, 64)
        if data:
            press(data.decode(errors="ignore"))
        else:
            loop.remove_reader(fd)  # the terminal is gone

    try:
        tty.setcbreak(fd)
        loop.add_reader(fd, read)
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
