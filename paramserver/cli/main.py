"""The command ``paramserver``. Commands are registered by path and imported when called, so that help is fast."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

from paramserver.cli.common import USAGE_EXIT_CODE, complain, guard


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"paramserver {version('paramserver')}"
    except PackageNotFoundError:
        return "paramserver (a checkout that is not installed)"


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
    here = "paramserver.cli"
    app.command(f"{here}.train.run:run", name="run", help="Train a script on a cluster on this machine.")
    app.command(f"{here}.train.chaos:chaos", name="chaos", help="Train under faults, and see whether it matters.")
    app.command(f"{here}.train.start:app", name="start", help="Start a coordinator, server or worker here.")
    app.command(f"{here}.look.status:status", name="status", help="Show a running job.")
    app.command(f"{here}.look.top:top", name="top", help="Watch a running job on the whole terminal.")
    app.command(f"{here}.look.logs:logs", name="logs", help="Print the output of the processes of a job of run.")
    app.command(f"{here}.look.set:set_", name="set", help="Change the consistency of a running job.")
    app.command(f"{here}.look.operate:restart", name="restart", help="Restart servers of a running job, one by one.")
    app.command(f"{here}.look.operate:drain", name="drain", help="Ask a worker or server of a running job to leave.")
    app.command(f"{here}.look.operate:scale", name="scale", help="Change the number of workers of a running job.")
    app.command(f"{here}.look.operate:stop", name="stop", help="End a running job.")
    app.command(f"{here}.prepare.doctor:doctor", name="doctor", help="Find out what is wrong on this machine.")
    app.command(f"{here}.look.health:health", name="health", help="Check the roles that run on this machine.")
    app.command(f"{here}.prepare.certs:app", name="certs", help="Make and check the certificates of a cluster.")
    app.command(f"{here}.prepare.render:render", name="render", help="Write files for systemd, compose, Kubernetes.")
    app.command(f"{here}.look.checkpoint:app", name="checkpoint", help="List, show, check, convert checkpoints.")
    app.command(f"{here}.look.ledger:ledger", name="ledger", help="Show which samples have counted how often.")
    app.command(f"{here}.prepare.simulate:simulate", name="simulate", help="Predict how fast a job would be.")
    app.command(f"{here}.prepare.config:app", name="config", help="Show, check and describe the settings.")
    return app


def split_script_arguments(tokens: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Our own tokens, and those of the script after the first ``--``; None if no script follows."""
    if (tokens[:1] not in (["run"], ["chaos"]) and tokens[:2] != ["start", "worker"]) or "--" not in tokens:
        return list(tokens), None
    cut = list(tokens).index("--")
    return list(tokens[:cut]), list(tokens[cut + 1 :])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Mistakes of the user become one line on standard error."""
    return guard(lambda: _dispatch(list(sys.argv[1:] if argv is None else argv)))


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
