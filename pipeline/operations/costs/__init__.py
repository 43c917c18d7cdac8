"""What a configuration costs, by arithmetic alone: sizes, work, memory, disk and time of every stage.

    sizes       weights of target and drafter, by what reads them
    corpus      rows, tokens, lengths: counted where they exist, assumed where they do not
    work        how often each weight is read: FLOPs and bytes moved of every stage
    memory      bytes on a device, per rank, engine and micro-batch
    disk        bytes every artifact takes
    hardware    a device's peak rates, and how many of them a stage runs on
    chain       all of it together, a row per stage

Calibration replaces peak rates by measured ones:

    measure     half a minute of small real pieces on this machine
    decoding    those of them that decode
    rates       what it found
    predict     CPU-seconds and peak memory of every stage from them
    compare     the same against what finished stages recorded
"""
