"""moejax-serve: an OpenAI-compatible server for one model."""

import argparse
import dataclasses
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import moejax
from moejax.environment import prepare_environment
from moejax.errors import ConfigError, MoejaxError
from moejax_serving.config import KERNELS, PLANNERS, EngineConfig
from moejax_serving.sizes import parse_size, parse_width

if TYPE_CHECKING:
    from moejax_serving.async_engine import AsyncEngine

BUILT_IN_MODEL = "demo"
"""The name of the model that is served without arguments."""

_LOG_LEVELS = ("debug", "info", "warning", "error")
_INTERRUPTED = "moejax-serve: interrupted"


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
        return _serve(args, _engine_config(args))
    except MoejaxError as error:
        print(f"moejax-serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(_INTERRUPTED, file=sys.stderr)
        return 130


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
        help="names that requests may use for the model, after MODEL; left out: the model's own",
    )
    group.add_argument(
        "--max-queued-requests",
        type=_positive,
        default=512,
        metavar="N",
        help="requests that may wait or run; more are answered with status 429",
    )
    group.add_argument(
        "--step-timeout",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="a step that takes longer is taken to hang, and the server to be broken; 0: none",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="how long running requests may take after SIGINT or SIGTERM; 0: they are ended at "
        "once; left out: as long as they take, or until a second signal",
    )
    group.add_argument(
        "--log-level",
        choices=_LOG_LEVELS,
        default="info",
        help="what to log; info: the start, the end, and every ten seconds how fast it goes",
    )


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
    add(
        "max_num_batched_tokens",
        "most prompt tokens in one step, besides one token of each running answer",
        type=_positive,
        metavar="N",
    )
    add(
        "expert_bits",
        "width of the experts of a quantised model: auto (the widest that is stored, 16 too, with "
        "which a sequence of --max-model-len, or of the model's length up to 8192 tokens, fits "
        "into --memory-budget), 2 to 8, 16 (as they were, where the model was quantised with "
        "--keep-dense), or a file of widths (see serving/README.md)",
        type=_width_or_file,
        metavar="auto|BITS|FILE",
    )
    add(
        "linear_bits",
        "width of attention and shared experts, where they are quantised: one that is stored, 2 to "
        "8, or 16 as they were; auto: the widest of these",
        type=_width,
        metavar="auto|BITS",
    )
    add(
        "planner",
        "static: choose the widths of gate_up and of down of each expert by what they cost in "
        "accuracy, within --expert-memory, 16 among them where it is stored; dynamic: the same "
        "within all memory that KV does not need, changed while requests run, down to "
        "--expert-bits; off: as --expert-bits says",
        choices=PLANNERS,
    )
    add(
        "expert_memory",
        "memory for the experts, such as 10GB; needed with --planner static, and only with it. "
        "Whole pages count, as moejax-convert --inspect shows them",
        type=_size,
        metavar="SIZE",
    )
    add(
        "kernel",
        "what multiplies with experts and attends: reference (plain jax.numpy, on any device), "
        "triton (NVIDIA GPUs, float32 too), gluon (NVIDIA GPUs, bfloat16, made for few tokens), "
        "mosaic (NVIDIA GPUs of compute capability 9.0, bfloat16, made for many tokens); auto: "
        "what is made for a step and works here. What is named and does not work is refused",
        choices=KERNELS,
    )
    add("seed", "seed for requests without one of their own", type=int, metavar="N")
    add(
        "skip_tokenizer_init",
        "take and give token ids only: for a model without tokenizer.json",
        action="store_true",
    )
    add(
        "enable_prefix_caching",
        "keep the KV cache of prompts for later ones that begin the same",
        action=argparse.BooleanOptionalAction,
    )
    add(
        "warm_up",
        "compile all programs before the first request",
        action=argparse.BooleanOptionalAction,
    )


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in vars(args).items() if name in names})


def _serve(args: argparse.Namespace, config: EngineConfig) -> int:
    # Imported here, since they take seconds and --help needs none of them.
    from moejax_serving.async_engine import AsyncEngine
    from moejax_serving.http import create_app
    from moejax_serving.metrics import Metrics
    from moejax_serving.server import base_url, bind, serve
    from moejax_serving.service import Service

    names = args.served_model_name or [args.model or BUILT_IN_MODEL]
    if args.model is None:
        _check_names(names)
    service = Service(Metrics(names[0]), names)

    def load() -> AsyncEngine:
        from moejax_serving.load import load_engine

        return AsyncEngine(
            load_engine(args.model, config, metrics=service.metrics),
            max_queued_requests=args.max_queued_requests,
            step_timeout=args.step_timeout or None,
        )

    with bind(args.host, args.port) as listener:
        url = base_url(listener)
        ending = serve(
            create_app(service),
            service,
            listener,
            load=load,
            on_ready=lambda engine: _print_greeting(url, names[0], engine),
            shutdown_timeout=args.shutdown_timeout,
        )
    if ending.status == 130:
        print(_INTERRUPTED, file=sys.stderr)
    if not ending.is_clean:
        # The interpreter's own end would wait for what the thread computes, or crash it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ending.status)
    return ending.status


def _check_names(names: Sequence[str]) -> None:
    """--served-model-name takes all words that follow: MODEL may be one of them."""
    for name in names:
        if os.path.isdir(name):
            raise ConfigError(
                f"--served-model-name took {name!r}, which is a folder: put MODEL before the flags"
            )


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


def _width_or_file(text: str) -> str | int:
    try:
        return parse_width(text)
    except MoejaxError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _width(text: str) -> str | int:
    width = _width_or_file(text)
    if isinstance(width, str) and width != "auto":
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a width: auto, 2 to 8, or 16")
    return width


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number above 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds: 0 or more")
    return seconds


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a port: 0 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
