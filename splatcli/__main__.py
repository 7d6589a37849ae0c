"""``python -m splatcli`` is ``splat``."""

import sys

from splatcli.cli import main

sys.exit(main())
