"""Small programs beside the pipeline: set-up, inspection, comparison, benchmarks. Not part of the installed package."""
