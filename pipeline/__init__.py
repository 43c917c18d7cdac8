"""dspark-pipeline: from a chat corpus and a target model to a trained, calibrated, measured drafter."""

__version__ = "0.1.0"
