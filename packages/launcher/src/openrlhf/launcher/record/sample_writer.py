"""`SampleWriter`: a learner rank's part of a record. What fails here costs one warning, never the run."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from openrlhf.launcher.record.files import (
    ABOUT,
    IMAGE_SCHEMA,
    IMAGES,
    SAMPLES,
    TEMPORARY,
    step_files,
    step_name,
    write_table,
)
from openrlhf.launcher.record.place import RecordPlace
from openrlhf.launcher.record.schema import RecordedSample, table_of

log = logging.getLogger(__name__)


def image_name(content: bytes) -> str:
    """What a record calls an image: by its content."""
    return hashlib.sha256(content).hexdigest()[:32]


class SampleWriter:
    """Writes a file per step, into a record that the trainer has begun. Where the rank's files take more than its room,
    those of the oldest steps go.

    The newest step always stays. Without samples a file is written too: it says that this rank had none.
    """

    def __init__(self, place: RecordPlace, rank: int) -> None:
        self._place = place
        self._rank = rank
        self._sizes: dict[int, int] = {}
        self._failed = False
        for folder in (place.folder / SAMPLES, place.folder / IMAGES):
            for leftover in folder.glob(f"{TEMPORARY}*.rank{rank}.parquet"):
                leftover.unlink(missing_ok=True)
            for file in step_files(folder):
                if file.rank == rank:
                    self._sizes[file.step] = self._sizes.get(file.step, 0) + file.path.stat().st_size

    def write(self, step: int, samples: Sequence[RecordedSample], images: Mapping[str, bytes]) -> None:
        """Record the rank's samples of a step, and the images that they name."""
        try:
            if not (self._place.folder / ABOUT).is_file():
                raise FileNotFoundError(
                    f"{str(self._place.folder / ABOUT)!r} is not there, which the trainer wrote: --logger.record_dir "
                    "must be a folder that all nodes share"
                )
            size = 0
            if images:
                rows = {"name": list(images), "content": list(images.values())}
                size += write_table(pa.table(rows, schema=IMAGE_SCHEMA), self._path(IMAGES, step))
            self._sizes[step] = size + write_table(table_of(samples), self._path(SAMPLES, step))
            self._make_room(step)
        except Exception as error:  # a record is no reason to stop training
            if not self._failed:
                self._failed = True
                log.warning(
                    "step %d was not recorded (%s: %s); the run goes on, further failures are not reported",
                    step,
                    type(error).__name__,
                    error,
                )

    def _make_room(self, newest: int) -> None:
        spare = sorted(step for step in self._sizes if step != newest)
        while spare and sum(self._sizes.values()) > self._place.max_bytes:
            step = spare.pop(0)
            del self._sizes[step]
            for kind in (SAMPLES, IMAGES):
                self._path(kind, step).unlink(missing_ok=True)

    def _path(self, kind: str, step: int) -> Path:
        return self._place.folder / kind / step_name(step, self._rank)
