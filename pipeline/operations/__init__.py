"""Commands beside the stages: run, plan, status, doctor, verify, repair, lineage, gc, generate, fetch, push."""
