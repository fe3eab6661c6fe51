"""Makes one self-contained HTML page of a run directory: curves, timeline, memory, samples.

With several runs, their curves in one page.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.config import cli
from jaxrl.errors import UserError, user_path
from jaxrl.process import atomic_files

REPORT_FILE = "report.html"


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.report", __doc__ or "")
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run directory, also of a run that is going on")
    add(
        "-o",
        "--output",
        metavar="FILE.html",
        help=f"file to write (default RUN/{REPORT_FILE}; required for several runs)",
    )
    arguments = parser.parse(argv)
    paths = [user_path(path) for path in dict.fromkeys(arguments.runs)]
    if arguments.output is None and len(paths) > 1:
        raise UserError(f"-o FILE.html is needed: {len(paths)} runs have no folder in common")
    from jaxrl.profile.waits import run_advice
    from jaxrl.report.html_page import page
    from jaxrl.report.read import read_run
    from jaxrl.run.diagnosis import HEADING, diagnose

    runs = [read_run(path) for path in paths]
    advice = run_advice(paths[0]) if len(paths) == 1 else {}
    if len(paths) == 1 and (wrong := diagnose(paths[0])):
        advice = {HEADING: wrong} | advice
    own = paths[0] / REPORT_FILE
    if arguments.output is None and own.exists() and not own.is_file():
        raise UserError(f"{own} is not a file: name another with -o")
    output = cli.check_writable("-o", own if arguments.output is None else arguments.output)
    # A completion may hold half a character, which has no UTF-8; escaped it is JSON still.
    made = page(runs, advice).encode("utf-8", "backslashreplace")
    place = Path(os.path.realpath(output))
    try:
        if place.exists() and not place.is_file():  # such as a pipe
            place.write_bytes(made)
        else:
            atomic_files.put_file(place, lambda file: file.write_bytes(made))
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from error
    print(output)


if __name__ == "__main__":
    sys.exit(cli.run(main))
