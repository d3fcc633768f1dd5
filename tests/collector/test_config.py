from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from spanmill.collector.config import BuildConfig, ServeConfig, load, load_config
from spanmill.collector.config_values import Address, parse_address, parse_duration
from spanmill.errors import ConfigError


def test_defaults_are_those_of_the_command_line() -> None:
    """Only --out has to be given."""
    assert load_config({"out": "data", "merge": None}, {}, None) == ServeConfig(
        out=Path("data"),
        journal=None,
        grpc=Address("127.0.0.1", 4317),
        http=Address("127.0.0.1", 4318),
        idle_timeout=600,
        settle=10,
        max_open=24 * 3600,
        await_reward=0,
        flush_interval=5,
        flush_on_exit=False,
        drain_timeout=30,
        max_message_mib=64,
        max_inflight_mib=512,
        merge="prefix",
        reward_names=(),
        realign_tokens=1024,
        train_failed=False,
    )


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    """Each option is taken from the first of the three that has it; keys may have - or _."""
    file = tmp_path / "spanmill.toml"
    file.write_text(
        'out = "file"\nmerge = "none"\nidle-timeout = "2m"\nreward_names = ["a", "b"]\ntrain-failed = true\n'
    )
    environ = {"SPANMILL_OUT": "environment", "SPANMILL_MERGE": "realign", "SPANMILL_CAPTURE_TEXT": "0"}

    config = load_config({"out": Path("flag"), "http": "[::1]:0"}, environ, file)

    assert config == ServeConfig(
        out=Path("flag"),
        merge="realign",
        idle_timeout=120,
        reward_names=("a", "b"),
        train_failed=True,
        http=Address("::1", 0),
    )


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    """SPANMILL_CONFIG stands for --config, which beats it."""
    for name in ("flag", "environment"):
        (tmp_path / name).write_text(f'out = "{name}"\n')
    environ = {"SPANMILL_CONFIG": str(tmp_path / "environment")}

    assert load_config({}, environ, None).out == Path("environment")
    assert load_config({}, environ, tmp_path / "flag").out == Path("flag")


def test_every_command_loads_the_same_way() -> None:
    """The loader takes the options from the dataclass, so `build` knows its own and not those of `serve`."""
    environ = {"SPANMILL_REWARDS": "r.csv", "SPANMILL_GRPC": "none of its business"}
    assert load(BuildConfig, {"out": "data", "reward_names": "a, b"}, environ) == BuildConfig(
        out=Path("data"), rewards=Path("r.csv"), reward_names=("a", "b")
    )


def test_every_option_explains_itself() -> None:
    """The command line takes its help from the fields."""
    assert [
        option.name for cls in (ServeConfig, BuildConfig) for option in fields(cls) if not option.metadata["help"]
    ] == []


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({}, {}, "--out is missing: folder of the dataset, or its URL in a store: s3://BUCKET/... or gs://BUCKET/..."),
        ({"out": ""}, {}, "--out is '': expected a folder, s3://BUCKET/... or gs://BUCKET/..."),
        ({"out": "d", "idle": 1}, {}, "--idle is no option of this command"),
        (
            {"out": "d", "grpc": "4317"},
            {},
            "--grpc is '4317': expected HOST:PORT, such as 127.0.0.1:4317 or [::1]:4317",
        ),
        ({"out": "d", "merge": "all"}, {}, "--merge is 'all': expected one of prefix, none, realign"),
        (
            {"out": "d", "settle": "soon"},
            {},
            "--settle is 'soon': expected seconds or a duration, such as 90, 500ms, 10s, 24h or 7d",
        ),
        ({"out": "d"}, {"SPANMILL_FLUSH_INTERVAL": "0"}, "SPANMILL_FLUSH_INTERVAL is '0': expected a duration above 0"),
        ({"out": "d"}, {"SPANMILL_TRAIN_FAILED": "maybe"}, "SPANMILL_TRAIN_FAILED is 'maybe': expected true or false"),
        ({"out": "d", "max_message_mib": 0}, {}, "--max-message-mib is 0: expected a whole number from 1 to 2047"),
        ({"out": "d", "reward_names": "a,,b"}, {}, "--reward-names is 'a,,b': expected names separated by commas"),
        (
            {"out": "d", "max_message_mib": "600"},
            {},
            "--max-inflight-mib is 512, which has no room for one request of --max-message-mib 600: "
            "expected at least as much",
        ),
        (
            {"out": "d", "journal_max_gib": 0},
            {},
            "--journal-max-gib is 0: expected a number of GiB above 0, such as 50 or 0.5",
        ),
        ({"out": "d", "log_format": "xml"}, {}, "--log-format is 'xml': expected one of text, json"),
        (
            {"out": "d", "forward": "tempo:4317"},
            {},
            "--forward is 'tempo:4317': expected http://HOST:PORT, https://HOST, grpc://HOST:PORT or grpcs://HOST:PORT",
        ),
        (
            {"out": "d"},
            {"SPANMILL_FORWARD_HEADERS": "authorization: Bearer secret"},
            "SPANMILL_FORWARD_HEADERS is not readable: expected NAME=VALUE, separated by commas",
        ),
        ({"out": "d", "tls_key": "k"}, {}, "--tls-key is given without --tls-cert: TLS needs both"),
    ],
)
def test_what_cannot_work_is_named(flags: Mapping[str, object], environ: Mapping[str, str], message: str) -> None:
    """One line with the option as it was given, what was found and what was expected."""
    with pytest.raises(ConfigError) as caught:
        load_config(flags, environ, None)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("idle = 3", "unknown key 'idle' in {file}"),
        ("[serve]\nout = 1", "unknown key 'serve' in {file}"),
        ("max-open = 1\nmax_open = 2", "key 'max_open' stands twice in {file}, with - and with _"),
        (
            "max-open = -1",
            "max-open in {file} is -1: expected seconds or a duration, such as 90, 500ms, 10s, 24h or 7d",
        ),
        (
            "max-open = nan",
            "max-open in {file} is nan: expected seconds or a duration, such as 90, 500ms, 10s, 24h or 7d",
        ),
        ("max_message_mib = 1.5", "max_message_mib in {file} is 1.5: expected a whole number from 1 to 2047"),
        ("out =", "--config {file} is no TOML: Invalid value (at end of document)"),
        (None, "--config {file} cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_work_in_a_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    """One line with the key and the file."""
    file = tmp_path / "spanmill.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config({"out": "d"}, {}, file)
    assert str(caught.value) == message.format(file=file)


def test_endpoints_and_their_headers() -> None:
    """As they are typed, in a file also as a list."""
    urls = ["http://tempo:4318", "https://otlp.example/base/", "grpc://[::1]:4317", "grpcs://tempo:4317"]
    found = [load_config({"out": "d", "forward": url}, {}, None).forward for url in urls]
    assert [url.rstrip("/") for url in urls] == found
    config = load_config({"out": "d", "forward_headers": "a=b=c, x-key=", "journal_max_gib": "0.5"}, {}, None)
    assert (("a=b=c", "x-key="), 0.5) == (config.forward_headers, config.journal_max_gib)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:4317", Address("127.0.0.1", 4317)),
        ("localhost:0", Address("localhost", 0)),
        ("[::1]:4317", Address("::1", 4317)),
        ("[fe80::1%eth0]:80", Address("fe80::1%eth0", 80)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    """A host with a port, IPv6 in brackets; written back as it was read."""
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", ":4317", "host", "host:", "::1:4317", "host:65536", "host:-1", "http://host:1", 4317]
)
def test_no_addresses(text: object) -> None:
    """Anything else is refused, also a port on its own: which interfaces are open has to be said."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(90, 90), ("90", 90), (0.5, 0.5), ("500ms", 0.5), ("10s", 10), ("1.5h", 5400), ("24h", 86400), ("7d", 604800)],
)
def test_durations(value: object, seconds: float) -> None:
    """Seconds, or a number with a unit."""
    assert parse_duration(value) == seconds


@pytest.mark.parametrize("value", ["", "-1", "1w", "1h30", "h", -1, True, float("inf"), None])
def test_no_durations(value: object) -> None:
    """Anything else is refused."""
    with pytest.raises(ValueError, match="seconds or a duration"):
        parse_duration(value)
