"""The stages, one module each with one function `run(context)`. Orchestration only: nobody imports these."""
