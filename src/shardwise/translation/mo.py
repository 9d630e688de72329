"""Reads compiled gettext catalogues (`.mo`): every message with its context and plural forms.

The standard library's `gettext` looks messages up but does not list the English plurals, so the
file is read here; which form of a plural a number takes is still asked of `gettext`, which knows
the catalogue's `Plural-Forms` expression.

Format (GNU gettext manual, "The Format of GNU MO Files"): a magic number that gives the byte order,
the count of messages, and two tables of (length, offset), of the originals and the translations.
An original is `context \\4 message \\0 plural`; a translation is its forms, `\\0` between them.
Messages marked fuzzy are not in the file: msgfmt leaves them out.
"""

from __future__ import annotations

import gettext
import io
import struct
from collections.abc import Iterator
from typing import NamedTuple

_MAGIC = 0x950412DE
_NUMBERS = (0, 2, 3, 5, 7, 10, 11, 20, 100, 1000000)
"""With 1, they reach every plural form of the languages that gettext's manual lists."""


class Entry(NamedTuple):
    """A pair of strings of a catalogue: an English `message` and its `translation`."""

    context: str
    message: str
    translation: str


class BadCatalogue(ValueError):
    """The bytes are not a compiled gettext catalogue."""


def read(data: bytes) -> Iterator[Entry]:
    """The entries of a catalogue, in the file's order, without its header and empty translations.

    A message with plural forms gives one entry for the form used of one thing, with the English
    singular, and one for each other form, with the English plural.  Where a language has one form
    for all numbers, it stands for the plural.

    Raises:
      BadCatalogue: no magic number, a table that leaves the file, or text that is not UTF-8.
    """
    plurals: gettext.GNUTranslations | None = None
    for original, translated in _strings(data):
        context, separator, message = original.rpartition("\4")
        message, is_plural, plural = message.partition("\0")
        if not message and not separator:  # the header
            continue
        if not is_plural:
            yield from _entry(context, message, translated)
            continue
        plurals = plurals or gettext.GNUTranslations(io.BytesIO(data))  # type: ignore[arg-type]
        yield from _plural(plurals, context if separator else None, message, plural)


def _entry(context: str, message: str, translation: str) -> Iterator[Entry]:
    if translation.strip():
        yield Entry(context, message, translation)


def _plural(
    catalogue: gettext.GNUTranslations, context: str | None, singular: str, plural: str
) -> Iterator[Entry]:
    def form(number: int) -> str:
        if context is None:
            return catalogue.ngettext(singular, plural, number)
        return catalogue.npgettext(context, singular, plural, number)

    one, many = form(1), [form(n) for n in _NUMBERS]
    if one not in many:
        yield from _entry(context or "", singular, one)
    for other in dict.fromkeys(many):  # each form once, in the order of the numbers
        yield from _entry(context or "", plural, other)


def _strings(data: bytes) -> Iterator[tuple[str, str]]:
    """(original, translation) as they stand in the file, decoded."""
    order = {struct.pack(o + "I", _MAGIC): o for o in "<>"}.get(data[:4])
    if order is None:
        raise BadCatalogue("not a gettext catalogue: no magic number")
    try:
        _, count, originals, translations = struct.unpack_from(order + "4I", data, 4)
        for i in range(count):
            yield (
                _string(data, order, originals + 8 * i),
                _string(data, order, translations + 8 * i),
            )
    except struct.error:
        raise BadCatalogue("not a gettext catalogue: a table leaves the file") from None
    except UnicodeDecodeError as error:
        raise BadCatalogue(f"a gettext catalogue that is not UTF-8: {error}") from None


def _string(data: bytes, order: str, at: int) -> str:
    length, offset = struct.unpack_from(order + "2I", data, at)
    if offset + length > len(data):
        raise BadCatalogue("not a gettext catalogue: a string leaves the file")
    return data[offset : offset + length].decode("utf-8")
