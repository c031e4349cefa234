"""The request of ``paramserver render``, and the settings that every target derives from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from paramserver.config import SECRETS, Settings, hide_password, split_addresses
from paramserver.errors import ConfigError
from paramserver.render.storage import Checkpoints, checkpoints_of

# A file's name to its text.
Files = dict[str, str]
# Dotted name of a setting to its value.
Values = dict[str, object]

DEFAULT_IMAGE = "paramserver:latest"
DEFAULT_PREFIX = "/opt/paramserver"
COORDINATOR_PORT = 8790
# In containers: of the coordinator, and of each server and worker.
DASHBOARD_PORT = 8780
METRICS_PORT = 8781
STORE_PORT = 6379
# In containers: a user id that no user of the host has.
UID = 10001
STORE_IMAGE = "valkey/valkey:9-alpine"
# Seconds that a process may take to leave: a worker hands in its present slice and gives back the others.
STOP_S = 60
# Exit codes after which starting again does not help: wrong configuration, wrong version.
HOPELESS = (2, 4)
# The health check that supervisors run; "--ready" also asks whether the process takes part.
HEALTH = ("paramserver", "health")

# Places of files, on a machine as in a container.
ETC = "/etc/paramserver"
CERTS = f"{ETC}/certs"
STORE_PASSWORD = f"{ETC}/store.password"
# Files, and the user of the store, that the image's keys.py makes for docker-compose.
COMPOSE_CERTS = "/certs"
COMPOSE_STORE = "redis://paramserver@redis:6379/0"
COMPOSE_STORE_PASSWORD = "/certs/redis.password"
# In containers, other users may read the files here.
STORE_SECRET = "/run/secrets/paramserver/password"
# Beside it in pods: the certificate of the store that is started along with the job, and its key.
STORE_CERTIFICATE, STORE_KEY = "/run/secrets/paramserver/tls.crt", "/run/secrets/paramserver/tls.key"
# What a user of the store has to be allowed, see docs/store.md.
STORE_COMMANDS = "ping select info time eval evalsha hmget get set hget hset hdel del pexpire pttl"
STATE = "/var/lib/paramserver"
# The only place where the image may write, temporary files aside: results, and checkpoints.
RESULTS = "/data"
# The workers' data in containers.
DATASET = "/dataset"
# Where containers of one host meet to share memory.
MEETING = "/meeting"

# Settings that a server or a worker needs; it gets all others from the coordinator. In particular it must not insist on
# a mode that may have changed meanwhile, and it has no business with the store.
_MEMBER_KEYS = (
    "cluster.coordinator",
    "cluster.meeting_dir",
    "cluster.join_timeout_s",
    "cluster.wait_timeout_s",
    "training.device",
    "log.level",
    "log.interval_s",
    "log.format",
    "web.metrics",
    "security.certs",
    "security.insecure",
)
# Settings that the coordinator does not need: the workers' script, and settings that each target writes itself.
_NOT_COORDINATOR = {
    *("run.script", "run.args", "training.device", "cluster.meeting_dir"),
    *("security.token_file", "security.admin_token_file"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """The options of the user.

    ``standby``: a second coordinator; ``gpu``: one GPU for each worker; ``dataset``: the workers' data, a directory of
    the machine or the name of a claim; ``storage_class``: of the volume of the checkpoints; ``share_memory``: pods of
    one node meet in a directory of the node.
    """

    settings: Settings
    image: str = DEFAULT_IMAGE
    prefix: str = DEFAULT_PREFIX
    gpu: bool = False
    standby: bool = False
    dataset: str = ""
    storage_class: str = ""
    share_memory: bool = False

    def __post_init__(self) -> None:
        self.settings.replicas(launched=False)  # refuses a wish that cannot be
        if not self.image or self.image.split() != [self.image]:
            raise ConfigError(f'{self.image!r} is not an image; give its name, as in "{DEFAULT_IMAGE}"')
        if not self.prefix.startswith("/") or self.prefix.split() != [self.prefix]:
            raise ConfigError(f'{self.prefix!r} is not an absolute path without spaces, such as "{DEFAULT_PREFIX}"')

    @property
    def replicated(self) -> bool:
        """Whether other servers go on with the shards of a server that dies."""
        return self.settings.replicas(launched=False) > 0

    @property
    def insecure(self) -> bool:
        """Whether members talk without TLS. Only a setting allows this."""
        return self.settings.security.insecure

    @property
    def meeting(self) -> str:
        """Where pods of one node meet; empty if they do not."""
        return MEETING if self.share_memory else ""

    @property
    def job(self) -> str:
        """Name of the job, which is also the first part of the names of objects."""
        return self.settings.cluster.job or "paramserver"

    @property
    def port(self) -> int:
        """The port of the coordinator."""
        addresses = split_addresses(self.settings.cluster.coordinator)
        return int(addresses[0].rpartition(":")[2]) if addresses else COORDINATOR_PORT

    @property
    def worker_words(self) -> list[str]:
        """How a worker is started, after "paramserver". Raises ConfigError if no script is given."""
        run = self.settings.run
        if not run.script:
            raise ConfigError(
                "run.script is empty, but must name the script of the workers; give it in the file or with --set"
            )
        return ["start", "worker", *(["-m"] if run.module else []), "--", run.script, *run.args]

    def coordinator_values(self, changes: Values) -> Values:
        """The coordinator's settings with the changes of the target; defaults are left out."""
        self._refuse_secrets()
        values = {key: value for key, value in self.settings.values().items() if key not in _NOT_COORDINATOR}
        return _not_default({**values, **changes})

    def member_values(self, changes: Values) -> Values:
        """The settings of a server or a worker, with the changes of the target; defaults are left out."""
        values = self.settings.values()
        return _not_default({**{key: values[key] for key in _MEMBER_KEYS}, **changes})

    def security_values(self, certs: str) -> Values:
        """TLS with the certificates in that directory, or not."""
        return {"security.certs": "" if self.insecure else certs, "security.insecure": self.insecure}

    def _refuse_secrets(self) -> None:
        store = self.settings.cluster.store
        if hide_password(store) != store:
            raise ConfigError(
                "cluster.store holds a password, which would end up in the files; write the password to a file of its "
                "own and name that in cluster.store_password_file"
            )


def _not_default(values: Mapping[str, object]) -> Values:
    defaults = Settings().values()
    return {key: value for key, value in values.items() if value != defaults[key] and key not in _NEVER}


# Settings that come from the environment only, and never from our files.
_NEVER: Collection[str] = [key for key in SECRETS if key.startswith("security.")]


@dataclass(frozen=True, slots=True)
class Containers:
    """The addresses, by service name, and the store of targets that run containers.

    ``coordinator`` is its host name; ``store``, ``store_password`` are URL and password file of the store that is
    started along with the job; ``certs`` is the directory with certificates; ``meeting`` is where servers and workers
    meet to share memory, empty if the job's settings say it.
    """

    request: Request
    coordinator: str
    store: str
    when_done: str
    certs: str = CERTS
    store_password: str = STORE_SECRET
    meeting: str = ""

    @property
    def own_store(self) -> bool:
        """Whether the store is started along with the job."""
        return self.request.settings.cluster.store == "auto"

    @property
    def store_url(self) -> str:
        """The store's address. Raises ConfigError for one that no container can reach."""
        url = self.request.settings.cluster.store
        if self.own_store:
            return self.store
        if url.startswith("unix:") or (urlsplit(url).hostname or "").lower() in ("localhost", "127.0.0.1", "::1"):
            raise ConfigError(
                f'cluster.store is "{hide_password(url)}", which no container can reach; name a host, or "auto" to '
                "start a store along with the job"
            )
        if url == "memory" and self.request.standby:
            raise ConfigError('a coordinator on standby needs a store that outlives the other: not "memory"')
        return url

    @property
    def results(self) -> bool:
        """Whether the coordinator writes files that are to stay, checkpoints aside."""
        run = self.request.settings.run
        return any((run.summary, run.report, run.save, run.records, run.track))

    @property
    def checkpoints(self) -> Checkpoints:
        """The place of the checkpoints. Raises ConfigError for one that is not mounted."""
        found = checkpoints_of(self.request.settings, RESULTS, "checkpoints")
        if found.on_disk:
            _check_inside("checkpoint.dir", found.dir, 'or a URL, or "none"')
        return found

    @property
    def password_file(self) -> str:
        """Where the coordinator finds the store's password; empty if there is none."""
        if self.own_store:
            return self.store_password
        return STORE_SECRET if self.request.settings.cluster.store_password_file else ""

    def coordinator_values(self) -> Values:
        """See `Request.coordinator_values`."""
        for key in ("run.summary", "run.report", "run.save", "run.records"):
            _check_inside(key, str(self.request.settings.values()[key]))
        if "://" not in (resume := self.request.settings.checkpoint.resume):
            _check_inside("checkpoint.resume", resume, "or a URL")
        port = self.request.port
        return self.request.coordinator_values(
            {
                "cluster.coordinator": f"{self.coordinator}:{port}",
                "cluster.listen": f"0.0.0.0:{port}",
                "cluster.advertise_host": self.coordinator,
                "cluster.job": self.request.job,
                "cluster.store": self.store_url,
                "cluster.store_password_file": self.password_file,
                "cluster.when_done": self.when_done,
                "checkpoint.dir": self.checkpoints.dir,
                "log.format": self.log_format,
                "web.dashboard": self.dashboard,
                "web.metrics": "off",
                **self.request.security_values(self.certs),
            }
        )

    def member_values(self) -> Values:
        """See `Request.member_values`."""
        address = f"{self.coordinator}:{self.request.port}"
        return self.request.member_values(
            {
                "cluster.coordinator": address,
                "log.format": self.log_format,
                "web.metrics": self.metrics,
                **({"cluster.meeting_dir": self.meeting} if self.meeting else {}),
                **self.request.security_values(self.certs),
            }
        )

    @property
    def dashboard(self) -> str:
        """Where the coordinator serves its API and metrics: all of the container's addresses, unless it is off."""
        wanted = self.request.settings.web.dashboard
        return f"0.0.0.0:{DASHBOARD_PORT}" if wanted == "auto" else wanted

    @property
    def metrics(self) -> str:
        """Where servers and workers serve metrics: as the coordinator, each in its own container."""
        wanted = self.request.settings.web.metrics
        return f"0.0.0.0:{METRICS_PORT}" if wanted == "off" and self.dashboard != "off" else wanted

    @property
    def log_format(self) -> str:
        """The log of a container is read by programs, unless the settings say otherwise."""
        wanted = self.request.settings.log.format
        return "json" if wanted == "auto" else wanted


def _check_inside(key: str, path: str, otherwise: str = "") -> None:
    """Only the directory for results can be written in a container."""
    inside = not path.startswith("/") or path.startswith(f"{RESULTS}/")
    if not inside or ".." in path.split("/"):
        also = f", {otherwise}" if otherwise else ""
        raise ConfigError(
            f'{key} is "{path}", but a container writes below {RESULTS} only; give a path relative to it{also}'
        )
