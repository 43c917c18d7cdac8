"""`report.html`: everything about one experiment on a page of its own that asks nothing of the network.

`sections`, `lineage` and `compare` turn artifacts into tables, figures and notes, `page` lays those out, `command`
writes the file, `shown` says which of an experiment's chains it shows. The page follows from what lies in the work
directory alone: unchanged artifacts give the same bytes.
"""
