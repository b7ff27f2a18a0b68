"""moejax-convert: converts a Hugging Face folder, or shows what a converted one is made of."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import moejax
from moejax.errors import MoejaxError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="moejax-convert",
        description="Converts a Mixture-of-Experts model from a Hugging Face folder "
        "(config.json and *.safetensors) into a folder that moejax-serve reads.",
    )
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="a Hugging Face folder")
    parser.add_argument("target", nargs="?", metavar="TARGET", help="the folder to make")
    parser.add_argument(
        "--inspect",
        metavar="FOLDER",
        help="show what a converted folder holds, and do nothing else",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {moejax.__version__}")
    args = parser.parse_args(argv)
    if args.inspect is None and args.target is None:
        parser.error("SOURCE and TARGET are needed, or --inspect FOLDER")
    if args.inspect is not None and args.source is not None:
        parser.error("--inspect takes no SOURCE and TARGET")
    # Conversion is work for the host: no memory of an accelerator is taken.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Imported late: --help answers without JAX.
    from moejax_converters import convert, inspection

    logging.basicConfig(format="moejax-convert: %(message)s")

    try:
        if args.inspect is not None:
            print(inspection.table(args.inspect))
        else:
            convert.convert(args.source, args.target)
    except MoejaxError as error:
        print(f"moejax-convert: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("moejax-convert: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
