"""The settings of a job: frozen values, read once from flags, environment and a TOML file.

Precedence: what the command line says, then ``PARAMSERVER_<SECTION>__<KEY>``, then the file, then the default. Every
name and every value is checked. All mistakes become one `errors.ConfigError` whose text names each setting, its value,
the source of the value, and the allowed values.
"""

from paramserver.config.secrets import SECRETS, hide_password, shown
from paramserver.config.sections import (
    NO_CHECKPOINTS,
    Checkpoint,
    Cluster,
    Consistency,
    Log,
    Run,
    Security,
    Training,
)
from paramserver.config.settings import (
    ENV_CONFIG,
    ENV_PREFIX,
    ENV_RESTART_COMMAND,
    FEEDBACK,
    FIELDS,
    SECTIONS,
    Settings,
    env_name,
    must_be,
)
from paramserver.config.sources import DEFAULT_FILE, ENV_INTERNAL_PREFIX, load_settings
from paramserver.config.values import (
    CHUNK_ALIGNMENT_BYTES,
    MAX_CHUNK_BYTES,
    MAX_PROCESSES,
    MIN_TOKEN_CHARS,
    Must,
    is_address,
    is_job_name,
    split_addresses,
)

__all__ = [
    "CHUNK_ALIGNMENT_BYTES",
    "DEFAULT_FILE",
    "ENV_CONFIG",
    "ENV_INTERNAL_PREFIX",
    "ENV_PREFIX",
    "ENV_RESTART_COMMAND",
    "FEEDBACK",
    "FIELDS",
    "MAX_CHUNK_BYTES",
    "MAX_PROCESSES",
    "MIN_TOKEN_CHARS",
    "NO_CHECKPOINTS",
    "SECRETS",
    "SECTIONS",
    "Checkpoint",
    "Cluster",
    "Consistency",
    "Log",
    "Must",
    "Run",
    "Security",
    "Settings",
    "Training",
    "env_name",
    "hide_password",
    "is_address",
    "is_job_name",
    "load_settings",
    "must_be",
    "shown",
    "split_addresses",
]
