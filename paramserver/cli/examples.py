"""An example for each command, which its help shows."""

from __future__ import annotations

EXAMPLES = {
    "run": "paramserver run train.py --servers 2 --workers 4 -- --epochs 5",
    "chaos": "paramserver chaos --seed 7 --faults 5 -- run train.py",
    "start coordinator": "paramserver start coordinator --listen 0.0.0.0 --certs certs --checkpoint-dir /shared/run1",
    "start server": "paramserver start server --restart --join a:8790 --certs certs",
    "start worker": "paramserver start worker --restart --join a:8790 --certs certs -- train.py --epochs 5",
    "start auto": "srun --ntasks 7 paramserver start auto train.py --servers 2 --restart --checkpoint-dir /shared/run1",
    "status": "paramserver status --job digits --json",
    "top": "paramserver top --coordinator a:8790 --certs certs",
    "dashboard": "paramserver dashboard --token",
    "logs": "paramserver logs worker-3 --follow",
    "report": "paramserver report --job digits -o report.html",
    "trace": "paramserver trace --steps 20 -o trace.json",
    "set": "paramserver set consistency.mode=async --staleness 4",
    "restart": "paramserver restart servers",
    "drain": "paramserver drain worker-3",
    "scale": "paramserver scale workers=5",
    "stop": 'paramserver stop --reason "the loss is flat"',
    "doctor": "paramserver doctor --config cluster.toml",
    "health": "paramserver health --ready",
    "certs init": "paramserver certs init ./certs",
    "certs renew": "paramserver certs renew ./certs --days 90",
    "certs show": "paramserver certs show ./certs",
    "render": "paramserver render k8s --config cluster.toml --output ./manifests",
    "checkpoint now": "paramserver checkpoint now --job digits",
    "checkpoint list": "paramserver checkpoint list ckpt",
    "checkpoint show": "paramserver checkpoint show ckpt step-00000050-t0",
    "checkpoint verify": "paramserver checkpoint verify ckpt",
    "checkpoint export": "paramserver checkpoint export ckpt --to torch",
    "ledger": "paramserver ledger ckpt",
    "simulate": "paramserver simulate --workers 8 --params 25M --compute 0.2s --suggest",
    "init": "paramserver init",
    "config show": "paramserver config show --origin --set training.seed=3",
    "config validate": "paramserver config validate paramserver.toml",
    "config schema": "paramserver config schema > paramserver.schema.json",
    "config page": "paramserver config page > docs/settings.md",
}


def example(command: str) -> str:
    """The last line of the help of ``command``, such as "start server"."""
    return f"Example: {EXAMPLES[command]}"
