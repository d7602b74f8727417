from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from .strategy.strategy import check_edges


ON_INEXACT = ("error", "disable")
SELECTORS = ("fixed", "beg_mab", "cost_model", "auto")
DRAFT_SAMPLINGS = ("greedy", "probabilistic", "adaptive")


@dataclass
class TLTGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`TLTGRPOTrainer`].

    It adds to [`~trl.GRPOConfig`] the parameters of speculative rollouts and of the drafter that is trained online.
    All of them are inactive unless `use_vllm=True` and `vllm_mode="colocate"`.

    Parameters:
        > Parameters that control speculative rollouts

        speculation_selector (`str`, *optional*, defaults to `"auto"`):
            How the number of draft tokens of every engine step is chosen. `"fixed"`: always `num_draft_tokens`, off
            above `speculation_activation_threshold` running requests. `"beg_mab"`: bucketed epsilon-greedy bandit of
            [TLT](https://huggingface.co/papers/2511.16665). `"cost_model"`: fitted step-time model as in
            [RLHFSpec](https://huggingface.co/papers/2512.04752). `"auto"`: the cost model as prior, the bandit as
            corrector. The adaptive ones always have "no speculation" among their choices.
        num_draft_tokens (`int`, *optional*, defaults to `3`):
            Number of draft tokens per step with `speculation_selector="fixed"`.
        draft_token_choices (`list[int]`, *optional*, defaults to `[1, 2, 3, 5]`):
            Numbers of draft tokens that the adaptive selectors choose from.
        ngram_draft_token_choices (`list[int]`, *optional*, defaults to `[4]`):
            Numbers of draft tokens that the adaptive selectors may look up in earlier answers to the same prompt, in
            place of the drafter's. An empty list leaves the lookup out.
        speculation_bucket_edges (`list[int]`, *optional*):
            Largest batch size of each bucket of the adaptive selectors, strictly increasing. Defaults to powers of two
            up to the engine's `max_num_seqs`.
        speculation_activation_threshold (`int`, *optional*):
            With `speculation_selector="fixed"`: largest number of running requests at which speculation is on. `None`
            keeps it on always.
        draft_sampling (`str`, *optional*, defaults to `"greedy"`):
            How the drafter picks its tokens: `"greedy"`, `"probabilistic"`, or `"adaptive"`, which makes every number
            of draft tokens two choices of an adaptive selector. All are lossless.
        vllm_engine_kwargs (`dict[str, Any]`, *optional*):
            Further keyword arguments for `vllm.LLM`, such as `{"compilation_config": {...}}`.
        verify_weight_sync (`bool`, *optional*, defaults to `True`):
            Whether to read weights back from the engine after every sync and compare them with what was pushed.
        spec_on_inexact (`str`, *optional*, defaults to `"error"`):
            What to do when the check at start-up finds that the engine is not exact under speculation: `"error"`
            stops, `"disable"` goes on without speculation.

        > Parameters that control the drafter

        drafter_model_name_or_path (`str`, *optional*):
            Folder or Hub id of an EAGLE-3 drafter to start from. If not set, one is initialised from the policy.
        drafter_vocab_size (`int`, *optional*):
            Size of the drafter's reduced vocabulary: the tokens most frequent in the training set's text columns.
            `None` drafts over the whole vocabulary. Ignored with `drafter_model_name_or_path`.
        drafter_aux_layer_ids (`list[int]`, *optional*):
            Policy layers whose input the drafter sees. Defaults to `[2, L // 2, L - 3]` (others below seven layers).
            Ignored with `drafter_model_name_or_path`.
        train_drafter (`bool`, *optional*, defaults to `True`):
            Whether to train the drafter while the run goes on.
        drafter_time_budget (`float`, *optional*, defaults to `0.1`):
            Share of the time between two rollouts that one process may spend on training its drafter.
        drafter_learning_rate (`float`, *optional*, defaults to `5e-4`):
            Learning rate of the drafter's own AdamW.
        drafter_unroll_steps (`int`, *optional*, defaults to `5`):
            Draft steps unrolled in training (training-time test of EAGLE-3).
        drafter_max_tokens_per_step (`int`, *optional*, defaults to `512`):
            Tokens packed into one optimiser step of the drafter.
        drafter_max_grad_norm (`float`, *optional*, defaults to `0.5`):
            Gradient clip of the drafter; never shared with the policy's.
        feature_buffer_tokens (`int`, *optional*, defaults to `65536`):
            Capacity of the feature buffer in tokens, in CPU memory.
        feature_long_answer_fraction (`float`, *optional*, defaults to `0.5`):
            Share of a drafter batch that is drawn from the longest answers of earlier steps; the rest is mixed from
            all that is there, the present step's included.
        feature_max_age (`int`, *optional*, defaults to `4`):
            Rollouts after which features are dropped; policy steps where a step has several rollouts.
        drafter_push_to_hub (`bool`, *optional*, defaults to `False`):
            Whether to push the drafter to the Hub at the end of training and, as `hub_strategy` says, at every save.
            `hub_token`, `hub_private_repo`, `hub_revision` and `hub_always_push` apply. A push that fails is reported
            and does not stop training.
        drafter_hub_model_id (`str`, *optional*):
            Repository of the drafter. Defaults to `hub_model_id` (or the name of `output_dir`) with `-drafter` added.

        > Parameters that control the use of idle time

        train_drafter_in_background (`bool`, *optional*):
            Whether one process trains its drafter in a thread while reward functions, tools and environments run. By
            default it does where the accelerator is not the CPU and no reward function is a model.
        timeline (`bool`, *optional*, defaults to `False`):
            Whether every rank writes what it did when to `<output_dir>/timeline/rank_<n>.jsonl`.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["vllm_engine_kwargs"]

    speculation_selector: str = field(
        default="auto",
        metadata={
            "help": "How the number of draft tokens of every engine step is chosen: `fixed`, `beg_mab`, `cost_model` "
            "or `auto`. The adaptive ones spend a few steps per rollout on trying alternatives and switch speculation "
            "off where it does not pay; `fixed` never explores and can lose at large batches."
        },
    )
    num_draft_tokens: int = field(
        default=3,
        metadata={
            "help": "Number of draft tokens per step with `speculation_selector='fixed'`. More tokens pay at small "
            "batches and high acceptance only: published results range from 1.8x (3 tokens) to 0.7x (7 tokens)."
        },
    )
    draft_token_choices: list[int] = field(
        default_factory=lambda: [1, 2, 3, 5],
        metadata={
            "help": "Numbers of draft tokens that the adaptive selectors choose from. The largest sizes the engine's "
            "buffers; each further choice costs some exploration."
        },
    )
    ngram_draft_token_choices: list[int] = field(
        default_factory=lambda: [4],
        metadata={
            "help": "Numbers of draft tokens that the adaptive selectors may look up in earlier answers to the same "
            "prompt. Pays where answers repeat themselves or each other and while no drafter is trained; each choice "
            "costs some exploration. Needs synchronous scheduling: with vLLM's asynchronous scheduler they are left "
            "out, and the log says so."
        },
    )
    speculation_bucket_edges: list[int] | None = field(
        default=None,
        metadata={
            "help": "Largest batch size of each bucket of the adaptive selectors. Finer buckets fit better and learn "
            "from fewer steps each. Defaults to powers of two up to the engine's `max_num_seqs`."
        },
    )
    speculation_activation_threshold: int | None = field(
        default=None,
        metadata={
            "help": "With `speculation_selector='fixed'`: largest number of running requests at which speculation is "
            "on (TLT uses 32). `None` keeps it on always."
        },
    )
    draft_sampling: str = field(
        default="greedy",
        metadata={
            "help": "How the drafter picks its tokens. `greedy` accepts with the policy's probability of the "
            "drafter's best token, `probabilistic` with one minus the total variation between the two distributions, "
            "at the cost of a softmax over the vocabulary per draft token; `adaptive` lets the selector find out, "
            "with twice as many choices to explore. All are lossless."
        },
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Further keyword arguments for `vllm.LLM`. They override those that TRL passes."},
    )
    verify_weight_sync: bool = field(
        default=True,
        metadata={
            "help": "Whether to read weights back from the engine after every sync. Costs about one pass over the "
            "weights; catches a stale or half-loaded engine, which would train on another policy's samples. A "
            "tensor-parallel engine, whose ranks hold slices, is not compared."
        },
    )

    spec_on_inexact: str = field(
        default="error",
        metadata={
            "help": "What to do when the check at start-up finds that the engine is not exact under speculation: "
            "`error` stops, `disable` goes on without speculation, as plain TRL would."
        },
    )

    drafter_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Folder or Hub id of an EAGLE-3 drafter to start from. If not set, one is initialised from the "
            "policy: nothing is accepted until it has trained for some ten thousand tokens."
        },
    )
    drafter_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Size of the drafter's reduced vocabulary. Smaller makes every draft step cheaper; tokens outside "
            "it can never be drafted. Fixed for the drafter's life."
        },
    )
    drafter_aux_layer_ids: list[int] | None = field(
        default=None,
        metadata={"help": "Policy layers whose input the drafter sees. Defaults to `[2, L // 2, L - 3]`."},
    )
    train_drafter: bool = field(
        default=True,
        metadata={
            "help": "Whether to train the drafter while the run goes on. Without it acceptance decays as the policy "
            "moves away from the one the drafter was trained for."
        },
    )
    drafter_time_budget: float = field(
        default=0.1,
        metadata={
            "help": "Share of the time between two rollouts that one process may spend on training its drafter. Pays "
            "back through acceptance; 0 trains in waiting time only, which a single process does not have."
        },
    )
    drafter_learning_rate: float = field(
        default=5e-4,
        metadata={"help": "Learning rate of the drafter's own AdamW. Too low and it cannot follow the policy."},
    )
    drafter_unroll_steps: int = field(
        default=5,
        metadata={
            "help": "Draft steps unrolled in training. Should cover the largest number of draft tokens; training time "
            "grows linearly with it."
        },
    )
    drafter_max_tokens_per_step: int = field(
        default=512,
        metadata={
            "help": "Tokens packed into one optimiser step of the drafter. Smaller learns more from the same tokens "
            "and stops sooner, larger uses a GPU better; samples longer than it are trained on in windows."
        },
    )
    drafter_max_grad_norm: float = field(
        default=0.5,
        metadata={
            "help": "Gradient clip of the drafter. It has its own, since a clip shared with the policy shrinks the "
            "policy's update (about 20x in a public report)."
        },
    )
    feature_buffer_tokens: int = field(
        default=65536,
        metadata={
            "help": "Capacity of the feature buffer in tokens. One token takes 8 bytes x hidden size of CPU memory."
        },
    )
    feature_long_answer_fraction: float = field(
        default=0.5,
        metadata={
            "help": "Share of a drafter batch that is drawn from the longest answers of earlier steps; the rest is "
            "mixed from all that is there. Early finishers are short, and the tail is where speculation pays."
        },
    )
    feature_max_age: int = field(
        default=4,
        metadata={
            "help": "Rollouts after which features are dropped. The states of an old policy teach the wrong "
            "distribution, few tokens teach nothing: lower it when the learning rate is high."
        },
    )

    train_drafter_in_background: bool | None = field(
        default=None,
        metadata={
            "help": "Whether one process trains its drafter in a thread while reward functions and tools run. "
            "Free where they leave the accelerator alone; on CPU they compete for the cores, and Python code "
            "competes for the interpreter lock. `None`: on where the accelerator is not the CPU and no reward is a "
            "model. With several processes it is off: ranks merge their drafters right after the rollout."
        },
    )
    timeline: bool = field(
        default=False,
        metadata={
            "help": "Whether every rank writes what it did when to `<output_dir>/timeline/rank_<n>.jsonl`, for "
            "`tlt-trl timeline`. Costs some fifteen lines a step."
        },
    )
    drafter_push_to_hub: bool = field(
        default=False,
        metadata={
            "help": "Whether to push the drafter to the Hub at the end of training and, as `hub_strategy` says, at "
            "every save, in the background. A push that fails is reported and does not stop training."
        },
    )
    drafter_hub_model_id: str | None = field(
        default=None,
        metadata={
            "help": "Repository of the drafter, apart from the policy's because engines load a drafter by its "
            "repository. Defaults to `hub_model_id` (or the name of `output_dir`) with `-drafter` added."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_choice("speculation_selector", SELECTORS)
        self._check_choice("draft_sampling", DRAFT_SAMPLINGS)
        self._check_choice("spec_on_inexact", ON_INEXACT)
        self._check_range("num_draft_tokens", self.num_draft_tokens, 1, 16)
        if not self.draft_token_choices or len(set(self.draft_token_choices)) != len(self.draft_token_choices):
            raise ValueError(
                f"`draft_token_choices` must be a non-empty list without repetitions, got {self.draft_token_choices}. "
                "'No speculation' is always among the choices; [1, 2, 3, 5] is a good start."
            )
        for choice in self.draft_token_choices:
            self._check_range("draft_token_choices", choice, 1, 16)
        if len(set(self.ngram_draft_token_choices)) != len(self.ngram_draft_token_choices):
            raise ValueError(f"`ngram_draft_token_choices` repeats a number: {self.ngram_draft_token_choices}.")
        for choice in self.ngram_draft_token_choices:
            self._check_range("ngram_draft_token_choices", choice, 1, 16)
        if self.speculation_bucket_edges is not None:
            check_edges(self.speculation_bucket_edges)
        if self.draft_sampling == "adaptive" and self.speculation_selector == "fixed":
            raise ValueError(
                "`draft_sampling='adaptive'` needs a selector that chooses: set `speculation_selector='auto'`, or "
                "name 'greedy' or 'probabilistic'."
            )
        if self.speculation_activation_threshold is not None:
            self._check_range("speculation_activation_threshold", self.speculation_activation_threshold, 0, None)
        self._check_range("drafter_time_budget", self.drafter_time_budget, 0.0, 0.9)
        for name in ("drafter_learning_rate", "drafter_max_grad_norm"):
            if not self.__dict__[name] > 0:
                raise ValueError(f"`{name}` must be greater than 0, got {self.__dict__[name]}.")
        for name in ("speculative_config", "disable_log_stats"):
            if name in (self.vllm_engine_kwargs or {}):
                raise ValueError(
                    f"`vllm_engine_kwargs` must not hold `{name}`: the trainer sets it. Speculation is configured by "
                    "`speculation_selector`, `draft_token_choices`, `num_draft_tokens` and `draft_sampling`."
                )
        self._check_range("drafter_unroll_steps", self.drafter_unroll_steps, 1, 16)
        self._check_range("drafter_max_tokens_per_step", self.drafter_max_tokens_per_step, 16, None)
        self._check_range("feature_buffer_tokens", self.feature_buffer_tokens, 1, None)
        self._check_range("feature_max_age", self.feature_max_age, 1, None)
        self._check_range("feature_long_answer_fraction", self.feature_long_answer_fraction, 0.0, 1.0)
        if self.drafter_vocab_size is not None:
            self._check_range("drafter_vocab_size", self.drafter_vocab_size, 1, None)

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if self.__dict__[name] not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {self.__dict__[name]!r}.")

    def _check_range(self, name: str, value: float, low: float, high: float | None) -> None:
        if value < low or (high is not None and value > high):
            upper = "" if high is None else f" and at most {high}"
            raise ValueError(f"`{name}` must be at least {low}{upper}, got {value}.")

    @property
    def all_draft_token_choices(self) -> list[int]:
        """Numbers of draft tokens that any strategy of this run proposes."""
        if self.speculation_selector == "fixed":
            return [self.num_draft_tokens]
        return [*self.draft_token_choices, *self.ngram_draft_token_choices]

    @property
    def max_num_draft_tokens(self) -> int:
        """Largest number of draft tokens that any strategy of this run proposes."""
        return max(self.all_draft_token_choices)

    @classmethod
    def from_grpo_config(cls, config: GRPOConfig) -> "TLTGRPOConfig":
        """
        Copies the values of a [`~trl.GRPOConfig`] and adds the defaults of this class.

        The trainer works on the copy: changing the original afterwards has no effect, and methods of a subclass of
        `GRPOConfig` are not taken over.
        """
        if isinstance(config, cls):
            return config
        new = cls.__new__(cls)
        new.__dict__.update(config.__dict__)
        for spec in fields(cls):
            if spec.name not in new.__dict__:
                value = spec.default if spec.default_factory is MISSING else spec.default_factory()
                new.__dict__[spec.name] = value
        return new
