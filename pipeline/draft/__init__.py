"""The drafter networks. One interface (`interface.py`): training outputs over packed anchors, proposals while decoding.

    config.py         what a drafter is            derive.py       its sizes from the target's config.json
    block.py          DSpark and DFlash            heads.py        sequential and confidence heads
    autoregressive.py the loop of Eagle3 and MTP   eagle3.py, mtp.py
    medusa.py         independent heads            layers.py, rope.py
    attention.py      many blocks over one packed context; flex.py on CUDA
    state.py          ragged memory while decoding
    build.py          from a seed                  from_target.py  from the target's own layers
    vocabulary.py     the tokens it may propose    io.py           our checkpoint, strict
    description.py    what a checkpoint says of itself, and whether it fits a target

Imports torch only, and of the pipeline nothing but its errors and `architecture`.
"""
