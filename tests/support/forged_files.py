"""Files that nobody wrote who knew their form: changed by chance, from the text of a good one.

One generator for all kinds of files.  A change is made in the JSON tree of a text, or in its bytes.
"""

import hashlib
import json
import os
import sys
from contextlib import contextmanager
from copy import deepcopy

ODD = (
    *(None, True, False, -1, 0, 1, 2, 10**9, 1 << 62, 1 << 63, 10**30, 1.5, -0.0, 1e308, 5e-324),
    *(float("nan"), float("inf"), "", "x", "S0", "O,O", "../../secret", "/etc/passwd", "fifo"),
    *("\x1b[31m", "$x^{$", "\ud800", "\u202e", "a\nb", "[/red]", "<script>", "9" * 500, "٣"),
    *([], {}, [["x"]], {"dict": 1}, {"array": "no", "library": "os"}, "rank-00000.bin", [0] * 40),
)
DEEP = 100_000


def all_values(tree, path=()):
    """Yield the path of each value in a JSON tree."""
    yield path
    inner = dict(enumerate(tree)) if isinstance(tree, list) else tree
    for key, value in inner.items() if isinstance(inner, dict) else ():
        yield from all_values(value, (*path, key))


def change_tree(tree, draw):
    """Return a JSON tree in which one value is another, or missing, or there twice, or moved."""
    paths = [path for path in all_values(tree) if path]
    if not paths or draw.random() < 0.01:
        return deepcopy(draw.choice(ODD))
    path = draw.choice(paths)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    key, how = path[-1], draw.randrange(8)
    if how == 0:
        del inner[key]
    elif how == 1:
        if isinstance(inner, list):
            inner.append(deepcopy(inner[key]))
        else:
            inner[f"{key}2"] = inner.pop(key)
    elif how == 2:
        other = tree
        for step in draw.choice(paths):
            other = other[step]
        inner[key] = deepcopy(other)
    elif how == 3 and isinstance(inner[key], (int, float)):
        inner[key] = draw.choice((-1, 2, 10**6, 1e-30)) * inner[key] + draw.choice((0, 1))
    else:
        like = [odd for odd in ODD if type(odd) is type(inner[key])] if how > 4 else ()
        inner[key] = deepcopy(draw.choice(like or ODD))
    return tree


def change_bytes(text, draw):
    """Return a text cut off, with other bytes, or with a piece of JSON that readers stumble on."""
    at, how = draw.randrange(len(text) + 1), draw.randrange(7)
    if how == 0:
        return text[:at]
    if how == 1:
        return text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :]
    if how == 2:
        return text[:at] + draw.choice((b"\xff", b"\x00", b"\xed\xa0\x80", b"1e999")) + text[at:]
    if how == 3:  # a key that is there twice
        keys = [b'"version": 2, ', b'"format": 9, ', b'"args": 1, ', b'"rows": [], ', b'"a": NaN, ']
        return text.replace(b"{", b"{" + draw.choice(keys), draw.randrange(1, 4))
    if how == 4:
        return draw.choice((b"[", b'{"a":', b"[" * 300)) * (DEEP if draw.random() < 0.2 else 1)
    if how == 5:
        other = draw.randrange(len(text) + 1)
        return text[:at] + text[min(at, other) : max(at, other)] + text[at:]
    return text.replace(b"1", draw.choice((b"1" + b"0" * 400, b"1" * 5000, b"-1", b"1.0")), 1)


def forged(text, draw):
    """Return the bytes of a forged file, from the bytes of a good one."""
    if draw.random() < 0.3:
        return change_bytes(text, draw)
    try:
        tree = json.loads(text)
    except ValueError:
        return change_bytes(change_bytes(text, draw), draw)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        tree = change_tree(tree, draw)
    return json.dumps(tree).encode()


def put_something_else(path, draw, secret):
    """Put something in a file's place that is no regular file of that length; True if nothing."""
    text = path.read_bytes()
    path.unlink()
    how = draw.randrange(7)
    if how == 0:
        os.mkfifo(path)
    elif how == 1:
        path.symlink_to(secret)
    elif how == 2:
        path.symlink_to(path)
    elif how == 3:
        path.mkdir()
    elif how == 4:
        path.symlink_to("/dev/zero")
    elif how == 5:
        path.write_bytes(change_bytes(text, draw))
    return how == 6


def forge_checkpoint(path, draw, secret):
    """Change one thing of a saved checkpoint; a changed manifest has the right checksum mostly."""
    manifest, how = path / "manifest.json", draw.random()
    checksum, body = manifest.read_bytes().split(b"\n", 1)
    if how < 0.75:
        body = forged(body, draw)
        right = hashlib.sha256(body.rstrip(b"\n")).hexdigest().encode()
        manifest.write_bytes((right if how < 0.7 else checksum) + b"\n" + body)
    elif how < 0.95:
        put_something_else(draw.choice(sorted(path.glob("*"))), draw, secret)
    elif how < 0.97:
        other = path.with_name(draw.choice(("step-x", "step-" + "9" * 200, "step-00000009.0")))
        draw.choice((other.mkdir, other.touch, lambda: os.mkfifo(other)))()
    else:
        target = path.with_name("elsewhere")
        path.rename(target)
        path.symlink_to(draw.choice((target, "/", path, secret)))


_OPENED = []  # the sets that are filled, the innermost last
_HOOKED = []


def _note(event, arguments):
    if event != "open" or not _OPENED or not isinstance(arguments[0], (str, bytes)):
        return
    path, _, flags = arguments
    path = os.fsdecode(path)
    if not (flags & os.O_NOFOLLOW and os.path.islink(path)):  # else it will not be opened
        path = os.path.realpath(path)
    if not os.path.isdir(path) and os.path.exists(path):
        _OPENED[-1].add(path)


@contextmanager
def opened_files():
    """Yield the set of the files that this process opens meanwhile, on any thread, links resolved.

    A link that is opened without following links counts as itself.
    """
    if not _HOOKED:  # a hook cannot be removed
        sys.addaudithook(_note)
        _HOOKED.append(True)
    _OPENED.append(set())
    try:
        yield _OPENED[-1]
    finally:
        _OPENED.pop()
