"""moejax-serve: an OpenAI-compatible server for one model."""

import argparse
import dataclasses
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import moejax
from moejax.errors import ConfigError, MoejaxError
from moejax_serving.config import EngineConfig
from moejax_serving.environment import prepare_environment
from moejax_serving.sizes import parse_size

if TYPE_CHECKING:
    from moejax_serving.async_engine import AsyncEngine

_LOG_LEVELS = ("debug", "info", "warning", "error")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until it is interrupted; returns the exit status."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # jax reports every backend that a machine does not have.
    logging.getLogger("jax").setLevel(logging.WARNING)
    prepare_environment(os.environ)
    try:
        _serve(args, _engine_config(args))
    except MoejaxError as error:
        print(f"moejax-serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("moejax-serve: interrupted", file=sys.stderr)
        return 130
    return 0


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None: there the help says what happens."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="moejax-serve",
        description="Serves a Mixture-of-Experts model over HTTP, as OpenAI's API does.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder of moejax-convert or a Hugging Face folder; left out: the built-in demo",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {moejax.__version__}")
    _add_server_flags(parser.add_argument_group("server"))
    _add_engine_flags(parser.add_argument_group("engine"))
    return parser.parse_args([_with_dashes(argument) for argument in argv])


def _add_server_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every network"
    )
    group.add_argument("--port", type=_port, default=8000, help="port to listen on; 0: a free one")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests may use for the model; left out: the model's own",
    )
    group.add_argument(
        "--max-queued-requests",
        type=_positive,
        default=512,
        metavar="N",
        help="requests that may wait or run; more are answered with status 429",
    )
    group.add_argument("--log-level", choices=_LOG_LEVELS, default="info", help="what to log")


def _add_engine_flags(group: "argparse._ArgumentGroup") -> None:
    """Flags with the names and the defaults of EngineConfig's fields."""
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}

    def add(name: str, help: str, **options: Any) -> None:
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, default=defaults[name], help=help, **options)

    add(
        "dtype",
        "what to compute in; auto: as the checkpoint says",
        choices=("auto", "float32", "bfloat16"),
    )
    add(
        "memory_budget",
        "device memory for everything, such as 10GB or 8GiB; left out: 90 %% of a GPU, or on a CPU "
        "the model and 1GiB",
        type=_size,
        metavar="SIZE",
    )
    add(
        "max_model_len",
        "most tokens of prompt and answer together; left out: the model's, or what fits",
        type=_positive,
        metavar="N",
    )
    add("max_num_seqs", "most sequences in one step", type=_positive, metavar="N")
    add("max_num_batched_tokens", "most tokens in one step", type=_positive, metavar="N")
    add("seed", "seed for requests without one of their own", type=int, metavar="N")


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in vars(args).items() if name in names})


def _serve(args: argparse.Namespace, config: EngineConfig) -> None:
    # Imported here, since they take seconds and --help needs none of them.
    from moejax_serving.async_engine import AsyncEngine
    from moejax_serving.http import create_app
    from moejax_serving.server import base_url, bind, serve

    with bind(args.host, args.port) as listener:
        from moejax_serving.load import load_engine

        core = load_engine(args.model, config)
        names = args.served_model_name or [core.model_name]
        engine = AsyncEngine(core, max_queued_requests=args.max_queued_requests)
        try:
            app = create_app(engine, names, core.default_sampling)
            listener.listen(2048)  # from here on, requests wait rather than fail
            _print_greeting(base_url(listener), names[0], engine)
            serve(app, engine, listener)
        finally:
            engine.shutdown()


def _print_greeting(url: str, model: str, engine: "AsyncEngine") -> None:
    prompt = [1, 2, 3] if engine.tokenizer is None else "Once upon a time"
    max_tokens = max(1, min(32, engine.max_model_len // 2))
    body = shlex.quote(json.dumps({"model": model, "prompt": prompt, "max_tokens": max_tokens}))
    print(f"moejax-serve: {model} is served at {url}\n", flush=True)
    print(
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' -d {body}\n", flush=True
    )


def _with_dashes(argument: str) -> str:
    """--max_num_seqs=8 as --max-num-seqs=8: both spellings are in use."""
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
