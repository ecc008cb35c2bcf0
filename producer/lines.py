"""A stream to lines, and to CSV rows, in flat memory whatever the stream holds."""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from wire.ticket import MAX_TICKET_BYTES

MAX_LINE_BYTES = 6 * MAX_TICKET_BYTES  # JSON may escape every character into six
MAX_ROW_BYTES = 96 * 1024  # well under csv's own limit of 131,072 characters a field, see `_RowFeed`

_BOM = b"\xef\xbb\xbf"
_INERT = re.compile(rb'[^",\r\n]+')
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Reject:
    """A line that is no ticket. Reasons: TicketError's, and not_csv, wrong_columns, has_nul."""

    line: int
    reason: str
    detail: str


def physical_lines(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Each line up to its newline, and whether it is whole: a longer one than MAX_LINE_BYTES is only a skeleton."""
    mark = _BOM
    while line := stream.readline(MAX_LINE_BYTES):
        whole = len(line) < MAX_LINE_BYTES or line.endswith(b"\n")
        line, mark = line.removeprefix(mark), b""
        yield (line, True) if whole else (_skeleton_to_newline(line, stream), False)


def _skeleton_to_newline(line: bytes, stream: BinaryIO) -> bytes:
    pieces = [_skeleton(line)]
    while not pieces[-1].endswith(b"\n") and (more := stream.readline(MAX_LINE_BYTES)):
        pieces.append(_skeleton(more))
    return b"".join(pieces)


def _skeleton(line: bytes) -> bytes:
    """The line with every run of bytes that means nothing to CSV shrunk to one: quotes keep opening and closing."""
    return _INERT.sub(b"x", line)


@dataclass(frozen=True, slots=True)
class Row:
    """A row's cells, and the physical line it begins at, from 1."""

    line: int
    cells: list[str]


def csv_rows(stream: BinaryIO) -> Iterator[Row | Reject]:
    """The rows of a CSV stream, blank ones left out, whatever their number of cells."""
    feed = _RowFeed(stream)
    # strict: a half-closed quote is an error of that row, where the lenient reader would guess.
    reader = csv.reader(feed, strict=True)
    while True:
        line = reader.line_num + 1
        feed.begin_row()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "field limit" in str(error):
                yield Reject(line, "not_csv", "a quote opens here and never closes: the rest of the file was not read")
                return
            yield Reject(line, "not_csv", str(error))
        else:
            if cells:
                yield _checked_row(Row(line, cells), feed)


class _RowFeed:
    """The lines that csv.reader asks for.

    Once a row is too large, the feed hands out skeletons only: the reader still finds the row's end, in little
    memory, and no line inside a long quoted text is mistaken for a ticket.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._lines = physical_lines(stream)
        self._row_bytes = 0

    def begin_row(self) -> None:
        self._row_bytes = 0

    @property
    def row_is_too_large(self) -> bool:
        return self._row_bytes > MAX_ROW_BYTES

    def __iter__(self) -> "_RowFeed":
        return self

    def __next__(self) -> str:
        line, whole = next(self._lines)
        self._row_bytes += len(line) if whole else MAX_ROW_BYTES + 1
        # Bad bytes travel on as surrogates, so that they spoil their own row and not the reader's place in the file.
        return (_skeleton(line) if self.row_is_too_large else line).decode("utf-8", "surrogateescape")


def _checked_row(row: Row, feed: _RowFeed) -> Row | Reject:
    if feed.row_is_too_large:
        return Reject(row.line, "too_large", f"the row is longer than {MAX_ROW_BYTES:,} bytes")
    if any("\0" in cell for cell in row.cells):
        return Reject(row.line, "has_nul", "the row has a NUL character")
    if any(_SURROGATE.search(cell) for cell in row.cells):
        return Reject(row.line, "not_utf8", "the row is not valid UTF-8")
    return row
