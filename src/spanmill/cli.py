"""The command line: `spanmill serve`, `spanmill build`, `spanmill run`, `spanmill stats`.

Exit codes: 0 done, 1 failed, 2 wrong usage. An error of ours is one line on stderr, never a traceback. A command hands
on what was typed and nothing else, so that environment and configuration file can decide the rest. It imports what it
needs when it runs: help is quick, and an install without the collector can say what is missing.
"""

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer
from typer.main import get_command

import spanmill
from spanmill.collector.config import BuildConfig, ExportConfig, ServeConfig, load, load_config
from spanmill.errors import ConfigError, SpanmillError
from spanmill.storage import locate

_DATASET: Final = "folder of a dataset, or its URL: s3://BUCKET/... or gs://BUCKET/..."
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return its exit code."""
    try:
        get_command(app).main(args=arguments, prog_name="spanmill")
    except SystemExit as end:  # typer ends every command with one, having printed what was wrong with the usage
        return end.code if isinstance(end.code, int) else 1
    except (SpanmillError, OSError) as error:  # a busy port, a full disk
        print(f"spanmill: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "spanmill":
            raise
        extras = {"aiohttp": "gateway", "msgspec": "export", "safetensors": "export", "ray": "ray", "obstore": "stores"}
        print(
            f"spanmill: this command needs {missing}, which is not installed: "
            f"pip install 'spanmill[{extras.get(missing, 'collector')}]'",
            file=sys.stderr,
        )
        return 1
    return 0


def with_options(config: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one more option per field of its configuration, all of them None where nothing was typed.

    The command takes them as keyword arguments by field name.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters = [*own, *_options(config)]
        signed = cast("Any", command)
        signed.__signature__ = inspect.Signature(parameters)
        signed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _options(config: type) -> Iterator[inspect.Parameter]:
    for option in fields(config):
        kind = bool if option.type is bool else str
        name = f"--{option.name.replace('_', '-')}"
        shown = typer.Option(name, help=_help(option), show_default=False, metavar=None if kind is bool else "VALUE")
        yield inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, shown]
        )


def _help(option: Field[Any]) -> str:
    """An option's help text with its default as it would be typed."""
    text, default = option.metadata["help"], option.default
    if default is MISSING:
        return f"{text} (required)"
    if default is None or default is False or default == ():
        return text
    return f"{text} (default: {f'{default:g}' if isinstance(default, float) else default})"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"spanmill {spanmill.__version__}")
        raise typer.Exit


@app.callback()
def _spanmill(  # pyright: ignore[reportUnusedFunction]  typer calls it
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """OpenTelemetry spans into training data for language-model reinforcement learning."""


@app.command()
@with_options(ServeConfig)
def serve(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="file with any of these options as keys")
    ] = None,
    **flags: object,
) -> None:
    """Receive spans over OTLP and write training rows as rollouts complete."""
    settings = load_config(flags, os.environ, config)
    from spanmill.collector.service import serve

    raise typer.Exit(serve(settings))


@app.command()
@with_options(BuildConfig)
def build(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="journals, OTLP JSON lines or protobuf: files, folders, s3:// or gs://"
        ),
    ],
    **flags: object,
) -> None:
    """Build a dataset from recorded spans, in one go."""
    settings = load(BuildConfig, flags, os.environ)
    from spanmill.collector.build import build

    raise typer.Exit(build([locate(given) for given in inputs], settings))


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="the command, with its own options")],
    rollout_id: Annotated[
        str | None, typer.Option(metavar="ID", help="of the rollout, or of a whole run of tasks (default: a new one)")
    ] = None,
    attempt: Annotated[int | None, typer.Option(metavar="N", help="number of the run (default: 0)")] = None,
    group_id: Annotated[str | None, typer.Option(metavar="ID", help="rollouts that are compared")] = None,
    task_id: Annotated[str | None, typer.Option(metavar="ID", help="the dataset row it works on")] = None,
    mode: Annotated[str | None, typer.Option(metavar="M", help="train, val or test")] = None,
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="OTLP receiver of its spans")] = None,
    base_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="model server with the plugin, or gateway, that clients are pointed at"),
    ] = None,
    reward_from_exit: Annotated[
        bool, typer.Option("--reward-from-exit", help="reward 1 if the command succeeds, else 0")
    ] = False,
    reward_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="where the command writes its rewards")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="FILE.jsonl", help="run CMD for each of these, {input} filled in")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(metavar="N", help="rollouts for each task: the size of its group (default: 1)")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(metavar="N", help="rollouts at once (default: the number of cores)")
    ] = None,
    retries: Annotated[
        int | None, typer.Option(metavar="N", help="more attempts at a rollout that fails (default: 0)")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="end an attempt that takes longer (default: never)")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="FILE", help="keep what is done there, and leave alone what was done")
    ] = None,
) -> None:
    """Run a command as one rollout, or as many; its exit code decides the status.

    The code of one is passed on; of many it is 0 if all succeeded, else 1.
    """
    many: dict[str, Any] = {"repeat": repeat, "parallel": parallel, "retries": retries, "timeout_s": timeout}
    if tasks is not None:
        from spanmill.instrument.runner import Options, run_tasks

        alone = {"attempt": attempt, "group-id": group_id, "task-id": task_id, "reward-file": reward_file}
        _refuse(alone, "is of one rollout, not of --tasks, which have their own")
        options = Options(**{name: value for name, value in many.items() if value is not None})._replace(
            endpoint=endpoint, base_url=base_url, reward_from_exit=reward_from_exit
        )
        raise typer.Exit(run_tasks(command, tasks, options, run_id=rollout_id, mode=mode, resume=resume))
    _refuse({**many, "resume": resume}, "needs --tasks FILE")
    from spanmill.instrument.run import run

    code = run(
        command,
        rollout_id=rollout_id,
        attempt=attempt,
        group_id=group_id,
        task_id=task_id,
        mode=mode,
        endpoint=endpoint,
        base_url=base_url,
        reward_from_exit=reward_from_exit,
        reward_file=reward_file,
    )
    raise typer.Exit(code)


def _refuse(options: Mapping[str, object], why: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"--{name.removesuffix('_s')} {why}")


@app.command()
def gateway(
    upstream: Annotated[str, typer.Option(metavar="URL", help="the model server", envvar="SPANMILL_UPSTREAM")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="where clients connect", envvar="SPANMILL_LISTEN")
    ] = "127.0.0.1:8800",
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="OTLP receiver of its spans", envvar="SPANMILL_ENDPOINT")
    ] = None,
) -> None:
    """Pass requests on to a model server and record what it samples."""
    from spanmill.instrument.gateway import gateway

    raise typer.Exit(gateway(upstream, listen, endpoint))


@app.command(context_settings={"ignore_unknown_options": True})  # else -0.5 would be one
def reward(
    rollout: Annotated[str | None, typer.Argument(metavar="ROLLOUT", help="its id")] = None,
    value: Annotated[str | None, typer.Argument(metavar="VALUE", help="a number, or true or false")] = None,
    attempt: Annotated[int | None, typer.Option(help="the attempt that is meant; else the highest", min=0)] = None,
    call: Annotated[str | None, typer.Option(metavar="ID", help="the call that is rewarded, else the rollout")] = None,
    name: Annotated[
        str | None, typer.Option(help="of the reward; only those without one, reward and final count")
    ] = None,
    table: Annotated[Path | None, typer.Option("--from", help="a table of rewards instead of ROLLOUT VALUE")] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="the collector's HTTP address", envvar="SPANMILL_ENDPOINT")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="the collector's bearer token, on its first line; else SPANMILL_TOKEN, OTEL_EXPORTER_OTLP_HEADERS",
            envvar="SPANMILL_TOKEN_FILE",
        ),
    ] = None,
) -> None:
    """Reward a rollout, or many from a Parquet, CSV or JSON lines table, at a running `spanmill serve`."""
    from spanmill.instrument.credentials import read_token
    from spanmill.instrument.posted import DEFAULT_ENDPOINT, RewardFields, post_rewards, said

    rewards: Iterable[RewardFields]
    if table is None:
        if rollout is None or value is None:
            raise ConfigError("ROLLOUT and VALUE are missing, or --from FILE in their place")
        fields = {"rollout_id": rollout, "value": _reward_value(value)}
        rewards = [fields | {"attempt": attempt, "call_id": call, "name": name}]
    elif any(given is not None for given in (rollout, value, attempt, call, name)):
        raise ConfigError(
            "--from FILE has all that is to be said of its rewards: leave ROLLOUT, VALUE and the rest out"
        )
    else:
        rewards = _table_rewards(table)
    token = None if token_file is None else read_token(token_file)
    print(said(post_rewards(rewards, endpoint or DEFAULT_ENDPOINT, token=token)))


def _reward_value(text: str) -> float:
    if text.lower() in ("true", "false"):
        return float(text.lower() == "true")
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"VALUE is {text!r}: expected a number, or true or false") from None
    if not math.isfinite(number):
        raise ConfigError(f"VALUE is {text}: a reward is a finite number; nothing was sent")
    return number


def _table_rewards(table: Path) -> Iterator[dict[str, Any]]:
    """The rewards of a table as they are posted; says how many of them cannot count."""
    from spanmill.collector.inputs import read_rewards

    odd = 0
    for row in read_rewards(table):
        odd += not math.isfinite(row.value)
        name = row.name or None
        found = {"rollout_id": row.rollout_id, "value": row.value, "attempt": row.attempt}
        yield found | {"call_id": row.call_id, "name": name}
    if odd:
        counted = "1 of the values is" if odd == 1 else f"{odd} of the values are"
        told = f"{counted} NaN or infinite and counts nowhere: quarantined as nonfinite_reward"
        print(f"spanmill: {told}", file=sys.stderr)


@app.command()
def show(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help=_DATASET)],
    rollout: Annotated[
        str | None, typer.Argument(metavar="[ROLLOUT]", help="its id, or the beginning of it", show_default=False)
    ] = None,
    attempt: Annotated[int | None, typer.Option(help="only this attempt", min=0)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="the rows as JSON: a rollout a line, or one with all")
    ] = False,
) -> None:
    """Show the rollouts of a dataset, or one rollout as a tree and as tokens."""
    from spanmill.collector.show import show

    show(dataset, rollout, attempt, as_json=as_json)


@app.command()
def doctor(
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="OTLP receiver of the spans", envvar="SPANMILL_ENDPOINT")
    ] = None,
    vllm: Annotated[list[str] | None, typer.Option(metavar="URL", help="a running model server")] = None,
    collector_config: Annotated[
        list[Path] | None, typer.Option(metavar="FILE.yaml", help="configuration of a Go collector in front")
    ] = None,
    python: Annotated[list[str] | None, typer.Option(metavar="PATH", help="another Python, that agents run by")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Show what is installed, patched and reachable, and what would lose data; exits 1 if anything does."""
    from spanmill.doctor import doctor

    raise typer.Exit(doctor(endpoint, vllm or (), collector_config or (), python or (), as_json=as_json))


@app.command()
def stats(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help=_DATASET)],
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON object")] = False,
) -> None:
    """Show what became of every call and every sampled token of a dataset."""
    from spanmill.collector.stats import loss_report

    print(loss_report(dataset, as_json=as_json), end="")


@app.command()
@with_options(ExportConfig)
def export(dataset: Annotated[str, typer.Argument(metavar="DATASET", help=_DATASET)], **flags: object) -> None:
    """Write a dataset in the form that a trainer reads, and say what was left out and why."""
    # Not from the environment: SPANMILL_MODE, say, tells a running agent what it is.
    settings = vars(load(ExportConfig, flags, {}))
    from spanmill.triplets.exports import Fill
    from spanmill.triplets.exports import export as write
    from spanmill.triplets.select import Selection

    fill = Fill(
        settings["fill_reward"], settings["fill_temperature"], settings["fill_policy_version"], settings["pad_token_id"]
    )
    selection = Selection(**{option.name: settings[option.name] for option in fields(Selection)})
    print(write(dataset, settings["to"], settings["out"], selection, fill).text, end="")


@app.command()
def view(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help=_DATASET)],
    port: Annotated[int, typer.Option(help="where the browser finds it; 0 takes a free one", min=0, max=65535)] = 8080,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="tokenizer.json, or its folder: tokens are shown as text")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="tokens that open the pages, one a line, as a password")
    ] = None,
) -> None:
    """Show a dataset in a browser: every rollout, call and token, and why it is trained or not."""
    from spanmill.collector.view.app import view

    raise typer.Exit(view(locate(dataset), host, port, tokenizer, token_file))
