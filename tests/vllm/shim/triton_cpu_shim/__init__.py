"""A `cpu` backend of Triton that compiles nothing, so that vLLM's second model runner starts without a GPU.

Test-only. Put this folder's parent on PYTHONPATH (the `.dist-info` beside it carries the entry point) and set
TRITON_INTERPRET=1, TRITON_DEFAULT_BACKEND=cpu, VLLM_USE_V2_MODEL_RUNNER=1: every kernel then runs in Triton's own NumPy
interpreter, far too slow for anything but a check of numbers.
"""
