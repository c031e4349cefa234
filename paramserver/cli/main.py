"""The command ``paramserver``. Commands are registered by path and imported when called, so that help is fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

from paramserver.cli.common import USAGE_EXIT_CODE, complain, guard, have_streams
from paramserver.cli.examples import EXAMPLES, example


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"paramserver {version('paramserver')}"
    except PackageNotFoundError:
        return "paramserver (a checkout that is not installed)"


# Name -> module and function below paramserver.cli, and what the command does.
COMMANDS = {
    "run": ("train.run:run", "Train a script on a cluster on this machine."),
    "chaos": ("train.chaos:chaos", "Train under faults, and see whether it matters."),
    "start": ("train.start:app", "Start a coordinator, server or worker here."),
    "status": ("look.status:status", "Show a running job."),
    "top": ("look.top:top", "Watch a running job on the whole terminal."),
    "dashboard": ("look.dashboard:dashboard", "Print a link to a job's page."),
    "logs": ("look.logs:logs", "Print the output of the processes of a job of run."),
    "report": ("train.report:report", "Tell what happened in a run, as one file."),
    "trace": ("record.trace:trace", "Record what all processes of a running job do."),
    "set": ("look.set:set_", "Change the consistency of a running job."),
    "restart": ("look.operate:restart", "Restart servers of a running job, one by one."),
    "drain": ("look.operate:drain", "Ask a worker or server of a running job to leave."),
    "scale": ("look.operate:scale", "Change the number of workers or servers of a running job."),
    "stop": ("look.operate:stop", "End a running job."),
    "doctor": ("prepare.doctor:doctor", "Find out what is wrong on this machine."),
    "health": ("look.health:health", "Check the roles that run on this machine."),
    "certs": ("prepare.certs:app", "Make and check the certificates of a cluster."),
    "render": ("prepare.render:render", "Write files for systemd, compose, Kubernetes."),
    "checkpoint": ("look.checkpoint:app", "Make, list, show, check, convert checkpoints."),
    "ledger": ("look.ledger:ledger", "Show which samples have counted how often."),
    "simulate": ("prepare.simulate:simulate", "Predict how fast a job would be."),
    "init": ("prepare.init:init", "Write a small file of settings to begin with."),
    "config": ("prepare.config:app", "Show, check and describe the settings."),
}


def build_app() -> App:
    """The tree of commands. The module of a command is imported when the command is called."""
    app = App(
        name="paramserver",
        help="A sharded parameter server for PyTorch.",
        version=_version,
        # Flags have no "--no-" twins. The configuration, not the function, has the defaults of settings.
        default_parameter=Parameter(negative=(), show_default=False),
        help_epilogue='"paramserver COMMAND --help" explains a command. Every setting: "paramserver config show".',
    )
    for name, (where, about) in COMMANDS.items():
        # A group of commands has no example of its own.
        kept = {"help_epilogue": example(name)} if name in EXAMPLES else {}
        app.command(f"paramserver.cli.{where}", name=name, help=about, **kept)
    return app


def split_script_arguments(tokens: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Our own tokens, and those of the script after the first ``--``; None if no script follows."""
    takes_script = tokens[:1] in (["run"], ["chaos"]) or tokens[:2] in (["start", "worker"], ["start", "auto"])
    if not takes_script or "--" not in tokens:
        return list(tokens), None
    cut = list(tokens).index("--")
    return list(tokens[:cut]), list(tokens[cut + 1 :])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Mistakes of the user become one line on standard error."""
    if argv is None:  # a process of its own
        have_streams()
        if not listens(sys.argv[1:]):
            os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        argv = sys.argv[1:]
    return guard(lambda: _dispatch(list(argv)))


def listens(tokens: Sequence[str]) -> bool:
    """Whether the command starts a process that other machines call.

    gRPC writes a line to standard error for each handshake that fails. On the calling side it buries our own sentence.
    On the side that is called, the line is the only place that has the reason. gRPC reads GRPC_VERBOSITY when it is
    imported, and child processes inherit the variable.
    """
    return tokens[:1] == ["start"] and (tokens[1:2] != ["worker"] or "--with-server" in tokens)


def _dispatch(tokens: list[str]) -> int:
    own, script_args = split_script_arguments(tokens)
    try:
        command, bound, ignored = build_app().parse_args(own, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        text = " ".join(str(error).split())
        if tokens[:1] == ["run"] and script_args is None:
            text, suggested, name = text.partition(". Did you mean")
            text = text.rstrip(".") + '; arguments of the script go after "--"' + suggested + name
        complain(text)
        return USAGE_EXIT_CODE
    if "script_args" in ignored:
        bound.arguments["script_args"] = script_args
    result = command(*bound.args, **bound.kwargs)
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
