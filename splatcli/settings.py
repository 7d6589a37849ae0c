"""The earlier name of ``splatcli.config``: scripts that import from here keep working."""

from __future__ import annotations

from splatcli.config import build_config as build_config
