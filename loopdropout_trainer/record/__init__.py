"""What is on record: what a number depends on (its identity), and the numbers themselves (measurements, one row each)."""

from loopdropout_trainer.record.identity import (
    ALIKE,
    ONE_RUN,
    ONE_SETTING,
    Difference,
    Identity,
    differences,
    identity_key,
    make_identity,
    read_identity,
)
from loopdropout_trainer.record.measurement import (
    IDENTITIES_FILE,
    MEASUREMENTS_FILE,
    Measurement,
    RecordError,
    read_measurements,
    write_measurements,
)


__all__ = [
    *("ALIKE", "IDENTITIES_FILE", "MEASUREMENTS_FILE", "ONE_RUN", "ONE_SETTING"),
    *("Difference", "Identity", "Measurement", "RecordError"),
    *("differences", "identity_key", "make_identity", "read_identity", "read_measurements", "write_measurements"),
]
