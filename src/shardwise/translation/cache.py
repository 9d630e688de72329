"""Files kept in a folder that the caller gives, named by a hash of what they were made from."""

from __future__ import annotations

import hashlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterable

Folder = str | os.PathLike[str] | None


def key(parts: Iterable[str]) -> str:
    """A name for what these strings, in this order, decide."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def stored(folder: Folder, name: str, make: Callable[[], bytes]) -> bytes:
    """The bytes of file `name` in the folder, made and written first if there is none.

    Without a folder they are made each time.  Several processes may do this at once: the file is written
    aside and renamed, so nobody reads half of it.
    """
    if folder is None:
        return make()
    path = pathlib.Path(folder).expanduser() / name
    if not path.exists():
        data = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{name}.{os.getpid()}.{threading.get_ident()}.part")
        part.write_bytes(data)
        os.replace(part, path)
    return path.read_bytes()
