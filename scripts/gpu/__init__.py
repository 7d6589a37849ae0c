"""The sections of scripts/gpu_check.py, one subject a file; importing it makes the checkout's splatcli importable."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
