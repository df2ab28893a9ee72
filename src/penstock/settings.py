"""A server's settings, read in one place: arguments, `PENSTOCK_…` variables, a config file.

The file is TOML; one whose name ends in `.conf` is a configuration file of ElasticMQ.

An argument replaces a variable, a variable replaces a value of the file, and that replaces the
default. An unknown name is an error in each of the three. `data` (a path) and `store` (a URL) both
say where the messages are: each of the three sources gives at most one of them. `PENSTOCK_URL`,
which the other commands read too, is a third variable for the store: beside `PENSTOCK_DATA` or
`PENSTOCK_STORE` it must name the same one.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from ipaddress import ip_address
from typing import Any, Final

import msgspec

from penstock.elasticmq import ENDING, read_elasticmq
from penstock.errors import InvalidField
from penstock.files import OtherOwner, read_named
from penstock.url import read_url, store_url, without_password

PREFIX: Final = "PENSTOCK_"
CONFIG_VARIABLE: Final = "PENSTOCK_CONFIG"
URL_VARIABLE: Final = "PENSTOCK_URL"
# Variables of this prefix that are not a server's: the command line, the tools and the tests of
# this repository read them.
_OTHER_VARIABLES: Final = frozenset(
    {
        URL_VARIABLE,
        CONFIG_VARIABLE,
        "PENSTOCK_CHAOS_SEED",
        "PENSTOCK_FULL",
        "PENSTOCK_SCORE",
        "PENSTOCK_FUZZ",
        "PENSTOCK_SERVICES",
        "PENSTOCK_SIMULATION_LIVES",
        "PENSTOCK_SPARK_KILLS",
    }
)
# Someone who has seen a signature can guess its secret offline, so a short one is not accepted.
SECRET_CHARS_MIN: Final = 16
AWS_WINDOW_S: Final = 60
LINE_FORMATS: Final = ("text", "json")
CLOCKS: Final = ("manual", "auto", "system")
# A host's name, or an IPv6 address, which has two colons or more.
_HOST: Final = re.compile(r"[\w.-]+|\[?[0-9a-fA-F]*:[0-9a-fA-F]*:[0-9a-fA-F:.]*\]?")
_CONFIG_BYTES_MAX: Final = 4 * 1024 * 1024
_STORE_SETTINGS: Final = {"data", "store"}
_LASTING_LOSS: Final = (
    "accept_loss, in {}: it would accept every later loss, too; give it by hand to the one start "
    "that is to go on without the missing files, as --accept-loss or in --url"
)


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every setting of `penstock serve`.

    `keys` maps each access key to its secret. `queues` are made at the start, with the settings of
    `Queues.create`. `allow_hosts` are further names by which clients may address a server that
    checks no signatures. For `deleted_window` seconds after its deletion a queue cannot be made
    again, and for `purged_window` seconds after a purge it cannot be purged again; both are 0
    unless set, or 60 with `aws_limits`, as in Amazon SQS. `carrot` is where a Carrot broker on the
    same store listens, `[HOST:]PORT`; `token_file` holds the token that its clients must send.
    With `strict_receipts` every receipt is refused once its claim has ended.
    `mask_messages` keeps bodies and attributes out of the console.
    `log_format` is the form of the lines on stderr: `text` or `json`; a request that takes
    `slow_request` seconds or longer gets one.
    With `kill_button` the console can end the server by SIGKILL, for `penstock demo`.
    `clock` makes a server for tests: its time is `manual`, `auto` or that of the `system`, and it
    has the control interface. `chaos` is the seed of the faults that such a server makes.
    With `create_on_use` a queue is created when a client first asks for its URL, sends to it or
    receives from it. The programs in `ready_dir` run when the server answers; with `ready_strict`
    it ends when one of them fails.
    `accept_loss` is meant for a single start, so it can only be an argument.
    """

    data: str = "penstock-data"
    store: str | None = None
    durability: str = "sync"
    host: str = "127.0.0.1"
    port: int = 9324
    region: str = "us-east-1"
    account: str = "000000000000"
    keys: dict[str, str] = {}
    tls_cert: str | None = None
    tls_key: str | None = None
    allow_hosts: list[str] = []
    aws_limits: bool = False
    strict_receipts: bool = False
    deleted_window: float | None = None
    purged_window: float | None = None
    insecure_without_keys: bool = False
    insecure_without_tls: bool = False
    insecure_other_owner: bool = False
    accept_loss: bool = False
    mask_messages: bool = False
    log_format: str = "text"
    slow_request: float = 1.0
    kill_button: bool = False
    carrot: str | None = None
    token_file: str | None = None
    clock: str | None = None
    chaos: int | None = None
    create_on_use: bool = False
    ready_dir: str | None = None
    ready_strict: bool = False
    queues: dict[str, dict[str, Any]] = {}

    @property
    def is_for_tests(self) -> bool:
        """Whether the server has the control interface: see `penstock.server.testing`."""
        return self.clock is not None or self.chaos is not None

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def deleted_window_ms(self) -> int:
        """How long the name of a deleted queue cannot be used again."""
        return self._window_ms(self.deleted_window)

    @property
    def purged_window_ms(self) -> int:
        """How long after a purge the next one of the same queue is refused."""
        return self._window_ms(self.purged_window)

    def _window_ms(self, given_s: float | None) -> int:
        default_s = AWS_WINDOW_S if self.aws_limits else 0
        return round((default_s if given_s is None else given_s) * 1_000)

    @property
    def where(self) -> str:
        """The URL of the store."""
        if self.store is not None:
            return self.store
        extra = "" if self.durability == "sync" else f"?durability={self.durability}"
        return f"file:{self.data}{extra}"


def read_settings(
    given: Mapping[str, Any], environment: Mapping[str, str], config: str | None = None
) -> ServerSettings:
    """The settings of a server. Raises InvalidField, which names the setting and its source."""
    sources: list[tuple[str, dict[str, Any]]] = []
    path = config or environment.get(CONFIG_VARIABLE)
    if path:
        # Only an argument allows it: a file cannot say this of itself.
        other_owner = bool(given.get("insecure_other_owner"))
        sources.append((path, _checked(_read_file(path, other_owner), path)))
    variables = _checked(_read_environment(environment), "the environment", strict=False)
    arguments = {name: value for name, value in given.items() if value is not None}
    if not _STORE_SETTINGS & arguments.keys():
        variables = _with_url(variables, url_in(environment))
    sources.append(("the environment", variables))
    for where, source in sources:
        if "accept_loss" in source or _accepts_loss(source.get("store")):
            raise InvalidField(_LASTING_LOSS.format(where))
        if "kill_button" in source:
            raise InvalidField(f"kill_button, in {where}: is for penstock demo, which gives it")
    sources.append(("the arguments", arguments))
    found: dict[str, Any] = {}
    for where, source in sources:
        if source.keys() >= _STORE_SETTINGS:
            raise InvalidField(f"data and store, in {where}: both say where the store is; give one")
        if _STORE_SETTINGS & source.keys():
            found = {name: value for name, value in found.items() if name not in _STORE_SETTINGS}
        found |= source
    if {"clock", "chaos"} & found.keys() and not _STORE_SETTINGS & found.keys():
        # A store on disk would keep what happened at a time that never was.
        found["store"] = "memory:"
    settings = _convert(found, "the arguments", strict=True)
    _check(settings)
    _check_for_tests(settings)
    return settings


def url_in(environment: Mapping[str, str]) -> str | None:
    """The store that PENSTOCK_URL names; None if it names none.

    Raises InvalidField if the URL accepts a loss.
    """
    url = store_url(environment.get(URL_VARIABLE, "")) or None
    if _accepts_loss(url):
        raise InvalidField(_LASTING_LOSS.format(URL_VARIABLE))
    return url


def _accepts_loss(url: str | None) -> bool:
    """Whether a store's URL accepts a loss. One that cannot be read is refused where it is used."""
    try:
        return url is not None and read_url(url).has_option("accept_loss")
    except InvalidField:
        return False


def _with_url(variables: dict[str, Any], url: str | None) -> dict[str, Any]:
    """The variables with the store that PENSTOCK_URL names. Raises InvalidField."""
    named = _STORE_SETTINGS & variables.keys()
    if not url or len(named) > 1:
        return variables
    if not named:
        return {**variables, "store": url}
    where = _convert(variables, "the environment", strict=True).where
    if not _names_same_store(url, where):
        other = PREFIX + named.pop().upper()
        raise InvalidField(
            f"{URL_VARIABLE} is {without_password(url)!r} and {other} means "
            f"{without_password(where)!r}: both say where the store is; unset one of them, or give "
            "--data or --store"
        )
    return variables


def _names_same_store(url: str, where: str) -> bool:
    """Whether PENSTOCK_URL names the store at `where`, and has no option that this lacks."""
    try:
        one, other = read_url(url), read_url(where)
    except InvalidField as error:
        raise InvalidField(f"{URL_VARIABLE} or {PREFIX}STORE: {error}") from None
    if one.scheme != other.scheme or not one.options.items() <= other.options.items():
        return False
    if one.scheme == "file":
        return os.path.realpath(one.path) == os.path.realpath(other.path)
    return one.rest == other.rest


def _convert(found: Mapping[str, Any], where: str, strict: bool) -> ServerSettings:
    try:
        return msgspec.convert(dict(found), ServerSettings, strict=strict)
    except msgspec.ValidationError as error:
        raise InvalidField(f"settings: in {where}: {error}") from None


def _checked(found: dict[str, Any], where: str, strict: bool = True) -> dict[str, Any]:
    """The same settings with the right types. Raises InvalidField, which names their source."""
    settings = _convert(found, where, strict)
    return {name: getattr(settings, name) for name in found}


def _read_file(path: str, other_owner: bool) -> dict[str, Any]:
    try:
        content = read_named(path, _CONFIG_BYTES_MAX, other_owner=other_owner)
    except OtherOwner as error:
        raise InvalidField(
            f"config: {path!r} {error.strerror}, or say --insecure-other-owner"
        ) from None
    except OSError as error:
        raise InvalidField(f"config: cannot read {path!r}: {error.strerror}") from None
    if path.endswith(ENDING):
        try:
            return read_elasticmq(content.decode(), path)
        except UnicodeDecodeError:
            raise InvalidField(f"config: {path!r} is not UTF-8") from None
    try:
        return tomllib.loads(content.decode())
    except RecursionError:
        raise InvalidField(f"config: {path!r} has values that are nested too deeply") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number of thousands of digits
        raise InvalidField(f"config: {path!r} is not TOML: {error}") from None


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if variable not in _VARIABLES:
            raise InvalidField(_unknown_variable(variable))
        found[name] = read_keys(text) if name == "keys" else text
        if name == "allow_hosts":
            found[name] = [host.strip() for host in text.split(",") if host.strip()]
    return found


_VARIABLES: Final = frozenset(
    PREFIX + name.upper() for name in ServerSettings.__struct_fields__ if name != "queues"
)


_ARGUMENTS_ONLY: Final = frozenset({f"{PREFIX}ACCEPT_LOSS", f"{PREFIX}KILL_BUTTON"})


def _unknown_variable(variable: str) -> str:
    if variable == f"{PREFIX}QUEUES":
        return f"{variable}: queues cannot be given in a variable; declare them in a config file"
    names = [each.removeprefix(PREFIX) for each in sorted(_VARIABLES - _ARGUMENTS_ONLY)]
    near = get_close_matches(variable.removeprefix(PREFIX).upper(), names, 1)
    hint = f"did you mean {PREFIX}{near[0]}?" if near else f"there are {PREFIX}{', '.join(names)}"
    return f"{variable}: there is no such setting; {hint}"


def read_keys(text: str) -> dict[str, str]:
    """Keys as `ID:SECRET,ID:SECRET`. Raises InvalidField."""
    keys: dict[str, str] = {}
    for pair in text.split(","):
        access_key, colon, secret = pair.strip().partition(":")
        if not (access_key and colon and secret):
            raise InvalidField("keys: expected ID:SECRET, several of them separated by commas")
        keys[access_key] = secret
    return keys


def _check_key(access_key: str, secret: str) -> None:
    if not access_key or access_key != access_key.strip():
        raise InvalidField(f"keys: {access_key!r} is not an access key")
    if len(secret.strip()) < SECRET_CHARS_MIN:
        raise InvalidField(
            f"keys: the secret of {access_key!r} has {len(secret.strip())} characters; "
            f"at least {SECRET_CHARS_MIN} are needed"
        )


def _check_for_tests(settings: ServerSettings) -> None:
    """Refuses a clock, or chaos, where it could harm more than a test. Raises InvalidField."""
    if settings.clock is None and settings.chaos is None:
        return
    name = "chaos" if settings.clock is None else "clock"
    if settings.clock not in (None, *CLOCKS):
        raise InvalidField(f"clock: {settings.clock!r} is none of {', '.join(CLOCKS)}")
    if settings.chaos is not None and not 0 <= settings.chaos < 2**63:
        raise InvalidField(f"chaos: {settings.chaos} is outside 0 to {2**63 - 1}")
    if not settings.on_loopback:
        raise InvalidField(
            f"{name}: is for tests on this machine, and {settings.host} can be reached by others; "
            "listen on 127.0.0.1"
        )
    if read_url(settings.where).scheme != "memory":
        raise InvalidField(
            f"{name}: is for a store in memory, and {without_password(settings.where)!r} is not: "
            "leave out the store, or give memory:"
        )
    if settings.carrot is not None:
        raise InvalidField(f"{name}: a Carrot broker has only real time; leave out one of the two")


def _check(settings: ServerSettings) -> None:
    if not 0 <= settings.port <= 65_535:
        raise InvalidField(f"port: {settings.port} is outside 0 to 65535")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise InvalidField("tls_cert and tls_key go together: give both or neither")
    if settings.log_format not in LINE_FORMATS:
        raise InvalidField(
            f"log_format: {settings.log_format!r} is none of {', '.join(LINE_FORMATS)}"
        )
    if not 0 < settings.slow_request <= 86_400:
        raise InvalidField("slow_request: expected more than 0 and at most 86400 seconds")
    if not (settings.account.isascii() and settings.account.isdigit()):
        raise InvalidField(f"account: {settings.account!r} is not twelve digits")
    if len(settings.account) != 12:
        raise InvalidField(f"account: {settings.account!r} is not twelve digits")
    if settings.store is not None and settings.durability != "sync":
        raise InvalidField(
            f"durability: {settings.durability!r} goes with data; a store is given it in its URL: "
            f"file:PATH?durability={settings.durability}"
        )
    if settings.store is None and "?" in settings.data:
        raise InvalidField(
            f"data: {settings.data!r} has a '?', which begins the options of a URL; give options "
            "in store: file:PATH?OPTION=VALUE"
        )
    for host in settings.allow_hosts:
        if _HOST.fullmatch(host) is None:
            raise InvalidField(
                f"allow_hosts: {host!r} is not a host's name; give it without a port"
            )
    for name in ("deleted_window", "purged_window"):
        if not 0 <= (getattr(settings, name) or 0) <= 86_400:
            raise InvalidField(f"{name}: expected 0 to 86400 seconds")
    for access_key, secret in settings.keys.items():
        _check_key(access_key, secret)
    if settings.ready_strict and settings.ready_dir is None:
        raise InvalidField("ready_strict: is for the programs of a directory; give ready_dir, too")
    if settings.token_file is not None and settings.carrot is None:
        raise InvalidField("token_file: is for the clients of a Carrot broker; give carrot, too")
    if settings.on_loopback:
        return
    if settings.kill_button:
        raise InvalidField(f"kill_button: not with the host {settings.host}: only on loopback")
    if not settings.keys and not settings.insecure_without_keys:
        raise InvalidField(
            f"host: {settings.host} can be reached by others, so the server needs keys to check "
            "signatures with (or --insecure-without-keys, which lets anyone in)"
        )
    if settings.tls_cert is None and not settings.insecure_without_tls:
        raise InvalidField(
            f"host: {settings.host} can be reached by others, so the server needs --tls-cert and "
            "--tls-key (or --insecure-without-tls, which lets anyone listen)"
        )
