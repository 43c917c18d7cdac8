"""Tests. `make test` runs them; `make prove` runs those marked `prove` at full size."""
