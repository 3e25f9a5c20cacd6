"""The Zstandard compression of Python 3.14; in an older Python, its backport. Runs on compute and login nodes."""

import sys

if sys.version_info >= (3, 14):
    from compression.zstd import CompressionParameter, ZstdError, ZstdFile
else:
    from backports.zstd import CompressionParameter, ZstdError, ZstdFile

__all__ = ["CompressionParameter", "ZstdError", "ZstdFile"]
