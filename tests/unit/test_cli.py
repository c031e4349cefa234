"""The command line: what reaches the launcher, one line per mistake, and the shape of `status --json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import paramserver.launcher
from paramserver.cli.common import guard, merge_overrides, parse_assignments
from paramserver.cli.look.facts import describe, headline, render
from paramserver.cli.look.operate import wished
from paramserver.cli.look.set import make_request
from paramserver.cli.main import main, split_script_arguments
from paramserver.config import Settings, load_settings
from paramserver.errors import ConfigError, DeadlineError, UnavailableError, VersionMismatchError
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2

Launch = tuple[Settings, Path, list[str]]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARAMSERVER_INTERNAL_RUNTIME_DIR", str(tmp_path / "runtime"))
    Path("train.py").write_text("")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What was launched, instead of launching it; every run "ends" with exit code 7."""
    calls: list[Launch] = []

    def launch(settings: Settings, script: Path, script_args: list[str], fresh: bool) -> int:
        assert not fresh
        calls.append((settings, script, script_args))
        return 7

    module = ModuleType("paramserver.launcher.launcher")
    module.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paramserver.launcher.launcher", module)
    monkeypatch.setattr(paramserver.launcher, "launcher", module, raising=False)
    return calls


def test_run_hands_settings_script_and_arguments_to_the_launcher(launches: list[Launch]) -> None:
    tokens = "run train.py --servers 3 --workers=4 --mode async --staleness unbounded --seed 9 --nonfinite fail "
    tokens += "--slices-per-step 8 --store redis://h/0 --job j --summary s.json --save w.safetensors "
    tokens += "--threads-per-worker 2 --set cluster.lease_s=2.5 --set log.level=debug -- --epochs 2 -- x"
    assert main(tokens.split()) == 7
    expected = {
        "cluster.servers": 3,
        "cluster.workers": 4,
        "cluster.store": "redis://h/0",
        "cluster.job": "j",
        "cluster.lease_s": 2.5,
        "consistency.mode": "async",
        "consistency.staleness": "unbounded",
        "training.seed": 9,
        "training.nonfinite": "fail",
        "training.slices_per_step": 8,
        "training.threads_per_worker": 2,
        "run.script": "train.py",
        "run.args": ("--epochs", "2", "--", "x"),
        "run.summary": "s.json",
        "run.save": "w.safetensors",
        "log.level": "debug",
    }
    ((settings, script, script_args),) = launches
    assert settings == load_settings(overrides=expected, environ={})
    assert script == Path("train.py")
    assert script_args == ["--epochs", "2", "--", "x"]


def test_run_takes_script_and_arguments_from_a_file(launches: list[Launch]) -> None:
    Path("job.toml").write_text('[run]\nscript = "train.py"\nargs = ["--epochs", "5"]\n[cluster]\nworkers = 3\n')
    assert main(["run", "--config", "job.toml", "--workers", "2"]) == 7
    assert main(["run", "--config", "job.toml", "--", "--epochs", "1"]) == 7
    assert main(["run", "--config", "job.toml", "--"]) == 7
    assert [(str(script), script_args) for _, script, script_args in launches] == [
        ("train.py", ["--epochs", "5"]),
        ("train.py", ["--epochs", "1"]),
        ("train.py", []),
    ]
    assert [settings.cluster.workers for settings, _, _ in launches] == [2, 3, 3]


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ("run", "no script is given"),
        ("run absent.py", 'script "absent.py" does not exist'),
        ("run .", 'script "." is a directory'),
        ("run train.py --mode bsp", 'consistency.mode is "bsp" (flag), but must be "sync" or "async"'),
        ("run train.py --staleness -1", "consistency.staleness"),
        ("run train.py --workers 0", "cluster.workers"),
        ("run train.py --workers two", "cluster.workers"),
        ("run train.py --epochs 2", 'arguments of the script go after "--"'),
        ("run train.py other.py", 'arguments of the script go after "--"'),
        ("run train.py --config absent.toml", '"absent.toml" does not exist'),
        ("run train.py --set consistency.mod=async", 'did you mean "consistency.mode"?'),
        ("run train.py --set workers", '"workers" is not an assignment'),
        ("run train.py --set log.level=info --set log.level=debug", "log.level is set twice"),
        ("run train.py --mode sync --set consistency.mode=async", "by a flag and by --set"),
        ("rnu train.py", "rnu"),
        ("config validate absent.toml", '"absent.toml" does not exist'),
        ("set", "nothing to set"),
        ("set training.seed=1", "training.seed cannot change while a job runs"),
        ("set consistency.mode=bsp", "consistency.mode"),
        ("set --staleness -1", "consistency.staleness"),
        ("status --coordinator nowhere", 'must be "host:port"'),
        ("status --coordinator h:1 --job x", "give one of them"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    tokens: str, says: str, launches: list[Launch], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tokens.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("paramserver: error: ")
    assert err.count("\n") == 1
    assert says in err
    assert launches == []


@pytest.mark.parametrize("command", ["status", "set consistency.mode=async"])
def test_no_running_job_is_exit_code_3(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 3
    assert "no job runs on this machine" in capsys.readouterr().err


def raiser(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (UnavailableError("x"), 3),
        (VersionMismatchError("x"), 4),
        (DeadlineError("x"), 6),
    ],
)
def test_errors_raised_on_purpose_have_an_exit_code_and_no_traceback(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guard(raiser(error)) == code
    assert capsys.readouterr().err == "paramserver: error: x\n"


def test_interruption_is_130_and_a_bug_keeps_its_traceback() -> None:
    assert guard(raiser(KeyboardInterrupt())) == 130
    with pytest.raises(ZeroDivisionError):
        guard(raiser(ZeroDivisionError()))


@pytest.mark.parametrize(
    ("tokens", "own", "rest"),
    [
        ("run a.py -- --x", "run a.py", "--x"),
        ("run a.py -- --x -- y", "run a.py", "--x -- y"),
        ("run a.py --", "run a.py", ""),
        ("run a.py", "run a.py", None),
        ("config -- x", "config -- x", None),
        ("", "", None),
    ],
)
def test_the_first_double_dash_of_run_splits(tokens: str, own: str, rest: str | None) -> None:
    assert split_script_arguments(tokens.split()) == (own.split(), None if rest is None else rest.split())


def test_assignments_and_flags_merge() -> None:
    assert parse_assignments(["a.b=c=d", "x.y="]) == {"a.b": "c=d", "x.y": ""}
    assert merge_overrides({"a.b": 1, "c.d": None}, {"e.f": "2"}) == {"a.b": 1, "e.f": "2"}


def test_config_show_is_toml_that_loads_and_hides_the_password(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--set", "cluster.store=redis://:secret@h/0", "--set", "training.seed=3"]) == 0
    out = capsys.readouterr().out
    assert "secret" not in out
    Path("shown.toml").write_text(out)
    assert load_settings(Path("shown.toml"), environ={}).training.seed == 3
    assert main(["config", "validate", "shown.toml"]) == 0


def test_config_show_says_where_values_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("paramserver.toml").write_text("[training]\nseed = 1\n")
    monkeypatch.setenv("PARAMSERVER_LOG__LEVEL", "debug")
    assert main(["config", "show", "--origin"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "seed = 1 # file paramserver.toml" in lines
    assert 'level = "debug" # env PARAMSERVER_LOG__LEVEL' in lines
    assert "workers = 2 # default" in lines
    assert main(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["training.seed"] == {"value": 1, "origin": "file paramserver.toml"}


def test_config_schema_describes_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {
        *("security", "cluster", "consistency", "training", "run", "log", "checkpoint", "web")
    }
    assert schema["additionalProperties"] is False


def response(mode: types_pb2.Mode, staleness: int | None) -> coordinator_pb2.StatusResponse:
    consistency = types_pb2.Consistency(revision=1, mode=mode)
    if staleness is not None:
        consistency.staleness = staleness
    return coordinator_pb2.StatusResponse(
        job="digits",
        state="training",
        view=types_pb2.View(
            generation=4, timeline=1, state=types_pb2.JOB_STATE_RUNNING, consistency=consistency, slices_per_step=2
        ),
        processes=[
            coordinator_pb2.ProcessStatus(
                role="server",
                name="server-0",
                pid=11,
                address="127.0.0.1:5",
                state="training",
                version=9,
                server=shard_pb2.StatsResponse(applied=18, duplicate=1, bytes_pushed=4096),
            ),
            coordinator_pb2.ProcessStatus(
                role="worker", name="worker-0", pid=12, state="training", version=9, clock=18, metrics={"loss": 0.5}
            ),
        ],
        lost=["worker-1"],
        uptime_s=2.5,
    )


def test_status_in_plain_values() -> None:
    facts = describe(response(types_pb2.MODE_ASYNC, 4))
    assert json.loads(json.dumps(facts)) == facts
    assert {key: facts[key] for key in ("job", "state", "mode", "staleness", "generation", "timeline", "lost")} == {
        "job": "digits",
        "state": "training",
        "mode": "async",
        "staleness": 4,
        "generation": 4,
        "timeline": 1,
        "lost": ["worker-1"],
    }
    server, worker = facts["processes"]
    assert server["server"]["applied"] == 18
    assert "server" not in worker
    assert {key: worker[key] for key in ("role", "name", "pid", "address", "state", "version", "clock", "metrics")} == {
        "role": "worker",
        "name": "worker-0",
        "pid": 12,
        "address": "",
        "state": "training",
        "version": 9,
        "clock": 18,
        "metrics": {"loss": 0.5},
    }


@pytest.mark.parametrize(
    ("mode", "staleness", "expected"),
    [
        (types_pb2.MODE_SYNC, None, ("sync", None)),
        (types_pb2.MODE_SYNC, 3, ("sync", None)),
        (types_pb2.MODE_ASYNC, None, ("async", "unbounded")),
        (types_pb2.MODE_ASYNC, 0, ("async", 0)),
        (types_pb2.MODE_UNSPECIFIED, None, (None, None)),
    ],
)
def test_mode_and_staleness_in_status(
    mode: types_pb2.Mode, staleness: int | None, expected: tuple[str | None, int | str | None]
) -> None:
    facts = describe(response(mode, staleness))
    assert (facts["mode"], facts["staleness"]) == expected


def test_status_as_a_table() -> None:
    from rich.console import Console

    console = Console(width=140, record=True, file=None, quiet=True)
    facts = describe(response(types_pb2.MODE_ASYNC, None))
    with console.capture() as capture:
        console.quiet = False
        console.print(render(facts))
    text = capture.get()
    assert headline(facts) == "digits: training · async, staleness unbounded · generation 4"
    assert headline(facts) in text
    assert "worker-0" in text
    assert "lost: worker-1" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["server", "server-0", "11", "127.0.0.1:5", "training", "9"] in rows, "a server is in no epoch"
    assert ["worker", "worker-0", "12", "training", "0", "9", "18", "0"] in rows


def test_status_says_why_memory_is_not_shared() -> None:
    from rich.console import Console

    status = coordinator_pb2.StatusResponse(job="digits")
    status.processes.add(role="server", name="server-0")
    elsewhere = "server-0, server-1: it is on another host"
    for number in range(9):
        near = number < 2
        transport, reason = ("shm", "") if near else ("bulk", elsewhere)
        tier = "pulls weights for 2 other workers of its host" if number == 8 else ""
        status.processes.add(
            role="worker", name=f"worker-{number}", transport=transport, transport_reason=reason, host_tier=tier
        )
    status.processes.add(role="worker", name="worker-9", transport="shm", gone=True)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(render(describe(status)))
    assert [line.rstrip() for line in capture.get().splitlines() if line.startswith("transport")] == [
        "transport of worker-0, worker-1: shm",
        f"transport of 6 workers: bulk; no shared memory ({elsewhere})",
        f"transport of worker-8: bulk; no shared memory ({elsewhere}); pulls weights for 2 other workers of its host",
    ]


@pytest.mark.parametrize(
    ("changes", "current", "expected"),
    [
        ({"consistency.mode": "async"}, ("sync", None), (types_pb2.MODE_ASYNC, 3)),
        ({"consistency.mode": "async"}, ("async", 7), (types_pb2.MODE_ASYNC, 7)),
        ({"consistency.staleness": "0"}, ("async", 7), (types_pb2.MODE_ASYNC, 0)),
        ({"consistency.staleness": "unbounded"}, ("async", 7), (types_pb2.MODE_ASYNC, None)),
        ({"consistency.mode": "async", "consistency.staleness": "4"}, ("sync", None), (types_pb2.MODE_ASYNC, 4)),
        ({"consistency.mode": "sync"}, ("async", 7), (types_pb2.MODE_SYNC, None)),
    ],
)
def test_set_sends_the_whole_wish(
    changes: dict[str, object], current: tuple[str, int | None], expected: tuple[types_pb2.Mode, int | None]
) -> None:
    request = make_request(changes, *current)
    staleness = request.staleness if request.HasField("staleness") else None
    assert (request.mode, staleness) == expected
    assert request.wait_s > 0


@pytest.mark.parametrize(
    ("changes", "mode"),
    [({"consistency.staleness": "4"}, "sync"), ({"consistency.mode": "sync", "consistency.staleness": "4"}, "async")],
)
def test_staleness_without_asynchronous_mode_is_a_contradiction(changes: dict[str, object], mode: str) -> None:
    with pytest.raises(ConfigError, match=r"consistency\.staleness has no meaning with consistency\.mode=sync"):
        make_request(changes, mode, None)


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ("servers=0", 'servers is "0", but must be an integer from 1 to 4096'),
        ("epochs=3", 'scale takes workers=N or servers=N, not "epochs=3"'),
        ("workers", 'workers is "", but must be an integer from 1 to 4096'),
        ("workers=0", 'workers is "0", but must be'),
        ("workers=4097", 'workers is "4097", but must be'),
        ("workers=-1", 'workers is "-1", but must be'),
        ("workers=99999999999999999999", "but must be an integer"),
    ],
)
def test_scale_takes_numbers_of_workers_and_servers_only(wish: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wished(wish)
    assert text in str(caught.value)


def test_scale_takes_a_number_of_workers_or_servers() -> None:
    assert [wished(f"workers={count}") for count in (1, 4096)] == [("workers", 1), ("workers", 4096)]
    assert wished("cluster.servers=4") == ("servers", 4)
