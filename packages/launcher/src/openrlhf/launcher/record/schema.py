"""What a record holds of a sample and of a step, and how both lie in files. No torch.

Samples are rows of Parquet files, one per step and learner rank. Log-probs, versions and advantages are stored for the
trainable tokens alone; `RecordedSample` has them at full length again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from openrlhf.agents.types import StopReason, Trajectory, Turn

FORMAT = 2
"""Goes up when an older reader could not read the files."""


@dataclass(frozen=True, kw_only=True)
class RecordedSample:
    """One trained sample. Per-token arrays have the length of `tokens`; index t speaks of token t.

    Example: prompt [5, 6], answer [7, 2] of step 3::

        sample.tokens            # [5, 6, 7, 2] int32
        sample.trainable         # [False, False, True, True]
        sample.engine_logprobs   # [0, 0, -0.1, -0.2] float32, of the engine that sampled; 0 where not trainable
        sample.trainer_logprobs  # the same of the learner before the first update on the sample; None: not measured
        sample.versions          # [-1, -1, 2, 2] int32: the weights that sampled the token
        sample.advantages        # [0, 0, 0.5, 0.5] float32, after whitening

    step: counted from 1, as in metrics. index: the sample's number in the rollout batch. mini_batch: the first epoch's.
    group_id: the prompt. sample_index: the episode of the prompt; samples that share both are branches of one episode.
    place: its place among all samples of the group, failed ones too.
    reward: as it was given; score: what filters look at; shaped: the reward after shaping and baseline. float64.
    label: as JSON tells it. images: names of the record's images, in the order of the prompt.
    """

    step: int
    index: int
    mini_batch: int
    group_id: str
    sample_index: int
    place: int
    prompt: str
    label: Any
    tokens: NDArray[np.int32]
    trainable: NDArray[np.bool_]
    engine_logprobs: NDArray[np.float32]
    trainer_logprobs: NDArray[np.float32] | None
    versions: NDArray[np.int32]
    advantages: NDArray[np.float32]
    prompt_length: int
    turns: Sequence[Turn]
    stop_reason: StopReason
    reward: float | None
    score: float | None
    shaped: float
    extra_logs: Mapping[str, float] = field(default_factory=dict)
    images: Sequence[str] = ()

    def trajectory(self, images: Sequence[bytes] = ()) -> Trajectory:
        """What an agent worker gave for it, as far as training looks at it. images: the contents of its images."""
        return Trajectory(
            token_ids=self.tokens.tolist(),
            trainable=self.trainable.astype(int).tolist(),
            logprobs=self.engine_logprobs.tolist(),
            versions=self.versions.tolist(),
            prompt_length=self.prompt_length,
            turns=list(self.turns),
            stop_reason=self.stop_reason,
            group_id=self.group_id,
            sample_index=self.sample_index,
            reward=self.reward,
            score=self.score,
            extra_logs=self.extra_logs,
            images=list(images),
            prompt=self.prompt,
            label=self.label,
        )


@dataclass(frozen=True, kw_only=True)
class RecordedGroup:
    """All samples of one prompt, as the trainer had them.

    samples: the trained ones by their place. others: what was sampled and not trained on, by place: the fields of
    `launcher.samples.SampleInfo`, `failure` with the traceback of one that failed. count: samples in all. columns: of
    the prompt's row (`--data.extra_keys`); a long value is the beginning of its JSON text. environment: in a run with
    several, whose agent it was.
    """

    group_id: str
    position: int
    episode: int
    datasource: str
    count: int
    environment: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[int, RecordedSample] = field(default_factory=dict)
    others: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One step without its tokens. before: the trainer's state before it (`state`, `kl`, `reward_norm`).

    groups: without samples, in the order in which they were trained. sampling: metrics of the sampling alone.
    metrics: all of the step; empty where the run ended before. evaluation: of the weights after the step.
    """

    step: int
    time: float
    before: Mapping[str, Any]
    groups: Sequence[RecordedGroup]
    sampling: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)


_TEXT = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32()),
        pa.field("index", pa.int32()),
        pa.field("mini_batch", pa.int32()),
        pa.field("group_id", _TEXT),
        pa.field("sample_index", pa.int32()),
        pa.field("place", pa.int32()),
        pa.field("prompt", _TEXT),
        pa.field("label", _TEXT),
        pa.field("tokens", pa.list_(pa.int32())),
        pa.field("trainable", pa.list_(pa.bool_())),
        pa.field("engine_logprobs", pa.list_(pa.float32())),
        pa.field("trainer_logprobs", pa.list_(pa.float32())),
        pa.field("versions", pa.list_(pa.int32())),
        pa.field("advantages", pa.list_(pa.float32())),
        pa.field("prompt_length", pa.int32()),
        pa.field("turns", _TEXT),
        pa.field("stop_reason", _TEXT),
        pa.field("reward", pa.float64()),
        pa.field("score", pa.float64()),
        pa.field("shaped", pa.float64()),
        pa.field("extra_logs", _TEXT),
        pa.field("images", pa.list_(pa.string())),
    ]
)

_OF_TRAINABLE = ("engine_logprobs", "trainer_logprobs", "versions", "advantages")
_OF_TOKENS = ("tokens", "trainable")
_AS_JSON = ("label", "turns", "extra_logs")


_TURN = ("start", "end", "finish_reason", "reward", "temperature")


def _turn(turn: Turn) -> list[Any]:
    """As a row has it: reward and temperature only where there is one, as records of format 1 have none."""
    values = [getattr(turn, name) for name in _TURN]
    while values[-1] is None:
        del values[-1]
    return values


def table_of(samples: Sequence[RecordedSample]) -> pa.Table:
    """Rows of `SCHEMA`."""
    columns = {name: [getattr(sample, name) for sample in samples] for name in SCHEMA.names}
    columns["turns"] = [[_turn(t) for t in turns] for turns in columns["turns"]]
    for name in _AS_JSON:
        columns[name] = [_encode(_plain(value)) for value in columns[name]]
    columns["stop_reason"] = [reason.value for reason in columns["stop_reason"]]
    masks = columns["trainable"]
    for name in _OF_TRAINABLE:
        columns[name] = [None if v is None else v[m] for v, m in zip(columns[name], masks, strict=True)]
    arrays = [_array(field, columns[field.name]) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _array(field: pa.Field, values: list[Any]) -> pa.Array:
    if field.name not in _OF_TRAINABLE + _OF_TOKENS:
        return (
            pa.array(values, field.type.value_type).dictionary_encode()
            if field.type == _TEXT
            else pa.array(values, field.type)
        )
    present = [value for value in values if value is not None]
    flat = np.concatenate(present) if present else np.zeros(0)
    offsets = np.cumsum([0, *(0 if value is None else len(value) for value in values)])
    missing = [value is None for value in values]
    mask = pa.array(missing, pa.bool_()) if any(missing) else None
    content = pa.array(flat.astype(field.type.value_type.to_pandas_dtype(), copy=False), field.type.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), content, mask=mask)


_encode = json.JSONEncoder(ensure_ascii=False).encode


def _plain(value: Any) -> Any:
    """As JSON can hold it; what JSON has no form for becomes its text."""
    if type(value) is str or type(value) is int or type(value) is float:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def samples_of(table: pa.Table) -> list[RecordedSample]:
    """The inverse of `table_of`."""
    columns = {name: _column(table.column(name).combine_chunks(), name) for name in SCHEMA.names}
    return [_sample({name: values[row] for name, values in columns.items()}) for row in range(table.num_rows)]


def _column(array: pa.Array, name: str) -> list[Any]:
    if name not in _OF_TRAINABLE + _OF_TOKENS:
        return array.to_pylist()
    flat = array.values.to_numpy(zero_copy_only=False)
    offsets = array.offsets.to_numpy()
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return [flat[a:b] if ok else None for a, b, ok in zip(offsets[:-1], offsets[1:], valid, strict=True)]


def _sample(row: dict[str, Any]) -> RecordedSample:
    mask = row["trainable"].astype(bool)
    for name in _OF_TRAINABLE:
        if row[name] is not None:
            full = np.full(len(mask), -1 if name == "versions" else 0, dtype=row[name].dtype)
            full[mask] = row[name]
            row[name] = full
    row |= {name: json.loads(row[name]) for name in _AS_JSON}
    row["turns"] = [Turn(**dict(zip(_TURN, turn, strict=False))) for turn in row["turns"]]
    row["stop_reason"] = StopReason(row["stop_reason"])
    return RecordedSample(**(row | {"trainable": mask}))
