"""Records, column spec, Parquet writer and reader: the right end of the flow."""

from spanmill.triplets import select
from spanmill.triplets.reader import read_episodes, read_quarantine, read_rollouts, read_triplets
from spanmill.triplets.records import Call, Episode, Quarantined, Reward, Rollout, Span, Triplet
from spanmill.triplets.schema import SCHEMA_VERSION
from spanmill.triplets.writer import DatasetWriter

__all__ = [
    "SCHEMA_VERSION",
    "Call",
    "DatasetWriter",
    "Episode",
    "Quarantined",
    "Reward",
    "Rollout",
    "Span",
    "Triplet",
    "read_episodes",
    "read_quarantine",
    "read_rollouts",
    "read_triplets",
    "select",
]
