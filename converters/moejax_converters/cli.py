"""moejax-convert: converts a Hugging Face folder, or shows what a converted one is made of."""

import _thread
import argparse
import contextlib
import logging
import os
import pathlib
import sys
import threading
from collections.abc import Iterator, Sequence

import moejax
from moejax.environment import prepare_environment
from moejax.errors import MoejaxError
from moejax_converters import staging


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="moejax-convert",
        description="Converts a Mixture-of-Experts model from a Hugging Face folder "
        "(config.json and *.safetensors) into a folder that moejax-serve reads.",
    )
    parser.add_argument(
        "source", nargs="?", metavar="SOURCE", help="a Hugging Face folder, or one of moejax"
    )
    parser.add_argument("target", nargs="?", metavar="TARGET", help="the folder to make")
    parser.add_argument(
        "--inspect",
        metavar="FOLDER",
        help="show what a converted folder holds, and do nothing else",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {moejax.__version__}")
    _add_quantize_flags(parser.add_argument_group("quantisation"))
    args = parser.parse_args(argv)
    if args.inspect is None and args.target is None:
        parser.error("SOURCE and TARGET are needed, or --inspect FOLDER")
    if args.inspect is not None and args.source is not None:
        parser.error("--inspect takes no SOURCE and TARGET")
    given = [name for name in _QUANTIZE_FLAGS if getattr(args, name) is not None]
    if args.quantize is None and given:
        parser.error(f"--{given[0].replace('_', '-')} needs --quantize any-precision")
    if args.quantize is not None and args.target is None:
        parser.error("--inspect takes no --quantize")
    if args.quantize is not None and args.calibration is None:
        parser.error(
            "--quantize needs --calibration FILE, a text like those that the model will see, "
            "or --calibration none"
        )
    of_text = [name for name in given if name.startswith("calibration_")]
    if args.calibration == "none" and of_text:
        parser.error(f"--calibration none takes no --{of_text[0].replace('_', '-')}")
    if args.calibration == "":
        parser.error("--calibration needs the name of a file, or none")
    if args.quantize is None:
        # Conversion is work for the host: no memory of an accelerator is taken.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    prepare_environment(os.environ)
    logging.basicConfig(format="moejax-convert: %(message)s")
    logging.getLogger("jax").setLevel(logging.ERROR)
    try:
        with _no_interruption_lost():
            _run(args)
    except MoejaxError as error:
        print(f"moejax-convert: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"moejax-convert: interrupted, {_left_behind(args)}", file=sys.stderr)
        return 130
    return 0


@contextlib.contextmanager
def _no_interruption_lost() -> Iterator[None]:
    """Ctrl-C comes again where Python could not raise it: in jax's callback of the collector."""

    def hook(lost: "sys.UnraisableHookArgs") -> None:
        if lost.exc_type is KeyboardInterrupt:
            # Not from here, where it would be lost again.
            threading.Timer(0.05, _thread.interrupt_main).start()
        else:
            before(lost)

    before, sys.unraisablehook = sys.unraisablehook, hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _left_behind(args: argparse.Namespace) -> str:
    """What there is after an interruption."""
    if args.target is None:
        return "nothing was written"
    target = pathlib.Path(args.target)
    if target.exists():
        return f"{target} is there"
    folder = staging.work_folder(target)
    if args.quantize is not None and folder.exists():
        return f"{folder} keeps what is done: the command that began it goes on"
    return "nothing was written"


_QUANTIZE_FLAGS = (
    "calibration",
    "seed_bits",
    "parent_bits",
    "rows_per_table",
    "quantize_linears",
    "keep_dense",
    "calibration_sequences",
    "calibration_length",
)


def _add_quantize_flags(group: "argparse._ArgumentGroup") -> None:
    """All default to None, so that a flag without --quantize is noticed."""
    group.add_argument(
        "--quantize",
        choices=["any-precision"],
        help="store experts as nested bit-planes with lookup tables: one model, every width",
    )
    group.add_argument(
        "--calibration",
        metavar="FILE|none",
        help="needed with --quantize: a text in UTF-8, or token ids [sequences, tokens] as .npy, "
        "that says which weights matter; none: all alike",
    )
    group.add_argument(
        "--seed-bits", type=int, choices=(2, 3), help="the smallest width (default: 3)"
    )
    group.add_argument(
        "--parent-bits", type=int, choices=range(2, 9), help="the largest width (default: 6)"
    )
    group.add_argument(
        "--rows-per-table",
        type=_rows_per_table,
        metavar="auto|N",
        help="rows that share lookup tables, a power of two up to 64 (default: auto, as few as "
        "keep the largest tables to half a bit per weight)",
    )
    group.add_argument(
        "--quantize-linears",
        type=_linears,
        metavar="attention,shared",
        help="quantise attention projections, shared experts, or both too (default: experts only)",
    )
    group.add_argument(
        "--keep-dense",
        action="store_true",
        default=None,
        help="store width 16 too, so that the model can be served as it was (default: codes only)",
    )
    group.add_argument(
        "--calibration-sequences",
        type=int,
        metavar="N",
        help="parts of the calibration, each as long as --calibration-length: the text must be "
        "long enough, a .npy must have this shape (default: 128)",
    )
    group.add_argument(
        "--calibration-length", type=int, metavar="N", help="tokens of each part (default: 512)"
    )


def _linears(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if not set(names) <= {"attention", "shared"}:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is neither attention, shared nor attention,shared"
        )
    return names


def _rows_per_table(text: str) -> int | str:
    if text == "auto":
        return text
    if text in ("1", "2", "4", "8", "16", "32", "64"):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is neither auto nor a power of two up to 64")


def _run(args: argparse.Namespace) -> None:
    # Imported late: --help answers without JAX.
    from moejax_converters import convert, inspection, quantize, quantize_options

    if args.inspect is not None:
        print(inspection.table(args.inspect))
    elif args.quantize is None:
        convert.convert(args.source, args.target)
    else:
        names = {
            "seed_bits": "seed_bits",
            "parent_bits": "parent_bits",
            "keep_dense": "keep_dense",
            "calibration_sequences": "sequences",
            "calibration_length": "length",
        }
        given = {
            field: value
            for flag, field in names.items()
            if (value := getattr(args, flag)) is not None
        }
        rows = args.rows_per_table
        options = quantize_options.QuantizeOptions(
            calibration=None if args.calibration == "none" else pathlib.Path(args.calibration),
            rows_per_table=None if rows in (None, "auto") else rows,
            linears=args.quantize_linears or (),
            **given,
        )
        quantize.quantize(args.source, args.target, options)
        print(f"{args.target}: quantised; --inspect {args.target} shows what its widths cost")


if __name__ == "__main__":
    sys.exit(main())
