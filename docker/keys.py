"""Make what the compose cluster keeps secret, once, and give each role its part of it.

The service `certs` of docker-compose.yml runs this before all others, at every `up`: what is there stays. Certificates
that end soon are renewed; `docker-compose run --rm certs --renew` renews them now.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

KEYS = Path("/keys")
# Beside admin.token the coordinator's container has the admin's certificate: commands are given there.
FILES = {
    "coordinator": (
        *("coordinator.key", "coordinator.crt", "admin.key", "admin.crt", "ca.crt"),
        *("join.token", "admin.token", "redis.password"),
    ),
    "server": ("server.key", "server.crt", "ca.crt", "join.token"),
    "worker": ("worker.key", "worker.crt", "ca.crt", "join.token"),
    # Enough to read metrics, too little to become a member.
    "monitoring": ("ca.crt", "join.token"),
}
# docs/store.md says what a user of the store has to be allowed.
COMMANDS = "ping select info time eval evalsha hmget get set hget hset hdel del pexpire pttl"
ENDS_SOON = 5  # what `paramserver certs show` exits with


def main() -> None:
    os.umask(0o077)
    made = KEYS / "ca" / "certs"
    authority(made, renew="--renew" in sys.argv[1:])
    for role, names in FILES.items():
        for name in names:
            write(KEYS / role / name, (made / name).read_bytes())
    # The store knows the password by its hash.
    digest = hashlib.sha256((made / "redis.password").read_text().strip().encode()).hexdigest()
    allowed = " ".join(f"+{command}" for command in COMMANDS.split())
    user = f"user paramserver on #{digest} resetkeys ~paramserver:* resetchannels -@all {allowed}"
    write(KEYS / "redis" / "users.acl", f"user default off\n{user}\n".encode())


def authority(made: Path, renew: bool) -> None:
    """Make certificates, tokens and the store's password, all or nothing; renew certificates that need it."""
    if not made.exists():
        unfinished = made.with_name("unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        run("paramserver", "certs", "init", str(unfinished), "--job", "compose")
        write(unfinished / "redis.password", f"{secrets.token_hex(32)}\n".encode())
        unfinished.rename(made)
        print("made certificates, tokens and the store's password", flush=True)
    elif renew or subprocess.run(["paramserver", "certs", "show", str(made)]).returncode == ENDS_SOON:
        run("paramserver", "certs", "renew", str(made))
        print("renewed the certificates", flush=True)


def run(*command: str) -> None:
    # Its advice about copying files is for people.
    if code := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        sys.exit(code)


def write(path: Path, content: bytes) -> None:
    """Replace the file as a whole, unless it holds that already."""
    if path.exists() and path.read_bytes() == content:
        return
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(name, path)


if __name__ == "__main__":
    main()
