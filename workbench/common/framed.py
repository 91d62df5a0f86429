"""A result that has a frame: it can be drawn, and written as a file of one table."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from workbench.common.output import check_extension, writing
from workbench.common.upper import PLOT, upper

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Framed:
    """What every result with a frame can do. A kind of result says what its frame is."""

    def to_frame(self) -> pd.DataFrame:
        """All numbers of the result as one frame."""
        raise NotImplementedError

    def plot(self, **how: Any) -> Figure:
        """The picture of the result, as a matplotlib figure that shows itself in a notebook.

        how: as the picture has it (`wb.plot`). Raises UsageError for a result without a picture.
        """
        figure: Figure = upper(PLOT)(self, **how)
        return figure

    def to_csv(self, path: str | PathLike[str]) -> Path:
        """Writes `to_frame()` as CSV, a line of column names first; returns the path. Raises
        UsageError where the file cannot be written, and for an extension other than .csv."""
        check_extension(Path(path), ".csv")
        with writing(path) as file:
            pacsv.write_csv(self._table(), file)
        return Path(path)

    def to_parquet(self, path: str | PathLike[str]) -> Path:
        """Writes `to_frame()` as Parquet, with the types of its columns; returns the path. Raises
        UsageError where the file cannot be written, and for an extension other than .parquet."""
        check_extension(Path(path), ".parquet")
        with writing(path) as file:
            pq.write_table(self._table(), file, compression="zstd")
        return Path(path)

    def _table(self) -> pa.Table:
        """The frame without its index and without `attrs`, which a file has no place for."""
        frame = self.to_frame()
        frame.attrs = {}
        return pa.Table.from_pandas(frame, preserve_index=False)
