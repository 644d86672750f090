"""Numbers and tables as people read them."""

from collections.abc import Iterable, Sequence

__all__ = ["markdown_table", "size_text"]


def size_text(size: float) -> str:
    """Decimal units, three digits: ``1.28 GB``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.9995 * unit:
            return f"{size / unit:.3g} {name}" if size < 999.5 * unit else f"{size / unit:.0f} {name}"
    return f"{size:.0f} B"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), "|---" * len(header) + "|", *map(line, rows)])
