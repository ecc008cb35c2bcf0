"""Figures as files and tables show them (pure)."""

from pathlib import Path

import msgspec


def write_json(file: Path, figures: msgspec.Struct) -> None:
    """Write a record as indented JSON, for people and for machines."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


def or_dash(value: float | None, form: str) -> str:
    """The value in this form, a dash where there is none."""
    return "-" if value is None else form.format(value)


def share(value: float | None) -> str:
    """A share of one in percent."""
    return or_dash(value, "{:.1%}")
