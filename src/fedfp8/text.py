"""Numbers as people read them."""

__all__ = ["size_text"]


def size_text(size: float) -> str:
    """Decimal units, three digits: ``1.28 GB``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.9995 * unit:
            return f"{size / unit:.3g} {name}" if size < 999.5 * unit else f"{size / unit:.0f} {name}"
    return f"{size:.0f} B"
