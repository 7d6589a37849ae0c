from typing import Any

PngCompression: Any

__all__ = ["PngCompression"]
