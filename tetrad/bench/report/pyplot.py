"""matplotlib, an extra, for whoever draws a picture."""

from __future__ import annotations

from typing import Any

from tetrad.core.errors import UnsupportedError
from tetrad.core.extras import install


def require_matplotlib(flag: str) -> Any:
    """matplotlib's pyplot. Raises UnsupportedError, naming the flag, where it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise UnsupportedError(
            f"{flag} needs matplotlib; `{install('plot')}` in Tetrad's folder installs it."
        ) from None
    mpl.use("agg")
    from matplotlib import pyplot as plt

    return plt
