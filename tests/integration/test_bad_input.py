"""A user's mistake gives one clear sentence, the right exit code, and no traceback."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.cli.main import main
from tests.support.integration.harness import SCRIPTS, Place, complaint, place_fixture

SCRIPT = str(SCRIPTS / "train.py")
SMALL = ["--servers", "1", "--workers", "1", "--store", "memory"]


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


# ---- noticed before anything is started


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (
            ["run", SCRIPT, "--mode", "eventual"],
            'consistency.mode is "eventual" (flag), but must be "sync" or "async"',
        ),
        (
            ["run", SCRIPT, "--mode", "async", "--staleness", "-1"],
            'consistency.staleness is "-1" (flag), but must be an integer of 0 or more, or "unbounded"',
        ),
        (["run", SCRIPT, "--workers", "0"], 'cluster.workers is "0" (flag), but must be an integer from 1 to 4096'),
        (
            ["run", SCRIPT, "--servers", "none"],
            'cluster.servers is "none" (flag), but must be an integer from 1 to 4096',
        ),
        (["run", "absent.py"], 'script "absent.py" does not exist; give the path of a Python file'),
        (["run"], "no script is given; name one, as in: paramserver run train.py"),
        (["run", "."], 'script "." is a directory; give the path of a Python file'),
        (
            ["run", SCRIPT, "--epochs", "3"],
            'Unknown option: --epochs; arguments of the script go after "--"',
        ),
        (["run", SCRIPT, "--config", "absent.toml"], 'configuration file "absent.toml" does not exist'),
        (
            ["run", SCRIPT, "--set", "training.sede=1"],
            '"training.sede" is not a setting; did you mean "training.seed"?',
        ),
        (
            ["run", SCRIPT, "--store", "sqlite://x"],
            'cluster.store is "sqlite://x" (flag), but must be "auto", "memory"',
        ),
        (["run", SCRIPT, "--nonfinite", "ignore"], 'training.nonfinite is "ignore" (flag), but must be '),
        (["run", SCRIPT, "--workers", "2", "--set", "cluster.workers=3"], "cluster.workers is given by a flag and by"),
        (["stauts"], 'Unknown command "stauts"'),
    ],
)
def test_wrong_command_line(
    tokens: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(tokens) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"paramserver: error: {says}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[consistency]\nstalenes = 4\n",
            '"consistency.stalenes" is not a setting; did you mean "consistency.staleness"?',
        ),
        ("[consistencies]\nmode = 'sync'\n", '"consistencies" is not a section; did you mean "consistency"?'),
        (
            "[cluster]\nworkers = true\n",
            "cluster.workers is true (file paramserver.toml), but must be an integer from 1",
        ),
        ("[cluster\n", 'configuration file "paramserver.toml" is not valid TOML: '),
    ],
)
def test_wrong_file(
    text: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("paramserver.toml").write_text(text)
    assert main(["run", SCRIPT]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"paramserver: error: {says}")
    assert err.count("\n") == 1


def test_unknown_variable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARAMSERVER_CONSISTENCI__MODE", "async")
    assert main(["run", SCRIPT]) == 2
    wanted = '"PARAMSERVER_CONSISTENCI__MODE" is not a setting; did you mean "PARAMSERVER_CONSISTENCY__MODE"?'
    assert capsys.readouterr().err == f"paramserver: error: {wanted}\n"


def test_output_that_cannot_be_written_is_told_before_training(place: Place) -> None:
    (place.work / "file").touch()
    done = place.paramserver("run", SCRIPT, *SMALL, "--summary", "file/out.json")
    assert complaint(done, 2) == "run.summary cannot be written to file/out.json: File exists"
    assert done.out == ""


def test_closed_output_is_no_mistake(place: Place) -> None:
    """Whoever starts a command may have closed its streams: `>&-`."""
    command = f"{sys.executable} -m paramserver"
    assert place.start("bash", "-c", f"{command} config show >&-").wait().said == ""
    done = place.start("bash", "-c", f"{command} run absent.py >&- <&-").wait()
    assert complaint(done, 2) == 'script "absent.py" does not exist; give the path of a Python file'
    assert place.start("bash", "-c", f"{command} run absent.py <&- >&- 2>&-").wait().code == 2


# ---- noticed by a worker


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no-parameters", "the model has no parameters to train: give it at least one ("),
        ("unsupported", "LBFGS is not supported: it calls its closure several times in a step"),
        ("empty", "the data set is empty: give it at least one sample ("),
    ],
)
def test_wrong_script(place: Place, kind: str, says: str) -> None:
    """What a worker's process makes of it; no cluster is started, since the mistake comes before it is needed."""
    script = str(SCRIPTS / "mistakes.py")
    sentence = complaint(place.python("-m", "paramserver.roles.child", "worker", script, kind), 2)
    assert sentence.startswith(says)
    assert f"({script}, line " in sentence


@pytest.mark.long  # tests/cluster/test_nonfinite.py has it in one process
def test_gradient_that_is_not_finite(place: Place) -> None:
    script = SCRIPTS / "mistakes.py"
    done = place.paramserver("run", script, *SMALL, "--nonfinite", "fail", "--", "not-finite")
    sentence = complaint(done, 1)
    wanted = "the gradient of '0.weight' is not finite (step 2, slice 0); training.nonfinite = fail ends the run"
    assert sentence.startswith(f"{wanted} ({script}, line ")
    assert "worker-0 failed with exit code 1; the run ends\n" in done.out
    assert place.processes() == {}
    assert place.leftovers() == []


def test_workers_with_different_models(place: Place) -> None:
    script = SCRIPTS / "mistakes.py"
    flags = ["--servers", "1", "--workers", "2", "--store", "memory"]
    done = place.paramserver("run", script, *flags, "--", "different")
    sentence = complaint(done, 2)
    assert sentence.startswith("this worker's model differs: ")
    assert "'0.weight'" in sentence
    assert "(8, 4)" in sentence
    assert "(9, 4)" in sentence
    assert re.search(r"^worker-\d failed with exit code 2; the run ends$", done.out, re.MULTILINE)


def test_mistake_in_a_script_alone(place: Place) -> None:
    done = place.python(SCRIPTS / "mistakes.py", "unsupported").check(1)
    # Python tells it; its last line is the same sentence.
    assert (
        done.err.rstrip()
        .splitlines()[-1]
        .startswith(
            "paramserver.errors.ModelError: LBFGS is not supported: it calls its closure several times in a step"
        )
    )
