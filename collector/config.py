"""Configuration: one dataclass a command, filled from flags, environment and TOML file.

Every field is an option. Its metadata has `help`, and `parse`, which turns what was given (text, or a TOML value) into
the field's type or raises ValueError with what was expected.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

from spanmill.collector.config_values import (
    Address,
    parse_address,
    parse_count,
    parse_duration,
    parse_gib,
    parse_headers,
    parse_location,
    parse_names,
    parse_number,
    parse_one_of,
    parse_path,
    parse_positive_duration,
    parse_switch,
    parse_text,
    parse_url,
)
from spanmill.errors import ConfigError
from spanmill.storage import Location

Merge = Literal["prefix", "none", "realign"]

LogFormat = Literal["text", "json"]
Engine = Literal["local", "ray"]

MERGES: Final[tuple[Merge, ...]] = ("prefix", "none", "realign")
LOG_FORMATS: Final[tuple[LogFormat, ...]] = ("text", "json")
ENGINES: Final[tuple[Engine, ...]] = ("local", "ray")

_ENVIRON_PREFIX: Final = "SPANMILL_"

T = TypeVar("T")


def about(parse: Callable[[object], object], help: str) -> Mapping[str, Any]:
    """The metadata of an option."""
    return {"help": help, "parse": parse}


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """What decides how rows look; the same for every command that makes some."""

    out: Location = field(
        metadata=about(
            parse_location, "folder of the dataset, or its URL in a store: s3://BUCKET/... or gs://BUCKET/..."
        )
    )
    merge: Merge = field(
        default="prefix", metadata=about(parse_one_of(*MERGES), "how calls become Episodes: prefix, none or realign")
    )
    reward_names: tuple[str, ...] = field(
        default=(), metadata=about(parse_names, "further names of rewards that count, separated by commas")
    )
    realign_tokens: int = field(
        default=1024,
        metadata=about(parse_count(0, 1 << 31), "with --merge realign, the most tokens at a turn's end that may drift"),
    )
    train_failed: bool = field(
        default=False, metadata=about(parse_switch, "train on failed rollouts without a final reward, too")
    )


@dataclass(frozen=True, kw_only=True)
class BuildConfig(RowConfig):
    """The options of `spanmill build`."""

    rewards: Location | None = field(
        default=None, metadata=about(parse_location, "table of rewards: Parquet, CSV or JSON lines")
    )
    workers: int | None = field(
        default=None, metadata=about(parse_count(1, 1024), "processes that do the work (default: the cores)")
    )
    engine: Engine = field(
        default="local",
        metadata=about(parse_one_of(*ENGINES), "local, or ray: Ray Data on one machine or, by RAY_ADDRESS, many"),
    )
    work: Path | None = field(
        default=None,
        metadata=about(parse_path, "with --engine ray, a folder that all its workers share (default: that of --out)"),
    )


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The options of `spanmill export`: those of `triplets.select.Selection` and `triplets.exports.Fill`, by name."""

    to: str = field(
        metadata=about(
            parse_text,
            "verl, verl-rollouts, verl-prompts, trl-sft, trl-grpo, trl-async, skyrl, skyrl-sft, prime-rl, areal, "
            "slime, tinker, nemo-rl, nemo-gym, atif, sft or dpo",
        )
    )
    out: Path = field(metadata=about(parse_path, "file or folder that is made"))
    model: tuple[str, ...] = field(default=(), metadata=about(parse_names, "only these models, separated by commas"))
    mode: tuple[str, ...] = field(default=(), metadata=about(parse_names, "only these modes, such as train"))
    status: tuple[str, ...] = field(
        default=(), metadata=about(parse_names, "only the last attempts that ended so (else the last usable ones)")
    )
    task_id: tuple[str, ...] = field(default=(), metadata=about(parse_names, "only these tasks"))
    rollout_prefix: str | None = field(
        default=None, metadata=about(parse_text, "only rollouts whose id begins so, such as batch/7/")
    )
    agent: str | None = field(
        default=None, metadata=about(parse_text, "only agents in whose name this regular expression is found")
    )
    min_reward: float | None = field(
        default=None, metadata=about(parse_number, "only rollouts with at least this reward")
    )
    max_reward: float | None = field(
        default=None, metadata=about(parse_number, "only rollouts with at most this reward")
    )
    max_policy_age: int | None = field(
        default=None,
        metadata=about(parse_count(0, 1 << 31), "only rollouts whose oldest token is at most this many versions old"),
    )
    policy_version: int | None = field(
        default=None,
        metadata=about(parse_count(0, 1 << 62), "the version that ages count from (default: the newest there is)"),
    )
    whole_groups: bool = field(
        default=False, metadata=about(parse_switch, "only groups of which no rollout is missing")
    )
    logprobs: str = field(
        default="one",
        metadata=about(
            parse_one_of("one", "raw", "processed", "any", "none"),
            "one mode, whichever; raw or processed; any, mixed; none: leave them out",
        ),
    )
    mix_models: bool = field(default=False, metadata=about(parse_switch, "allow several models in one export"))
    max_tokens: int | None = field(
        default=None, metadata=about(parse_count(1, 1 << 31), "only sequences of at most this many tokens")
    )
    overlong: str = field(
        default="drop",
        metadata=about(parse_one_of("drop", "truncate"), "what becomes of longer ones: drop or truncate"),
    )
    fill_reward: float | None = field(
        default=None, metadata=about(parse_number, "the reward where none was recorded (else such rows are left out)")
    )
    fill_temperature: float | None = field(
        default=None, metadata=about(parse_number, "the temperature where none was recorded, likewise")
    )
    fill_policy_version: int | None = field(
        default=None,
        metadata=about(parse_count(0, 1 << 62), "the policy version where no whole number was recorded, likewise"),
    )
    pad_token_id: int = field(
        default=0, metadata=about(parse_count(0, (1 << 31) - 1), "what token ids in tensors are padded with")
    )


@dataclass(frozen=True, kw_only=True)
class ServeConfig(RowConfig):
    """The options of `spanmill serve`. Durations are in seconds."""

    journal: Path | None = field(
        default=None, metadata=about(parse_path, "folder of the journal; OUT/.journal if not given")
    )
    grpc: Address = field(default=Address("127.0.0.1", 4317), metadata=about(parse_address, "address for OTLP/gRPC"))
    http: Address = field(default=Address("127.0.0.1", 4318), metadata=about(parse_address, "address for OTLP/HTTP"))
    idle_timeout: float = field(
        default=600.0, metadata=about(parse_positive_duration, "close a rollout after this time without a span")
    )
    settle: float = field(
        default=10.0, metadata=about(parse_duration, "wait this long after the newest span of an ended rollout")
    )
    max_open: float = field(
        default=86400.0,
        metadata=about(parse_positive_duration, "close even a rollout that will report its end after this time"),
    )
    await_reward: float = field(
        default=0.0, metadata=about(parse_duration, "wait up to this long for the final reward of a closed rollout")
    )
    flush_interval: float = field(
        default=5.0, metadata=about(parse_positive_duration, "write closed rollouts this often")
    )
    flush_on_exit: bool = field(
        default=False, metadata=about(parse_switch, "close every rollout when the service stops")
    )
    drain_timeout: float = field(default=30.0, metadata=about(parse_duration, "how long stopping may take"))
    max_message_mib: int = field(
        default=64, metadata=about(parse_count(1, 2047), "largest request after decompression")
    )
    max_inflight_mib: int = field(
        default=512, metadata=about(parse_count(1, 1 << 20), "how much may be received and not yet on disk")
    )
    min_free_mib: int = field(
        default=512, metadata=about(parse_count(0, 1 << 30), "refuse requests while the disk has less than this left")
    )
    journal_max_gib: float = field(
        default=50.0, metadata=about(parse_gib, "remove the oldest of the journal above this size, once it is written")
    )
    journal_max_age: float = field(
        default=7 * 86400.0,
        metadata=about(parse_positive_duration, "write what is older as it is, and remove it from the journal"),
    )
    workers: int = field(
        default=1, metadata=about(parse_count(1, 256), "processes that receive, each with its own part of the journal")
    )
    tls_cert: Path | None = field(
        default=None, metadata=about(parse_path, "file with the certificate chain (PEM): serve over TLS")
    )
    tls_key: Path | None = field(default=None, metadata=about(parse_path, "file with its private key (PEM)"))
    tls_client_ca: Path | None = field(
        default=None, metadata=about(parse_path, "take requests only from clients with a certificate by this CA (PEM)")
    )
    token_file: Path | None = field(
        default=None, metadata=about(parse_path, "file with the bearer tokens that may send, one a line")
    )
    forward: str | None = field(
        default=None,
        metadata=about(parse_url, "pass every request on to this OTLP endpoint, such as http://tempo:4318"),
    )
    forward_queue_mib: int = field(
        default=256, metadata=about(parse_count(1, 1 << 20), "how much may wait to be passed on; what is more is not")
    )
    forward_headers: tuple[str, ...] = field(
        default=(), metadata=about(parse_headers, "headers for that endpoint, NAME=VALUE, separated by commas")
    )
    log_format: LogFormat = field(
        default="text", metadata=about(parse_one_of(*LOG_FORMATS), "how messages look: text or json")
    )

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("--tls-cert", "--tls-key") if self.tls_cert else ("--tls-key", "--tls-cert")
            raise ConfigError(f"{given} is given without {missing}: TLS needs both")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("--tls-client-ca is given without --tls-cert and --tls-key: there is no TLS without them")
        if self.journal is None and not isinstance(self.out, Path):
            raise ConfigError(
                f"--journal is missing: --out {self.out} needs a folder of this machine beside it, "
                "where what was acknowledged is"
            )
        if self.max_inflight_mib < self.max_message_mib:
            raise ConfigError(
                f"--max-inflight-mib is {self.max_inflight_mib}, which has no room for one request of "
                f"--max-message-mib {self.max_message_mib}: expected at least as much"
            )

    @property
    def journal_folder(self) -> Path:
        """Where the journal is."""
        if self.journal is None and isinstance(self.out, Path):
            return self.out / ".journal"
        return cast("Path", self.journal)  # of an object store it is never missing


def load_config(flags: Mapping[str, object], environ: Mapping[str, str], toml_path: Path | None) -> ServeConfig:
    """The configuration of `spanmill serve`, see `load`; the file may also be named by SPANMILL_CONFIG."""
    if toml_path is None and environ.get("SPANMILL_CONFIG"):
        toml_path = Path(environ["SPANMILL_CONFIG"])
    return load(ServeConfig, flags, environ, toml_path)


def load(cls: type[T], flags: Mapping[str, object], environ: Mapping[str, str], toml_path: Path | None = None) -> T:
    """A `cls` from `flags` (by field name, None if not given), else from `SPANMILL_<NAME>`, else from the TOML file.

    Raises ConfigError, in one line that names option and value: for an unknown flag or key, an impossible value, a
    missing option, a file that cannot be read. Unknown variables are left alone, other parts of spanmill have theirs.
    """
    options = {option.name: option for option in fields(cast("Any", cls))}
    given: dict[str, tuple[str, object]] = {}
    if toml_path is not None:
        given |= _from_toml(toml_path, options)
    for name in options:
        variable = _ENVIRON_PREFIX + name.upper()
        if variable in environ:
            given[name] = variable, environ[variable]
    for name, value in flags.items():
        if name not in options:
            raise ConfigError(f"{_flag(name)} is no option of this command")
        if value is not None:
            given[name] = _flag(name), value
    for name, option in options.items():
        if name not in given and option.default is MISSING:
            raise ConfigError(f"{_flag(name)} is missing: {option.metadata['help']}")
    return cls(**{name: _parsed(options[name], source, value) for name, (source, value) in given.items()})


def _from_toml(path: Path, options: Mapping[str, object]) -> dict[str, tuple[str, object]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--config {path} is no TOML: {error}") from error
    given: dict[str, tuple[str, object]] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in options:
            raise ConfigError(f"unknown key {key!r} in {path}")
        if name in given:
            raise ConfigError(f"key {key!r} stands twice in {path}, with - and with _")
        given[name] = f"{key} in {path}", value
    return given


def _parsed(option: Field[Any], source: str, value: object) -> object:
    try:
        return option.metadata["parse"](value)
    except ValueError as error:
        # Headers may hold a secret.
        shown = "not readable" if option.name == "forward_headers" else repr(value)
        raise ConfigError(f"{source} is {shown}: expected {error}") from error


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
