"""``python -m splatcli.gsplat program.py``: run a program that is written for gsplat, unchanged."""

import sys

from splatcli.errors import UsageError
from splatcli.gsplat import run_program

if __name__ == "__main__":
    try:
        run_program(sys.argv[1:])
    except UsageError as error:
        print(*error.lines(), sep="\n", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
