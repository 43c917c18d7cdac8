"""The sections of a run configuration, field by field. `pipeline.config` loads and validates them.

Every field is marked *result* (it changes what is computed, so it takes part in fingerprints) or *execution* (it only
changes how: ranks, workers, batch shapes, paths). The description of each field is its documentation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Dtype = Literal["float32", "bfloat16"]


def _whole(value: Any) -> Any:
    """Counts are whole numbers: 4.0, "4" and true are refused rather than rounded or cast."""
    if isinstance(value, bool | float | str):
        raise ValueError("a whole number is expected")
    return value


def _number(value: Any) -> Any:
    """true is not 1.0. Text that is a number is one, as on a command line."""
    if isinstance(value, bool):
        raise ValueError("a number is expected")
    return value


Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Natural = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0.0, le=1.0)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, BeforeValidator(_number), Field(ge=0.0, allow_inf_nan=False)]


def result(default: Any = ..., doc: str = "", **kwargs: Any) -> Any:
    """A field that changes the result: part of every fingerprint that reads its section."""
    return Field(default, description=doc, json_schema_extra={"role": "result"}, **kwargs)


def execution(default: Any = ..., doc: str = "", **kwargs: Any) -> Any:
    """A field that only changes how the result is computed: never part of a fingerprint."""
    return Field(default, description=doc, json_schema_extra={"role": "execution"}, **kwargs)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


class TinyTarget(Section):
    """A small Qwen3-architecture target made on the spot, for tests and first experiments."""

    layers: Count = result(4, "decoder layers")
    hidden_size: Count = result(64, "model width")
    vocabulary: Count = result(512, "BPE vocabulary, special tokens included")
    train_steps: Natural = result(60, "language-model steps on the demo corpus; 0 keeps random weights")


class Target(Section):
    model: str | None = result(None, "hub id or local folder of the frozen target")
    revision: str | None = result(None, "hub revision (branch, tag or commit)")
    tiny: TinyTarget | None = result(None, "make a tiny target instead of loading one")
    trust_remote_code: bool = execution(False, "run code shipped with the model")
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = execution("auto", "attention implementation")
    device_map: str | None = execution(None, "accelerate placement for targets larger than one device, e.g. auto")
    tensor_parallel: bool = execution(False, "use the model's own tensor-parallel plan over the ranks")

    @model_validator(mode="after")
    def _one(self) -> Target:
        if (self.model is None) == (self.tiny is None):
            raise ValueError("set exactly one of target.model and target.tiny")
        return self


class Template(Section):
    """How chats are rendered. Carried from tokens to targets, checkpoint and evaluation; a mismatch stops there."""

    thinking: bool | None = result(None, "enable_thinking of the chat template; null leaves the template's default")
    system_prompt: str | None = result(None, "put before conversations that have no system turn")
    chat_template: str | None = result(None, "path of a Jinja file that replaces the tokenizer's template")


class Source(Section):
    """One corpus: a hub id, local files (glob), or a generated demo set."""

    path: str | None = execution(None, "hub id, or local file/glob: parquet, arrow, json, jsonl, jsonl.gz")
    demo: Literal["gsm_symbolic", "codeio", "chatterbot"] | None = result(None, "generated or packaged demo rows")
    name: str | None = result(None, "source name in reports; default: the row's own source, the demo or the file name")
    revision: str | None = result(None, "hub revision")
    subset: str | None = result(None, "hub configuration name")
    split: str = result("train", "hub split")
    weight: Positive = result(1.0, "share of rows kept (<= 1), by hash of the row id")
    limit: Count | None = result(None, "stop after this many rows")

    @model_validator(mode="after")
    def _one(self) -> Source:
        if (self.path is None) == (self.demo is None):
            raise ValueError("set exactly one of path and demo")
        if self.weight > 1.0:
            raise ValueError(f"weight is a share in (0, 1], found {self.weight}")
        return self


class NearDuplicates(Section):
    threshold: Fraction = result(0.8, "estimated Jaccard similarity above which the larger id is removed")
    permutations: Count = result(128, "MinHash permutations")
    ngram: Count = result(5, "words per shingle")


class Decontaminate(Section):
    prompt_sets: tuple[str, ...] = result((), "prompt sets (names or JSONL files) that must not be in the corpus")
    ngram: Count = result(13, "words per n-gram")
    exempt: tuple[str, ...] = result((), "source names left alone (held-out prompts made by the same generator)")


class Data(Section):
    sources: tuple[Source, ...] = result((), "corpora, in order", min_length=1)
    shard_rows: Count = result(1000, "conversations per shard")
    exact_duplicates: bool = result(True, "remove rows with the same content")
    near_duplicates: NearDuplicates | None = result(None, "MinHash near-duplicate removal; null is off")
    decontaminate: Decontaminate | None = result(None, "remove rows that overlap evaluation sets; null is off")
    calibration_fraction: Fraction = result(0.02, "share of rows held out for calibration, by hash of the id")
    evaluation_fraction: Fraction = result(0.02, "share of rows held out for evaluation, by hash of the id")
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = result({}, "extra role names to accept")
    max_skip_fraction: Fraction = result(0.05, "the stage fails when a larger share of rows is skipped")
    workers: Natural = execution(0, "processes; 0 works in this one")

    @model_validator(mode="after")
    def _splits(self) -> Data:
        if self.calibration_fraction + self.evaluation_fraction >= 1.0:
            raise ValueError("calibration_fraction + evaluation_fraction leave nothing to train on")
        return self


class Answers(Section):
    enabled: bool = result(True, "answer the prompts with the target; off trains on the corpus's own answers")
    backend: Literal["local", "openai"] = result("local", "in-process generation or an OpenAI-compatible server")
    model: str | None = result(None, "model name sent to the server; default target.model")
    dtype: Dtype = result("bfloat16", "compute dtype of in-process generation")
    temperature: NonNegative = result(0.7, "sampling temperature; 0 is greedy")
    top_p: Fraction = result(1.0, "nucleus mass")
    top_k: Natural = result(0, "0 keeps all tokens")
    max_new_tokens: Count = result(2048, "answer length cap")
    cut_answers: Literal["keep", "drop"] = result("keep", "cut answers stay without a supervised end-of-turn, or go")
    max_skip_fraction: Fraction = result(0.05, "the stage fails when a larger share of rows is skipped")
    batch_size: Count = result(64, "rows decoded together (in process); part of the numerics in bfloat16")
    endpoints: tuple[str, ...] = execution((), "base URLs of OpenAI-compatible servers")
    api_key_env: str = execution("OPENAI_API_KEY", "environment variable that holds the key")
    concurrency: Count = execution(64, "requests in flight per endpoint")
    timeout_seconds: Positive = execution(600.0, "per request")
    retries: Natural = execution(5, "per request, with exponential back-off")

    @model_validator(mode="after")
    def _server(self) -> Answers:
        if self.enabled and self.backend == "openai" and not self.endpoints:
            raise ValueError("answers.backend openai needs answers.endpoints")
        return self


class Tokens(Section):
    max_length: Count = result(4096, "rows are cut to this many tokens")
    multi_turn: Literal["expand", "last"] = result("expand", "one row per assistant turn, or the final turn only")
    supervise_end_of_turn: bool = result(True, "train on the token that ends an answer (never for cut answers)")
    min_loss_tokens: Count = result(2, "rows with fewer supervised tokens are skipped")
    max_skip_fraction: Fraction = result(0.05, "the stage fails when a larger share of rows is skipped")
    workers: Natural = execution(0, "processes; 0 works in this one")


class Targets(Section):
    mode: Literal["cached", "live", "rolling", "streamed"] = result(
        "cached", "build a cache, run the target beside the drafter, both by turns, or read a finished cache from a URL"
    )
    layers: tuple[int, ...] | None = result(None, "tapped decoder layers; null spreads five over the depth")
    taps: Literal["bf16", "fp8", "int8", "int4", "int3", "int2"] = result("int8", "hidden-state codec")
    channel_rms: bool = result(False, "static per-channel RMS before int4/int3/int2")
    logits: Literal["last_hidden", "topk", "full"] = result("topk", "target-distribution codec")
    topk: Count = result(64, "log-probabilities kept per position by the topk codec")
    positions: Literal["supervised", "all"] = result("supervised", "positions whose distribution is kept")
    dtype: Dtype = result("bfloat16", "compute dtype of the target forward")
    max_skip_fraction: Fraction = result(0.01, "the stage fails when a larger share of rows is not finite")
    batch_tokens: Count = execution(8192, "tokens per forward, padding included")
    max_bytes: Count | None = execution(None, "rolling and streamed: the disk never holds more")
    url: str | None = execution(None, "streamed: the finished cache; http(s), gs, hf, a folder, or pipe:COMMAND {}")

    @model_validator(mode="after")
    def _modes(self) -> Targets:
        problems = []
        if self.mode in ("rolling", "streamed") and self.max_bytes is None:
            problems.append(f"targets.mode {self.mode} needs targets.max_bytes")
        if self.mode == "streamed" and self.url is None:
            problems.append("targets.mode streamed needs targets.url")
        if self.url is not None and self.url.startswith("pipe:") and "{}" not in self.url:
            problems.append("targets.url: a pipe: command needs {} in the place of the file's name")
        if problems:
            raise ValueError("; ".join(problems))
        if self.channel_rms and self.taps not in ("int4", "int3", "int2"):
            raise ValueError(f"targets.channel_rms has no effect on taps {self.taps}: it goes with int4, int3 and int2")
        return self


class Draft(Section):
    kind: Literal["dspark", "dflash", "eagle3", "mtp", "medusa"] = result("dspark", "drafter family")
    block_size: Count = result(7, "draft slots per round (K)")
    layout: Literal["next_token", "fill_in"] = result("next_token", "what a slot's input predicts")
    layers: Count = result(5, "draft decoder layers")
    markov: Literal["none", "vanilla", "gated", "rnn"] = result("vanilla", "sequential head")
    markov_rank: Natural = result(256, "rank r of the sequential head")
    confidence: bool = result(True, "confidence head")
    taps: bool = result(True, "feed the target's hidden states; off is the no-taps control")
    mask_token_id: int | None = result(None, "token of the empty slots; an unused row of the target's embedding")
    allow_used_mask_token: bool = result(False, "accept a mask token that looks used (pad, eos, end-of-turn)")
    vocabulary: Count | None = result(None, "draft vocabulary size; null is the target's")
    init: Literal["random", "target_layers"] = result("random", "where draft layers start")
    init_layers: tuple[int, ...] | None = result(
        None, "target layers copied by init target_layers; null: the last ones"
    )
    intermediate_size: Count | None = result(None, "MLP width; null is the target's")
    heads: Count | None = result(None, "attention heads; null is the target's")
    kv_heads: Count | None = result(None, "key/value heads; null is the target's")
    activation: Literal["silu", "gelu", "gelu_pytorch_tanh", "relu"] | None = result(None, "null is the target's")

    @model_validator(mode="after")
    def _family(self) -> Draft:
        problems = []
        if self.kind == "dspark" and (self.markov == "none" or self.markov_rank == 0):
            problems.append("kind dspark needs a Markov head (markov, markov_rank > 0); without one it is kind dflash")
        if self.kind != "dspark" and self.markov != "none":
            problems.append(f"kind {self.kind} has no Markov head: set markov: none")
        if self.mask_token_id is not None and self.kind in ("eagle3", "mtp", "medusa"):
            problems.append(f"kind {self.kind} has no empty slots: set mask_token_id: null")
        if self.layout == "fill_in" and self.kind != "dflash":
            problems.append("layout fill_in belongs to kind dflash")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class Train(Section):
    steps: Count | None = result(None, "optimizer steps; overrides epochs")
    epochs: Count = result(10, "passes over the training rows, when steps is not set")
    global_batch_size: Count = result(512, "conversations per optimizer step")
    learning_rate: Positive = result(6e-4, "peak")
    min_learning_rate: NonNegative = result(0.0, "at the last step")
    warmup_fraction: Fraction = result(0.04, "share of the steps")
    weight_decay: NonNegative = result(0.0, "AdamW")
    betas: tuple[Fraction, Fraction] = result((0.9, 0.95), "AdamW")
    max_grad_norm: Positive = result(1.0, "global norm")
    num_anchors: Count = result(512, "anchors per conversation and epoch")
    anchor_rule: Literal["generated", "label"] = result("generated", "anchor and label supervised, or label only")
    ce_weight: NonNegative = result(0.1, "cross-entropy")
    tv_weight: NonNegative = result(0.9, "total-variation term")
    confidence_weight: NonNegative = result(1.0, "confidence term")
    divergence: Literal["tv", "kl"] = result("tv", "what tv_weight multiplies")
    ce_label: Literal["data", "argmax"] = result("data", "data token or the target's argmax")
    position_decay: Positive | Literal["block_size"] | None = result(4.0, "w_k = exp(-(k-1)/decay); null is uniform")
    detach_confidence: bool = result(False, "keep the confidence loss out of backbone and Markov head")
    precision: Dtype = result("float32", "compute dtype; weights and moments stay float32")
    validation_fraction: Fraction = result(0.02, "share of training rows held out for the training curves")
    init_from: str | None = result(None, "weights of a published or own checkpoint to start from")
    continue_from: str | None = result(None, "fingerprint or path of a finished run to extend")
    published: str | None = result(None, "take this published or own checkpoint as it is; nothing is trained")
    validate_every: Count = execution(500, "steps")
    save_every: Count = execution(500, "steps")
    keep_checkpoints: Count = execution(2, "older ones are removed")
    micro_batch_tokens: Count = execution(8192, "context tokens per forward and rank")
    loss_chunk: Count = execution(512, "slots whose logits exist at a time")
    attention: Literal["auto", "flex", "sdpa", "eager"] = execution("auto", "attention over anchors")
    compile: bool = execution(False, "torch.compile the draft backbone")
    activation_checkpointing: bool = execution(False, "recompute draft layers in the backward pass")
    engine: Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp2"] | None = execution(
        None, "null takes what the launcher was configured with"
    )
    sharded_checkpoints: bool = execution(False, "save with torch.distributed.checkpoint instead of gathering")
    workers: Natural = execution(1, "reader threads per rank; 0 reads between the steps")

    @model_validator(mode="after")
    def _some_loss(self) -> Train:
        if self.ce_weight == 0 and self.tv_weight == 0:
            raise ValueError("ce_weight and tv_weight are both 0: nothing would be learned")
        if self.published is not None and (self.init_from is not None or self.continue_from is not None):
            raise ValueError("published trains nothing: init_from and continue_from have no effect beside it")
        return self


class Calibrate(Section):
    temperatures: tuple[NonNegative, ...] = result((0.0, 1.0), "served temperatures, one file each", min_length=1)
    prompt_sets: tuple[str, ...] | None = execution(
        None, "names or JSONL files of turns, such as the traffic you serve; null: the calibration split", min_length=1
    )
    num_prompts: Count = result(64, "prompts, half of which fit and half report")
    records: str | None = result(None, ".pt shards recorded by SGLang (file name may be a glob), not decoded here")
    max_new_tokens: Count = result(256, "per prompt")
    bins: Count = result(15, "ECE bins")
    dtype: Dtype = result("float32", "compute dtype")
    batch_size: Count = execution(16, "rows decoded together")

    @model_validator(mode="after")
    def _one(self) -> Calibrate:
        if self.records is not None and self.prompt_sets is not None:
            raise ValueError("records and prompt_sets exclude each other: recorded rounds bring their own prompts")
        return self


class Profile(Section):
    grid: Literal["full", "powers_of_two"] = result("full", "every B up to 64, then at most 10 % apart; or 1, 2, 4 …")
    max_batch_tokens: Count = result(512, "largest forward measured, in tokens")
    context_length: Count = result(256, "tokens in the cache of each row")
    repeats: Count = result(5, "timed repetitions; the median is kept")
    dtype: Dtype = result("float32", "compute dtype")
    synthetic: Literal["constant", "sqrt", "staircase"] | None = result(None, "a named curve instead of a measurement")
    endpoint: str | None = execution(None, "profile a running OpenAI-compatible server by load")


class Evaluate(Section):
    prompt_sets: tuple[str, ...] = result(("heldout",), "`heldout`, names such as gsm8k, or JSONL files of turns")
    num_prompts: Count | None = result(None, "per prompt set; null takes all")
    temperatures: tuple[NonNegative, ...] = result((0.0, 1.0), "one record each", min_length=1)
    top_p: Fraction = result(1.0, "target nucleus mass; the law is the truncated one")
    top_k: Natural = result(0, "0 keeps all tokens")
    max_new_tokens: Count = result(256, "per turn")
    policy: Literal["full", "early_stop", "lagged_global", "static_length", "static_threshold"] = result(
        "full", "how many drafted tokens are verified"
    )
    policy_length: Count | None = result(None, "static_length")
    policy_threshold: Fraction | None = result(None, "static_threshold")
    batch_size: Count = result(8, "rows decoded together")
    dtype: Dtype = result("float32", "compute dtype")
    bootstrap: Count = result(1000, "resamples over requests")
    vanilla: bool = result(True, "also decode without a drafter, for speed and losslessness")
    lookup: bool = result(True, "also score prompt lookup on the same outputs")
    allow_template_mismatch: bool = result(False, "evaluate in another chat mode than the drafter was trained in")


class Export(Section):
    layouts: tuple[Literal["deepspec", "speculators", "specforge", "dflash", "eagle3", "mtp"], ...] = result(
        ("deepspec",), "published layouts to write; none switches the stage off"
    )
    engines: tuple[Literal["vllm", "sglang", "llama.cpp", "deepspec", "speculators", "specforge"], ...] = result(
        (), "engines one of the layouts must be servable by; refused before anything is written otherwise"
    )
    dtype: Dtype = result("bfloat16", "stored dtype")
    include_target_tensors: bool = result(False, "add the target's embedding and head")
    temperature: NonNegative = result(1.0, "whose STS file ships")
    max_shard_bytes: Count = result(5_000_000_000, "larger exports are split")
    license: str | None = result(None, "licence named in the model card; null: that of the target and the data")


class Tracking(Section):
    enabled: bool = execution(True, "MLflow")
    uri: str | None = execution(
        None, "tracking store; null takes MLFLOW_TRACKING_URI, else an sqlite file in the work directory"
    )
    artifact_location: str | None = execution(None, "where MLflow keeps artifacts; null beside the store")

    @model_validator(mode="after")
    def _store(self) -> Tracking:
        schemes = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
        if self.uri is not None and self.uri.partition(":")[0].partition("+")[0] not in schemes:
            raise ValueError(
                "uri: MLflow no longer writes plain folders; use http(s)://host:port, sqlite:////path/to/mlflow.db, "
                "or leave it out for an sqlite file in the work directory"
            )
        return self


class Launch(Section):
    """How `dspark submit` and `dspark run` start processes."""

    nodes: Count = execution(1, "nodes of the train job")
    processes_per_node: Count = execution(1, "ranks per node")
    array_tasks: Count = execution(1, "array tasks of the sharded stages")
    partition: str | None = execution(None, "Slurm partition")
    account: str | None = execution(None, "Slurm account")
    gres: str | None = execution(None, "e.g. gpu:8")
    time_limit: str | None = execution(None, "Slurm time limit, e.g. 24:00:00")
    site_file: str | None = execution(None, "sourced in the body of every batch script")
    stop_signal: Literal["SIGTERM", "SIGUSR1", "SIGUSR2"] | None = execution(
        None, "asks a run to save and end, beside SIGTERM; null: Slurm sends SIGUSR1, SIGUSR2 works too"
    )
    grace_seconds: Count = execution(120, "between that signal and the kill")
    port: Annotated[int, Field(ge=1024, le=65535)] | None = execution(None, "rendezvous; null derives it from the job")


class Config(Section):
    experiment: str = execution("default", "name of the run group", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    work_dir: Path = execution(Path("work"), "everything is written below it")
    seed: Natural = result(0, "of every random choice")
    target: Target = result(doc="the frozen model")
    template: Template = result(Template(), "chat rendering")
    data: Data = result(doc="corpus")
    answers: Answers = result(Answers(), "regenerated answers")
    tokens: Tokens = result(Tokens(), "token ids and loss masks")
    targets: Targets = result(Targets(), "hidden states and distributions")
    draft: Draft = result(Draft(), "the drafter")
    train: Train = result(Train(), "optimisation")
    calibrate: Calibrate = result(Calibrate(), "STS")
    profile: Profile = result(Profile(), "SPS")
    evaluate: Evaluate = result(Evaluate(), "acceptance and speed")
    export: Export = result(Export(), "published checkpoints")
    tracking: Tracking = execution(Tracking(), "MLflow")
    launch: Launch = execution(Launch(), "processes and Slurm")

    @model_validator(mode="after")
    def _across(self) -> Config:
        if self.train.engine == "single" and self.launch.processes_per_node * self.launch.nodes > 1:
            raise ValueError(
                "train.engine single is one process: leave launch.nodes and launch.processes_per_node at 1"
            )
        if self.draft.kind in ("mtp", "medusa") and (self.targets.logits, self.targets.positions) != (
            "last_hidden",
            "all",
        ):
            raise ValueError(
                f"draft.kind {self.draft.kind} reads the exact last hidden state everywhere: "
                "set targets.logits: last_hidden and targets.positions: all"
            )
        return self
