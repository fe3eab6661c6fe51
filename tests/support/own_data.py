"""Rows that code makes: the forms that `data.train=file.py:NAME` takes."""

from __future__ import annotations

import itertools
import random

LISTED = [{"prompt": f"{n}+1=", "completion": str(n + 1), "answer": str(n + 1)} for n in range(7)]


def listed():
    return LISTED


def few():
    yield from LISTED


def endless():
    draw = random.Random(3)
    for n in itertools.count():
        m = draw.randrange(9)
        yield {"prompt": f"{n % 10}+{m}=", "completion": str(n % 10 + m), "answer": str(n % 10 + m)}


def numbered(start=0):
    for n in itertools.count(start):
        m = random.Random(n).randrange(9)
        yield {"prompt": f"{n % 10}+{m}=", "completion": str(n % 10 + m), "answer": str(n % 10 + m)}


def breaks():
    yield LISTED[0]
    raise KeyError("the third")


def asks(folder):
    return LISTED


def bare():
    yield "text"


class Rows:
    def __iter__(self):
        return endless()


ROWS = Rows()
