"""The settings, the variables around them, and whether they fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paramserver.config import (
    ENV_CONFIG,
    ENV_INTERNAL_PREFIX,
    ENV_PREFIX,
    ENV_RESTART_COMMAND,
    FIELDS,
    Settings,
    env_name,
    is_address,
    load_settings,
    split_addresses,
)
from paramserver.doctor.finding import Finding, Level, listing
from paramserver.errors import ConfigError
from paramserver.transport.addresses import host_of, loopback

_PROXIES = ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of `config.load_settings`, with the environment as it was at the start."""

    config: Path | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


def read_settings(request: Request) -> tuple[Settings, list[Finding]]:
    """The settings in force, and findings. Wrong settings are replaced by the flags alone, or by the defaults."""
    unknown = unknown_variables(request.environ)
    known = {name: value for name, value in request.environ.items() if name not in unknown}
    findings = [check_variables(request.environ)]
    try:
        settings = load_settings(request.config, request.overrides, known)
        settings.replicas(launched=False)  # refuses an impossible wish
    except ConfigError as error:
        findings.append(
            Finding("configuration", Level.FAIL, str(error), "correct it; the checks below go on without it")
        )
        return _flags_alone(request), findings
    places = {origin.partition(" ")[0] for origin in settings.origins().values()} - {"default"}
    files = sorted({origin for origin in settings.origins().values() if origin.startswith("file ")})
    value = "; ".join([*files, *(f"{place}s" for place in ("env", "flag") if place in places)]) or "defaults only"
    value = value.replace("envs", "environment").replace("file ", "")
    findings.append(Finding("configuration", Level.OK, value))
    return settings, findings


def _flags_alone(request: Request) -> Settings:
    try:
        return load_settings(overrides=request.overrides, environ={ENV_CONFIG: ""})
    except ConfigError:
        return Settings()


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Names of variables that look like settings, but are no settings."""
    known = {ENV_CONFIG, ENV_RESTART_COMMAND, *map(env_name, FIELDS)}
    ours = (name for name in environ if name.startswith(ENV_PREFIX) and not name.startswith(ENV_INTERNAL_PREFIX))
    return sorted(name for name in ours if name not in known)


def check_variables(environ: Mapping[str, str]) -> Finding:
    """Variables with our prefix that have no meaning: nearly always a typing error."""
    unknown = unknown_variables(environ)
    if unknown:
        return Finding("variables", Level.FAIL, f"unknown: {listing(unknown)}", "; ".join(map(_advice, unknown[:5])))
    count = sum(env_name(key) in environ for key in FIELDS)
    return Finding("variables", Level.OK, f"{count} settings from {ENV_PREFIX}* variables, no unknown name")


def _advice(name: str) -> str:
    """The message of load_settings about an unknown name, with the nearest known name."""
    try:
        load_settings(environ={ENV_CONFIG: "", name: ""})
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{name} is known")


def check_proxies(environ: Mapping[str, str]) -> Finding:
    """Name proxies, which are for the web only. Their addresses are not shown: they may hold passwords."""
    found = sorted(name for name in environ if name.lower() in _PROXIES and environ[name])
    if found:
        return Finding("proxies", Level.NOTE, f"{', '.join(found)}: ignored between members of a cluster")
    return Finding("proxies", Level.OK, "none")


def check_security(settings: Settings) -> Finding:
    """Whether connections to other machines use TLS, or a setting allows to go without."""
    security, cluster = settings.security, settings.cluster
    hosts = [host_of(address) for address in split_addresses(cluster.coordinator)]
    hosts += [listen_host(cluster.listen)] if cluster.listen else []
    away = [host for host in dict.fromkeys(hosts) if not loopback(host)]
    if security.certs:
        if security.insecure:
            return Finding("security", Level.NOTE, "TLS; security.insecure is set as well", "unset security.insecure")
        return Finding("security", Level.OK, "TLS with certificates")
    if not away:
        return Finding("security", Level.OK, "no TLS: this machine only")
    value = f"no TLS, but other machines ({listing(away)})"
    remedy = "paramserver certs init ./certs, copy to each machine the files of its roles, and set security.certs"
    if security.insecure:
        return Finding("security", Level.WARN, f"{value}: everybody on the network can read and interfere", remedy)
    return Finding("security", Level.FAIL, value, f"{remedy}; or set security.insecure on a network of your own")


def listen_host(listen: str) -> str:
    """The host in cluster.listen, which may have a port."""
    return host_of(listen) if is_address(listen) else listen.strip("[]")
