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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from jaxrl.data.example import Example, JsonObject
from jaxrl.data.rows import Keys, no_prompt, to_example
from jaxrl.errors import UserError

Table = Any
"""A `pyarrow.Table` or `RecordBatch`; Any, because pyarrow is an optional package."""
CACHE_BYTES = 2**30
"""Decoded row groups kept in memory, over all parquet files of one source."""
_BATCH = 1024
"""Rows checked at once."""


class TablePart:
    """The rows of a table."""

    procedural = False

    def __init__(
        self,
        name: str,
        open_reader: Callable[[], ParquetReader | DatasetReader],
        keys: Keys,
        label: str,
    ):
        """
        Args:
            name: as the source was given.
            label: the config key, for error messages.
        """
        self.name, self._keys, self._place = name, keys, f"{label}: {name}"
        with _readable(self._place):
            self._reader = open_reader()
        self.columns = self._reader.columns
        if keys.prompt not in self.columns and keys.messages not in self.columns:
            raise no_prompt(self.columns, keys, self._place, "the table")
        if not len(self):
            raise UserError(f"{self._place}: no rows")
        self._check()

    def where(self, index: int) -> str:
        return f"{self.name}: row {index}"

    def digest(self) -> str:
        whole = hashlib.sha256()
        with _readable(self._place):
            for path in self._reader.files:
                with open(path, "rb") as file:
                    whole.update(hashlib.file_digest(file, "sha256").digest())
        return whole.hexdigest()

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> Example:
        place = f"{self._place}: row {index}"
        with _readable(place):
            (row,) = self._reader.row(index).to_pylist()
        return to_example(row, self._keys, place)

    def _check(self) -> None:
        """Reads what makes an example of every row, and nothing else."""
        keys = self._keys
        named = (keys.prompt, keys.messages, keys.completion, keys.answer)
        start = 0
        with _readable(self._place):
            for batch in self._reader.batches([key for key in named if key in self.columns]):
                for index, row in enumerate(self._rows(batch, start), start):
                    to_example(row, keys, f"{self._place}: row {index}")
                start += len(batch)

    def _rows(self, batch: Table, start: int) -> list[JsonObject]:
        """The rows of a batch; where one cannot be read, it is named."""
        try:
            rows: list[JsonObject] = batch.to_pylist()
        except Exception:  # whatever it is, the row that has it raises it again
            rows = []
            for at in range(len(batch)):
                with _readable(f"{self._place}: row {start + at}"):
                    rows += batch.slice(at, 1).to_pylist()
        return rows


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
        self.columns = tuple(self._file.schema_arrow.names)
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


class DatasetReader:
    """What `datasets.Dataset.save_to_disk` wrote: streams of Arrow, memory-mapped. Images and the
    like stay bytes that nobody decodes.
    """

    def __init__(self, files: list[str]):
        import pyarrow as pa

        self.files = files
        self._table = pa.concat_tables(
            pa.ipc.open_stream(pa.memory_map(file)).read_all() for file in files
        )
        self.columns = tuple(self._table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> Table:
        return self._table.slice(index, 1)

    def batches(self, columns: list[str]) -> Iterator[Table]:
        return iter(self._table.select(columns).to_batches(_BATCH))


def open_dataset(name: str, folder: str, keys: Keys, label: str) -> TablePart:
    """The rows of a saved `Dataset`, which may be one split of a `DatasetDict`."""
    state = Path(folder) / "state.json"
    with _readable(f"{label}: {state}"):
        written = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
        files = [str(Path(folder) / file["filename"]) for file in written]
    if not files:
        raise UserError(f"{label}: {name}: no rows")
    return TablePart(name, lambda: DatasetReader(files), keys, label)


def dataset_splits(folder: str, label: str) -> list[str] | None:
    """The splits of a saved `DatasetDict`, [] of a saved `Dataset`, None of any other folder."""
    index = Path(folder) / "dataset_dict.json"
    if not index.is_file():
        saved = (Path(folder) / "state.json").is_file()
        return [] if saved and (Path(folder) / "dataset_info.json").is_file() else None
    with _readable(f"{label}: {index}"):
        return [str(name) for name in json.loads(index.read_text(encoding="utf-8"))["splits"]]


@contextmanager
def _readable(place: str) -> Iterator[None]:
    """What the readers of files raise is about the file at `place`."""
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
