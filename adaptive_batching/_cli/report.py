"""``report``: make the page of a run again, or one page of several runs. Knows nothing of torchtune."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from adaptive_batching._report.events import RecordError
from adaptive_batching._report.page import PAGE, write_page


def add_report(subparsers: Any, prog: str) -> None:
    text = "Make the page of a run from its record, whether it has ended or not, or lay several runs side by side."
    parser = subparsers.add_parser("report", prog=f"{prog} report", help=text, description=text)
    parser.add_argument("output_dir", nargs="+", type=Path, help="of a run; or the folder of its record, or the record")
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help=f"default: {PAGE} next to the record of a run, and in this folder for several",
    )  # fmt: skip
    parser.set_defaults(func=lambda args: _run(args, parser))


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    output = args.output or (Path(PAGE) if len(args.output_dir) > 1 else None)
    try:
        print(write_page(args.output_dir, output))
    except RecordError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename or output}: {error.strerror or error}; name another file with --output")
