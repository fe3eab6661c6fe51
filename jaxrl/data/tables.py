"""Parquet files and folders that the Hugging Face `datasets` package saved (extra `data`).

Columns are the fields of a row. As with JSONL, every row is checked once when the file is opened.
Rows are numbered from 0, as pandas and `datasets` do.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from jaxrl.data import rows
from jaxrl.data.example import Example, JsonObject, Part
from jaxrl.errors import UserError
from jaxrl.formats.opened import OpenedFile
from jaxrl.process.waiting import count_rows

Table = Any
"""A `pyarrow.Table` or `RecordBatch`; Any, because pyarrow is an optional package."""
CACHE_BYTES = 2**30
"""Decoded row groups kept in memory, over all parquet files of one source."""
_BATCH = 1024
"""Rows checked at once."""


class TablePart(Part):
    """The rows of a table."""

    def __init__(
        self,
        name: str,
        open_reader: Callable[[], ParquetReader | TableReader],
        keys: rows.Keys,
        label: str,
    ):
        self.name, self._keys, self._place = name, keys, f"{label}: {name}"
        with _readable(self._place):
            self._reader = open_reader()
            self._opened = [OpenedFile(path, sha256_of) for path in self._reader.files]
            self._decode = row_decoder(self._reader.schema, self._reader.features)
        self._columns = columns = list(self._reader.schema.names)
        rows.check_column_names(columns, self._place)
        asked = keys.prompt, keys.messages, keys.text
        if not any(rows.column_of(name, columns) for name in asked):
            raise rows.no_prompt(columns, keys, self._place, "the table")
        if not len(self):
            raise UserError(f"{self._place}: no rows")
        # what makes an example is read of every row, and nothing else
        names = dict.fromkeys(columns)
        read = (rows.column_of(key, names) for key in (*keys.named, keys.text))
        needed = dict.fromkeys(filter(None, read))
        with _readable(self._place):
            for index, row in enumerate(count_rows(self._every_row(list(needed)), name)):
                rows.to_example(row, keys, f"{self._place}: row {index}")
                names |= dict.fromkeys(rows.names_in(row, keys))
        self.columns = tuple(names)

    def digest(self) -> str:
        whole = hashlib.sha256()
        with _readable(self._place):
            for batch in () if self._reader.files else self._reader.batches(self._columns):
                whole.update(json.dumps(batch.to_pylist(), default=repr).encode())
            for file in self._opened:
                whole.update(file.digest)
        return whole.hexdigest()

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> Example:
        place = f"{self._place}: row {index}"
        for file in self._opened:
            file.check(place)
        with _readable(place):
            row = self._decode(self._reader.row(index).to_pylist()[0])
        return rows.to_example(row, self._keys, place)

    def _every_row(self, columns: list[str]) -> Iterator[JsonObject]:
        start = 0
        for batch in self._reader.batches(columns):
            yield from self._rows(batch, start)
            start += len(batch)

    def _rows(self, batch: Table, start: int) -> list[JsonObject]:
        try:
            return [self._decode(row) for row in batch.to_pylist()]
        except Exception:  # whatever it is, the row that has it raises it again
            decoded: list[JsonObject] = []
            for at in range(len(batch)):
                with _readable(f"{self._place}: row {start + at}"):
                    decoded.append(self._decode(batch.slice(at, 1).to_pylist()[0]))
            return decoded


def sha256_of(path: str) -> bytes:
    """Returns the digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


class GroupCache:
    """The row groups used last, decoded, up to `limit` bytes; one is kept whatever its size."""

    def __init__(self, limit: int = CACHE_BYTES):
        self._limit, self._bytes = limit, 0
        self._groups: OrderedDict[tuple[str, int], Table] = OrderedDict()

    def get(self, key: tuple[str, int], read: Callable[[], Table]) -> Table:
        if key not in self._groups:
            self._groups[key] = read()
            self._bytes += self._groups[key].nbytes
        self._groups.move_to_end(key)
        while self._bytes > self._limit and len(self._groups) > 1:
            _, dropped = self._groups.popitem(last=False)
            self._bytes -= dropped.nbytes
        return self._groups[key]


class ParquetReader:
    """A parquet file, decoded one row group at a time.

    `row` gives a table of one row; `batches` these columns of all rows, in order.
    """

    def __init__(self, path: str, cache: GroupCache):
        import pyarrow.parquet as pq

        self.files = (path,)
        self._file, self._cache = pq.ParquetFile(path), cache
        self.schema = self._file.schema_arrow
        self.features = features_in(self.schema)
        metadata = self._file.metadata
        groups = range(metadata.num_row_groups)
        self._ends = list(accumulate(metadata.row_group(group).num_rows for group in groups))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> Table:
        group = bisect_right(self._ends, index)
        table = self._cache.get((self.files[0], group), lambda: self._file.read_row_group(group))
        return table.slice(index - (self._ends[group - 1] if group else 0), 1)

    def batches(self, columns: list[str]) -> Iterator[Table]:
        return self._file.iter_batches(_BATCH, columns=columns)


class TableReader:
    """A `pyarrow.Table`, or a `datasets.Dataset` of a Python program."""

    def __init__(self, rows: Any, files: tuple[str, ...] = (), features: Any = None):
        """
        Args:
            files: that the rows are in, where they are in any.
            features: what `datasets` says of the columns; None: as the schema has it.
        """
        self.files = files
        as_arrow = getattr(rows, "with_format", None)
        self._rows = rows if as_arrow is None else as_arrow("arrow")
        self.schema = rows.schema if as_arrow is None else rows.features.arrow_schema
        self.features = features or features_in(self.schema)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Table:
        return self._take(self._rows, index, 1)

    def batches(self, columns: list[str]) -> Iterator[Table]:
        rows = self._rows
        chosen = (rows.select if hasattr(rows, "schema") else rows.select_columns)(columns)
        for start in range(0, len(rows), _BATCH):
            yield self._take(chosen, start, min(_BATCH, len(rows) - start))

    def _take(self, rows: Any, start: int, count: int) -> Table:
        return rows.slice(start, count) if hasattr(rows, "schema") else rows[start : start + count]


def open_dataset(name: str, folder: str, keys: rows.Keys, label: str) -> TablePart:
    """Returns the rows of a saved `Dataset`, which may be one split of a `DatasetDict`: streams of
    Arrow, memory-mapped. Images and the like stay bytes that nobody decodes."""
    state = Path(folder) / "state.json"
    with _readable(f"{label}: {state}"):
        written = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
        files = [str(Path(folder) / file["filename"]) for file in written]
    if not files:
        raise UserError(f"{label}: {name}: no rows")

    def read() -> TableReader:
        import pyarrow as pa

        streams = (pa.ipc.open_stream(pa.memory_map(file)) for file in files)
        table = pa.concat_tables(stream.read_all() for stream in streams)
        info = json.loads((Path(folder) / "dataset_info.json").read_text(encoding="utf-8"))
        return TableReader(table, tuple(files), info.get("features"))

    return TablePart(name, read, keys, label)


def dataset_splits(folder: str, label: str) -> list[str] | None:
    """Returns the splits of a saved `DatasetDict`, [] of a saved `Dataset`, else None."""
    index = Path(folder) / "dataset_dict.json"
    if not index.is_file():
        saved = (Path(folder) / "state.json").is_file()
        return [] if saved and (Path(folder) / "dataset_info.json").is_file() else None
    with _readable(f"{label}: {index}"):
        return [str(name) for name in json.loads(index.read_text(encoding="utf-8"))["splits"]]


def features_in(schema: Any) -> Any:
    """Reads what `datasets` says of the columns in an Arrow schema's metadata, or {}."""
    metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    return (metadata.get("info") or {}).get("features") or {}


def row_decoder(schema: Any, features: Any) -> Callable[[JsonObject], JsonObject]:
    """Makes a function from the row that `to_pylist` gives to the one that was written.

    The nulls are gone that a struct has for the fields which only other rows have; JSON is parsed,
    which `datasets` writes where objects are too unlike for a struct; maps are objects; a float32
    has its own digits.

    Args:
        features: of `datasets`, in the form of its JSON; {} where nothing is known.
    """
    found = {field.name: _decoder(field.type, _inner(features, field.name)) for field in schema}
    decoders = {name: decode for name, decode in found.items() if decode is not None}
    return lambda row: rows.as_json(row | {n: f(row[n]) for n, f in decoders.items() if n in row})


def _decoder(kind: Any, feature: Any) -> Callable[[Any], Any] | None:
    """Makes the decoder of values of an Arrow type; None where there is nothing to do."""
    import pyarrow.types as types

    named = isinstance(feature, dict) and feature.get("_type") == "Json"
    if named or getattr(kind, "extension_name", "") == "arrow.json":
        keep = named and not feature.get("decode", True)
        return None if keep else lambda x: json.loads(x) if isinstance(x, str) else x
    if types.is_float32(kind) or types.is_float16(kind):
        number = kind.to_pandas_dtype()
        return lambda x: x if x is None else float(str(number(x)))
    if types.is_struct(kind):
        fields = {field.name: _decoder(field.type, _inner(feature, field.name)) for field in kind}
        return lambda x: x if x is None else _decoded(x, fields)
    if types.is_map(kind):
        values = {"": _decoder(kind.item_type, None)}
        return lambda x: x if x is None else {k: _decoded({"": v}, values).get("") for k, v in x}
    if hasattr(kind, "value_field"):  # every kind of list
        decode = _decoder(kind.value_type, _inner(feature, None))
        if decode is not None:
            return lambda x: x if x is None else [decode(one) for one in x]
    return None


def _decoded(value: JsonObject, fields: Mapping[str, Callable[[Any], Any] | None]) -> JsonObject:
    there = ((name, one, fields[name]) for name, one in value.items() if one is not None)
    return {name: decode(one) if decode else one for name, one, decode in there}


def _inner(feature: Any, name: str | None) -> Any:
    """Returns the feature of an object's field, or (None) of a list's values, if known."""
    if isinstance(feature, list):
        return feature[0] if name is None and feature else None
    if not isinstance(feature, dict):
        return None
    return feature.get("feature") if name is None else feature.get(name)


@contextmanager
def _readable(place: str) -> Iterator[None]:
    """Turns what the readers of files raise into a UserError about the file at `place`."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(
            f"{place}: needs the extra `data`: pip install 'jaxrl[data]' ({error})"
        ) from error
    except Exception as error:  # pyarrow and datasets raise nearly every kind
        why = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, OSError) and error.errno is not None:
            why = os.strerror(error.errno)
        raise UserError(f"{place}: cannot be read: {why}") from error
