"""The report of a job that a coordinator leads without a launcher, and the settings that reports show."""

from __future__ import annotations

from paramserver.config import Settings
from paramserver.roles.dashboard import settings_of
from paramserver.v1 import coordinator_pb2


def in_force(settings: Settings) -> list[coordinator_pb2.SettingInForce]:
    """All settings in force without their secrets, and where each came from."""
    return [
        coordinator_pb2.SettingInForce(key=one.key, value=one.value, origin=one.origin) for one in settings_of(settings)
    ]
