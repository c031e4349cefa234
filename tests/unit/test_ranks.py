"""What `paramserver run --ddp` refuses."""

from __future__ import annotations

import pytest

from paramserver.config import load_settings
from paramserver.errors import ConfigError
from paramserver.launcher.ranks import refuse_with_ddp


def test_settings_of_models_on_servers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMSERVER_CONSISTENCY__MODE", "async")
    with pytest.raises(ConfigError) as caught:
        refuse_with_ddp(load_settings(None, {"run.save": "x.safetensors"}))
    assert "these do nothing: consistency.mode (env PARAMSERVER_CONSISTENCY__MODE), run.save (flag)" in str(
        caught.value
    )


def test_settings_of_processes_are_not() -> None:
    refuse_with_ddp(load_settings(None, {"cluster.workers": "4", "cluster.max_restarts": "0", "run.ddp": "true"}))
